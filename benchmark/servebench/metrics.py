"""Figures of a run from the client's records. Times in ms, rates per second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from servebench.client import RequestRecord

# (TTFT ms, TPOT ms) within which an answer counts as good.
DEFAULT_LIMITS_MS = ((5000.0, 15.0), (1000.0, 10.0))
LATE_CLIENT_MS = 20.0


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default); NaN for no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def ttft_ms(record: RequestRecord) -> float:
    return record.events_ms[0]


def tpot_ms(record: RequestRecord) -> float:
    """Time per output token after the first: (last - first) / (tokens that came after the first event).

    Tokens that arrived together with the first one are left out of the count. NaN where nothing came after it.
    """
    after = record.num_tokens - record.event_tokens[0]
    return (record.events_ms[-1] - record.events_ms[0]) / after if after > 0 else math.nan


def gaps_ms(record: RequestRecord) -> list[float]:
    """Gaps between consecutive events: what the reader of the stream waits."""
    return [b - a for a, b in zip(record.events_ms, record.events_ms[1:], strict=False)]


def itl_ms(record: RequestRecord) -> list[float]:
    """Inter-token latencies: an event's gap for its first token, zero for those that came with it."""
    result: list[float] = []
    for gap, tokens in zip(gaps_ms(record), record.event_tokens[1:], strict=True):
        result += [gap] + [0.0] * (tokens - 1)
    return result


def saturation_rate(finished_ms: Sequence[float], concurrency: int) -> float:
    """Requests per second of a closed loop between the ``concurrency``-th finish and the last moment at which the
    loop was still full, i.e. without ramp-up and drain; NaN for fewer than 3 x concurrency finishes."""
    ordered = sorted(finished_ms)
    if len(ordered) < 3 * concurrency:
        return math.nan
    first, last = ordered[concurrency - 1], ordered[len(ordered) - concurrency - 1]
    return (len(ordered) - 2 * concurrency) / (last - first) * 1e3 if last > first else math.nan


def summarise(
    records: Sequence[RequestRecord],
    *,
    concurrency: int | None = None,
    limits_ms: Sequence[tuple[float, float]] = DEFAULT_LIMITS_MS,
) -> dict[str, Any]:
    """One flat dictionary of figures; failed requests count in ``num_failed`` and against goodput only."""
    good = [record for record in records if not record.error and record.events_ms]
    finishes = [record.planned_ms + record.events_ms[-1] for record in good]
    first_ms = min((record.planned_ms for record in records), default=0.0)
    span_s = (max(finishes, default=first_ms) - first_ms) / 1e3
    planned_span_s = (max(record.planned_ms for record in records) - first_ms) / 1e3 if records else 0.0
    ttfts = [ttft_ms(record) for record in good]
    tpots = [value for record in good if not math.isnan(value := tpot_ms(record))]
    itls = [value for record in good for value in itl_ms(record)]
    longest = [max(gaps, default=0.0) for record in good if (gaps := gaps_ms(record))]
    lateness = [record.sent_ms - record.planned_ms for record in records if record.sent_ms]
    served = len(good) / span_s if span_s > 0 else math.nan
    figures: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "offered_rate": (len(records) - 1) / planned_span_s if planned_span_s > 0 and concurrency is None else math.nan,
        "served_rate": served,
        "output_tokens_per_s": sum(record.num_tokens for record in good) / span_s if span_s > 0 else math.nan,
        "ttft_mean_ms": mean(ttfts),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "tpot_mean_ms": mean(tpots),
        "tpot_p50_ms": percentile(tpots, 50),
        "tpot_p99_ms": percentile(tpots, 99),
        "itl_p50_ms": percentile(itls, 50),
        "itl_p99_ms": percentile(itls, 99),
        "longest_gap_ms": max(longest, default=math.nan),
        "longest_gap_mean_ms": mean(longest),
        "longest_gap_p99_ms": percentile(longest, 99),
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "cached_tokens": sum(record.cached_tokens for record in good),
        "output_tokens": sum(record.num_tokens for record in good),
        "duration_s": span_s,
        "client_late_p99_ms": percentile(lateness, 99),
        "saturation_rate": saturation_rate(finishes, concurrency) if concurrency else math.nan,
    }
    figures["client_was_late"] = bool(figures["client_late_p99_ms"] > LATE_CLIENT_MS)
    for ttft_limit, tpot_limit in limits_ms:
        within = [
            record
            for record in good
            if ttft_ms(record) <= ttft_limit and (math.isnan(value := tpot_ms(record)) or value <= tpot_limit)
        ]
        figures[f"goodput_ttft{ttft_limit:g}_tpot{tpot_limit:g}"] = len(within) / span_s if span_s > 0 else math.nan
    return {key: _plain(value) for key, value in figures.items()}


def _plain(value: Any) -> Any:
    """JSON has no NaN: None instead; four digits after the point are more than the clock is worth."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 4)
    return value


def compact(record: RequestRecord) -> dict[str, Any]:
    """A record for storage: times since the planned arrival as differences in tenths of a millisecond.

    Differences are taken between rounded instants, so rounding does not add up. ``tokens`` is left out where every
    event carried one token.
    """
    ticks = [round(value * 10) for value in record.events_ms]
    row: dict[str, Any] = {
        "id": record.id,
        "at": round(record.planned_ms, 1),
        "sent": round(record.sent_ms, 1),
        "d": [b - a for a, b in zip([0, *ticks], ticks, strict=False)],
        "prompt": record.prompt_tokens,
        "cached": record.cached_tokens,
    }
    if any(tokens != 1 for tokens in record.event_tokens):
        row["tokens"] = record.event_tokens
    if record.error:
        row["error"] = record.error
    return row


def expand(row: dict[str, Any]) -> RequestRecord:
    """Inverse of ``compact`` up to rounding."""
    ticks = 0
    events = []
    for difference in row["d"]:
        ticks += difference
        events.append(ticks / 10)
    return RequestRecord(
        id=row["id"],
        planned_ms=row["at"],
        sent_ms=row["sent"],
        events_ms=events,
        event_tokens=row.get("tokens") or [1] * len(events),
        prompt_tokens=row["prompt"],
        cached_tokens=row["cached"],
        finished_ms=events[-1] if events else 0.0,
        error=row.get("error", ""),
    )
