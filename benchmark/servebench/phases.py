"""A load that changes: phases of several workloads at once, one after another, as one trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from servebench.workload import Trace, TraceRequest, Workload, make_trace


@dataclass(frozen=True)
class Phase:
    """`workloads` run at once for `duration_s`. Their rates are absolute; closed loops have no place here."""

    name: str
    duration_s: float
    workloads: tuple[Workload, ...]

    @classmethod
    def parse(cls, text: str) -> Phase:
        """``NAME=SECONDS:WORKLOAD+WORKLOAD...``, e.g. ``heavy=8:text@8+fixed:2048@2``. Raises ValueError."""
        name, equals, rest = text.partition("=")
        seconds, _, loads = rest.partition(":")
        try:
            duration_s = float(seconds)
        except ValueError:
            duration_s = 0.0
        if not (name and equals and loads and 0 < duration_s < math.inf):
            raise ValueError(f"not a phase: {text!r} (expected NAME=SECONDS:WORKLOAD+WORKLOAD)")
        parsed = tuple(Workload.parse(load) for load in loads.split("+"))
        if any(load.kind in ("sat", "turns") or load.relative for load in parsed):
            raise ValueError(f"phase {name!r}: workloads of a phase have a rate in requests per second")
        return cls(name, duration_s, parsed)


# Text answers stream all the time, so that the decode side has work in every phase.
DEFAULT_PHASES = (
    "text=7:text@16",
    "light=8:text@8+fixed:448@10",
    "heavy=10:text@8+fixed:2048@2",
    "burst=8:text@8+burst:1024@6",
)


@dataclass(frozen=True)
class PhasedTrace:
    """`phase_of[i]` is the name of the phase in which request i arrives."""

    trace: Trace
    phase_of: tuple[str, ...]


def phased_trace(phases: Sequence[Phase], seed: int, *, output_len: int, num_words: int, scale: float) -> PhasedTrace:
    """The phases one after another, drawn with `seed`. Every workload has exactly rate x duration arrivals."""
    drawn: list[tuple[float, str, TraceRequest]] = []
    begin_s = 0.0
    for number, phase in enumerate(phases):
        for part, workload in enumerate(phase.workloads):
            count = max(1, round(workload.rate * phase.duration_s))
            part_seed = seed * 1009 + 31 * number + part
            options = {"output_len": output_len, "num_words": num_words, "scale": scale}
            one = make_trace(replace(workload, num_requests=count), part_seed, **options)  # type: ignore[arg-type]
            stretch = min(1.0, phase.duration_s * workload.rate / count)
            drawn += [(begin_s + request.arrival_s * stretch, phase.name, request) for request in one.requests]
        begin_s += phase.duration_s
    drawn.sort(key=lambda row: row[0])
    requests = tuple(
        replace(request, id=index, arrival_s=round(arrival_s, 4)) for index, (arrival_s, _, request) in enumerate(drawn)
    )
    rate = len(requests) / begin_s
    return PhasedTrace(Trace("phases", seed, rate, requests), tuple(name for _, name, _ in drawn))
