"""Measured TPOT and TTFT beside the best estimate of what is attainable (tradeoff.py): rows, a table and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servebench import metrics, report, tradeoff
from servebench.curve_costs import TEXT_TOKENS
from servebench.matrix import TARGETS, Target
from servebench.metrics import DEFAULT_LIMITS_MS
from servebench.results import Results, write_atomic
from servebench.tradeoff import Outcome, Sharing, Work
from servebench.workload import Trace, Workload, load_trace, make_trace
from spaceserve.sis.curves import DeviceCurves, shipped_files

SHARED, MIXED = "SMs and time shared", "mixed chunks too"
FRONTS: Mapping[str, tuple[str, ...]] = {SHARED: ("encoder", "both", "none", "turns"), MIXED: Sharing.MODES}
# Kinds whose prompts are not all new cost less than their images say.
UNSUITED = ("sat", "turns")
SEED = 1


@dataclass(frozen=True)
class Point:
    """What an arm reached in one run."""

    arm: str
    ours: bool
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Row:
    """One workload. Limits are those of its row of the target table; None where there is none or stock lacks.

    ``load`` is the rate times the mean of E + P. What our runs spend outside the estimate: ``outside_ms`` is the least
    by which a request's TTFT exceeded its E + P (pre-processing, HTTP, launches), ``stretch`` our TPOT without images
    over the curves' decode step.
    """

    workload: str
    rate: float
    load: float
    fronts: Mapping[str, Sequence[Outcome]]
    points: Sequence[Point]
    tpot_limit_ms: float | None = None
    ttft_limit_ms: float | None = None
    outside_ms: float | None = None
    stretch: float = 1.0
    of_goodput: bool = False

    def least_tpot_ms(self, front: str, *, outside: bool = False) -> float:
        """At the TTFT limit; NaN without one. ``outside`` adds what our runs spend outside the estimate."""
        if self.ttft_limit_ms is None:
            return math.nan
        if not outside:
            return tradeoff.tpot_at(self.fronts[front], self.ttft_limit_ms)
        return self.stretch * tradeoff.tpot_at(self.fronts[front], self.ttft_limit_ms - (self.outside_ms or 0.0))

    @property
    def verdict(self) -> str:
        if self.tpot_limit_ms is None or self.ttft_limit_ms is None:
            return "-"
        if self.of_goodput:
            return "not judged: goodput"
        if not self.least_tpot_ms(MIXED) <= self.tpot_limit_ms:
            return "**lies beyond**"
        if not self.least_tpot_ms(SHARED) <= self.tpot_limit_ms:
            return "only with mixed chunks"
        if not self.least_tpot_ms(SHARED, outside=True) <= self.tpot_limit_ms:
            return "within, but for time outside"
        return "within"


def shipped_curves(slices: Sequence[Mapping[str, Any]], model: str) -> DeviceCurves | None:
    """SpaceServe's curves of this model on the GPU of ``slices``; None where it has none."""
    gpus = {gpu["name"] for data in slices if data["model"] == model for gpu in data["environment"]["gpus"]}
    found = (DeviceCurves.load(path) for path in shipped_files() if path.stem.endswith(f"_{model}"))
    return next((curves for curves in found if curves.device_name in gpus), None)


def plays(curves: DeviceCurves, trace: Trace) -> tuple[list[float], list[Work]]:
    """Arrivals in ms and works of a trace."""
    kinds: dict[tuple[tuple[int, int], ...], Work] = {}
    works = []
    for request in trace.requests:
        images = tuple((image.width, image.height) for image in request.images)
        if images not in kinds:
            kinds[images] = tradeoff.work_of(curves, images, TEXT_TOKENS)
        works.append(kinds[images])
    return [request.arrival_s * 1e3 for request in trace.requests], works


def fronts_of(curves: DeviceCurves, traces: Sequence[Trace]) -> dict[str, list[Outcome]]:
    """The envelopes of ``FRONTS`` on the arrivals of ``traces`` together."""
    runs = [plays(curves, trace) for trace in traces]
    works = [work for _, run in runs for work in run]
    output_len = traces[0].requests[0].output_len
    context = sum(work.tokens for work in works) / len(works) + output_len / 2
    return {
        name: tradeoff.envelope(tradeoff.sweep(runs, Sharing(curves, context, modes), output_len=output_len))
        for name, modes in FRONTS.items()
    }


