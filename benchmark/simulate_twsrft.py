"""Replays arrival traces through TWSRFT, slack order, FCFS and SRF and compares when each image's features are ready.

A discrete-event simulation without clocks: the encoder is one server, a forward takes what the cost curve says, and
the real `EncodeQueue` picks each batch. Every policy sees the same arrivals. The cost of a forward over images of
n_1, ..., n_k patches is

    overhead + linear * sum(n_i) + quadratic * sum(n_i^2)        [ms]

because attention stays inside an image. The default coefficients go through two points measured with a plain torch
ViT of Qwen2-VL's shape on a whole H200 (5,329 patches 26.5 ms, 21,316 patches 251 ms); two points leave the overhead
open, so it is given (--overhead-ms). A curve from a profile (--curve, JSON list of [patches, ms]) with three points
or more has all three fitted.

    python benchmark/simulate_twsrft.py --out benchmark/results          # everything, some minutes
    python benchmark/simulate_twsrft.py --trace arrivals.jsonl --out .   # a recorded trace

A trace has one request a line: {"arrival_s": 0.01, "images": [{"key": "a", "num_patches": 256}]}; instead of
num_patches an image may give "side_px".
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servebench.environment import commit_of
from spaceserve.encoder_schedule import (
    DEFAULT_BATCH_CAPACITY_PATCHES,
    DEFAULT_WINDOW_S,
    POLICIES,
    EncodeItem,
    EncodeQueue,
    SchedulePolicy,
)
from twsrftbench.report import plot_sizes, plot_windows, table
from twsrftbench.simulation import (
    CLASSES,
    SIDE_SHARES,
    STAND_IN_CURVE,
    CostCurve,
    make_trace,
    patches_of,
    read_trace,
    simulate,
    summarise,
)

REPO = Path(__file__).resolve().parent.parent
DEFAULT_WINDOW_MS = round(DEFAULT_WINDOW_S * 1e3)


@dataclass(frozen=True)
class Point:
    """One setting of an experiment; each is run on every seed."""

    kind: str
    load: float
    policy: SchedulePolicy
    window_ms: float
    capacity_patches: int
    overhead_ms: float | None = None
    multi_share: float = 0.0
    hot_share: float = 0.0


def run_point(args: tuple[Point, CostCurve, int, list[int]]) -> dict[str, Any]:
    """Means over the seeds, with the standard error of the mean over all requests' mean."""
    point, curve, num_requests, seeds = args
    runs, by_size = [], defaultdict(list)
    for seed in seeds:
        arrivals = make_trace(point.kind, point.load, num_requests, seed, curve, point.multi_share, point.hot_share)
        latency_s = simulate(arrivals, point.policy, point.window_ms / 1e3, point.capacity_patches, curve)
        runs.append(summarise(arrivals, latency_s))
        for arrival in arrivals:
            if len(arrival.items) == 1:
                by_size[arrival.num_patches].append(latency_s[arrival.rid] * 1e3)
    classes = {
        name: {
            **{what: float(np.mean([run[name][what] for run in runs])) for what in ("mean_ms", "p99_ms", "max_ms")},
            "stderr_of_mean_ms": float(np.std([run[name]["mean_ms"] for run in runs]) / math.sqrt(len(runs))),
        }
        for name in [*CLASSES, "all"]
    }
    sizes = {
        str(size): {"mean_ms": float(np.mean(values)), "p99_ms": float(np.percentile(values, 99))}
        for size, values in sorted(by_size.items())
    }
    return {**asdict(point), "classes": classes, "sizes": sizes}


ARMS: dict[str, tuple[SchedulePolicy, float]] = {
    "fcfs": ("fcfs", 0.0),
    "srf": ("srf", 0.0),
    **{f"twsrft {w} ms": ("twsrft", float(w)) for w in (50, 100, 250, 500, 1000, 2000, 4000, 8000)},
    **{f"slack {w} ms": ("slack", float(w)) for w in (250, 500, 1000, 2000, 4000, 8000)},
}


