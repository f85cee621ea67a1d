"""Record what encoder worker and decoder compute at the same time on a running server, as a picture and intervals.

  timeline_record.py --out OUT --model DIR --common-flags "--load-format dummy"      (starts a server of ours)
  timeline_record.py --out OUT --url http://127.0.0.1:30000 --trace-dir DIR           (a server that runs)
  serve_bench.py run --together --timeline OUT ...                                    (at the end of a run)

A server that runs must have been started with ``SPACESERVE_TRACE_DIR=DIR`` and ``PYTHONPATH`` beginning with
``benchmark/servebench/trace_hook`` (see there); it records once. Some text answers stream while large images arrive.
OUT gets ``timeline.png``, all of it above, the 25 ms with the most overlap below, kernel by kernel; and its intervals
as ``timeline.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servebench import arms, servers
from servebench.arms import Arm
from servebench.bodies import APIS, build_body
from servebench.client import run_job
from servebench.environment import describe
from servebench.results import write_atomic
from servebench.workload import ImageSpec, TraceRequest
from timeline import Interval, Lanes, busy_us, cut, merged, overlap_us

REPO = Path(__file__).resolve().parent.parent
HOOK = Path(__file__).resolve().parent / "servebench" / "trace_hook"
SEED = 1 << 45
READY_TIMEOUT_S = 20.0
ENCODER, DECODE = "encoder worker", "scheduler, decode's stream"
ZOOM_MS = 25.0


@dataclass(frozen=True)
class Load:
    """``texts`` answers of ``text_tokens`` stream from the start; from ``lead_s`` on an image every ``every_s``."""

    texts: int = 8
    text_tokens: int = 300
    images: int = 5
    side: int = 2048
    lead_s: float = 0.5
    every_s: float = 0.3
    image_tokens: int = 32
    timeout_s: float = 15.0


def traced(arm: Arm, folder: Path) -> Arm:
    """The arm with its processes ready to record into ``folder``."""
    paths = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    env = {"SPACESERVE_TRACE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return replace(arm, servers=tuple(replace(server, env={**server.env, **env}) for server in arm.servers))


def send(url: str, load: Load, seed: int) -> int:
    """Send the load; the number of requests that failed."""
    requests = [
        *(TraceRequest(n, 0.0, (), (seed + n,), 32, load.text_tokens) for n in range(load.texts)),
        *(
            TraceRequest(
                load.texts + n,
                load.lead_s + n * load.every_s,
                (ImageSpec(seed + 100 + n, load.side, load.side),),
                (seed + 100 + n,),
                32,
                load.image_tokens,
            )
            for n in range(load.images)
        ),
    ]
    bodies = [build_body(request, api="generate", model="model") for request in requests]
    arrivals = [request.arrival_s for request in requests]
    job = run_job(url + APIS["generate"], bodies, arrivals, concurrency=None, timeout_s=load.timeout_s)
    return sum(bool(record.error) for record in asyncio.run(job))


def wait_for_files(folder: Path, pattern: str, count: int, timeout_s: float) -> list[Path]:
    """Raises ValueError where fewer than ``count`` are there in time."""
    end = time.monotonic() + timeout_s
    while len(found := sorted(folder.glob(pattern))) < count:
        if time.monotonic() > end:
            raise ValueError(f"{len(found)} of {count} processes recorded: was the server started with the trace hook?")
        time.sleep(0.1)
    return found


def record(url: str, folder: Path, out: Path, load: Load) -> str:
    """Warm up, record under ``load``, write picture and intervals into ``out``; a summary in a few lines.

    Raises ValueError where a process did not record.
    """
    if (folder / "go").exists():
        raise ValueError(f"the server that records into {folder.name} has done so already: it does once")
    send(url, replace(load, texts=1, text_tokens=4, images=2, lead_s=0.0, image_tokens=4), SEED)
    (folder / "go").touch()
    try:
        wait_for_files(folder, "ready-*", 2, READY_TIMEOUT_S)
        failed = send(url, load, SEED + 1000)
    finally:
        (folder / "stop").touch()
    recordings = [json.loads(path.read_text()) for path in wait_for_files(folder, "*-*.json", 2, READY_TIMEOUT_S)]
    for recording in recordings:
        if "error" in recording:
            raise ValueError(f"{recording['lane']} could not record: {recording['error']}")
    lanes = lanes_of(recordings)
    summary = {**figures(lanes), "num_failed": failed, "device": recordings[0]["device"]}
    out.mkdir(parents=True, exist_ok=True)
    zoom = busiest_window(lanes)
    write(lanes, zoom, summary, load, out / "timeline.json")
    draw(lanes, zoom, summary, out / "timeline.png")
    return "\n".join(f"{key}: {value}" for key, value in summary.items())


def lanes_of(recordings: Sequence[dict[str, Any]]) -> Lanes:
    """The encoder worker's work as one lane, the scheduler's by stream, decode's first.

    Decode's stream is the one with the most kernels: hundreds for each step, several hundred steps. Raises ValueError
    where one of the two processes did nothing.
    """
    encoder: list[Interval] = []
    by_stream: dict[int, list[Interval]] = defaultdict(list)
    for recording in recordings:
        for start, end, name, stream in recording["intervals_us"]:
            if recording["lane"] == "encoder":
                encoder.append(Interval(start, end, name))
            else:
                by_stream[stream if recording["device"] == "cuda" else 0].append(Interval(start, end, name))
    if not encoder or not by_stream:
        raise ValueError(f"no work recorded in the {'scheduler' if encoder else 'encoder worker'}")
    order = sorted(by_stream, key=lambda stream: -len(by_stream[stream]))
    lanes = {ENCODER: encoder, DECODE: by_stream[order[0]]}
    for stream in order[1:4]:
        if busy_us(by_stream[stream]) > 1000:
            lanes[f"scheduler, stream {stream}"] = by_stream[stream]
    return {name: sorted(lane, key=lambda interval: interval.start_us) for name, lane in lanes.items()}


def figures(lanes: Lanes) -> dict[str, Any]:
    """Busy times (ms) of encoder and decode and of both at once, and how many of decode's kernels ran meanwhile."""
    encoder, decode = lanes[ENCODER], lanes[DECODE]
    both = overlap_us(encoder, decode)
    return {
        "encoder_busy_ms": round(busy_us(encoder) / 1e3, 2),
        "decode_stream_busy_ms": round(busy_us(decode) / 1e3, 2),
        "both_at_once_ms": round(both / 1e3, 2),
        "share_of_encoder": round(both / max(1e-9, busy_us(encoder)), 3),
        "decode_kernels_beside_encoder": count_beside(decode, encoder),
        "kernels": {name: len(lane) for name, lane in lanes.items()},
        "most_frequent_beside": [name[:60] for name, _ in Counter(names_beside(decode, encoder)).most_common(3)],
    }


