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
from collections.abc import Iterable, Iterator, Sequence
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

REPO = Path(__file__).resolve().parent.parent
DEFAULT_WINDOW_MS = round(DEFAULT_WINDOW_S * 1e3)
STAND_IN_CURVE = [(5_329, 26.5), (21_316, 251.0)]
# Mostly small pictures with a tail of large ones, as chat and document traffic has; shares are an assumption.
SIDE_SHARES = {224: 0.25, 336: 0.20, 448: 0.20, 672: 0.12, 1024: 0.13, 1536: 0.06, 2048: 0.04}
COLOURS = {"fcfs": "tab:red", "srf": "tab:green", "twsrft": "tab:blue", "slack": "tab:orange"}
CLASSES = {"small (to 448 px)": 1_024, "medium (672, 1024 px)": 5_476, "large (1536, 2048 px)": 10**9}


def patches_of(side_px: int) -> int:
    """Patches of a square image at 14 px a patch."""
    return round(side_px / 14) ** 2


def class_of(num_patches: int) -> str:
    """Size class of a request by the patches of all its images."""
    return next(name for name, most in CLASSES.items() if num_patches <= most)


@dataclass(frozen=True)
class CostCurve:
    overhead_ms: float
    linear_ms: float  # per patch
    quadratic_ms: float  # per patch squared

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]], overhead_ms: float | None) -> CostCurve:
        """Least squares of the relative error; the overhead is fitted where None. Raises ValueError if too few."""
        patches, latency_ms = np.array(points, dtype=float).T
        powers = [1, 2] if overhead_ms is not None else [0, 1, 2]
        if len(points) < len(powers):
            raise ValueError(f"{len(powers)} points at least are needed to fit {len(powers)} coefficients")
        target = latency_ms - (overhead_ms or 0.0)
        design = np.stack([patches**power for power in powers], axis=1) / latency_ms[:, None]
        coefficients, *_ = np.linalg.lstsq(design, target / latency_ms, rcond=None)
        if overhead_ms is not None:
            coefficients = np.array([overhead_ms, *coefficients])
        return cls(*(max(0.0, float(c)) for c in coefficients))

    def alone_ms(self, num_patches: int) -> float:
        """Time that an image adds to a forward."""
        return self.linear_ms * num_patches + self.quadratic_ms * num_patches**2

    def forward_ms(self, items: Iterable[EncodeItem]) -> float:
        return self.overhead_ms + sum(self.alone_ms(item.num_patches) for item in items)


@dataclass(frozen=True)
class Arrival:
    rid: str
    arrival_s: float
    items: tuple[EncodeItem, ...]

    @property
    def num_patches(self) -> int:
        return sum(item.num_patches for item in self.items)


def read_trace(path: Path) -> list[Arrival]:
    arrivals = []
    for number, line in enumerate(path.read_text().splitlines()):
        if not line.strip():
            continue
        record = json.loads(line)
        items = tuple(
            EncodeItem(
                str(image.get("key", f"{number}/{i}")).encode(),
                image["num_patches"] if "num_patches" in image else patches_of(image["side_px"]),
            )
            for i, image in enumerate(record["images"])
        )
        arrivals.append(Arrival(f"{number:06d}", float(record["arrival_s"]), items))
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def make_trace(
    kind: str,
    load: float,
    num_requests: int,
    seed: int,
    curve: CostCurve,
    multi_share: float = 0.0,
    hot_share: float = 0.0,
    side_shares: dict[int, float] | None = None,
) -> list[Arrival]:
    """Poisson arrivals, or bursts: half a second at three times the mean rate, then a second of silence (means).

    load is the share of the encoder's time that the images need if their fixed cost were free, so that 1.0 and more
    is too much for every policy. multi_share of the requests have two to four images; hot_share of the images come
    from a pool of twenty (and are the same features for everyone who has them).
    """
    rng = np.random.default_rng(seed)
    shares = side_shares or SIDE_SHARES
    sides, weights = list(shares), np.array(list(shares.values()))
    weights = weights / weights.sum()
    counts = np.where(rng.random(num_requests) < multi_share, rng.integers(2, 5, num_requests), 1)
    hot_sides = rng.choice(sides, size=20, p=weights)
    images = []
    for index, count in enumerate(counts):
        own: dict[bytes, EncodeItem] = {}
        for i in range(count):
            if rng.random() < hot_share:
                hot = int(rng.integers(20))
                item = EncodeItem(f"hot{hot}".encode(), patches_of(int(hot_sides[hot])))
            else:
                item = EncodeItem(f"{index}/{i}".encode(), patches_of(int(rng.choice(sides, p=weights))))
            own[item.key] = item
        images.append(tuple(own.values()))
    work_s = sum(curve.alone_ms(item.num_patches) for items in images for item in items) / 1e3
    rate = load * num_requests / work_s
    if kind == "poisson":
        arrivals_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    elif kind == "bursty":
        busy_s = np.cumsum(rng.exponential(1 / (3 * rate), num_requests))  # time that counts bursts only
        ends_s = np.cumsum(rng.exponential(0.5, 10 + int(8 * busy_s[-1])))
        silences_s = np.concatenate([[0.0], np.cumsum(rng.exponential(1.0, len(ends_s)))])
        arrivals_s = busy_s + silences_s[np.searchsorted(ends_s, busy_s)]
    else:
        raise ValueError(f"unknown kind of trace: {kind}")
    return [Arrival(f"{i:06d}", float(t), items) for i, (t, items) in enumerate(zip(arrivals_s, images, strict=True))]