def experiments(capacity: int) -> dict[str, list[Point]]:
    """Every setting that docs/twsrft.md speaks of."""
    arms = list(ARMS.values())
    chosen = [ARMS[name] for name in ("fcfs", "srf", f"twsrft {DEFAULT_WINDOW_MS} ms", f"slack {DEFAULT_WINDOW_MS} ms")]
    kinds = ("poisson", "bursty")
    return {
        "policies": [
            Point(kind, load, policy, window_ms, capacity)
            for kind in kinds
            for load in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
            for policy, window_ms in arms
        ],
        "capacity": [
            Point(kind, 0.8, policy, window_ms, patches)
            for kind in kinds
            for policy, window_ms in chosen
            for patches in (1, 256, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
        ],
        "overhead": [
            Point("bursty", 0.8, policy, window_ms, patches, overhead_ms=overhead_ms)
            for overhead_ms in (0.0, 2.0, 4.0)
            for policy, window_ms in chosen
            for patches in (1_024, 4_096, 8_192, 16_384)
        ],
        "several images, shared": [
            Point("bursty", 0.8, policy, window_ms, capacity, multi_share=0.25, hot_share=0.2)
            for policy, window_ms in chosen
        ],
    }


def time_queue(num_requests: int = 1_000) -> dict[str, float]:
    """Microseconds of CPU time that `next_batch` takes with num_requests queued down to half of them."""
    rng = np.random.default_rng(0)
    sides = rng.choice(list(SIDE_SHARES), size=num_requests, p=list(SIDE_SHARES.values()))
    result = {}
    for policy in POLICIES:
        # 4,099 is no sum of these sizes' patches, so the search for something that fits goes on to the end.
        for capacity in (4_096, 4_099, 32_768):
            queue = EncodeQueue(policy, 0.5, capacity)
            for i, side in enumerate(sides):
                queue.add(f"{i}", [EncodeItem(b"%d" % i, patches_of(int(side)))], i / 100)
            took_us = []
            while len(queue) > num_requests // 2:
                start = time.thread_time()
                batch = queue.next_batch(0.0, lambda rid: True)
                took_us.append((time.thread_time() - start) * 1e6)
                queue.items_done(item.key for item in batch)
            result[f"{policy} capacity {capacity} mean_us"] = round(float(np.mean(took_us)), 1)
            result[f"{policy} capacity {capacity} max_us"] = round(float(np.max(took_us)), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for twsrft-simulation*.{json,md,png}")
    parser.add_argument("--trace", type=Path, help="JSON lines; replaces the generated traces")
    parser.add_argument("--curve", type=Path, help="JSON list of [patches, ms] of single images")
    parser.add_argument("--overhead-ms", type=float, help="fixed cost of a forward; default 2 without --curve")
    parser.add_argument("--capacity", type=int, default=DEFAULT_BATCH_CAPACITY_PATCHES, help="patches of a batch")
    parser.add_argument("--requests", type=int, default=2_000, help="requests in a generated trace")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    points = [tuple(p) for p in json.loads(args.curve.read_text())] if args.curve else STAND_IN_CURVE
    overhead_ms = args.overhead_ms if args.overhead_ms is not None or args.curve else 2.0
    curve = CostCurve.fit(points, overhead_ms)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"cost curve: {curve}")

    if args.trace:
        arrivals = read_trace(args.trace)
        rows = []
        for policy, window_ms in ARMS.values():
            latency_s = simulate(arrivals, policy, window_ms / 1e3, args.capacity, curve)
            rows.append({"policy": policy, "window_ms": window_ms, "classes": summarise(arrivals, latency_s)})
        print(json.dumps(rows, indent=1))
        (args.out / "twsrft-simulation-trace.json").write_text(json.dumps(rows, indent=1) + "\n")
        return

    seeds = list(range(args.seeds))
    started = time.perf_counter()
    results: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, settings in experiments(args.capacity).items():
            tasks = []
            for point in settings:
                own = curve if point.overhead_ms is None else CostCurve.fit(points, point.overhead_ms)
                tasks.append((point, own, args.requests, seeds))
            results[name] = list(pool.map(run_point, tasks))
            print(f"{name}: {len(settings)} settings, {time.perf_counter() - started:.0f} s", file=sys.stderr)

    columns = {
        "policies": ["kind", "load", "policy"],
        "capacity": ["kind", "capacity_patches", "policy"],
        "overhead": ["overhead_ms", "capacity_patches", "policy"],
        "several images, shared": ["policy"],
    }
    lines = [
        "# Simulated encoder completion latency (ms from arrival to features)",
        "",
        f"A simulation, not a run on hardware: `benchmark/simulate_twsrft.py`, {args.requests:,} requests a trace, "
        f"means over {args.seeds} seeds, forward = {curve.overhead_ms:.2f} + {curve.linear_ms * 1e3:.3f} n/1000 + "
        f"{curve.quadratic_ms * 1e6:.3f} (n/1000)^2 ms. Same arrivals for every policy. A trace ends after its last "
        "request, so at load 1.0 and above the figures grow with its length.",
    ]
    for name, rows in results.items():
        lines += ["", f"## {name}", "", *table(rows, columns[name])]
    queue_us = time_queue()
    lines += ["", "## CPU time of next_batch, 1,000 requests queued (µs)", "", "| case | µs |", "|---|---|"]
    lines += [f"| {case} | {value} |" for case, value in queue_us.items()]
    (args.out / "twsrft-simulation.md").write_text("\n".join(lines) + "\n")
    report = {
        "commit": commit_of(REPO),
        "python": platform.python_version(),
        "cost_curve": asdict(curve),
        "curve_points": points,
        "num_requests": args.requests,
        "seeds": seeds,
        "side_shares": SIDE_SHARES,
        "queue_host_time_us": queue_us,
        "results": results,
    }
    (args.out / "twsrft-simulation.json").write_text(json.dumps(report, indent=1) + "\n")
    plot_sizes(results["policies"], args.out / "twsrft-simulation-by-size.png", (0.5, 0.8, 1.0), DEFAULT_WINDOW_MS)
    plot_windows(results["policies"], args.out / "twsrft-simulation-windows.png", (0.5, 0.8, 1.0))
    print("\n".join(table([r for r in results["policies"] if r["load"] == 0.8], columns["policies"])))


if __name__ == "__main__":
    main()