def rows(results: Results, model: str) -> list[Row]:
    """A row for each workload that was measured, and for each target that was not but whose rate is known."""
    slices = [data for data in results.slices() if data["model"] == model]
    curves = shipped_curves(slices, model)
    if curves is None:
        return []
    targets = {target.workload: target for target in TARGETS}
    names = dict.fromkeys([*targets, *sorted(data["workload"] for data in slices)])
    found = []
    for name in names:
        workload = Workload.parse(name)
        same = [data for data in slices if data["workload"] == name]
        if workload.kind in UNSUITED or not (traces := _traces(results, model, workload, same)):
            continue
        target = targets.get(name, Target(name))
        limits = report.target_limits(target, same, report.text_tpot_ms(slices))
        # A target of goodput has a limit of TTFT for each request instead.
        ttft_limit_ms = DEFAULT_LIMITS_MS[0][0] if target.goodput_of_stock else limits["ttft_mean_ms"]
        works = [work for trace in traces for work in plays(curves, trace)[1]]
        found.append(
            Row(
                workload=name,
                rate=traces[0].rate,
                load=traces[0].rate * sum(work.total_ms for work in works) / len(works) / 1e3,
                fronts=fronts_of(curves, traces),
                points=list(_points(same)),
                tpot_limit_ms=limits["tpot_mean_ms"],
                ttft_limit_ms=ttft_limit_ms,
                outside_ms=_outside_ms(curves, traces[0], same),
                of_goodput=target.goodput_of_stock is not None,
            )
        )
    ratios = [
        point.tpot_ms / tradeoff.tpot_at(row.fronts[SHARED], point.ttft_ms)
        for row in found
        for point in row.points
        if row.workload.startswith("text@") and point.ours
    ]
    stretch = max(1.0, min((ratio for ratio in ratios if ratio > 0), default=1.0))
    return [replace(row, stretch=stretch) for row in found]


def _traces(results: Results, model: str, workload: Workload, slices: Sequence[Mapping[str, Any]]) -> list[Trace]:
    """The stored traces of ``slices``; without slices one drawn at the rate, if that is known."""
    repeats = sorted({data["repeat"] for data in slices})
    prefix = f"{model}__" if workload.relative else ""
    paths = [results.root / "traces" / f"{prefix}{workload.slug}__r{repeat}.json" for repeat in repeats]
    if slices:
        return [load_trace(path) for path in paths if path.exists()]
    saturation = results.saturation(model, workload) if workload.relative else 1.0
    return [make_trace(workload, SEED, rate=workload.rate * saturation)] if saturation else []


def _points(slices: Iterable[Mapping[str, Any]]) -> Iterable[Point]:
    for data in slices:
        for arm in data["arms"]:
            ttft_ms, tpot_ms = (arm["summary"].get(key) for key in ("ttft_mean_ms", "tpot_mean_ms"))
            if ttft_ms is not None and tpot_ms is not None:
                yield Point(arm["arm"], arm["ours"], ttft_ms, tpot_ms)


def _outside_ms(curves: DeviceCurves, trace: Trace, slices: Iterable[Mapping[str, Any]]) -> float | None:
    works = dict(zip((request.id for request in trace.requests), plays(curves, trace)[1], strict=True))
    over = []
    for data in slices:
        for arm in data["arms"]:
            for row in arm["requests"] if arm["ours"] else ():
                record = metrics.expand(row)
                if record.events_ms and record.id in works:
                    over.append(metrics.ttft_ms(record) - works[record.id].total_ms)
    return max(0.0, min(over)) if over else None


def table(found: Sequence[Row]) -> str:
    """Markdown: what is attainable at the TTFT limit of every target."""
    header = ["workload", "rate", "rho", "target TPOT ms", "at TTFT ms", f"least TPOT: {SHARED}", MIXED]
    header += [f"{SHARED}, with our time outside", "the target", "TTFT its TPOT needs", "TPOT / TTFT of the arms"]
    lines = []
    for row in found:
        needs = math.nan if row.tpot_limit_ms is None else tradeoff.ttft_at(row.fronts[MIXED], row.tpot_limit_ms)
        figures = [row.least_tpot_ms(SHARED), row.least_tpot_ms(MIXED), row.least_tpot_ms(SHARED, outside=True)]
        arms = ", ".join(f"{p.arm} {p.tpot_ms:.1f} / {p.ttft_ms:.0f}" for p in row.points)
        line = [row.workload, f"{row.rate:.2f}", f"{row.load:.2f}", _show(row.tpot_limit_ms, 2)]
        line += [_show(row.ttft_limit_ms, 0), *(_show(value, 2) for value in figures)]
        lines.append([*line, row.verdict, _show(needs, 0), arms or "-"])
    outside = ", ".join(f"{row.workload} {row.outside_ms:.0f} ms" for row in found if row.outside_ms is not None)
    text = report.markdown(header, lines)
    if outside:
        text += f"\n\nOur time outside: decode steps x {found[0].stretch:.3f}; to the first token {outside}."
    return text


