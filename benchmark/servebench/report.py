"""Tables from all slices so far."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from servebench import bound_model
from servebench.matrix import TARGETS, Target
from servebench.memory import gpu_mib, memory_lines
from servebench.metrics import DEFAULT_LIMITS_MS
from servebench.results import FAILED, Results
from servebench.workload import MIX_SIZES, Workload

GOODPUT_KEY = f"goodput_ttft{DEFAULT_LIMITS_MS[0][0]:g}_tpot{DEFAULT_LIMITS_MS[0][1]:g}"
OURS_DEFAULT = "spaceserve"


@dataclass(frozen=True)
class Spread:
    """Mean of a figure over repeats with its extremes."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        return cls(statistics.fmean(known), min(known), max(known), len(known)) if known else None

    def show(self, digits: int = 1, scale: float = 1.0) -> str:
        text = f"{self.mean * scale:.{digits}f}"
        if self.count > 1:
            text += f" ({self.low * scale:.{digits}f}..{self.high * scale:.{digits}f})"
        return text


def show(value: Spread | None, digits: int = 1, scale: float = 1.0) -> str:
    return "-" if value is None else value.show(digits, scale)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def collect(slices: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Arms' results by (model, workload) and arm name."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for data in slices:
        for arm in data["arms"]:
            found[data["model"], data["workload"]][arm["arm"]].append(arm)
    return found


def load_bounds(results: Results, model: str) -> dict[str, Any] | None:
    """The stored costs of a model's parts with the least E + P (several arms may have been measured), measured ones
    before estimates."""
    files = sorted((results.root / "bounds").glob(f"{model}__*.json"))
    found = [json.loads(path.read_text()) for path in files]

    def cost(data: dict[str, Any]) -> tuple[bool, float]:
        totals = [size["encode_ms"] + size["prefill_ms"] for size in data["sizes"].values()]
        return not data["measured"], statistics.fmean(totals)

    return min(found, key=cost, default=None)


def bound_for(bounds: dict[str, Any], workload: Workload, rate: float, output_len: int) -> bound_model.Bound | None:
    """The limits of a workload; None where a size was not measured or the workload's sizes are not known ones."""
    wanted: tuple[str, ...] = (workload.size,)
    if workload.kind == "mix" or workload.size == "mix":
        wanted = tuple(str(size) for size in MIX_SIZES)
    elif workload.kind == "text" or workload.size == "text":
        wanted = ("text",)
    elif workload.kind in ("mmmu", "turns") or workload.size == "mmmu":
        return None
    if any(size not in bounds["sizes"] for size in wanted):
        return None
    parts = [
        bound_model.PartCosts(bounds["sizes"][size]["encode_ms"], bounds["sizes"][size]["prefill_ms"])
        for size in wanted
    ]
    steps = {int(batch): step for batch, step in bounds["decode_step_ms"].items()}
    return bound_model.bound(parts, steps, rate, output_len)


def describe_bound(bounds: dict[str, Any] | None, workload: Workload, rate: float, output_len: int) -> str:
    limit = bound_for(bounds, workload, rate, output_len) if bounds else None
    if limit is None:
        return "Bound: not known (E, P and D of these sizes were not measured)."
    text = (
        f"Bound: at most {limit.max_rate_overlap:.2f} req/s with decode hidden, {limit.max_rate_turns:.2f} when the "
        f"parts take turns."
    )
    if workload.kind != "sat":
        if math.isnan(limit.ttft_ms):
            return text + f" The offered {rate:.2f} req/s lies beyond it (rho = {limit.utilisation:.2f})."
        text += (
            f" At {rate:.2f} req/s (rho = {limit.utilisation:.2f}): TPOT at least {limit.tpot_overlap_ms:.1f} ms "
            f"({limit.tpot_turns_ms:.1f} taking turns), TTFT mean at least {limit.ttft_ms:.0f} ms."
        )
    return text


def workload_section(
    model: str, workload: str, arms: dict[str, list[dict[str, Any]]], bounds: dict[str, Any] | None, rate: float
) -> str:
    """A table of all arms on one workload, over all repeats."""
    parsed = Workload.parse(workload)
    header = ["arm", "runs", "S req/s" if parsed.kind == "sat" else "offered req/s", "served req/s", "tok/s"]
    header += ["TPOT mean ms", "TPOT p99", "ITL p99", "longest gap ms", "TTFT mean ms", "TTFT p50", "TTFT p99"]
    header += ["good req/s", "failed", "GPU GiB"]
    rows = []
    for name, runs in sorted(arms.items()):
        figure = _figures(runs)
        rate_column = figure("saturation_rate" if parsed.kind == "sat" else "offered_rate")
        rows.append(
            [
                name,
                str(len(runs)),
                show(rate_column, 2),
                show(figure("served_rate"), 2),
                show(figure("output_tokens_per_s"), 0),
                show(figure("tpot_mean_ms"), 2),
                show(figure("tpot_p99_ms")),
                show(figure("itl_p99_ms")),
                show(figure("longest_gap_ms"), 0),
                show(figure("ttft_mean_ms"), 0),
                show(figure("ttft_p50_ms"), 0),
                show(figure("ttft_p99_ms"), 0),
                show(figure(GOODPUT_KEY), 2),
                str(sum(run["summary"]["num_failed"] for run in runs)),
                show(Spread.of(gpu_mib(run) for run in runs), 1, 1 / 1024),
            ]
        )
    late = [name for name, runs in arms.items() if any(run["summary"].get("client_was_late") for run in runs)]
    output_len = _output_len(arms)
    note = describe_bound(bounds, parsed, rate, output_len)
    together = sum(
        bool(run["memory_after"].get("others_up")) for runs in arms.values() for run in runs if "memory_after" in run
    )
    if together:
        note += f" In {together} runs other arms' servers were up and idle; GPU memory is of the arm's own processes."
    if late:
        note += f" **The client was late in runs of {', '.join(sorted(late))}: their TTFT is too high.**"
    return f"### {model}, {workload}\n\n{markdown(header, rows)}\n\n{note}\n"


def _figures(runs: Sequence[dict[str, Any]]) -> Callable[[str], Spread | None]:
    return lambda key: Spread.of(run["summary"].get(key) for run in runs)


def _output_len(arms: dict[str, list[dict[str, Any]]]) -> int:
    for runs in arms.values():
        for run in runs:
            good = run["summary"]["num_requests"] - run["summary"]["num_failed"]
            if good:
                return round(run["summary"]["output_tokens"] / good)
    return 128


def best_stock(slices: Iterable[dict[str, Any]], key: str, *, largest: bool = False) -> float | None:
    """The best value of ``key`` among the stock arms of ``slices``: the better setting for each figure by itself."""
    values = [arm["summary"].get(key) for data in slices for arm in data["arms"] if not arm["ours"]]
    known = [value for value in values if value is not None]
    return (max(known) if largest else min(known)) if known else None


def pairs_table(slices: Sequence[dict[str, Any]]) -> str:
    """Each of our arms relative to the best stock figure of its own slice; below 1 is better, except for goodput."""
    ratios: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    keys = ("tpot_mean_ms", "longest_gap_ms", "ttft_mean_ms", "served_rate", GOODPUT_KEY, "saturation_rate")
    for data in slices:
        for arm in data["arms"]:
            if not arm["ours"]:
                continue
            for key in keys:
                largest = key in ("served_rate", "saturation_rate", GOODPUT_KEY)
                ours, stock = arm["summary"].get(key), best_stock([data], key, largest=largest)
                if ours is not None and stock:
                    ratios[data["model"], data["workload"], arm["arm"]][key].append(ours / stock)
    rows = [
        [model, workload, name, *(show(Spread.of(values[key]), 2) for key in keys)]
        for (model, workload, name), values in sorted(ratios.items())
    ]
    header = ["model", "workload", "arm", "TPOT", "longest gap", "TTFT", "served", "goodput", "S"]
    return markdown(header, rows) if rows else "No pairs yet."


def _trace_of(data: dict[str, Any]) -> tuple[str, str, int]:
    return data["model"], data["workload"], data["repeat"]


def target_limits(target: Target, slices: Sequence[dict[str, Any]], text_ms: float | None) -> dict[str, float | None]:
    """The target's limits by figure; None where it has none or stock was not measured.

    ``slices`` are those of the target's workload. Stock's figure is the mean over traces of the better setting's:
    settings that did not fit into one call ran on the same trace in another.
    """

    def stock(key: str, factor: float | None, *, largest: bool = False) -> float | None:
        groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
        for data in slices:
            groups[_trace_of(data)].append(data)
        spread = Spread.of(best_stock(group, key, largest=largest) for group in groups.values())
        return None if spread is None or factor is None else spread.mean * factor

    tpot = target.tpot_ms
    if target.tpot_of_text is not None:
        tpot = None if text_ms is None else target.tpot_of_text * text_ms
    elif target.tpot_of_stock is not None:
        tpot = stock("tpot_mean_ms", target.tpot_of_stock)
    return {
        "tpot_mean_ms": tpot,
        "longest_gap_ms": target.gap_ms,
        "ttft_mean_ms": stock("ttft_mean_ms", target.ttft_of_stock),
        GOODPUT_KEY: stock(GOODPUT_KEY, target.goodput_of_stock, largest=True),
        "saturation_rate": stock("saturation_rate", target.saturation_of_stock, largest=True),
    }


def text_tpot_ms(slices: Iterable[dict[str, Any]]) -> float | None:
    """TPOT (ms) of stock without images: the mean over its text-only runs."""
    texts = Spread.of(best_stock([data], "tpot_mean_ms") for data in slices if _is_text_only(data["workload"]))
    return texts.mean if texts else None


def _is_text_only(workload: str) -> bool:
    parsed = Workload.parse(workload)
    return (parsed.kind, parsed.rate) == ("text", 10.0)


def check_target(target: Target, slices: Sequence[dict[str, Any]], text_tpot_ms: float | None) -> list[str] | None:
    """A row of the target table for SpaceServe's defaults; None where the workload was not measured."""
    pairs = []
    for data in slices:
        for arm in data["arms"]:
            if data["workload"] == target.workload and arm["arm"] == OURS_DEFAULT:
                pairs.append((arm["summary"], data))
    if not pairs:
        return None
    cells = []

    def cell(ours: Iterable[float | None], limits: Iterable[float | None], digits: int, *, above: bool = False) -> str:
        value, limit = Spread.of(ours), Spread.of(limits)
        if value is None or limit is None:
            return "-"
        met = value.mean >= limit.mean if above else value.mean <= limit.mean
        relation = "at least" if above else "at most"
        return f"{value.show(digits)}, {relation} {limit.mean:.{digits}f}: {'met' if met else '**missed**'}"

    def ours(key: str) -> list[float | None]:
        return [summary.get(key) for summary, _ in pairs]

    traces = {_trace_of(data) for _, data in pairs}
    limits = target_limits(target, [data for data in slices if _trace_of(data) in traces], text_tpot_ms)
    cells.append(cell(ours("tpot_mean_ms"), [limits["tpot_mean_ms"]], 2))
    cells.append(cell(ours("longest_gap_ms"), [limits["longest_gap_ms"]], 0))
    cells.append(cell(ours("ttft_mean_ms"), [limits["ttft_mean_ms"]], 0))
    if target.goodput_of_stock is not None:
        cells.append("goodput " + cell(ours(GOODPUT_KEY), [limits[GOODPUT_KEY]], 2, above=True))
    elif target.saturation_of_stock is not None:
        cells.append("S " + cell(ours("saturation_rate"), [limits["saturation_rate"]], 2, above=True))
    else:
        cells.append("-")
    return [target.workload, str(len(pairs)), *cells]


def targets_table(slices: Sequence[dict[str, Any]]) -> str:
    """Targets against measurements; the text-only TPOT is the mean over stock's text-only runs."""
    text = text_tpot_ms(slices)
    rows = [row for target in TARGETS if (row := check_target(target, slices, text))]
    if not rows:
        return "None of the target workloads was measured yet."
    header = ["workload", "slices", "TPOT mean ms", "longest gap ms", "TTFT mean ms", "other"]
    return markdown(header, rows) + (f"\n\nText-only TPOT of stock: {text:.2f} ms." if text else "")


def bounds_table(results: Results) -> str:
    """E, P and D of every model and arm measured."""
    rows, steps = [], []
    for path in sorted((results.root / "bounds").glob("*.json")):
        data = json.loads(path.read_text())
        for size, cost in data["sizes"].items():
            total = cost["encode_ms"] + cost["prefill_ms"]
            row = [data["model"], data["arm"], size, str(cost["prompt_tokens"]), f"{cost['encode_ms']:.1f}"]
            row += [f"{cost['prefill_ms']:.1f}", f"{1e3 / total:.2f}" if total > 0 else "-", cost["source"]]
            rows.append(row)
        shown = ", ".join(f"{batch}: {step:.2f}" for batch, step in data["decode_step_ms"].items())
        steps.append(f"Decode step (ms) by batch, {data['model']}, {data['arm']}: {shown}.")
    if not rows:
        return "Not measured yet (`bound.py measure`)."
    header = ["model", "arm", "size", "prompt tokens", "E ms", "P ms", "1/(E+P) req/s", "source"]
    return markdown(header, rows) + "\n\n" + "\n\n".join(steps)


def report(results: Results) -> str:
    """The whole report as markdown."""
    slices, failed = results.slices(), results.slices(FAILED)
    parts = ["# Serving benchmark", ""]
    machines = sorted(
        {
            f"{', '.join(gpu['name'] for gpu in data['environment']['gpus']) or data['environment']['cpu']}; "
            f"driver {', '.join(gpu['driver'] for gpu in data['environment']['gpus']) or '-'}; "
            f"SGLang {data['environment']['versions'].get('sglang', '?')}, "
            f"torch {data['environment']['versions'].get('torch', '?')}; commit {data['environment']['commit'][:10]}"
            f"{' with uncommitted changes' if data['environment']['uncommitted_changes'] else ''}"
            for data in slices
        }
    )
    parts += [f"{len(slices)} slices. Figures are means over runs, with the range where there are several.", ""]
    parts += [f"- {machine}" for machine in machines]
    if slices:
        # The targets are of one model on one machine type; other models have their own shapes and floors.
        parts += ["", "## Targets (Qwen2-VL-7B, one H200)", ""]
        parts += [targets_table([data for data in slices if "7b" in data["model"].lower()])]
    parts += ["", "## Relative to the best stock figure of the same slice", "", pairs_table(slices)]
    parts += ["", "## Costs of a request's parts and the bound", "", bounds_table(results), "", "## Memory", ""]
    parts += [f"    {line}" for line in memory_lines(slices)]
    parts += ["", "GiB; `rest` is what no log names: contexts, workspaces, cached blocks of the allocator.", ""]
    parts += ["## Workloads", ""]
    for (model, workload), arms in sorted(collect(slices).items()):
        rates = {data["trace"]["rate"] for data in slices if (data["model"], data["workload"]) == (model, workload)}
        parts.append(workload_section(model, workload, arms, load_bounds(results, model), max(rates)))
    if failed:
        parts += ["## Failed slices", ""]
        for data in failed:
            for arm in data["arms"]:
                if "error" in arm:
                    first = arm["error"].splitlines()[0] if arm["error"] else "?"
                    parts.append(f"- {data['model']}, {data['workload']}, r{data['repeat']}, {arm['arm']}: {first}")
    return "\n".join(parts) + "\n"
