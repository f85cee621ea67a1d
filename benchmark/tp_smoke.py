"""Smoke test of tensor parallelism: the same image requests to stock SGLang and to SpaceServe, both with ``--tp 2``.

  tp_smoke.py OUT_DIR --tokenizer DIR                     (two GPUs: Qwen2-VL-2B's shapes, random weights)
  tp_smoke.py OUT_DIR --model DIR --device cpu            (any checkpoint, ranks on two cores)

One server after the other, on one checkpoint with the same flags. Twenty requests with one to three images of mixed
sizes are sent one by one and decoded greedily; then a canary: a picture several times at once, different pictures at
once, and a picture again that the server has seen. Answers are compared token by token.

Two correct servers may differ where two tokens are almost equally likely: stock splits the encoder over the ranks,
SpaceServe does not, and sums of bfloat16 are then rounded differently. An answer that leaves stock's counts as right
where stock gave the other token a log-probability within ``--tie`` of its own. That this proves something is shown by
a control: the same text under pictures of other content and equal size must move stock's answers.

Writes OUT_DIR/tp-smoke.json and the servers' logs, prints a table last. Exit status 0: all answers agree.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import requests

import two_servers
from answers import MAX_TOKENS, ask, compare, message, picture_url
from servebench import arms, servers
from servebench.environment import describe, scrub
from servebench.results import write_atomic

REPO = Path(__file__).resolve().parent.parent
NUM_REQUESTS = 20
NUM_CONTROLS = 6
SIZES = ((224, 224), (448, 336), (640, 480), (336, 672), (1024, 768), (280, 140), (896, 896))
TEXTS = (
    "Describe the picture.",
    "What colours are there, and which of them covers most of the area?",
    "Compare what you see with a chessboard.",
    "Write down the first thing that comes to mind about this.",
)
FLAGS = "--random-seed 1 --disable-custom-all-reduce --max-running-requests 16"
GPU_FLAGS = "--max-total-tokens 100000 --cuda-graph-max-bs-decode 8"
CPU_FLAGS = "--max-total-tokens 20000"
# What SGLang needs for several ranks on a CPU: a core for each, and no search for NCCL, which would find it.
CPU_ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent", "OMP_NUM_THREADS": "1"}
# NVLink multicast needs rights that containers often lack.
GPU_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}


def image_requests(first_seed: int, scale: float) -> list[list[dict[str, Any]]]:
    """Requests with 1 to 3 pictures of mixed sizes; another first seed gives pictures of other content."""
    found = []
    for index in range(NUM_REQUESTS):
        pictures = []
        for position in range(1 + index % 3):
            width, height = SIZES[(2 * index + 3 * position) % len(SIZES)]
            pictures.append(
                picture_url(
                    first_seed + 10 * index + position, max(56, int(width * scale)), max(56, int(height * scale))
                )
            )
        found.append(message(f"{TEXTS[index % len(TEXTS)]} Number {index}.", *pictures))
    return found


def run_server(url: str, scale: float) -> dict[str, Any]:
    """Send everything to one server: `alone` one by one, `control`, and the canary's `again` and `at_once`."""
    begin = time.monotonic()
    alone = [ask(url, request) for request in image_requests(0, scale)]
    alone_s = time.monotonic() - begin
    control = [ask(url, request) for request in image_requests(100_000, scale)[:NUM_CONTROLS]]
    side = max(56, int(448 * scale))
    same = message("What is this?", picture_url(7_000, side, side))
    different = [message("What is this?", picture_url(7_000 + index, side, side)) for index in range(1, 5)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda messages: ask(url, messages), [same] * 4 + different))
    again = [ask(url, messages) for messages in [same, *different]]
    return {"alone": alone, "alone_s": round(alone_s, 2), "control": control, "at_once": at_once, "again": again}


def judge(ours: dict[str, Any], stock: dict[str, Any], tie: float) -> dict[str, Any]:
    """All comparisons, and whether together they say that both servers agree."""
    groups = {
        name: [compare(a, b, tie) for a, b in zip(ours[name], stock[name], strict=True)]
        for name in ("alone", "control", "at_once", "again")
    }
    # Each picture's answer in the crowd against its answer afterwards, when its features or tokens were cached.
    later = [ours["again"][0]] * 4 + ours["again"][1:]
    groups["crowd_and_later"] = [compare(a, b, tie) for a, b in zip(ours["at_once"], later, strict=True)]
    moved = [not compare(a, b, tie)["ok"] for a, b in zip(stock["control"], stock["alone"], strict=False)]
    return {
        "groups": groups,
        "control_moved": sum(moved),
        "control_total": len(moved),
        "ok": all(row["ok"] for rows in groups.values() for row in rows) and 2 * sum(moved) >= len(moved),
    }


