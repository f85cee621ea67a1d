"""Answers of SpaceServe against stock SGLang's on the same weights and GPU, and whether an image keeps its features.

  correctness.py OUT_DIR --tokenizer DIR [--shape qwen2-vl-2b] [--budget-s 200]   (random weights of a real shape)
  correctness.py OUT_DIR --model DIR [--scale 0.25] [--device cpu]                (any checkpoint)

Both servers run at once. Three questions are answered:

**logits**: 50 requests (text, one image, two images, 224 to 1536 pixels a side) with the log-probabilities of the
likeliest tokens. The first token's depend on the whole prompt and nothing else, so they are what differs when features
or prefill do. Servers that are both right still differ, as sums of bfloat16 depend on the batch; the yardstick is
stock's own noise on the same requests: asked again (`stock again`), and 16 at once (`stock at once`). SpaceServe, asked
one by one and 16 at once, may differ from stock asked one by one by `--factor` times that noise, or by two steps of a
bfloat16 logit where stock has less. Log-probabilities are logits less one number per token. A control shows that the
answers depend on the images: other images of the same sizes under the same text must move stock's.

**features**: SpaceServe is started through feature_probe.py, which records SHA-256 sums of the features that the
encoder wrote and that prefills read. A canary image is asked for 50 times between 500 other images at concurrency 64,
each time behind a text of its own, so that no RadixCache prefix spares the reading. Every prefill must read, bit for
bit, features that the encoder wrote for that very image, and all reads of the canary must be equal. Then the caches are
flushed again and again, so that the canary is encoded anew in other company: by how much its features differ then is
reported (kernels round differently in other batches), and that reads equal what was written still has to hold.

**answers**: the canary's answers in the crowd against its answer alone, as above within stock's noise.

Writes OUT_DIR/correctness.json, the answers and the servers' logs; prints a table last. Exit status 0: all hold.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import requests

import two_servers
from answers import Answer, Message, ask, message, picture_url
from servebench import servers
from servebench.arms import OURS, STOCK, STOCK_CPU_FLAGS, ServerSpec
from servebench.environment import describe, scrub
from servebench.results import write_atomic

REPO = Path(__file__).resolve().parent.parent
NUM_REQUESTS = 50
NUM_CONTROLS = 10
NUM_TOKENS = 8
TOP_LOGPROBS = 20
AT_ONCE = 16
NUM_CANARIES, CONCURRENCY = 50, 64
NUM_FLUSHES, NUM_BESIDE = 10, 15
# Sides of images; the requests take them in turn.
SIZES = ((224, 224), (448, 336), (640, 480), (1536, 1536), (336, 672), (1024, 768), (280, 140), (896, 896), (1280, 720))
CANARY_SIZE = (448, 448)
CROWD_SIZES = ((448, 448), (448, 448), (336, 448), (224, 224), (280, 140))
TEXTS = ("Describe the picture.", "Which colour covers most of the area?", "What comes to your mind?", "How many?")
# Two servers and their KV caches share the device: neither may reckon with all of it, and both are bounded.
GPU_FLAGS = (
    "--random-seed 1 --mem-fraction-static 0.4 --max-total-tokens 120000 --max-running-requests 72 "
    "--cuda-graph-max-bs-decode 16"
)
CPU_FLAGS = "--random-seed 1 --max-total-tokens 20000 --max-running-requests 16"
# A bfloat16 has 8 bits of mantissa: logits of 16 to 32 come in steps of 1/8.
LOGIT_STEP = 0.125

Json = dict[str, Any]
Request = list[Message]


def mixed_requests(first_seed: int, scale: float, num: int = NUM_REQUESTS) -> list[Request]:
    """Requests without, with one and with two images; another first seed gives other images of the same sizes."""
    found = []
    for index in range(num):
        urls = []
        for position in range((0, 1, 1, 2, 1)[index % 5]):
            width, height = scaled(SIZES[(index + 4 * position) % len(SIZES)], scale)
            urls.append(picture_url(first_seed + 10 * index + position, width, height))
        found.append(message(f"{TEXTS[index % len(TEXTS)]} Number {index}.", *urls))
    return found


def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    width, height = size
    return max(56, int(width * scale)), max(56, int(height * scale))


def alone_of_its_kind(number: int, url: str) -> Request:
    """A request for one image behind a text that no other request begins with."""
    text = message(f"This is number {number}. What is this?", url, text_first=True)
    return [{"role": "system", "content": f"You are assistant number {number}."}, *text]


def ask_all(url: str, asked: Iterable[Request], at_once: int, deadline: float) -> list[Answer | str]:
    """Answers in the order of `asked`; a text says why there is none."""

    def one(request: Request) -> Answer | str:
        if time.monotonic() > deadline:
            return "not sent: the budget was spent"
        try:
            return ask(url, request, max_tokens=NUM_TOKENS, top_logprobs=TOP_LOGPROBS)
        except (RuntimeError, requests.RequestException, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"[:300]

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, asked))


def flush(url: str) -> None:
    """Empty the server's caches."""
    servers.flush(url, timeout_s=15)


