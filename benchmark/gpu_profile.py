"""Profile this GPU in one go: quick and full curves of Qwen2-VL shapes, with validation. For an idle GPU.

    python benchmark/gpu_profile.py OUT_FOLDER [--models 7b 2b 2.5-7b] [--skip-full]

Writes into OUT_FOLDER, for each model: config.json (the public one's shapes), curves and validation of both modes
(JSON), a plot, the log; summary.json with durations and errors. Prints a short table last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from dummy_model import SHAPES, model_config

ROOT = Path(__file__).parents[1]

MODELS = {"7b": "qwen2-vl-7b", "2b": "qwen2-vl-2b", "2.5-7b": "qwen2.5-vl-7b"}


def run_profile(folder: Path, name: str, extra: list[str]) -> dict[str, object]:
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "spaceserve.profile", "--model-path", str(folder), "--device", "cuda"]
    command += ["--out", str(out), *extra]
    if importlib.util.find_spec("matplotlib") is not None:
        command += ["--plot", str(folder / f"{name}.png")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python") + os.pathsep + os.environ.get("PYTHONPATH", "")}
    started = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    row: dict[str, object] = {"seconds": round(time.monotonic() - started, 1), "rc": code}
    if out.exists():
        data = json.loads(out.read_text())
        row |= {"errors": data["validation"].get("errors", {}), "contention": data["contention"]}
        row |= {"versions": data["versions"], "provenance": data["provenance"]}
    else:
        row["log_tail"] = (folder / f"{name}.log").read_text()[-1500:]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["7b"])
    parser.add_argument("--skip-full", action="store_true")
    options = parser.parse_args()
    summary: dict[str, dict[str, object]] = {}
    for model in options.models:
        folder = options.out / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_config(SHAPES[MODELS[model]]), indent=1))
        # Quick without validation first: its duration is what --quick promises.
        summary[f"{model} quick"] = run_profile(folder, "quick", ["--quick"])
        summary[f"{model} quick, validated"] = run_profile(folder, "quick_validated", ["--quick", "--validate"])
        if not options.skip_full:
            summary[f"{model} full, validated"] = run_profile(folder, "full", ["--validate"])
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{'run':26} {'rc':>3} {'s':>6}  median / worst error: all, encoder, decode, prefill")
    for name, row in summary.items():
        errors: dict[str, dict[str, float]] = row.get("errors", {})  # type: ignore[assignment]
        shown = [f"{errors[p]['median_error']:.1%}/{errors[p]['worst_error']:.1%}" for p in errors]
        print(f"{name:26} {row['rc']:>3} {row['seconds']:>6}  {', '.join(shown) or row.get('log_tail', '')}")
    return max(int(str(row["rc"])) for row in summary.values())


if __name__ == "__main__":
    sys.exit(main())
