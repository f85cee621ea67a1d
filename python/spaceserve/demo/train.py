"""Trains the demo model on renders: `python -m spaceserve.demo.train --out DIR --time-budget-s 520 --workers 15`.

First the vision encoder learns the renderer's own labels, then the whole model learns to answer, with lessons about
what it finds hardest (`--lessons`). Time, not a number of steps, bounds the run; it counts from the end of imports.
What is written to DIR: model.tar (the checkpoint's folder), resume.pt (float32 weights for `--resume`), report.json and
log.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from spaceserve.demo.answer import encode_pictures, exact_match, held_out_set
from spaceserve.demo.architecture import CELL_SIZE, processed_size, save_configs
from spaceserve.demo.data import Batch, training_batch, worker
from spaceserve.demo.eval import evaluate_transformers, table
from spaceserve.demo.heads import DenseHeads, cell_of, dense_loss
from spaceserve.demo.lessons import Plan
from spaceserve.demo.model import DemoModel, checkpoint_tensors, initialise
from spaceserve.demo.optimiser import FlatAdamW
from spaceserve.demo.pixels import on_device, patches_of, pin
from spaceserve.demo.tokenizer import special_id

VALIDATION_SEED = 3


class Trainee(nn.Module):
    """The model and the heads that teach its encoder."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.demo = DemoModel()
        initialise(self.demo, seed)
        torch.manual_seed(seed)
        self.heads = DenseHeads()


class BatchSource:
    """Training batches from worker processes, or made on the spot without any."""

    def __init__(self, num_workers: int, seed: int, budget: int, plan: Plan) -> None:
        self._rng = random.Random(f"train-{seed}")
        self._budget, self.plan = budget, plan
        self._ready: Queue[Batch] = Queue(maxsize=16)
        self._processes: list[Any] = []
        self.pin = False  # set once CUDA may be used
        if num_workers:
            context = multiprocessing.get_context("fork")  # before the first use of CUDA
            shared = context.Queue(maxsize=2 * num_workers)
            for number in range(num_workers):
                arguments = (shared, f"train-{seed}-{number}", budget, plan)
                process = context.Process(target=worker, args=arguments, daemon=True)
                process.start()
                self._processes.append(process)
            threading.Thread(target=self._unpack, args=(shared,), daemon=True).start()

    def _unpack(self, shared: Any) -> None:
        while True:
            batch = shared.get()
            if self.pin:
                pin(batch)
            self._ready.put(batch)

    def next(self) -> Batch:
        if not self._processes:
            return training_batch(self._rng, self._budget, self.plan.now())
        return self._ready.get(timeout=120)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()