# ---- comparisons


def first_token(a: Answer, b: Answer) -> tuple[list[float], bool]:
    """Differences of the first token's log-probabilities, over those in both lists, and whether the first agree."""
    of_a, of_b = dict(a[0]["top"]), dict(b[0]["top"])
    return [abs(of_a[token] - of_b[token]) for token in of_a if token in of_b], a[0]["token"] == b[0]["token"]


def compare(asked: Sequence[Answer | str], reference: Sequence[Answer | str]) -> Json:
    """How far answers are from the reference's, over the first token and over the tokens after it."""
    deltas: list[float] = []
    shares: list[float] = []
    same_first = same_answer = compared = 0
    later: list[float] = []
    errors = [str(answer) for answer in asked if isinstance(answer, str)]
    for a, b in zip(asked, reference, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            continue
        compared += 1
        found, agree = first_token(a, b)
        deltas += found
        shares.append(len(found) / max(1, len(b[0]["top"])))
        same_first += agree
        same_answer += [token["token"] for token in a] == [token["token"] for token in b]
        for x, y in zip(a[1:] if agree else [], b[1:], strict=False):  # behind other tokens nothing is comparable
            if x["token"] != y["token"]:
                break
            later.append(abs(x["logprob"] - y["logprob"]))
    return {
        "compared": compared,
        "errors": errors[:5],
        "num_errors": len(errors),
        "first_token_max": max(deltas, default=None),
        "first_token_mean": statistics.fmean(deltas) if deltas else None,
        "common_of_top": statistics.fmean(shares) if shares else None,
        "same_first_token": same_first,
        "same_answer": same_answer,
        "later_tokens_max": max(later, default=None),
    }


def within(found: Json, noise: Sequence[Json], factor: float) -> bool:
    """Whether a comparison stays within `factor` times the noise, or two steps of a logit (a quarter of that on
    average) where the noise is less; nothing compared is not within."""
    if found["first_token_max"] is None or found["num_errors"]:
        return False
    most = factor * max([row["first_token_max"] or 0.0 for row in noise])
    mean = factor * max([row["first_token_mean"] or 0.0 for row in noise])
    return bool(
        found["first_token_max"] <= max(most, 2 * LOGIT_STEP) and found["first_token_mean"] <= max(mean, LOGIT_STEP / 2)
    )


def check_records(lines: Sequence[Json], canary: str) -> Json:
    """What the records of feature_probe.py say: `canary` is the canary's key."""
    written: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    wrong, reads, canary_reads = [], 0, []
    deltas = []
    num_canary_encodes = 0
    for line in lines:  # a read comes after the write that it reads
        if line["side"] == "encoder":
            written.setdefault(line["key"], set()).add(line["sha"])
            owners.setdefault(line["sha"], set()).add(line["key"])
            if line["key"] == canary:
                num_canary_encodes += 1
                if line.get("max_delta") is not None:
                    deltas.append(line["max_delta"])
            continue
        reads += 1
        if line["key"] == canary:
            canary_reads.append(line["sha"])
        if line["sha"] not in written.get(line["key"], set()):
            wrong.append(line)
    return {
        "images_encoded": len(written),
        "reads": reads,
        "reads_of_other_features": len(wrong),
        "examples": wrong[:5],
        "features_shared_by_images": sum(len(keys) > 1 for keys in owners.values()),
        "canary_encodes": num_canary_encodes,
        "canary_reads": len(canary_reads),
        "canary_distinct_reads": len(set(canary_reads)),
        "canary_encoded_anew_max_delta": max(deltas, default=None),
    }


# ---- the run


class Correctness:
    """One run; `result` goes to the file after each part."""

    def __init__(self, options: argparse.Namespace, work_dir: Path) -> None:
        self.options = options
        self.work_dir = work_dir
        self.started = time.monotonic()
        self.deadline = self.started + options.budget_s
        self.record = work_dir / "features.jsonl"
        self.lock = threading.Lock()
        self.answers: dict[str, list[Answer | str]] = {}
        self.result: Json = {
            "environment": describe(REPO),
            "command": scrub(" ".join(["correctness.py", *sys.argv[1:]])),
            "model": scrub(options.model) if options.model else f"{options.shape}, random weights",
            "factor": options.factor,
        }

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        with self.lock:
            self.result["wall_s"] = round(time.monotonic() - self.started, 1)
            write_atomic(self.options.out / "correctness.json", json.dumps(self.result, indent=1) + "\n")

    def start(self, model: str) -> dict[str, servers.Server]:
        """Start both servers; they are not up yet."""
        options = self.options
        probe = Path(__file__).with_name("feature_probe.py")
        on_gpu = options.device == "cuda"
        flags = f"{GPU_FLAGS if on_gpu else CPU_FLAGS} {options.common_flags}".strip()
        self.result["flags"] = flags
        ours = OURS.replace("-m spaceserve.launch_server", str(probe))
        assert str(probe) in ours
        templates = {
            "spaceserve": (f"{ours} {options.ours_flags}", {"FEATURE_RECORD": str(self.record)}),
            "stock": (STOCK, {}),
        }
        started = {}
        for name, port in zip(templates, servers.free_ports(2), strict=True):
            template, env = templates[name]
            if not on_gpu:
                template += " --device cpu" if name == "spaceserve" else f" {STOCK_CPU_FLAGS}"
            spec = ServerSpec("server", f"{template} {flags}")
            values = {"model": model, "port": str(port)}
            started[name] = servers.start_server(spec, self.work_dir / f"{name}.log", port, env, values)
        return started

    def stock_side(self, url: str, asked: Sequence[Request], controls: Sequence[Request]) -> None:
        """Everything that stock is asked."""
        for name, requests_, at_once in (
            ("stock", asked, 1),
            ("stock again", asked, 1),
            ("stock at once", asked, AT_ONCE),
            ("stock, other images", controls, 1),
        ):
            flush(url)
            self.answers[name] = ask_all(url, requests_, at_once, self.deadline)
            self.say(f"{name}: {sum(not isinstance(answer, str) for answer in self.answers[name])} answers")

    def our_side(self, url: str, asked: Sequence[Request]) -> None:
        """The same requests, then the canary."""
        for name, at_once in (("spaceserve", 1), ("spaceserve at once", AT_ONCE)):
            flush(url)
            self.answers[name] = ask_all(url, asked, at_once, self.deadline)
            self.say(f"{name}: {sum(not isinstance(answer, str) for answer in self.answers[name])} answers")

    def records(self) -> list[Json]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def canary(self, url: str) -> None:
        """The canary alone, in the crowd, and encoded anew."""
        scale = self.options.scale
        url_of_canary = picture_url(77_000, *scaled(CANARY_SIZE, scale))
        num_canaries, num_others = self.options.canaries, 10 * self.options.canaries
        crowd: list[tuple[bool, Request]] = []
        for i in range(num_others):
            size = scaled(CROWD_SIZES[i % len(CROWD_SIZES)], scale)
            crowd.append((False, alone_of_its_kind(1000 + i, picture_url(80_000 + i, *size))))
            if i % 10 == 5:
                crowd.append((True, alone_of_its_kind(10 + i // 10, url_of_canary)))
        assert sum(is_canary for is_canary, _ in crowd) == num_canaries
        # The texts differ, so each request has an answer of its own: alone, then, with nothing cached, in the crowd.
        flush(url)
        canaries = [request for is_canary, request in crowd if is_canary]
        self.answers["canary alone"] = ask_all(url, canaries, 1, self.deadline)
        flush(url)
        self.record.touch()
        begin = time.monotonic()
        first = ask_all(url, [alone_of_its_kind(0, url_of_canary)], 1, self.deadline)
        keys = {line["key"] for line in self.records()}
        if len(keys) != 1:
            raise RuntimeError(f"one image was asked for, and {len(keys)} were recorded: {first}")
        (key,) = keys
        found = ask_all(url, [request for _, request in crowd], CONCURRENCY, self.deadline)
        self.answers["canary in the crowd"] = [a for (is_canary, _), a in zip(crowd, found, strict=True) if is_canary]
        num_failed = sum(isinstance(answer, str) for answer in found)
        in_crowd = {
            **check_records(self.records(), key),
            "seconds": round(time.monotonic() - begin, 1),
            "requests": len(crowd),
            "failed": num_failed,
            "first_errors": [answer for answer in found if isinstance(answer, str)][:3],
        }
        in_crowd["ok"] = bool(
            not num_failed
            and in_crowd["canary_reads"] > 1  # one for each prefill batch: its requests share a read
            and in_crowd["canary_distinct_reads"] == 1
            and not in_crowd["reads_of_other_features"]
            and not in_crowd["features_shared_by_images"]
            and in_crowd["images_encoded"] == num_others + 1
        )
        self.result["features"] = in_crowd
        self.save()
        self.say(f"canary in the crowd: {'ok' if in_crowd['ok'] else 'NOT ok'}")
        self.encoded_anew(url, url_of_canary, key, [request for is_canary, request in crowd if not is_canary])

    def encoded_anew(self, url: str, url_of_canary: str, key: str, others: Sequence[Request]) -> None:
        """The canary after flushes, each time beside other images."""
        rounds = 0
        for number in range(NUM_FLUSHES):
            if time.monotonic() > self.deadline - 5:
                break
            flush(url)
            beside = others[NUM_BESIDE * number : NUM_BESIDE * (number + 1)]
            middle = len(beside) // 2
            request = alone_of_its_kind(500 + number, url_of_canary)
            ask_all(url, [*beside[:middle], request, *beside[middle:]], NUM_BESIDE + 1, self.deadline)
            rounds += 1
        found = {**check_records(self.records(), key), "rounds": rounds}
        found["ok"] = bool(
            rounds
            and found["canary_encodes"] > rounds // 2
            and not found["reads_of_other_features"]
            and not found["features_shared_by_images"]
        )
        self.result["features_encoded_anew"] = found
        self.record.unlink()
        self.save()
        self.say(f"canary encoded anew: {'ok' if found['ok'] else 'NOT ok'}")

    def judge(self) -> None:
        """Comparisons of whatever was answered."""
        answers, factor = self.answers, self.options.factor
        pairs = {
            "stock again": ("stock again", "stock"),
            "stock at once": ("stock at once", "stock"),
            "spaceserve": ("spaceserve", "stock"),
            "spaceserve at once": ("spaceserve at once", "stock"),
            "spaceserve at once, itself": ("spaceserve at once", "spaceserve"),
            "canary in the crowd": ("canary in the crowd", "canary alone"),
        }
        rows = {name: compare(answers[a], answers[b]) for name, (a, b) in pairs.items() if {a, b} <= answers.keys()}
        noise = [rows[name] for name in ("stock again", "stock at once") if name in rows]
        for name in ("spaceserve", "spaceserve at once", "canary in the crowd"):
            if name in rows:
                rows[name]["ok"] = bool(noise) and within(rows[name], noise, factor)
        if {"stock", "stock, other images"} <= answers.keys():
            with_images = [i for i in range(NUM_CONTROLS) if i % 5]
            controls = compare(
                [answers["stock, other images"][i] for i in with_images], [answers["stock"][i] for i in with_images]
            )
            controls["ok"] = bool(noise) and not within(controls, noise, factor)
            rows["stock, other images"] = controls
        self.result["logits"] = rows
        self.result["ok"] = bool(
            all(rows.get(name, {}).get("ok") for name in ("spaceserve", "spaceserve at once", "canary in the crowd"))
            and rows.get("stock, other images", {}).get("ok")
            and self.result.get("features", {}).get("ok")
            and self.result.get("features_encoded_anew", {}).get("ok")
        )
        self.save()

    def run(self) -> None:
        options = self.options
        model = two_servers.make_model(options, self.work_dir)
        self.say("the checkpoint is there")
        group = self.start(str(model))
        try:
            asked = mixed_requests(0, options.scale)
            controls = mixed_requests(500_000, options.scale, NUM_CONTROLS)
            for name, server in group.items():
                server.wait_ready(min(self.deadline, time.monotonic() + 150))
                self.say(f"{name} is up")
            self.result["servers"] = {name: servers.describe_server(server.url) for name, server in group.items()}
            self.result["memory"] = servers.memory(list(group.values()))
            self.save()
            ours, stock = group["spaceserve"].url, group["stock"].url
            steps: list[Callable[[], None]] = [
                lambda: self.stock_side(stock, asked, controls),
                lambda: self.our_side(ours, asked),
            ]
            with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
                for done in [pool.submit(step) for step in steps]:
                    done.result()
            self.judge()
            self.canary(ours)
        finally:
            with concurrent.futures.ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(servers.Server.stop, group.values()))
            self.judge()


def table(result: Json) -> list[str]:
    """One line for each comparison, then what the records of features say."""
    lines = [f"correctness: {result.get('wall_s')} s, {result['model']}, commit {result['environment']['commit'][:12]}"]
    lines.append(f"{'against stock alone':<28}{'answers':>8}{'failed':>7}{'first':>6}{'all':>5}{'max':>9}{'mean':>9}  ")
    for name, row in result.get("logits", {}).items():
        words = {True: "ok", False: "NOT", None: ""}[row.get("ok")]
        most, mean = (
            f"{row[key]:.4f}" if row[key] is not None else "-" for key in ("first_token_max", "first_token_mean")
        )
        lines.append(
            f"{name:<28}{row['compared']:>8}{row['num_errors']:>7}{row['same_first_token']:>6}{row['same_answer']:>5}"
            f"{most:>9}{mean:>9}  {words}"
        )
    lines.append("(first: same first token; all: same answer; max, mean: of the first token's log-probabilities)")
    for part in ("features", "features_encoded_anew"):
        if part in result:
            row = result[part]
            lines.append(
                f"{part}: {row['images_encoded']} images, {row['reads']} reads, {row['reads_of_other_features']} of "
                f"other features; canary encoded {row['canary_encodes']} times, read {row['canary_reads']} times, "
                f"{row['canary_distinct_reads']} kinds of bits, anew at most {row['canary_encoded_anew_max_delta']} off"
                f"  {'ok' if row['ok'] else 'NOT'}"
            )
    if "error" in result:
        lines.append(result["error"])
    lines.append("OK" if result.get("ok") else "NOT OK")
    return lines


def main() -> int:
    parser = two_servers.make_parser(__doc__)
    parser.add_argument("--factor", type=float, default=2.0, help="how many times stock's noise counts as equal")
    parser.add_argument("--canaries", type=int, default=NUM_CANARIES, help="and ten times as many other images")
    parser.add_argument("--budget-s", type=float, default=200.0)
    options = two_servers.parse(parser)
    servers.stop_on_sigterm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with servers.work_folder("correctness-", options.out) as work_dir:
        run = Correctness(options, work_dir)
        try:
            run.run()
        except (servers.ServerFailed, RuntimeError, OSError) as error:
            run.result["error"] = scrub(str(error))[-3000:]
        finally:
            run.save()
            write_atomic(options.out / "answers.json", json.dumps(run.answers) + "\n")
    print("\n".join(table(run.result)))
    return 0 if run.result.get("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
