"""SIS against static splits and no mask, on a load that changes: one server, its SM mode changed between passes.

  sm_modes.py measure --model DIR --out FOLDER [--modes sis sis:8 static:68 off ...] [--phases NAME=S:LOAD+LOAD ...]
  sm_modes.py report FOLDER

A pass is the whole trace (phases.py) under one mode (`--sm-partition`'s words; those with `both+`
need `--ours-flags "--sm-partition both+sis"`, which captures decode's graphs). All passes have the same arrivals and
images; caches are emptied between them. Repeats run the modes in the opposite order, so that drift of the machine
favours none. A pass that is in FOLDER is not run again, and one that does not fit into `--budget-s` is left for the
next call. Full records go to FOLDER, a table is printed last.

The score is the mean time from a request's arrival to its last token, in each phase: what somebody who waits for the
whole answer feels. It weighs TTFT once and the time per token as often as there are tokens, so neither side of the
split can be bought with the other for nothing. Over phases a mode's score is the geometric mean of its ratios to the
best static split of each phase: 1.00 is a split chosen with hindsight for every phase, which no single one can be.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_bench import REPO, stored_command
from servebench import arms, metrics, servers
from servebench.bodies import BodyFile, write_bodies
from servebench.client import RequestRecord
from servebench.environment import describe
from servebench.phases import DEFAULT_PHASES, Phase, PhasedTrace, phased_trace
from servebench.results import write_atomic
from servebench.session import run_client, warmup_trace
from servebench.workload import Trace

# An H200 grants 20, 28, ..., 116 and all 132 SMs.
DEFAULT_MODES = ("sis", "sis:1:4", "static:36", "static:68", "static:92", "static:116", "off")
SETTLE_S = 1.0


def set_mode(url: str, mode: str) -> dict[str, Any]:
    """Change the server's mode; its answer. Raises ServerFailed where it refuses."""
    body = json.dumps({"mode": mode}).encode()
    request = urllib.request.Request(
        f"{url}/spaceserve/sm-partition", data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer
    except OSError as error:
        raise servers.ServerFailed(f"the server does not change to {mode}: {error}") from error


def split_state(url: str) -> dict[str, Any] | None:
    """What the server's status page says of its split, and of decode's SMs; None where it has no such page."""
    status, text = servers.http(f"{url}/spaceserve/status")
    if status != 200:
        return None
    page = json.loads(text)
    split: dict[str, Any] | None = page.get("split")
    return None if split is None else {**split, "decoder": page.get("decoder")}


def is_static(mode: str) -> bool:
    """Whether a mode has one split for everything, whichever sides it masks."""
    return mode.removeprefix("both+").startswith("static:")


def pass_path(folder: Path, mode: str, repeat: int) -> Path:
    return folder / "passes" / f"{mode.replace(':', '-')}__r{repeat}.json"


class Measurement:
    """Passes on one running server."""

    def __init__(self, options: argparse.Namespace, work_dir: Path) -> None:
        self.options = options
        self.folder: Path = options.out
        self.end = time.monotonic() + options.budget_s
        phases = [Phase.parse(text) for text in options.phases]
        self.trace = phased_trace(
            phases, options.seed, output_len=options.output_len, num_words=options.num_words, scale=options.scale
        )
        self.duration_s = sum(phase.duration_s for phase in phases)
        self.work_dir = work_dir
        self.check_same_load()

    def check_same_load(self) -> None:
        """Passes of two loads must not be compared. Raises ValueError."""
        load = {
            "phases": list(self.options.phases),
            "trace": self.trace.trace.digest,
            "model": self.options.model_name or Path(self.options.model).name,
            "output_len": self.options.output_len,
        }
        path = self.folder / "load.json"
        if not path.exists():
            write_atomic(path, json.dumps(load, indent=1) + "\n")
        elif json.loads(path.read_text()) != load:
            raise ValueError(f"{self.folder} holds passes of another load: give another folder")

    def missing(self) -> list[tuple[int, str]]:
        """(repeat, mode) of the passes to run, the modes of odd repeats backwards."""
        return [
            (repeat, mode)
            for repeat in range(self.options.repeats)
            for mode in (self.options.modes if repeat % 2 == 0 else reversed(self.options.modes))
            if not pass_path(self.folder, mode, repeat).exists()
        ]

    def bodies(self, trace: Trace, name: str) -> BodyFile:
        return write_bodies(trace, self.work_dir / name, api="generate", model=self.options.model)

    def run(self) -> int:
        """Run what is missing and fits. Returns the number of passes that were run."""
        wanted = self.missing()
        if not wanted:
            return 0
        options = self.options
        arm = arms.prepare(
            arms.parse_arm("spaceserve"),
            device=options.device,
            common_flags=options.common_flags,
            ours_flags=f"--enable-metrics {options.ours_flags}",
        )
        bodies = self.bodies(self.trace.trace, "bodies")
        warmup = self.bodies(warmup_trace(self.trace.trace, 2), "warmup")
        environment = describe(REPO)
        num_run = 0
        with servers.running_arm(
            arm, model=options.model, work_dir=self.work_dir, start_timeout_s=options.start_timeout_s
        ) as (server,):
            print(f"[{self.end - time.monotonic():.0f} s left] the server is up", flush=True)
            url = server.url
            # Each mode once: its first batch makes green contexts and tunes kernels.
            for mode in dict.fromkeys(mode for _, mode in wanted):
                set_mode(url, mode)
                self.client(warmup, [0.0] * len(warmup.spans), url, 8, 120.0)
            for repeat, mode in wanted:
                planned_s = self.duration_s + options.drain_s
                if self.end - time.monotonic() < planned_s:
                    print(f"no time left for {mode}, repeat {repeat}", flush=True)
                    break
                set_mode(url, mode)
                flushed = servers.flush(url)
                time.sleep(SETTLE_S)
                before = servers.describe_server(url)["metrics"]
                arrivals_s = [request.arrival_s for request in self.trace.trace.requests]
                records = self.client(bodies, arrivals_s, url, None, planned_s)
                if all(record.error for record in records):
                    raise servers.ServerFailed(f"nothing was answered under {mode}\n{server.tail()}")
                result = {
                    "mode": mode,
                    "repeat": repeat,
                    "command": stored_command(sys.argv),
                    "server": arm.servers[-1].template,
                    "environment": environment,
                    "flushed": flushed,
                    "scores": phase_scores(self.trace, records),
                    "metrics_before": before,
                    "metrics_after": servers.describe_server(url)["metrics"],
                    "split": split_state(url),
                    "requests": [metrics.compact(record) for record in records],
                }
                write_atomic(pass_path(self.folder, mode, repeat), json.dumps(result, allow_nan=False) + "\n")
                num_run += 1
                whole = result["scores"]["all"]
                print(
                    f"[{self.end - time.monotonic():.0f} s left] {mode:15} r{repeat}  latency "
                    f"{whole['latency_ms']:.0f} TTFT {whole['ttft_ms']:.0f} TPOT {whole['tpot_ms']:.2f} ms, "
                    f"failed {whole['num_failed']}",
                    flush=True,
                )
        return num_run

    def client(
        self, bodies: BodyFile, arrivals_s: Sequence[float], url: str, concurrency: int | None, timeout_s: float
    ) -> list[RequestRecord]:
        return run_client(self.work_dir, bodies, arrivals_s, f"{url}/generate", (concurrency,), timeout_s)


def phase_scores(trace: PhasedTrace, records: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Means of each phase and of all: latency to the last token, TTFT, TPOT in ms; and what failed."""
    groups: dict[str, list[RequestRecord]] = {"all": list(records)}
    for name, record in zip(trace.phase_of, records, strict=True):
        groups.setdefault(name, []).append(record)
    found = {}
    for name, some in groups.items():
        good = [record for record in some if not record.error and record.events_ms]
        tpots = [value for record in good if not math.isnan(value := metrics.tpot_ms(record))]
        with_image = [record for record in good if trace.trace.requests[record.id].images]
        row = {
            "num_requests": float(len(some)),
            "num_failed": float(len(some) - len(good)),
            "latency_ms": metrics.mean([record.events_ms[-1] for record in good]),
            "ttft_ms": metrics.mean([metrics.ttft_ms(record) for record in good]),
            "image_ttft_ms": metrics.mean([metrics.ttft_ms(record) for record in with_image]),
            "tpot_ms": metrics.mean(tpots),
            "tpot_p99_ms": metrics.percentile(tpots, 99),
        }
        found[name] = {key: round(value, 4) for key, value in row.items() if not math.isnan(value)}
    return found


def compare(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Scores by mode and phase (mean over repeats), the best static split of each phase, and what each mode loses.

    Returns {"phases": [...], "modes": {mode: {"repeats", "phases": {phase: row}, "overall"}}, "best_static": {phase:
    mode}}; a row's `ratio` is its latency over the best static split's in that phase, `overall` their geometric mean.
    """
    modes = list(dict.fromkeys(one["mode"] for one in passes))
    phases = list(dict.fromkeys(name for one in passes for name in one["scores"] if name != "all"))
    table: dict[str, dict[str, Any]] = {}
    for mode in modes:
        mine = [one["scores"] for one in passes if one["mode"] == mode]
        rows = {}
        for phase in [*phases, "all"]:
            keys = set.intersection(*(set(scores[phase]) for scores in mine))
            rows[phase] = {key: statistics.mean(scores[phase][key] for scores in mine) for key in sorted(keys)}
            latencies = [scores[phase]["latency_ms"] for scores in mine if "latency_ms" in scores[phase]]
            rows[phase]["latency_spread_ms"] = max(latencies, default=0.0) - min(latencies, default=0.0)
        table[mode] = {"repeats": len(mine), "phases": rows}
    static = [mode for mode in modes if is_static(mode)]
    best = {}
    if static:
        for phase in phases:
            best[phase] = min(static, key=lambda mode: table[mode]["phases"][phase].get("latency_ms", math.inf))
        for mode in modes:
            rows = table[mode]["phases"]
            for phase in phases:
                lowest = table[best[phase]]["phases"][phase]["latency_ms"]
                rows[phase]["ratio"] = rows[phase].get("latency_ms", math.inf) / lowest
            table[mode]["overall"] = math.exp(statistics.mean(math.log(rows[phase]["ratio"]) for phase in phases))
    return {"phases": phases, "modes": table, "best_static": best}


def report(folder: Path) -> str:
    """The table, and FOLDER/summary.json. Raises ValueError where nothing has been measured."""
    passes = [json.loads(path.read_text()) for path in sorted((folder / "passes").glob("*.json"))]
    if not passes:
        raise ValueError(f"{folder} holds no pass")
    found = compare(passes)
    write_atomic(folder / "summary.json", json.dumps(found, indent=1) + "\n")
    phases, table = found["phases"], found["modes"]
    lines = ["mean ms to the last token / to the first token / per token; x: over the best static split of the phase"]
    lines.append(f"{'mode':15} {'n':>2} {'overall':>7} " + " ".join(f"{phase:>27}" for phase in phases))
    order = sorted(table, key=lambda mode: (table[mode].get("overall", 0.0), mode))
    for mode in order:
        cells = []
        for phase in phases:
            row = table[mode]["phases"][phase]
            ratio = f" x{row['ratio']:.3f}" if "ratio" in row else ""
            cell = f"{row['latency_ms']:.0f}/{row['ttft_ms']:.0f}/{row['tpot_ms']:.2f}" if "tpot_ms" in row else "-"
            cells.append(f"{cell + ratio:>27}")
        overall = table[mode].get("overall")
        shown = "-" if overall is None else f"{overall:.3f}"
        lines.append(f"{mode:15} {table[mode]['repeats']:>2} {shown:>7} " + " ".join(cells))
    failed = {mode: table[mode]["phases"]["all"]["num_failed"] for mode in table}
    if any(failed.values()):
        lines.append(f"failed requests: {failed}")
    if found["best_static"]:
        lines.append("best static split: " + ", ".join(f"{p} {mode}" for p, mode in found["best_static"].items()))
        lines += verdict(found)
    return "\n".join(lines)


def verdict(found: dict[str, Any]) -> list[str]:
    """How near each SIS mode is to the best static split of every phase, and to the best single one overall."""
    table = found["modes"]
    static = [mode for mode in table if is_static(mode)]
    single = min(static, key=lambda mode: table[mode]["overall"])
    lines = []
    for mode in (mode for mode in table if mode.removeprefix("both+").startswith("sis")):
        worst = max(found["phases"], key=lambda phase: table[mode]["phases"][phase]["ratio"])
        farthest = table[mode]["phases"][worst]["ratio"] - 1
        gain = table[mode]["overall"] / table[single]["overall"] - 1
        lines.append(
            f"{mode}: {farthest:+.1%} at most against the best static split of a phase ({worst}), "
            f"{gain:+.1%} overall against the best single one ({single})"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    measure = commands.add_parser("measure", help="run passes that are missing, then report")
    measure.add_argument("--model", required=True)
    measure.add_argument("--model-name")
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--modes", nargs="+", default=list(DEFAULT_MODES))
    measure.add_argument("--phases", nargs="+", default=list(DEFAULT_PHASES))
    measure.add_argument("--repeats", type=int, default=2)
    measure.add_argument("--seed", type=int, default=1)
    measure.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    measure.add_argument("--output-len", type=int, default=128)
    measure.add_argument("--num-words", type=int, default=64)
    measure.add_argument("--scale", type=float, default=1.0, help="factor on every image side, for small machines")
    measure.add_argument("--budget-s", type=float, default=560.0, help="bound on the whole call")
    measure.add_argument("--start-timeout-s", type=float, default=180.0)
    measure.add_argument("--drain-s", type=float, default=15.0, help="wait for answers after the last phase")
    measure.add_argument("--common-flags", default="")
    measure.add_argument("--ours-flags", default="")
    measure.add_argument("--bundle", type=Path, help="also pack FOLDER into this .tgz")
    measure.add_argument("--log-dir", type=Path, help="keep the server's log here")
    commands.add_parser("report", help="the table again").add_argument("out", type=Path)
    options = parser.parse_args(argv)
    status = 0
    if options.action == "measure":
        servers.stop_on_sigterm()
        with tempfile.TemporaryDirectory(prefix="sm-modes-") as name:
            try:
                measurement = Measurement(options, Path(name))
            except ValueError as error:
                parser.error(str(error))
            try:
                measurement.run()
            except (servers.ServerFailed, subprocess.SubprocessError, OSError) as error:
                print(f"FAILED {error}", flush=True)
                status = 1
            if options.log_dir:
                options.log_dir.mkdir(parents=True, exist_ok=True)
                for log in Path(name).glob("*.log"):
                    (options.log_dir / log.name).write_bytes(log.read_bytes())
    try:
        print(report(options.out))
    except ValueError as error:
        print(error)
        status = 1
    if options.action == "measure" and options.bundle:
        options.bundle.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.bundle, "w:gz") as archive:
            archive.add(options.out, arcname=options.out.name)
    return status


if __name__ == "__main__":
    sys.exit(main())