def names_beside(one: Sequence[Interval], other: Sequence[Interval]) -> list[str]:
    """Names of the intervals of ``one`` during which something of ``other`` runs."""
    busy, place, names = merged(other), 0, []
    for interval in sorted(one, key=lambda i: i.start_us):
        while place < len(busy) and busy[place].end_us <= interval.start_us:
            place += 1
        if place < len(busy) and busy[place].start_us < interval.end_us:
            names.append(interval.label)
    return names


def count_beside(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    return len(names_beside(one, other))


def busiest_window(lanes: Lanes) -> tuple[float, float]:
    """The ``ZOOM_MS`` window, among those that start every half of it, in which encoder and decode share most time."""
    length = ZOOM_MS * 1e3
    begin = min(lane[0].start_us for lane in lanes.values())
    end = max(interval.end_us for lane in lanes.values() for interval in lane)
    starts = [begin + n * length / 2 for n in range(max(1, int((end - begin) / (length / 2))))]
    encoder, decode = merged(lanes[ENCODER]), merged(lanes[DECODE])

    def shared(start: float) -> float:
        part = cut({ENCODER: encoder, DECODE: decode}, start, start + length)
        return overlap_us(part[ENCODER], part[DECODE])

    busy = [start for start in starts if any(i.start_us < start + length and i.end_us > start for i in encoder)]
    best = max(busy or starts, key=shared)
    return best, best + length


def write(lanes: Lanes, zoom: tuple[float, float], summary: dict[str, Any], load: Load, path: Path) -> None:
    """All lanes with stretches closer than 0.1 ms joined, and the kernels of the zoomed window; ms since the start."""
    origin = min(lane[0].start_us for lane in lanes.values())

    def rows(lane: Sequence[Interval]) -> list[list[Any]]:
        return [
            [
                round((i.start_us - origin) / 1e3, 4),
                round((i.end_us - origin) / 1e3, 4),
                *([i.label[:60]] * bool(i.label)),
            ]
            for i in lane
        ]

    data = {
        "summary": summary,
        "load": load.__dict__,
        "environment": describe(REPO),
        "joined_ms": {name: rows(merged(lane, 100.0)) for name, lane in lanes.items()},
        "window_ms": [round((edge - origin) / 1e3, 3) for edge in zoom],
        "window_kernels_ms": {name: rows(lane) for name, lane in cut(lanes, *zoom).items()},
    }
    write_atomic(path, json.dumps(data, separators=(",", ":")).replace('"window_', '\n"window_') + "\n")


def draw(lanes: Lanes, zoom: tuple[float, float], summary: dict[str, Any], path: Path) -> None:
    """Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib (pip install matplotlib)") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    origin = min(lane[0].start_us for lane in lanes.values())
    figure, (whole, window) = pyplot.subplots(2, 1, figsize=(13, 3 + 0.9 * len(lanes)))
    for axis, part, gap in ((whole, lanes, 200.0), (window, cut(lanes, *zoom), 0.0)):
        for row, lane in enumerate(part.values()):
            shown = merged(lane, gap) if gap else lane
            bars = [((i.start_us - origin) / 1e3, (i.end_us - i.start_us) / 1e3) for i in shown]
            axis.broken_barh(bars, (row - 0.38, 0.76), facecolors=f"C{row}", edgecolor="white", linewidth=0.1)
        axis.set_yticks(range(len(part)), list(part))
        axis.invert_yaxis()
        axis.set_xlabel("ms")
    low, high = ((edge - origin) / 1e3 for edge in zoom)
    whole.axvspan(low, high, color="black", alpha=0.15)
    window.set_xlim(low, high)
    both, encoder = summary["both_at_once_ms"], summary["encoder_busy_ms"]
    where = "one GPU" if summary["device"] == "cuda" else "the CPU"
    whole.set_title(f"Encoder and decode at once on {where} for {both:.0f} of the encoder's {encoder:.0f} ms")
    window.set_title("The window marked above, each kernel", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def record_on(arm: Arm, options: argparse.Namespace, load: Load) -> str:
    """Start the arm's server, record, stop it. Raises ServerFailed and ValueError."""
    with tempfile.TemporaryDirectory(prefix="timeline-", ignore_cleanup_errors=True) as folder:
        work_dir = Path(folder)
        ready = traced(arm, work_dir)
        with servers.running_arm(
            ready, model=options.model, work_dir=work_dir, start_timeout_s=options.start_timeout_s
        ) as group:
            return record(group[-1].url, work_dir, options.out, load)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", help="a server that runs, with --trace-dir")
    parser.add_argument("--trace-dir", type=Path, help="its SPACESERVE_TRACE_DIR")
    parser.add_argument("--model", help="model folder, to start a server")
    parser.add_argument("--arm", default="spaceserve")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--common-flags", default="")
    parser.add_argument("--start-timeout-s", type=float, default=180.0)
    parser.add_argument("--texts", type=int, default=Load.texts)
    parser.add_argument("--text-tokens", type=int, default=Load.text_tokens)
    parser.add_argument("--images", type=int, default=Load.images)
    parser.add_argument("--side", type=int, default=Load.side)
    options = parser.parse_args(argv)
    load = Load(texts=options.texts, text_tokens=options.text_tokens, images=options.images, side=options.side)
    try:
        servers.stop_on_sigterm()
        if options.url and options.trace_dir:
            print(record(options.url, options.trace_dir, options.out, load))
        elif options.model:
            arm = arms.prepare(arms.parse_arm(options.arm), device=options.device, common_flags=options.common_flags)
            print(record_on(arm, options, load))
        else:
            raise ValueError("give --model, or --url and --trace-dir")
    except (ValueError, servers.ServerFailed) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