def _show(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def section(found: Sequence[Row]) -> str:
    """The part of the report."""
    if not found:
        return ""
    return (
        "## TPOT at a given TTFT\n\n"
        "Estimates of the best attainable, from the measured interference of encoder, prefill and decode "
        "(docs/benchmarking.md, The bound). Mixed chunks are from curves, not measured as a whole.\n\n"
        f"{table(found)}\n"
    )


def store(found: Sequence[Row], path: Path) -> None:
    """Rows with their envelopes as JSON."""
    data = [
        {
            "workload": row.workload,
            "rate": row.rate,
            "load": round(row.load, 4),
            "tpot_limit_ms": row.tpot_limit_ms,
            "ttft_limit_ms": row.ttft_limit_ms,
            "outside_ms": row.outside_ms and round(row.outside_ms, 1),
            "stretch": round(row.stretch, 4),
            "verdict": row.verdict.strip("*"),
            "points": [[point.arm, round(point.ttft_ms, 1), round(point.tpot_ms, 3)] for point in row.points],
            "fronts": {
                name: [
                    {"ttft_ms": round(o.ttft_ms, 1), "tpot_ms": round(o.tpot_ms, 3), "policy": o.policy}
                    | {"shares": {f"{phase}: {label}": round(share, 3) for (phase, label), share in o.shares.items()}}
                    for o in front
                ]
                for name, front in row.fronts.items()
            },
        }
        for row in found
    ]
    write_atomic(path, json.dumps(data, indent=1) + "\n")


def draw(found: Sequence[Row], path: Path) -> None:
    """TPOT against TTFT, a panel for each workload: envelopes, what the arms reached, and the target's corner."""
    from servebench.plots import COLOURS, pyplot_agg

    pyplot = pyplot_agg()
    columns = min(3, max(1, len(found)))
    lines = math.ceil(len(found) / columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(5 * columns, 3.8 * lines), squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.axis("off")
    for axes, row in zip(grid.flat, found, strict=False):
        for (name, front), style in zip(row.fronts.items(), ("-", "--"), strict=True):
            axes.plot([o.ttft_ms for o in front], [o.tpot_ms for o in front], style, color="grey", label=name)
        first, stretch, outside_ms = row.fronts[SHARED], row.stretch, row.outside_ms or 0.0
        if stretch > 1 or outside_ms:
            shifted = [(o.ttft_ms + outside_ms, stretch * o.tpot_ms) for o in first]
            axes.plot(
                *zip(*shifted, strict=True), "-", color="tab:blue", alpha=0.5, label=f"{SHARED}, our time outside"
            )
        for point in row.points:
            axes.scatter(point.ttft_ms, point.tpot_ms, marker="o" if point.ours else "x", color=COLOURS.get(point.arm))
            axes.annotate(point.arm, (point.ttft_ms, point.tpot_ms), (4, 4), textcoords="offset points", fontsize=7)
        if row.tpot_limit_ms and row.ttft_limit_ms:
            corner = ([0, row.ttft_limit_ms], 0, row.tpot_limit_ms)
            axes.fill_between(*corner, color="tab:green", alpha=0.2, label="target")
        right = max([row.ttft_limit_ms or 0, 3 * first[0].ttft_ms, *(point.ttft_ms for point in row.points)])
        top = max([first[0].tpot_ms, *(point.tpot_ms for point in row.points)])
        axes.set(xlim=(0, 1.3 * right), ylim=(0, 1.1 * top), xlabel="TTFT mean (ms)", ylabel="TPOT mean (ms)")
        axes.set_title(f"{row.workload}, {row.rate:.2f} req/s, rho {row.load:.2f}", fontsize=9)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
