"""How long a call will take: estimates in seconds, printed before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from servebench.matrix import EXPECTED_S, Entry
from servebench.workload import Workload

# Client start, flushes, reading of memory and state; the answers after the last arrival; a closed loop's last ones.
OVERHEAD_S = 4.0
TAIL_S = 4.0
WARMUP_S_PER_SIZE = 2.0
UNKNOWN_CLOSED_LOOP_S = 40.0
STOP_S = 12.0


def expected_rates(text: Iterable[str]) -> dict[str, float]:
    """``EXPECTED_S`` with changes written as ``2048=2.8``. Raises ValueError."""
    rates = dict(EXPECTED_S)
    for part in text:
        size, _, rate = part.partition("=")
        try:
            rates[size] = float(rate)
        except ValueError:
            raise ValueError(f"expected SIZE=RATE, not {part!r}") from None
        if rates[size] <= 0:
            raise ValueError(f"{part!r}: the rate must be positive")
    return rates


def saturation_size(workload: Workload) -> str:
    return workload.saturation_name.partition(":")[2]


def replay_s(workload: Workload, saturation: float | None) -> float:
    """Expected time of the workload on one arm that serves ``saturation`` requests per second, without its warm-up."""
    count = workload.num_requests
    if workload.kind == "sat":
        return (count / saturation if saturation else UNKNOWN_CLOSED_LOOP_S) + OVERHEAD_S
    rate = workload.rate * (saturation or 1.0) if workload.relative else workload.rate
    busy_s = count / saturation if saturation else 0.0
    return max(count / rate, busy_s) + TAIL_S + OVERHEAD_S


def plan_lines(
    entries: Iterable[Entry],
    arms: tuple[str, ...],
    known: Mapping[str, float | None],
    start_s: float,
    expected: Mapping[str, float] = EXPECTED_S,
) -> tuple[list[str], float]:
    """A line for each entry with the time at its end, and the total in seconds, for servers that are up together.

    ``known`` holds measured saturation rates by size, ``expected`` what to take where there is none.
    """
    total = start_s
    lines = [f"{f'start of {len(arms)} servers':<62} {start_s:>6.0f} s, at {total:>5.0f} s"]
    warm: set[str] = set()
    for entry in entries:
        size = saturation_size(entry.workload)
        names = entry.arms_of(arms)
        saturation = known.get(size) or expected.get(size)
        sizes = 5 if size in ("mix", "mmmu", "sizes") else 1
        warmup_s = 0.0 if size in warm else WARMUP_S_PER_SIZE * sizes
        warm.add(size)
        seconds = len(names) * (replay_s(entry.workload, saturation) + warmup_s)
        total += seconds
        label = f"{entry.workload.name} on {len(names)} ({', '.join(names)})"
        lines.append(f"{label:<62} {seconds:>6.0f} s, at {total:>5.0f} s")
    total += STOP_S
    return lines, total
