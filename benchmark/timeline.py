"""Draw encode and decode on one time axis, and say for how long both ran at once.

  timeline.py OUT.png --intervals encoder.json decoder.json [--start-ms A --length-ms B]
  timeline.py OUT.png --trace encoder=ENCODER.trace.json.gz decoder=SCHEDULER.trace.json.gz

``--intervals`` takes files ``{"lane": NAME, "intervals_us": [[start, end, label], ...]}`` (or a list of such objects)
on a clock that all processes share, such as CLOCK_MONOTONIC. ``--trace`` takes traces of the torch profiler (SGLang's
``/start_profile``): their GPU kernels become a lane named on the command line, the clocks joined by each trace's
``baseTimeNanoseconds``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Interval:
    """Half-open interval in microseconds on a common clock."""

    start_us: float
    end_us: float
    label: str = ""


Lanes = dict[str, list[Interval]]


def read_intervals(data: Any) -> Lanes:
    """Lanes of a decoded intervals file. Raises ValueError for an interval that ends before it starts."""
    lanes: Lanes = {}
    for entry in data if isinstance(data, list) else [data]:
        lane = lanes.setdefault(entry["lane"], [])
        for row in entry["intervals_us"]:
            start, end, label = float(row[0]), float(row[1]), str(row[2]) if len(row) > 2 else ""
            if end < start:
                raise ValueError(f"lane {entry['lane']}: interval {row} ends before it starts")
            lane.append(Interval(start, end, label))
    return {name: sorted(lane, key=lambda i: i.start_us) for name, lane in lanes.items()}


def read_trace(data: dict[str, Any]) -> list[Interval]:
    """GPU work in a torch profiler trace. Raises ValueError where it holds none (profiled without CUDA activity)."""
    base_us = float(data.get("baseTimeNanoseconds", 0)) / 1e3
    found = [
        Interval(base_us + float(event["ts"]), base_us + float(event["ts"]) + float(event["dur"]), event["name"])
        for event in data["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES
    ]
    if not found:
        raise ValueError("the trace holds no GPU activity")
    return sorted(found, key=lambda interval: interval.start_us)


def load_json(path: Path) -> Any:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)


def merged(intervals: Sequence[Interval], gap_us: float = 0.0) -> list[Interval]:
    """Union of intervals, those closer than ``gap_us`` joined; labels are dropped."""
    result: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: i.start_us):
        if result and interval.start_us <= result[-1].end_us + gap_us:
            result[-1] = Interval(result[-1].start_us, max(result[-1].end_us, interval.end_us))
        else:
            result.append(Interval(interval.start_us, interval.end_us))
    return result


def busy_us(intervals: Sequence[Interval]) -> float:
    return sum(interval.end_us - interval.start_us for interval in merged(intervals))


def overlap_us(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Time during which both lanes are busy."""
    left, right = merged(one), merged(other)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i].end_us, right[j].end_us) - max(left[i].start_us, right[j].start_us))
        if left[i].end_us < right[j].end_us:
            i += 1
        else:
            j += 1
    return total


def cut(lanes: Lanes, start_us: float, end_us: float) -> Lanes:
    """The part of every lane within [start, end], intervals clipped."""
    return {
        name: [
            Interval(max(i.start_us, start_us), min(i.end_us, end_us), i.label)
            for i in lane
            if i.end_us > start_us and i.start_us < end_us
        ]
        for name, lane in lanes.items()
    }


def summary(lanes: Lanes) -> str:
    """Busy time of each lane and the overlap of each pair, in ms."""
    names = list(lanes)
    lines = [f"{name}: busy {busy_us(lanes[name]) / 1e3:.2f} ms" for name in names]
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            both = overlap_us(lanes[one], lanes[other])
            share = both / max(1e-9, min(busy_us(lanes[one]), busy_us(lanes[other])))
            lines.append(f"{one} and {other} at once: {both / 1e3:.2f} ms ({share:.0%} of the shorter)")
    return "\n".join(lines)


def draw(lanes: Lanes, out: Path, title: str) -> None:
    """One row per lane. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib (pip install matplotlib)") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    origin = min(interval.start_us for lane in lanes.values() for interval in lane)
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.7 * len(lanes)))
    colours = pyplot.get_cmap("tab10")
    for row, lane in enumerate(lanes.values()):
        bars = [((i.start_us - origin) / 1e3, max(1e-4, (i.end_us - i.start_us) / 1e3)) for i in lane]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colours(row % 10), edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set(xlabel="ms", title=title)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--intervals", type=Path, nargs="*", default=[])
    parser.add_argument("--trace", nargs="*", default=[], help="LANE=FILE")
    parser.add_argument("--start-ms", type=float, default=0.0, help="offset of the window from the first interval")
    parser.add_argument("--length-ms", type=float, help="length of the window (default: everything)")
    parser.add_argument("--title", default="encode and decode on one GPU")
    options = parser.parse_args(argv)
    lanes: Lanes = {}
    try:
        for path in options.intervals:
            for name, lane in read_intervals(load_json(path)).items():
                lanes.setdefault(name, []).extend(lane)
        for text in options.trace:
            name, _, file = text.partition("=")
            if not file:
                raise ValueError(f"--trace takes LANE=FILE, not {text!r}")
            lanes.setdefault(name, []).extend(read_trace(load_json(Path(file))))
        if not any(lanes.values()):
            raise ValueError("nothing to draw: give --intervals or --trace")
        begin = min(i.start_us for lane in lanes.values() for i in lane) + options.start_ms * 1e3
        if options.length_ms is not None or options.start_ms:
            length_us = options.length_ms * 1e3 if options.length_ms is not None else float("inf")
            lanes = cut(lanes, begin, begin + length_us)
            if not any(lanes.values()):
                raise ValueError("the window holds no interval")
        draw(lanes, options.out, options.title)
    except ValueError as error:
        parser.error(str(error))
    print(summary(lanes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