def simulate(
    arrivals: Sequence[Arrival], policy: SchedulePolicy, window_s: float, capacity_patches: int, curve: CostCurve
) -> dict[str, float]:
    """Seconds from arrival until the last image of each request is encoded. The feature store always has room."""
    queue = EncodeQueue(policy, window_s, capacity_patches)
    arrived_at = {arrival.rid: arrival.arrival_s for arrival in arrivals}
    latency_s: dict[str, float] = {}
    now_s, upcoming = 0.0, 0
    while upcoming < len(arrivals) or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[upcoming].arrival_s)
        while upcoming < len(arrivals) and arrivals[upcoming].arrival_s <= now_s:
            arrival = arrivals[upcoming]
            queue.add(arrival.rid, arrival.items, arrival.arrival_s)
            upcoming += 1
        batch = queue.next_batch(now_s, lambda rid: True)
        end_s = now_s + curve.forward_ms(batch) / 1e3
        # Whoever arrives during the forward and wants an image of it shares it.
        while upcoming < len(arrivals) and arrivals[upcoming].arrival_s <= end_s:
            arrival = arrivals[upcoming]
            queue.add(arrival.rid, arrival.items, arrival.arrival_s)
            upcoming += 1
        concerned = dict.fromkeys(rid for item in batch for rid in queue.wanted(item.key))
        queue.items_done(item.key for item in batch)
        now_s = end_s
        for rid in concerned:
            if not queue.remaining_patches(rid):
                latency_s[rid] = end_s - arrived_at[rid]
    assert len(latency_s) == len(arrivals), "every request completes once"
    return latency_s


def summarise(arrivals: Sequence[Arrival], latency_s: dict[str, float]) -> dict[str, dict[str, float]]:
    """Mean, p99 and maximum in milliseconds, by class and over all."""
    by_class: dict[str, list[float]] = defaultdict(list)
    for arrival in arrivals:
        by_class[class_of(arrival.num_patches)].append(latency_s[arrival.rid] * 1e3)
        by_class["all"].append(latency_s[arrival.rid] * 1e3)
    return {
        name: {
            "num": len(values),
            "mean_ms": float(np.mean(values)),
            "p99_ms": float(np.percentile(values, 99)),
            "max_ms": float(np.max(values)),
        }
        for name, values in by_class.items()
    }


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


def arm_name(row: dict[str, Any]) -> str:
    return f"{row['policy']} {row['window_ms']:g} ms" if row["window_ms"] else str(row["policy"])


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Markdown: mean / p99 by class, largest wait, one row a setting."""
    names = [*CLASSES, "all"]
    yield "| " + " | ".join([*columns, *(f"{name}: mean / p99" for name in names), "longest wait"]) + " |"
    yield "|" + "---|" * (len(columns) + len(names) + 1)
    for row in rows:
        cells = [arm_name(row) if column == "policy" else str(row[column]) for column in columns]
        for name in names:
            cells.append(f"{row['classes'][name]['mean_ms']:,.0f} / {row['classes'][name]['p99_ms']:,.0f}")
        cells.append(f"{row['classes']['all']['max_ms']:,.0f}")
        yield "| " + " | ".join(cells) + " |"


def plot_sizes(rows: list[dict[str, Any]], path: Path, loads: Sequence[float], window_ms: float) -> None:
    """Completion latency by image size: mean (solid) and p99 (dashed) for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sides = {patches_of(side): side for side in SIDE_SHARES}
    figure, axes = plt.subplots(2, len(loads), figsize=(4 * len(loads), 7), sharex=True, squeeze=False)
    for axes_row, kind in zip(axes, ("poisson", "bursty"), strict=True):
        for axis, load in zip(axes_row, loads, strict=True):
            for policy, colour in COLOURS.items():
                row = next(
                    r
                    for r in rows
                    if (r["kind"], r["load"], r["policy"]) == (kind, load, policy)
                    and r["window_ms"] in (0.0, window_ms)
                )
                x = [sides[int(size)] for size in row["sizes"]]
                for what, style in (("mean_ms", "-"), ("p99_ms", "--")):
                    y = [values[what] for values in row["sizes"].values()]
                    label = arm_name(row) if style == "-" else None
                    axis.plot(x, y, style, color=colour, marker=".", label=label)
            axis.set(title=f"{kind}, load {load}", yscale="log", xscale="log")
            axis.set_xticks(list(sides.values()), [str(side) for side in sides.values()], rotation=45)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("image side (px)")
    for axis in axes[:, 0]:
        axis.set_ylabel("arrival to features (ms)\nsolid mean, dashed p99")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_windows(rows: list[dict[str, Any]], path: Path, loads: Sequence[float]) -> None:
    """Mean of the small class and p99 of the large one over the window; FCFS and SRF are the ends of the axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    small, _, large = CLASSES
    ladder = sorted({window_ms for _, window_ms in ARMS.values() if window_ms})
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True)
    for axes_row, kind in zip(axes, ("poisson", "bursty"), strict=True):
        for axis, (name, what) in zip(axes_row, ((small, "mean_ms"), (large, "p99_ms")), strict=True):
            for shade, load in enumerate(loads):
                by_arm = {arm_name(r): r for r in rows if (r["kind"], r["load"]) == (kind, load)}
                for policy, style in (("twsrft", "-"), ("slack", "--")):
                    names = ["fcfs", *(f"{policy} {window_ms:g} ms" for window_ms in ladder), "srf"]
                    x = [i for i, arm in enumerate(names) if arm in by_arm]
                    y = [by_arm[names[i]]["classes"][name][what] for i in x]
                    label = f"{policy}, load {load}"
                    axis.plot(x, y, style, color=f"C{shade}", marker=".", label=label)
            axis.set(title=f"{kind}: {name}, {what.removesuffix('_ms')}", yscale="log", ylabel="ms")
            axis.set_xticks(range(len(ladder) + 2), ["fcfs", *(f"{w:g} ms" for w in ladder), "srf"], rotation=45)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


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
