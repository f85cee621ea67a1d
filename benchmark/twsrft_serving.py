"""TWSRFT on a running server with images of mixed sizes: TTFT and TPOT by size class, against other orders and stock.

  twsrft_serving.py all --runs RUNS --out twsrft-cpu.json      (all arms up at once, then the report)
  twsrft_serving.py model OUT_DIR                  (Qwen2-VL's shape, small, random weights: the encoder is what costs)
  serve_bench.py run --device cpu --model OUT_DIR --model-name small-vl --results RUNS --set twsrft-cpu ...
  twsrft_serving.py report --runs RUNS --out twsrft-cpu.json          (and a table beside it, .md, and a plot, .png)

``serve_bench.py`` starts one arm after the other, as on a GPU; ``all`` is for cores that others use too.

The table's classes are those of the simulation, by the side that an image has before ``--scale``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from servebench import arms, servers
from servebench.environment import describe
from servebench.metrics import expand, mean, percentile, tpot_ms, ttft_ms
from servebench.results import DONE, Results
from servebench.session import Session, SessionConfig, session_table
from servebench.workload import Trace, Workload

CLASSES = {"small (to 448 px)": 448, "medium (672, 1024 px)": 1024, "large (1536, 2048 px)": 2048}
FIGURES = {"ttft": "TTFT", "tpot": "TPOT"}
# The encoder's shape: some 6 M parameters, so that an image of 512 x 512 takes a second on one core.
VISION = {"depth": 8, "embed_dim": 256, "num_heads": 4}
LARGEST_PIXELS = 1 << 20
MODEL_NAME = "small-vl"
# Near what two cores can encode.
WORKLOAD = "sizes@6x120"
ARMS = ("spaceserve-twsrft", "spaceserve-fcfs", "spaceserve-srf")
SCALE = 0.25
OUTPUT_LEN = 16
START_TIMEOUT_S = 300.0
REPO = Path(__file__).resolve().parent.parent


def write_model(out: Path) -> None:
    """The bundled demo model's configuration and tokenizer with a larger encoder and larger images; no weights."""
    from spaceserve.demo import model_path

    source = model_path()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, out / name)
    config = json.loads((source / "config.json").read_text())
    config["vision_config"].update(VISION)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    processor = json.loads((source / "preprocessor_config.json").read_text())
    processor.update(min_pixels=56 * 56, max_pixels=LARGEST_PIXELS)
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def run_all(runs: Path, out: Path, names: Sequence[str], repeats: int, note: str, workload: str = WORKLOAD) -> None:
    """Start all arms at once, replay each repeat's trace through one after the other, and write the report.

    Neighbours in time meet the same load of a shared machine, which arms minutes apart do not; servers that wait use
    next to no time. One thread for each process: with more, PyTorch's threads wait for each other in loops, and whoever
    computes in one process (stock) loses several times over once anything else runs.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    servers.stop_on_sigterm()
    chosen = [
        arms.prepare(arms.parse_arm(name), device="cpu", common_flags="--load-format dummy", ours_flags="")
        for name in names
    ]
    environment = describe(REPO)
    with tempfile.TemporaryDirectory(prefix="twsrft-") as folder, ExitStack() as stack:
        model = Path(folder) / MODEL_NAME
        write_model(model)
        groups = {}
        for arm in chosen:
            work_dir = Path(folder) / arm.name
            work_dir.mkdir()
            started = servers.running_arm(arm, model=str(model), work_dir=work_dir, start_timeout_s=START_TIMEOUT_S)
            groups[arm.name] = stack.enter_context(started)
        for repeat in range(repeats):
            config = SessionConfig(
                model=str(model),
                model_name=MODEL_NAME,
                results=runs,
                work_dir=Path(folder),
                repo=REPO,
                device="cpu",
                repeat=repeat,
                output_len=OUTPUT_LEN,
                num_words=8,
                scale=SCALE,
                start_estimate_s=0.0,
                warmup_rounds=1,
                command="twsrft_serving.py all",
            )
            session = Session(config, chosen, [Workload.parse(workload)])
            print(session_table(session.run_on(groups, environment)), flush=True)
    report(runs, out, note)


def class_of(side: float) -> str:
    """Size class of an image by its side in pixels before scaling."""
    return next(name for name, most in CLASSES.items() if side <= most)


def rows_of(data: dict[str, Any], trace: Trace) -> Iterator[dict[str, Any]]:
    """One row for each answered request of a slice: arm, repeat, side in pixels before scaling, class, TTFT, TPOT."""
    scale = data["trace"]["scale"]
    sides = {r.id: round(max(image.width for image in r.images) / scale) for r in trace.requests if r.images}
    for arm in data["arms"]:
        for compact in arm["requests"]:
            record = expand(compact)
            if record.error or not record.events_ms:
                continue
            side = sides[record.id]
            tpot = tpot_ms(record)
            yield {
                "arm": arm["arm"],
                "repeat": data["repeat"],
                "at_s": round(record.planned_ms / 1e3, 3),
                "side": side,
                "class": class_of(side),
                "ttft_ms": round(ttft_ms(record), 1),
                "tpot_ms": None if math.isnan(tpot) else round(tpot, 2),
            }


def figures(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean, p50, p99 and longest of TTFT and TPOT (ms) for each class and for all."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["class"]].append(row)
        groups["all"].append(row)
    found: dict[str, dict[str, Any]] = {}
    for name in [*CLASSES, "all"]:
        entry: dict[str, Any] = {"num_requests": len(groups[name])}
        for figure in FIGURES:
            values = [row[f"{figure}_ms"] for row in groups[name] if row[f"{figure}_ms"] is not None]
            if values:
                entry[figure] = {
                    "mean_ms": round(mean(values), 1),
                    "p50_ms": round(percentile(values, 50), 1),
                    "p99_ms": round(percentile(values, 99), 1),
                    "max_ms": round(max(values), 1),
                }
        found[name] = entry
    return found


def table(found: dict[str, Any]) -> Iterator[str]:
    """Markdown: mean / p99 in ms by class, for TTFT and TPOT."""
    for figure, title in FIGURES.items():
        yield f"| {title}: mean / p99 in ms | " + " | ".join([*CLASSES, "all"]) + " |"
        yield "|" + "---|" * (len(CLASSES) + 2)
        for name, arm in found.items():
            cells = [arm["classes"][group].get(figure) for group in [*CLASSES, "all"]]
            digits = 0 if figure == "ttft" else 1
            shown = (f"{c['mean_ms']:,.{digits}f} / {c['p99_ms']:,.{digits}f}" if c else "-" for c in cells)
            yield f"| {name} | " + " | ".join(shown) + " |"
        yield ""


def plot(found: dict[str, Any], path: Path) -> None:
    """Mean (bar) and p99 (line above it) of TTFT and TPOT by class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [*CLASSES, "all"]
    drawn, axes = plt.subplots(1, len(FIGURES), figsize=(12, 4.5))
    width = 0.8 / len(found)
    for axis, (figure, title) in zip(axes, FIGURES.items(), strict=True):
        for number, (name, arm) in enumerate(found.items()):
            places = [place + (number - (len(found) - 1) / 2) * width for place in range(len(groups))]
            means = [arm["classes"][group][figure]["mean_ms"] for group in groups]
            tails = [arm["classes"][group][figure]["p99_ms"] for group in groups]
            axis.bar(places, means, width * 0.9, label=name, color=f"C{number}")
            axis.plot(places, tails, "_", color=f"C{number}", markersize=12, markeredgewidth=2)
        axis.set(title=f"{title}: mean (bar), p99 (line)", yscale="log", ylabel="ms")
        axis.set_xticks(range(len(groups)), [group.replace(" (", "\n(") for group in groups], fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)