class Training:
    """One run: state, steps, checkpoints and evaluations."""

    def __init__(self, args: argparse.Namespace, source: BatchSource) -> None:
        self.args = args
        self.start = time.monotonic()
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.log_file = (self.out / "log.txt").open("w")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for each of the hundreds of shapes of batches
        self.source = source
        source.pin = self.device.type == "cuda"
        self.trainee = Trainee(args.seed).to(self.device)
        self.optimiser = FlatAdamW(self.trainee, dtype)
        self.report: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "seed": args.seed,
            "time_budget_s": args.time_budget_s,
            "resumed": bool(args.resume),
            "lessons": [args.lessons, args.last_lessons],
            "pictures": 0,
            "answer_tokens": 0,
            "evaluations": [],
        }
        if args.resume:
            self.optimiser.load(torch.load(args.resume / "resume.pt", map_location=self.device, weights_only=True))
        self.shadow = DemoModel().to(self.device, dtype)  # holds averaged weights while they are evaluated

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def log(self, text: str) -> None:
        line = f"[{self.seconds():6.1f} s] {text}"
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def _dense(self, batch: Batch, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        losses, scores = [], []
        for pictures, feature in zip(batch.pictures, features, strict=True):
            width, height = processed_size(pictures.width, pictures.height)
            rows = on_device(pictures.rows, self.device)
            cells = cell_of(rows, pictures.width, pictures.height, (height // CELL_SIZE, width // CELL_SIZE))
            labels = on_device(pictures.labels, self.device)
            known = on_device(pictures.globals, self.device)
            loss, score = dense_loss(self.trainee.heads, feature, cells, labels, known)
            losses.append(loss)
            scores.append(score)
        return torch.stack(losses).mean(), torch.stack(scores).mean(0)

    def _vision_step(self, batch: Batch) -> list[Tensor]:
        dtype = self.optimiser.work.dtype
        features = []
        for pictures in batch.pictures:
            patches, grid = patches_of(pictures, self.device, noise=True)
            features.append(self.trainee.demo.visual(patches.to(dtype), *grid))
        loss, scores = self._dense(batch, features)
        loss.backward()
        return [loss.detach(), *scores]

    def _joint_step(self, batch: Batch, dense_weight: float) -> list[Tensor]:
        model = self.trainee.demo
        features = encode_pictures(model, batch, self.device, noise=True)
        flat = None if features is None else features.flatten(0, 1)
        tokens = on_device(batch.tokens, self.device).long()
        positions = on_device(batch.positions, self.device)
        index = on_device(batch.target_index, self.device)
        targets = on_device(batch.targets, self.device)
        segments = None if batch.segments is None else on_device(batch.segments, self.device)
        hidden = model.hidden(tokens, positions, flat, special_id("<|image_pad|>"), segments)
        logits = model.logits(hidden.flatten(0, 1)[index]).float()
        loss = F.cross_entropy(logits, targets)
        token_score = (logits.detach().argmax(-1) == targets).float().mean()
        total, scores = loss, torch.zeros(6, device=self.device)
        if features is not None and dense_weight > 0:
            counts = []
            for pictures in batch.pictures:
                width, height = processed_size(pictures.width, pictures.height)
                counts.append((width // CELL_SIZE) * (height // CELL_SIZE))
            dense, scores = self._dense(batch, list(features.split(counts, dim=1)))
            total = loss + dense_weight * dense
        total.backward()
        return [loss.detach(), *scores, token_score]

    def phase(self, name: str, until_s: float, peak_rate: float, prefixes: tuple[str, ...], joint: bool) -> None:
        """Train until `until_s` seconds after the start, with a warm-up and a cosine that ends at zero (joint) or at a
        fifth of the peak (encoder only)."""
        began = self.seconds()
        if until_s <= began:
            return
        self.optimiser.restart(prefixes)
        self.log(f"phase {name}: {until_s - began:.0f} s")
        evaluate_at = [began + (until_s - began) * share for share in (0.33, 0.66)] if joint else []
        recent: deque[list[Tensor]] = deque(maxlen=50)
        step = waited_s = 0.0
        floor = 0.0 if joint else 0.2
        while (now := self.seconds()) < until_s:
            progress = (now - began) / (until_s - began)
            rate = peak_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
            rate *= min(1.0, (step + 1) / 300)
            if joint:
                self.source.plan.progress.value = progress
            before = time.monotonic()
            batch = self.source.next()
            waited_s += time.monotonic() - before
            if not joint and not batch.pictures:
                continue
            values = self._joint_step(batch, 0.3) if joint else self._vision_step(batch)
            norm = self.optimiser.step(rate)
            recent.append([*values, norm])
            step += 1
            self.report["pictures"] += len(batch.tokens) * len(batch.pictures)
            self.report["answer_tokens"] += len(batch.targets) if joint else 0
            if step % self.args.log_every == 0:
                self._log_step(name, int(step), rate, recent, now - began, waited_s)
            if evaluate_at and now > evaluate_at[0]:
                evaluate_at.pop(0)
                self.save()
                self.evaluate(f"{name}, step {int(step)}", self.args.eval_per_kind)
        self._log_step(name, int(step), 0.0, recent, self.seconds() - began, waited_s)
        self.report[f"steps_{name}"] = int(step)

    def _log_step(
        self, name: str, step: int, rate: float, recent: deque[list[Tensor]], elapsed_s: float, waited_s: float
    ) -> None:
        lengths = {len(values) for values in recent}
        rows = torch.tensor([[float(v) for v in values] for values in recent if len(values) == max(lengths)])
        loss, kind, colour, ordinal, rank, ground, number, *rest = rows.mean(0).tolist()
        tokens = f" tokens {100 * rest[0]:.1f} %" if len(rest) > 1 else ""
        self.log(
            f"{name} {step}: loss {loss:.3f}{tokens}; cells: kind {100 * kind:.1f} colour {100 * colour:.1f} ordinal "
            f"{100 * ordinal:.1f} rank {100 * rank:.1f} ground {100 * ground:.1f} number {100 * number:.1f}; norm "
            f"{rest[-1]:.2f} rate {rate:.1e}; {1000 * elapsed_s / max(step, 1):.1f} ms a step, "
            f"{100 * waited_s / max(elapsed_s, 1e-9):.0f} % waiting for data; {self.report['pictures']} pictures"
        )

    def evaluate(self, name: str, per_kind: int) -> dict[str, tuple[int, int]]:
        """Log and keep exact match per kind of the averaged weights on held-out renders."""
        self.shadow.load_state_dict(self.optimiser.averaged("demo."))
        batches = held_out_set(per_kind, VALIDATION_SEED)
        batches += held_out_set(3 * per_kind, VALIDATION_SEED + 1, ("yesno",), num_sizes=15)
        result = exact_match(self.shadow, batches, self.device, lambda: self.seconds() > self.args.time_budget_s)
        self.log(f"exact match, {name}\n{table(result)}")
        self.report["evaluations"].append({"name": name, "at_s": round(self.seconds(), 1), "exact_match": result})
        return result

    def write_checkpoint(self, folder: Path) -> None:
        """Write the averaged weights as a checkpoint that transformers and SGLang load."""
        save_configs(folder)
        model = DemoModel()
        model.load_state_dict(self.optimiser.averaged("demo."))
        save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})

    def save(self) -> None:
        """Write model.tar, resume.pt and report.json."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            self.write_checkpoint(folder)
            with tarfile.open(self.out / "model.tar", "w") as tar:
                tar.add(folder, arcname="model")
        # The average is the better start: a resumed run warms up anew.
        torch.save(self.optimiser.ema.cpu(), self.out / "resume.pt")
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1) + "\n")

    def verify(self, num: int, until_s: float) -> None:
        """Ask the written checkpoint through transformers, processor and all, as many questions as time allows."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            self.write_checkpoint(folder)
            result = evaluate_transformers(
                folder, num, str(self.device), VALIDATION_SEED, stop=lambda: self.seconds() > until_s
            )
        self.log(f"exact match through transformers, bfloat16\n{table(result)}")
        self.report["evaluations"].append({"name": "transformers", "exact_match": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder with the resume.pt of an earlier run")
    parser.add_argument("--time-budget-s", type=float, default=520)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1, help="another one for a resumed run, or it repeats its pictures")
    parser.add_argument(
        "--vision-share", type=float, help="share of the time for the encoder alone (default 0.22, or 0)"
    )
    parser.add_argument("--lessons", type=float, default=0.0, help="share of lessons (see lessons.py), such as 0.5")
    parser.add_argument("--last-lessons", type=float, default=0.15, help="their share in the last third")
    parser.add_argument("--vision-rate", type=float, default=2e-3)
    parser.add_argument("--joint-rate", type=float, help="peak learning rate (default 1.5e-3, resumed 1e-3)")
    parser.add_argument("--patch-budget", type=int, default=140_000, help="cost of a batch, in patches")
    parser.add_argument("--eval-per-kind", type=int, default=100)
    parser.add_argument("--final-per-kind", type=int, default=170)
    parser.add_argument("--reserve-s", type=float, default=50, help="kept for the last evaluations")
    parser.add_argument("--verify", type=int, default=600, help="questions asked through transformers at the end")
    parser.add_argument("--log-every", type=int, default=250)
    args = parser.parse_args()
    plan = Plan(args.lessons, args.last_lessons if args.lessons else 0.0)
    source = BatchSource(args.workers, args.seed, args.patch_budget, plan)
    training = Training(args, source)
    until_s = args.time_budget_s - args.reserve_s
    vision_share = args.vision_share if args.vision_share is not None else 0.0 if args.resume else 0.22
    joint_rate = args.joint_rate or (1e-3 if args.resume else 1.5e-3)
    try:
        training.phase("vision", until_s * vision_share, args.vision_rate, ("demo.visual", "heads"), joint=False)
        training.save()
        training.phase("joint", until_s, joint_rate, ("demo", "heads"), joint=True)
    finally:
        training.save()
        source.close()
    training.evaluate("final", args.final_per_kind)
    training.save()
    if args.verify:
        try:
            training.verify(args.verify, args.time_budget_s)
        except Exception as error:  # the model is written; a fault of the check must not cost the run
            training.log(f"the check through transformers failed: {error!r}")
        training.save()
    training.log("done")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
