"""GPU memory of an arm, item by item: per process from the driver, and what the servers' logs say of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from servebench.servers import Server

GIB = 1 << 30
# What the logs of SGLang 0.5.17 (GB there are 2^30 bytes) and of SpaceServe's encoder worker (10^9) say.
WEIGHTS = re.compile(r"Load weight end\..*?mem usage=([\d.]+) GB")
KV = re.compile(
    r"KV Cache is allocated\..*?#tokens: (\d+), (?:K size: ([\d.]+) GB, V size: ([\d.]+)|KV size: ([\d.]+)) GB"
)
GRAPHS = re.compile(r"Capture [^\n]*? end\..*?mem usage=([\d.]+) GB")
WORKER = re.compile(
    r"Encoder worker ready: ([\d.]+) M parameters, features of \d+ x torch\.(\w+), store of \d+ tokens \(([\d.]+) GB\)"
)
ENCODER = "spaceserve::encoder"
# What an encoder process takes that stock, which encodes in its scheduler, has not; its weights both have.
BEYOND_STOCK = ("slab", "encoder_workspace", "encoder_context")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def log_figures(group: Iterable[Server]) -> dict[str, float]:
    """Sizes in GiB that the arm's logs name (``weights, kv, graphs, slab, encoder_weights``), and ``kv_tokens``.

    ``weights`` and ``graphs`` are differences of free memory on the GPU: wrong where other servers started meanwhile.
    """
    return parse_log("\n".join(server.log.read_text(errors="replace") for server in group if server.log.exists()))


def parse_log(text: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    if weights := WEIGHTS.findall(text):
        figures["weights"] = sum(map(float, weights))
    if kv := KV.findall(text):
        figures["kv_tokens"] = float(kv[-1][0])
        figures["kv"] = sum(float(value) for value in kv[-1][1:] if value)
    if graphs := GRAPHS.findall(text):
        figures["graphs"] = round(sum(map(float, graphs)), 2)
    if worker := WORKER.findall(text):
        parameters, dtype, slab = worker[-1]
        figures["encoder_weights"] = round(float(parameters) * 1e6 * DTYPE_BYTES.get(dtype, 2) / GIB, 2)
        figures["slab"] = round(float(slab) * 1e9 / GIB, 2)
    return figures


def own_processes(arm: dict[str, Any]) -> list[tuple[str, float]]:
    """(process, GiB) of the arm's processes on the GPU, the largest first; none where the driver hides them.

    Slices stored before processes were told apart hold one arm's only.
    """
    rows = (arm.get("memory_after") or {}).get("gpu_processes", [])
    found = [(row["name"], row["mib"] / 1024) for row in rows if row["mib"] and row.get("own", True)]
    return sorted(found, key=lambda row: -row[1])


def gpu_mib(arm: dict[str, Any]) -> float | None:
    """GPU memory of an arm: the sum over its processes where the driver names them. Else what is in use at all, which
    is None where other arms' servers were up too."""
    if parts := own_processes(arm):
        return sum(gib for _, gib in parts) * 1024
    memory = arm.get("memory_after") or {}
    return None if memory.get("others_up") else memory.get("gpu_used_mib")


def of_the_encoder(arm: dict[str, Any], figures: dict[str, float]) -> dict[str, float]:
    """Of the encoder worker, in GiB: ``encoder_workspace``, what batches take and PyTorch keeps for the next ones, on
    all SM groups; ``encoder_context``, what the driver, libraries and compiled kernels take. Empty where not known."""
    reported = (arm.get("server") or {}).get("encoder_gpu_memory")
    process = next((gib for name, gib in own_processes(arm) if name == ENCODER), None)
    if not reported or process is None or "slab" not in figures:
        return {}
    reserved = reported["reserved_bytes"] / GIB
    return {
        "encoder_workspace": round(reserved - figures["slab"] - figures.get("encoder_weights", 0.0), 2),
        "encoder_context": round(process - reserved, 2),
    }


def items(arm: dict[str, Any], together: bool) -> dict[str, float]:
    """Parts of the arm's memory in GiB that are known; ``rest`` is what none of them names: contexts, workspaces, the
    allocator's cache. Without ``weights`` and ``graphs`` for servers that started together."""
    figures = dict((arm.get("server") or {}).get("log", {}))
    figures |= of_the_encoder(arm, figures)
    if together:
        for name in ("weights", "graphs"):
            figures.pop(name, None)
    tokens = figures.pop("kv_tokens", None)
    total = gpu_mib(arm)
    if total is not None:
        figures["rest"] = round(total / 1024 - sum(figures.values()), 2)
        figures["total"] = round(total / 1024, 2)
    if tokens is not None:
        figures["kv_tokens"] = tokens
    return figures


def beyond_stock(slices: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for each arm of ours: its memory beyond a stock arm's of the same slice with as large a KV cache, and
    what is named of that. From the slice with the largest difference."""
    largest: dict[tuple[str, str], tuple[float, str]] = {}
    for data in slices:
        known = [(arm, items(arm, True)) for arm in data["arms"] if arm.get("memory_after")]
        for ours, mine in known:
            for stock, theirs in known:
                alike = mine.get("kv_tokens") == theirs.get("kv_tokens") is not None
                itemised = {"total", *BEYOND_STOCK} <= mine.keys() and "total" in theirs
                if not ours["ours"] or stock["ours"] or not alike or not itemised:
                    continue
                beyond = mine["total"] - theirs["total"]
                named = ", ".join(f"{name.replace('_', ' ')} {mine[name]:.2f}" for name in BEYOND_STOCK)
                rest = beyond - sum(mine[name] for name in BEYOND_STOCK)
                line = f"{ours['arm']} beyond {stock['arm']}: {beyond:.2f} GiB: {named}, rest {rest:.2f}"
                key = (data["model"], ours["arm"])
                if key not in largest or beyond > largest[key][0]:
                    largest[key] = (beyond, f"{line} (after {data['workload']})")
    yield from (line for _, line in (largest[key] for key in sorted(largest)))


def memory_lines(slices: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Two short lines for each arm: from the run with the largest total of its last session, preferring sessions in
    which it had the GPU to itself."""
    chosen: dict[tuple[str, str], tuple[tuple[bool, str, float], str, dict[str, Any]]] = {}
    for data in slices:
        for arm in data["arms"]:
            if not arm.get("memory_after"):
                continue
            rank = (not data.get("servers_up_together"), data.get("session", ""), gpu_mib(arm) or 0.0)
            key = (data["model"], arm["arm"])
            if key not in chosen or rank > chosen[key][0]:
                chosen[key] = (rank, data["workload"], arm)
    for (_, name), ((alone, _, _), workload, arm) in sorted(chosen.items(), key=lambda item: item[0]):
        together = not alone
        known = items(arm, together)
        tokens = known.pop("kv_tokens", None)
        parts = ", ".join(f"{label.replace('_', ' ')} {gib:.2f}" for label, gib in known.items() if label != "total")
        total = f"{known['total']:.2f}" if "total" in known else "?"
        kv = f" at {tokens:.0f} tokens" if tokens else ""
        yield f"{name}: {total} GiB{kv}: {parts}"
        processes = ", ".join(f"{process} {gib:.2f}" for process, gib in own_processes(arm))
        where = "servers up together: own processes only" if together else "alone on the GPU"
        yield f"  after {workload}, {where}{': ' if processes else ''}{processes}"
    yield from beyond_stock(slices)
