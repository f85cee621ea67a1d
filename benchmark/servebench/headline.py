"""The targets' figures in short lines, one for each workload and arm, for the end of a run's output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from servebench.matrix import TARGETS, Target
from servebench.report import (
    GOODPUT_KEY,
    OURS_DEFAULT,
    Spread,
    best_stock,
    bound_for,
    collect,
    load_bounds,
    target_limits,
    text_tpot_ms,
)
from servebench.results import Results, write_atomic
from servebench.workload import Workload

WIDTH = 150


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None or math.isnan(value) else f"{value * scale:.{digits}f}"


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def verdict(target: Target, figures: dict[str, float | None], limits: dict[str, float | None]) -> str:
    """``met``, or what was missed; a figure without a limit or a measurement is not judged."""
    missed, judged = [], 0
    for key, limit in limits.items():
        value = figures.get(key)
        if limit is None or value is None:
            continue
        judged += 1
        above = key in (GOODPUT_KEY, "saturation_rate")
        if (value < limit) if above else (value > limit):
            missed.append(key.removesuffix("_ms").removesuffix("_mean").replace("goodput_ttft5000_tpot15", "goodput"))
    return "MISSED " + ",".join(missed) if missed else "met" if judged else ""


def headline_lines(results: Results, model: str) -> list[str]:
    """TPOT and how much that is of the better stock's text-only TPOT, longest gap, TTFT and goodput and how much these
    are of the better stock's, for every arm on every workload measured; then the bound of each workload."""
    slices = [data for data in results.slices() if data["model"] == model]
    text_ms, bounds = text_tpot_ms(slices), load_bounds(results, model)
    order = {target.workload: place for place, target in enumerate(TARGETS)}
    found = sorted(collect(slices).items(), key=lambda item: (order.get(item[0][1], len(order)), item[0][1]))
    lines = [
        f"{'workload':<19}{'arm':<18}{'runs':>4} {'offered/served':>14} {'TPOT ms':>8} {'xtext':>5} {'gap s':>7} "
        f"{'TTFT s':>7} {'xstock':>6} {'good/s':>6} {'xstock':>6}  target"
    ]
    for (_, workload), arms in found:
        same = [data for data in slices if data["workload"] == workload]
        for name, runs in sorted(arms.items(), key=lambda item: (not item[1][0]["ours"], item[0])):
            figures = {
                key: spread.mean if (spread := Spread.of(run["summary"].get(key) for run in runs)) else None
                for key in (
                    *("offered_rate", "served_rate", "tpot_mean_ms", "longest_gap_ms", "ttft_mean_ms"),
                    *(GOODPUT_KEY, "saturation_rate"),
                )
            }
            lines.append(_line(workload, name, len(runs), figures, same, text_ms)[:WIDTH])
    for (_, workload), _ in found:
        rates = [data["trace"]["rate"] for data in slices if data["workload"] == workload]
        if bounds and (text := short_bound(bounds, Workload.parse(workload), max(rates))):
            lines.append(f"bound {workload:<16} {text}"[:WIDTH])
    if bounds:
        lines.append(f"bound: E, P, D from arm {bounds['arm']}{'' if bounds['measured'] else ' (estimates)'}"[:WIDTH])
    return lines


def _line(
    workload: str,
    name: str,
    runs: int,
    figures: dict[str, float | None],
    same: Sequence[dict[str, Any]],
    text_ms: float | None,
) -> str:
    rates = f"{number(figures['offered_rate'], 2)}/{number(figures['served_rate'], 2)}"
    if figures["saturation_rate"] is not None:
        rates = f"S {number(figures['saturation_rate'], 2)}"
    target = next((target for target in TARGETS if target.workload == workload), None)
    judged = ""
    if target is not None and name == OURS_DEFAULT:
        judged = verdict(target, figures, target_limits(target, same, text_ms))
    gap, ttft, good = (figures[key] for key in ("longest_gap_ms", "ttft_mean_ms", GOODPUT_KEY))
    return (
        f"{workload:<19}{name:<18}{runs:>4} {rates:>14} {number(figures['tpot_mean_ms'], 2):>8} "
        f"{ratio(figures['tpot_mean_ms'], text_ms):>5} {number(gap, 3, 1e-3):>7} {number(ttft, 3, 1e-3):>7} "
        f"{ratio(ttft, best_stock(same, 'ttft_mean_ms')):>6} {number(good, 2):>6} "
        f"{ratio(good, best_stock(same, GOODPUT_KEY, largest=True)):>6}  {judged}"
    )


def short_bound(bounds: dict[str, Any], workload: Workload, rate: float, output_len: int = 128) -> str:
    """1 / (E + P) and the least TPOT and TTFT at ``rate``; empty where the sizes were not measured."""
    limit = bound_for(bounds, workload, rate, output_len)
    if limit is None or math.isinf(limit.max_rate_overlap):
        return ""
    text = f"1/(E+P) {limit.max_rate_overlap:.2f}/s"
    if workload.kind == "sat":
        return text
    if math.isnan(limit.ttft_ms):
        return f"{text}: {rate:.2f}/s is beyond it; TPOT >= {limit.tpot_overlap_ms:.1f} ms"
    return f"{text}: at {rate:.2f}/s TPOT >= {limit.tpot_overlap_ms:.1f} ms, TTFT >= {limit.ttft_ms / 1e3:.3f} s"


def store_shipped_bound(results: Results, model: str, gpu_names: Iterable[str], model_dir: Path | None = None) -> bool:
    """Write the costs that SpaceServe's curves of this GPU and model give as a bound, where none is stored; whether a
    bound is stored now. The model is known by its shapes, or, without its folder, by the curve file's name."""
    from servebench.curve_costs import from_curves
    from spaceserve.sis import shape_from_model_path
    from spaceserve.sis.curves import DeviceCurves, shipped_files

    if load_bounds(results, model) is not None:
        return True
    names = set(gpu_names)
    fingerprint = shape_from_model_path(model_dir).fingerprint() if model_dir else None
    for path in shipped_files():
        curves = DeviceCurves.load(path)
        same = curves.model_fingerprint == fingerprint if fingerprint else path.stem.endswith(f"_{model}")
        if curves.device_name in names and same:
            target = results.root / "bounds" / f"{model}__curves.json"
            write_atomic(target, json.dumps(from_curves(curves, model), indent=1) + "\n")
            results.written.append(target)
            return True
    return False
