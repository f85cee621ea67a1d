"""Pictures from all slices so far. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servebench import metrics
from servebench.report import collect
from servebench.workload import Workload

COLOURS = {"stock": "tab:red", "stock-mixed": "tab:orange", "spaceserve": "tab:blue"}


def pyplot_agg() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib (pip install matplotlib)") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_all(slices: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw every plot that the slices allow; returns the files. Raises ValueError without matplotlib."""
    pyplot = pyplot_agg()
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for (model, workload), arms in sorted(collect(slices).items()):
        if Workload.parse(workload).kind == "sat":
            continue
        stem = f"{model}__{Workload.parse(workload).slug}"
        files.append(_save(pyplot, _tpot_ttft(pyplot, arms, f"{model}, {workload}"), folder / f"{stem}__tpot_ttft.png"))
        files.append(_save(pyplot, _gap_tail(pyplot, arms, f"{model}, {workload}"), folder / f"{stem}__gaps.png"))
    for model, size, figure in _by_rate(pyplot, slices):
        files.append(_save(pyplot, figure, folder / f"{model}__{size}__by_rate.png"))
    return files


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _tpot_ttft(pyplot: Any, arms: dict[str, list[dict[str, Any]]], title: str) -> Any:
    """One point per run: below and to the left is better."""
    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for name, runs in sorted(arms.items()):
        points = [(r["summary"]["ttft_mean_ms"], r["summary"]["tpot_mean_ms"]) for r in runs]
        points = [(x, y) for x, y in points if x is not None and y is not None]
        if points:
            marker = "o" if runs[0]["ours"] else "x"
            axes.scatter(*zip(*points, strict=True), label=name, marker=marker, color=COLOURS.get(name))
    axes.set(xlabel="TTFT mean (ms)", ylabel="TPOT mean (ms)", title=title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)
    return figure


def _gap_tail(pyplot: Any, arms: dict[str, list[dict[str, Any]]], title: str) -> Any:
    """Share of gaps between tokens that are longer than x: where stalls show."""
    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for name, runs in sorted(arms.items()):
        gaps = sorted(gap for run in runs for row in run["requests"] for gap in metrics.gaps_ms(metrics.expand(row)))
        if gaps:
            share = [1 - index / len(gaps) for index in range(len(gaps))]
            style = "-" if runs[0]["ours"] else "--"
            axes.step([max(gap, 0.1) for gap in gaps], share, style, label=name, color=COLOURS.get(name))
    axes.set(xscale="log", yscale="log", xlabel="gap between tokens (ms)", ylabel="share of longer gaps", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _by_rate(pyplot: Any, slices: Sequence[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    """TPOT, longest gap and TTFT over the offered rate, for fixed sizes measured at two rates or more."""
    series: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for data in slices:
        workload = Workload.parse(data["workload"])
        if workload.kind not in ("fixed", "mix"):
            continue
        for arm in data["arms"]:
            series[data["model"], workload.size or workload.kind][arm["arm"]].append(
                (data["trace"]["rate"], arm["summary"])
            )
    figures = []
    for (model, size), arms in sorted(series.items()):
        if len({rate for points in arms.values() for rate, _ in points}) < 2:
            continue
        figure, all_axes = pyplot.subplots(1, 3, figsize=(13, 4))
        keys = ("tpot_mean_ms", "longest_gap_ms", "ttft_mean_ms")
        for axes, key in zip(all_axes, keys, strict=True):
            for name, points in sorted(arms.items()):
                known = sorted((rate, summary[key]) for rate, summary in points if summary.get(key) is not None)
                if known:
                    axes.plot(*zip(*known, strict=True), "o-", label=name, color=COLOURS.get(name))
            axes.set(xlabel="offered rate (req/s)", ylabel=key, title=f"{model}, {size}")
            axes.set_ylim(bottom=0)
        all_axes[0].legend(fontsize=8)
        figures.append((model, size, figure))
    return figures
