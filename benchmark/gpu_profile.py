"""Profile this GPU in one go: curves of Qwen2-VL shapes, with validation. For an idle GPU; about 2 minutes a model.

    python benchmark/gpu_profile.py OUT_FOLDER [--models 7b 2b 2.5-7b] [--mode standard|quick|both] [--timeout-s 240]

Writes into OUT_FOLDER, for each model: config.json (the public one's shapes), the curve file (with the raw times of
operators, contention in both mask modes, decode beside prefill, and the validation), a plot, the log; summary.json
with durations and errors. A part that fails is named and the others stay. Says how long each part took, and prints
short tables last: errors of predictions, decode on few SMs, and what each side costs the other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from dummy_model import SHAPES, model_config  # noqa: E402
from spaceserve.sis.curves import DeviceCurves  # noqa: E402

MODELS = {"7b": "qwen2-vl-7b", "2b": "qwen2-vl-2b", "2.5-7b": "qwen2.5-vl-7b"}
MODES = {"standard": ["--validate"], "quick": ["--quick", "--validate"]}
SMALL_SMS = (16, 24, 32, 48, 64)


def end_group(process: subprocess.Popen[str], grace_s: float = 15.0) -> None:
    """End a process and all that it started: politely first, as it has an MPS daemon to end."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def run_profile(folder: Path, name: str, extra: list[str], timeout_s: float) -> dict[str, Any]:
    """One profile in a process of its own; its lines go to this one's output, its log and progress to a file."""
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "spaceserve.profile", "--model-path", str(folder), "--device", "cuda"]
    command += ["--out", str(out), *extra]
    if importlib.util.find_spec("matplotlib") is not None:
        command += ["--plot", str(folder / f"{name}.png")]
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    log_file = folder / f"{name}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        killer = threading.Timer(timeout_s, end_group, [process])
        killer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
            code = process.wait()
        finally:
            killer.cancel()
            if process.poll() is None:
                end_group(process)
    row: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "rc": code, "file": str(out)}
    if out.exists():
        data = json.loads(out.read_text())
        row |= {"errors": data["validation"].get("errors", {}), "contention": data["contention"]}
        row |= {"failed_parts": data["validation"].get("failed_parts", {}), "sharing": data["sharing"]}
        row |= {"versions": data["versions"], "provenance": data["provenance"]}
    if code != 0 or not out.exists():
        row["log_tail"] = log_file.read_text()[-1500:]
    return row


def print_curves(file: Path) -> None:
    """Times by SM count, and factors beside the other side, of one curve file."""
    curves = DeviceCurves.load(file)
    total = curves.total_units
    print(f"{'SMs':>5} {'encoder 5329':>13} {'decode 16x2048':>15} {'prefill 2048':>13}   alone, ms")
    for units in (*SMALL_SMS, 80, 96, 112, total):
        at = curves.at(units)
        encoder, decode = at.encoder_batch_ms([5329]), at.decode_step_ms(16, 2048)
        print(f"{units:5d} {encoder:13.2f} {decode:15.2f} {at.prefill_chunk_ms(2048, 0):13.2f}")
    if curves.contention:
        print("time beside over time alone, by SMs of the encoder:")
        for case, table in sorted(curves.contention.items()):
            print(f"  {case:34} " + "  ".join(f"{units}: {factor:.2f}" for units, factor in sorted(table.items())))
    if curves.sharing:
        print("decode beside prefill in one process (few layers), ms alone -> beside:")
        for row in curves.sharing:
            print(
                f"  {row['mode']:17} decode on {row['decode_units']:3d}: {row['decode_alone_ms']:.3f} -> "
                f"{row['decode_ms']:.3f}   prefill on {row['prefill_units']:3d}: {row['prefill_alone_ms']:.3f} -> "
                f"{row['prefill_ms']:.3f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["7b"])
    parser.add_argument("--mode", choices=[*MODES, "both"], default="standard")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one profile; what it has measured stays")
    options = parser.parse_args()
    # The profile leads a session of its own, and must end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    summary: dict[str, dict[str, Any]] = {}
    for model in options.models:
        folder = options.out / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_config(SHAPES[MODELS[model]]), indent=1))
        for mode in MODES if options.mode == "both" else [options.mode]:
            print(f"== {model} {mode}", flush=True)
            summary[f"{model} {mode}"] = run_profile(folder, mode, MODES[mode], options.timeout_s)
            (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for name, row in summary.items():
        print(f"== {name}: exit {row['rc']} after {row['seconds']} s")
        with contextlib.suppress(FileNotFoundError):
            print_curves(Path(row["file"]))
        for part, text in row.get("failed_parts", {}).items():
            print(f"FAILED {part}: {text}")
        if "log_tail" in row:
            print(row["log_tail"])
        errors: dict[str, dict[str, float]] = row.get("errors", {})
        for phase, error in errors.items():
            print(
                f"{phase:16} median error {error['median_error']:6.1%}, worst {error['worst_error']:6.1%} "
                f"over {error['num_points']} points"
            )
    return max(abs(int(row["rc"])) for row in summary.values())


if __name__ == "__main__":
    sys.exit(main())
