"""Soak test: many requests over few images on a store that holds a tenth of them, answers compared with stock SGLang.

  soak.py --model DIR --out soak.json \\
    --server "{python} -m spaceserve.launch_server --model-path {model} --port {port} ..." \\
    --stock "{python} -m sglang.launch_server --model-path {model} --port {port} ..."

Sends ``--requests`` requests in a closed loop over ``--images`` images in random order (image and question drawn
anew each time, from fixed seeds), and records the resident memory of every process of the server as it goes. Then
it starts the stock server on the same weights, sends a sample of the same requests, and compares the answers word for
word. The result is one JSON file; the exit code is 0 when all were answered and every sampled answer is equal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from servebench import servers
from servebench.arms import Arm, ServerSpec
from servebench.bodies import APIS, build_body
from servebench.client import RequestRecord, run_job
from servebench.environment import describe, scrub
from servebench.metrics import percentile, ttft_ms
from servebench.results import write_atomic
from servebench.workload import ImageSpec, TraceRequest

REPO = Path(__file__).resolve().parent.parent


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is no file's and no shared segment's.

    Neither RSS, which counts the slab in each process that maps it, nor USS: a process that was forked makes pages its
    own when it writes to them, as the garbage collector does to each object, and USS takes that for growth.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


class MemoryRecorder:
    """Samples anonymous memory (bytes) of the servers' processes in a thread, with the number of answers so far."""

    def __init__(self, group: Sequence[servers.Server], interval_s: float) -> None:
        self.group, self.interval_s = group, interval_s
        self.answers = 0
        self.names: dict[int, str] = {}
        self.samples: list[tuple[float, int, dict[int, int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> MemoryRecorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def _loop(self) -> None:
        self.sample()
        while not self._stop.wait(self.interval_s):
            self.sample()

    def sample(self) -> None:
        resident: dict[int, int] = {}
        for server in self.group:
            for process in server.family():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                    resident[process.pid] = anonymous_bytes(process.pid)
                    if process.pid not in self.names:
                        self.names[process.pid] = servers.title(process)
        self.samples.append((time.monotonic(), self.answers, resident))


def memory_growth(
    samples: Sequence[tuple[float, int, dict[int, int]]], names: dict[int, str], total: int, window: int
) -> list[dict[str, Any]]:
    """For each process, mean memory (MiB) while the first ``window`` answers came (after a tenth of them, as warm-up)
    and while the last did. Processes that did not live through both are listed with None. The scheduler's RadixCache
    grows until it is full: ``late_growth_mib`` is what came after 60 % of the answers. ``by_window_mib`` is the mean
    over each window in turn, so that a step can be told from a slope."""
    rows = []
    for pid in sorted({pid for _, _, resident in samples for pid in resident}):
        first = [r[pid] for _, n, r in samples if pid in r and window / 10 <= n <= window]
        last = [r[pid] for _, n, r in samples if pid in r and n >= total - window]
        filled = [r[pid] for _, n, r in samples if pid in r and 0.6 * total <= n <= 0.6 * total + window]
        windows = [
            [r[pid] for _, n, r in samples if pid in r and begin <= n < begin + window]
            for begin in range(0, total, window)
        ]
        early = sum(first) / len(first) / 2**20 if first else None
        late = sum(last) / len(last) / 2**20 if last else None
        growth = late - early if early is not None and late is not None else None
        late_growth = late - sum(filled) / len(filled) / 2**20 if filled and late is not None else None
        rows.append(
            {
                "pid": pid,
                "name": names.get(pid, "?"),
                "first_mib": None if early is None else round(early, 1),
                "last_mib": None if late is None else round(late, 1),
                "growth_mib": None if growth is None else round(growth, 1),
                "late_growth_mib": None if late_growth is None else round(late_growth, 1),
                "by_window_mib": [round(sum(w) / len(w) / 2**20, 1) if w else None for w in windows],
            }
        )
    return rows


def draw_requests(count: int, num_images: int, side: int, output_len: int, seed: int) -> list[TraceRequest]:
    """``count`` requests with one of ``num_images`` images each; sizes vary so that slots of several sizes mix."""
    rng = random.Random(f"soak {seed}")
    sides = [max(28, int(side * factor)) for factor in (0.5, 0.75, 1.0)]
    pool = [
        ImageSpec((seed << 20) + i, sides[i % len(sides)], sides[(i // 3) % len(sides)], format="png")
        for i in range(num_images)
    ]
    return [
        TraceRequest(i, 0.0, (rng.choice(pool),), (rng.randrange(1000),), rng.choice((4, 8, 16)), output_len)
        for i in range(count)
    ]


class LazyBodies(Sequence[bytes]):
    """Bodies built when they are sent: ten thousand at once would not fit in memory."""

    def __init__(self, requests: Sequence[TraceRequest], *, api: str, model: str) -> None:
        self.requests, self.api, self.model = requests, api, model

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: Any) -> Any:
        return build_body(self.requests[index], api=self.api, model=self.model)

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))


def compare(ours: Sequence[RequestRecord], stock: Sequence[RequestRecord], sample: Sequence[int]) -> dict[str, Any]:
    """Answers of the sampled requests against stock's, which were sent in the order of ``sample``."""
    unequal = [
        {"request": index, "ours": ours[index].text, "stock": reference.text, "stock_error": reference.error}
        for index, reference in zip(sample, stock, strict=True)
        if ours[index].text != reference.text or reference.error or ours[index].error
    ]
    distinct = len({record.text for record in stock})
    return {
        "sampled": len(sample),
        "equal": len(sample) - len(unequal),
        "distinct_answers": distinct,
        "unequal": unequal[:20],
    }


def one_server(name: str, template: str) -> Arm:
    return Arm(name, (ServerSpec("server", template),), ours=name != "stock")


def ask_all(
    options: argparse.Namespace,
    url: str,
    requests: Sequence[TraceRequest],
    concurrency: int,
    on_finish: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send all requests to the server, ``concurrency`` at a time."""
    bodies = LazyBodies(requests, api=options.api, model=options.model)
    job = run_job(
        url + APIS[options.api],
        bodies,
        [0.0] * len(requests),
        concurrency=concurrency,
        timeout_s=options.timeout_s,
        on_finish=on_finish,
    )
    return asyncio.run(job)


def run(options: argparse.Namespace) -> dict[str, Any]:
    servers.stop_on_sigterm()
    requests = draw_requests(options.requests, options.images, options.side, options.output_len, options.seed)
    sample = sorted(random.Random(f"sample {options.seed}").sample(range(len(requests)), options.sample))
    result: dict[str, Any] = {
        "environment": describe(REPO),
        "settings": {
            key: getattr(options, key)
            for key in ("requests", "images", "side", "output_len", "seed", "concurrency", "sample", "api")
        },
        "server": scrub(options.server),
        "stock_server": scrub(options.stock or ""),
    }
    with servers.work_folder("soak-", options.log_dir) as work_dir:
        arm = one_server("soaked", options.server)
        with servers.running_arm(
            arm, model=options.model, work_dir=work_dir, start_timeout_s=options.start_timeout_s
        ) as group:
            recorder = MemoryRecorder(group, options.interval_s)

            def count(record: RequestRecord) -> None:
                recorder.answers += 1
                if recorder.answers % 500 == 0:
                    print(f"{recorder.answers} answers", flush=True)

            begin = time.monotonic()
            with recorder:
                records = ask_all(options, group[-1].url, requests, options.concurrency, count)
            duration_s = time.monotonic() - begin
            metrics_text = servers.http(f"{group[-1].url}/metrics")[1]
        failed = [record for record in records if record.error]
        window = max(1, min(1000, len(requests) // 10))
        result |= {
            "duration_s": round(duration_s, 1),
            "requests_per_s": round(len(records) / duration_s, 2),
            "num_failed": len(failed),
            "first_errors": [record.error for record in failed[:5]],
            "ttft_p50_ms": round(percentile([ttft_ms(r) for r in records if r.events_ms], 50), 1),
            "memory_window_requests": window,
            "memory": memory_growth(recorder.samples, recorder.names, recorder.answers, window),
            "memory_samples": [
                {"answers": n, "mib": {pid: value >> 20 for pid, value in resident.items()}}
                for _, n, resident in recorder.samples[:: max(1, len(recorder.samples) // 200)]
            ],
            "store_metrics": [line for line in metrics_text.splitlines() if line.startswith("spaceserve:")],
        }
        write_atomic(options.out, json.dumps(result, indent=1) + "\n")
        if options.stock:
            reference = Path(options.model if not options.stock_model else options.stock_model)
            with servers.running_arm(
                one_server("stock", options.stock),
                model=str(reference),
                work_dir=work_dir,
                start_timeout_s=options.start_timeout_s,
            ) as group:
                sampled = [requests[i] for i in sample]
                stock = ask_all(options, group[-1].url, sampled, options.stock_concurrency)
            result["against_stock"] = compare(records, stock, sample)
        write_atomic(options.out, json.dumps(result, indent=1) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="command template with {python}, {model}, {host}, {port}")
    parser.add_argument("--stock", help="command template of the server to compare with")
    parser.add_argument("--model", required=True, help="model folder ({model})")
    parser.add_argument("--stock-model", help="model folder of the stock server, if another")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--side", type=int, default=224, help="largest image side in pixels")
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--stock-concurrency", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--api", choices=sorted(APIS), default="chat")
    parser.add_argument("--interval-s", type=float, default=5.0)
    parser.add_argument("--timeout-s", type=float, default=4 * 3600.0)
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("--log-dir", type=Path)
    options = parser.parse_args(argv)
    if options.sample > options.requests:
        parser.error("--sample is larger than --requests")
    try:
        result = run(options)
    except servers.ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    for row in result["memory"]:
        growth = f"growth {row['growth_mib']}, of that {row['late_growth_mib']} after 60 %"
        print(f"{row['name'][:60]:<60} first {row['first_mib']} last {row['last_mib']} MiB, {growth}")
    against = result.get("against_stock")
    print(f"failed {result['num_failed']} of {options.requests}; against stock: {against and against['equal']}")
    equal = against is None or against["equal"] == against["sampled"]
    return 0 if equal and not result["num_failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
