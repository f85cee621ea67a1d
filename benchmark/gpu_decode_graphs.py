"""Decode graphs of SM groups in SGLang's own runner, in one process without a server; under a minute on an H200.

  gpu_decode_graphs.py --model DIR --out FOLDER [--flags "..."]

DIR may hold a dummy model (dummy_model.py; `--load-format dummy` is given). For each batch size, one decode step of the
same batch is run without graphs, with SGLang's graphs and with those of each group:

    equal      whether the most likely tokens are those of the step without, and the largest difference of a logit over
               the largest logit (kernels may be chosen anew for other SMs, so bits can differ)
    ms         time of a step alone, with the host's part
    own full   time of a step launched while the group's own SMs are full for 50 ms: it must wait for them
    others full time of a step launched while all SMs besides the group's are full for 50 ms: it must not

Ends with status 1 where a group's graph is wrong or leaves its SMs.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FULL_NS = 50_000_000
NUM_REPEATS = 20
# Logits of bfloat16 layers: rounding of other kernels' sums stays well below this.
MAX_DIFFERENCE = 0.05


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Step:
    """One decode step of a batch, which can be run again and again: it writes the same slots with the same values."""

    def __init__(self, runner: Any, batch_size: int, context: int) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        drawn = torch.randint(0, runner.model_config.vocab_size, (batch_size, context), generator=generator(0))
        reqs = one_batch.prepare_synthetic_inputs_for_latency_test(batch_size, context, drawn.tolist())
        tokens, _, batch = one_batch.extend(reqs, runner)
        batch.input_ids = tokens.to(torch.int64)
        batch.prepare_for_decode()
        self._runner = runner
        self._forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)

    def logits(self) -> torch.Tensor:
        """Float logits [batch size, vocabulary] of the step."""
        found: torch.Tensor = self._runner.forward(self._forward_batch).logits_output.next_token_logits
        return found.float().clone()

    def eager_logits(self) -> torch.Tensor:
        """The same without a CUDA graph: with SGLang's kernels on the whole device."""
        graph_runner, self._runner.decode_cuda_graph_runner = self._runner.decode_cuda_graph_runner, None
        try:
            return self.logits()
        finally:
            self._runner.decode_cuda_graph_runner = graph_runner

    def ms(self, before: Callable[[], None] = lambda: None) -> float:
        """Milliseconds from the end of `before`'s launches to the end of the step."""
        synchronize()
        before()
        began_s = time.perf_counter()
        self._runner.forward(self._forward_batch)
        synchronize_current()
        return (time.perf_counter() - began_s) * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def synchronize_current() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def rows_of(runner: Any, graphs: Any, force: SimpleNamespace, batch_size: int, context: int) -> list[dict[str, Any]]:
    """The table's rows for one batch size."""
    expected = Step(runner, batch_size, context).eager_logits()
    step = Step(runner, batch_size, context)
    rows = []
    for units in (graphs.ladder.total_units, *reversed(graphs.ladder.rungs)):
        whole = units == graphs.ladder.total_units
        force.units = 0 if whole else graphs.ladder.total_units - units
        logits = step.logits()
        row: dict[str, Any] = {
            "batch": batch_size,
            "sms": units,
            "same_tokens": bool((logits.argmax(-1) == expected.argmax(-1)).all()),
            "difference": float((logits - expected).abs().max() / expected.abs().max()),
            "ms": statistics.median(step.ms() for _ in range(NUM_REPEATS)),
        }
        if not whole:
            row |= full_ms(step, graphs._partitioner, units)
        rows.append(row)
    return rows


def full_ms(step: Step, partitioner: Any, units: int) -> dict[str, float]:
    """A step while its own SMs, and while all others, are full."""
    from spaceserve.partition.probe import Probe

    probe = Probe(partitioner.device)
    found = {}
    encoder = partitioner.group(partitioner.total_units - units)
    for name, group in (("own_full_ms", partitioner.complement_of(encoder.granted)), ("others_full_ms", encoder)):
        occupation = probe.new_occupation(2 * group.granted)

        def fill(group: Any = group, occupation: Any = occupation) -> None:
            probe.occupy(group.stream, FULL_NS, occupation)
            time.sleep(0.002)  # its blocks are there before the step

        found[name] = step.ms(fill)
        group.stream.synchronize()
    probe.close()
    return found


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row shows a graph that computes something else or leaves its SMs."""
    wrong = row["difference"] > MAX_DIFFERENCE
    if "own_full_ms" in row:
        wrong |= row["own_full_ms"] < FULL_NS / 1e6 * 0.8 or row["others_full_ms"] > FULL_NS / 1e6 * 0.8
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--skinny-gemm", choices=("auto", "off"), default="auto", help="as of the server")
    parser.add_argument("--flags", default="--max-total-tokens 100000 --mem-fraction-static 0.6")
    options = parser.parse_args()
    began_s = time.monotonic()

    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    from spaceserve.hooks import install
    from spaceserve.scheduler.decode_graphs import DecodeGraphs, decode_graph_hooks
    from spaceserve.skinny_gemm.linears import SkinnyLinears, skinny_linear_hooks

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = ["--model-path", options.model, "--load-format", "dummy", *shlex.split(options.flags)]
    server_parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(server_parser)
    server_args = ServerArgs.from_cli_args(server_parser.parse_args(args))
    force = SimpleNamespace(units=0)
    watch: Any = SimpleNamespace(look=lambda: (force.units, True))
    with tempfile.TemporaryDirectory() as folder:
        graphs = DecodeGraphs(Path(folder) / "decoder.json", watch, lambda: False)
        hooks = decode_graph_hooks(graphs)
        if options.skinny_gemm == "auto":
            linears = SkinnyLinears()
            graphs.on_group = linears.on
            hooks += skinny_linear_hooks(linears, lambda model: model.model.layers)
        install(hooks)
        one_batch._set_envs_and_config(server_args)
        for prepare in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
            getattr(one_batch, prepare)(server_args)
        bench, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
        logging.getLogger("spaceserve").setLevel(logging.INFO)
        runner = bench.torch_runner
        rows = []
        with torch.no_grad():
            for batch_size in options.batch_sizes:
                rows += rows_of(runner, graphs, force, batch_size, options.context)
    steps = graphs._steps
    result = {
        "ladder": list(graphs.ladder.rungs),
        "reason": graphs.ladder.reason,
        "capture": graphs._cost,
        "skinny_gemm": options.skinny_gemm,
        "steps": steps,
        "context": options.context,
        "rows": rows,
        "seconds": time.monotonic() - began_s,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode-graphs.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\ngroups {list(graphs.ladder.rungs)} {graphs.ladder.reason} capture {graphs._cost} steps {steps}")
    print(
        f"{'batch':>5} {'SMs':>4} {'ms':>7} {'same tokens':>11} {'difference':>10} {'own full':>9} {'others full':>11}"
    )
    for row in rows:
        own, others = (f"{row[name]:.1f}" if name in row else "-" for name in ("own_full_ms", "others_full_ms"))
        print(
            f"{row['batch']:>5} {row['sms']:>4} {row['ms']:>7.3f} {row['same_tokens']!s:>11} "
            f"{row['difference']:>10.4f} {own:>9} {others:>11}{'  WRONG' if is_wrong(row) else ''}"
        )
    wrong = sum(is_wrong(row) for row in rows)
    print(f"{wrong} of {len(rows)} rows wrong, {time.monotonic() - began_s:.0f} s")
    return 1 if wrong or not graphs.ladder.rungs else 0


if __name__ == "__main__":
    sys.exit(main())