def report(runs: Path, out: Path, note: str = "") -> None:
    """Gather all slices of the runs. Raises ValueError where there is none, or where they replay different traces."""
    results = Results(runs)
    slices = [data for data in results.slices() if data["status"] == DONE]
    traces = {data["workload"]: None for data in slices}
    if len(traces) != 1:
        raise ValueError(f"expected slices of one workload in {runs.name}, found {sorted(traces)}")
    stored = {path: Trace.from_json(path.read_text()) for path in (runs / "traces").glob("*.json")}
    by_digest = {trace.digest: trace for trace in stored.values()}
    rows = [row for data in slices for row in rows_of(data, by_digest[data["trace"]["sha256"]])]
    names = list(dict.fromkeys(row["arm"] for row in rows))
    found = {
        name: {
            "commands": next(arm["commands"] for data in slices for arm in data["arms"] if arm["arm"] == name),
            "num_failed": sum(
                arm["summary"]["num_failed"] for data in slices for arm in data["arms"] if arm["arm"] == name
            ),
            "classes": figures(row for row in rows if row["arm"] == name),
            "by_repeat": {
                str(data["repeat"]): figures(
                    row for row in rows if row["arm"] == name and row["repeat"] == data["repeat"]
                )
                for data in slices
            },
        }
        for name in sorted(names)
    }
    data = {
        "note": note,
        "workload": slices[0]["workload"],
        "model": slices[0]["model"],
        "vision": VISION,
        "scale": slices[0]["trace"]["scale"],
        "repeats": [
            {
                "repeat": part["repeat"],
                "session": part["session"],
                "command": part["command"],
                "trace_sha256": part["trace"]["sha256"],
                "num_requests": part["trace"]["num_requests"],
                "order": [arm["arm"] for arm in part["arms"]],
                "cores_used_elsewhere": {arm["arm"]: arm.get("cores_used_elsewhere") for arm in part["arms"]},
                "environment": part["environment"],
            }
            for part in slices
        ],
        "arms": found,
        "rows": rows,
    }
    body = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f'{body},\n "rows": [\n{lines}\n ]\n}}\n')
    out.with_suffix(".md").write_text("\n".join(table(found)))
    plot(found, out.with_suffix(".png"))
    print("\n".join(table(found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="write the model's folder")
    model.add_argument("out", type=Path)
    for name, text in (
        ("report", "results file, table and plot from the stored slices"),
        ("all", "model, runs and report"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--runs", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--note", default="", help="kept in the results file: what else the machine did, say")
        if name == "all":
            command.add_argument("--arms", nargs="+", default=ARMS)
            command.add_argument("--repeats", type=int, default=3)
            command.add_argument("--workload", default=WORKLOAD)
    options = parser.parse_args()
    try:
        if options.command == "all":
            run_all(options.runs, options.out, options.arms, options.repeats, options.note, options.workload)
        elif options.command == "model":
            write_model(options.out)
        else:
            report(options.runs, options.out, options.note)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