def table(verdict: dict[str, Any]) -> str:
    """One line for each group of requests."""
    lines = [f"{'group':<18}{'answers':>8}{'equal':>7}{'ties':>6}{'wrong':>7}{'max gap':>9}{'max d(logprob)':>16}"]
    for name, rows in verdict["groups"].items():
        equal = sum(row["ok"] and row["equal_tokens"] == MAX_TOKENS for row in rows)
        wrong = sum(not row["ok"] for row in rows)
        gaps = [row["gap"] for row in rows if row["gap"] is not None]
        deltas = [row["max_delta"] for row in rows if row["max_delta"] is not None]
        lines.append(
            f"{name:<18}{len(rows):>8}{equal:>7}{len(rows) - equal - wrong:>6}{wrong:>7}"
            f"{max(gaps, default=0.0):>9.3f}{max(deltas, default=0.0):>16.4f}"
        )
    lines.append(
        f"control: other pictures moved {verdict['control_moved']} of {verdict['control_total']} stock answers"
    )
    lines.append("OK" if verdict["ok"] else "NOT OK")
    return "\n".join(lines)


def ask_both(options: argparse.Namespace, flags: str, work_dir: Path, deadline: float, result: dict[str, Any]) -> None:
    """Start, ask and stop one server after the other; each one's answers and the verdict go to `result`."""
    model = two_servers.make_model(options, work_dir)
    answers: dict[str, dict[str, Any]] = {}
    for name in ("stock", "spaceserve"):
        arm = arms.prepare(
            arms.parse_arm(name),
            device=options.device,
            common_flags=flags,
            ours_flags=options.ours_flags,
            stock_flags=options.stock_flags,
        )
        begin = time.monotonic()
        with servers.running_arm(
            arm, model=str(model), work_dir=work_dir, start_timeout_s=max(30.0, deadline - begin)
        ) as group:
            start_s = time.monotonic() - begin
            print(f"{name}: up after {start_s:.0f} s", flush=True)
            answers[name] = run_server(group[-1].url, options.scale)
            result[name] = {
                "start_s": round(start_s, 1),
                "server": servers.describe_server(group[-1].url),
                "memory": servers.memory(group),
                **answers[name],
            }
        print(f"{name}: {NUM_REQUESTS} requests in {answers[name]['alone_s']} s", flush=True)
    result["verdict"] = judge(answers["spaceserve"], answers["stock"], options.tie)


def run(options: argparse.Namespace) -> bool:
    servers.stop_on_sigterm()
    deadline = time.monotonic() + options.budget_s
    on_gpu = options.device == "cuda"
    os.environ.update(GPU_ENVIRONMENT if on_gpu else CPU_ENVIRONMENT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    flags = f"--tp {options.tp} {FLAGS} {GPU_FLAGS if on_gpu else CPU_FLAGS} {options.common_flags}".strip()
    result: dict[str, Any] = {
        "environment": describe(REPO),
        "command": scrub(" ".join(["tp_smoke.py", *sys.argv[1:]])),
        "flags": flags,
        "tie": options.tie,
        "model": "given" if options.model else f"{options.shape}, random weights",
    }
    with servers.work_folder("tp-smoke-", options.out) as work_dir:
        try:
            ask_both(options, flags, work_dir, deadline, result)
        except (servers.ServerFailed, RuntimeError, requests.RequestException) as error:
            result["error"] = scrub(str(error))
            print(error, file=sys.stderr)
        finally:
            write_atomic(options.out / "tp-smoke.json", json.dumps(result, indent=1) + "\n")
    if "verdict" not in result:
        print("NOT OK: no comparison, see the error above")
        return False
    print(table(result["verdict"]))
    return bool(result["verdict"]["ok"])


def main() -> int:
    parser = two_servers.make_parser(__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tie", type=float, default=0.3, help="log-probabilities this close count as equal")
    parser.add_argument("--budget-s", type=float, default=280.0)
    parser.add_argument("--stock-flags", default="")
    options = two_servers.parse(parser)
    return 0 if run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
