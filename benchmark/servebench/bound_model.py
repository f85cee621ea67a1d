"""The best that any arrangement of the work could reach, from the cost of one request's parts.

Per request: encode E and prefill P (compute-bound), and D, its share of decode steps (bandwidth-bound). Running decode
beside encode and prefill can hide D; nothing hides E behind P, since both want the same compute units. Hence

- throughput is at most ``1 / (E + P)`` with perfect overlap, ``1 / (E + P + D)`` when the parts take turns;
- TPOT is at least one decode step at the batch that Little's law gives for the rate; while the parts take turns a step
  is stretched by ``1 / (1 - rate (E + P))``;
- mean TTFT is that of an M/G/1 queue which gives E + P the whole GPU and serves the smaller first, pre-empting
  (Conway, Maxwell, Miller 1967): for size k, ``s_k / (1 - rho_<k) + rate E[s^2; s <= s_k] / (2 (1 - rho_<k)
  (1 - rho_<=k))``. For one size that is the M/D/1 queue (Pollaczek-Khinchine), and a bound: working on several images
  at once only makes the mean longer. For a mix, shortest *remaining* first is optimal and can be a little faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PartCosts:
    """Costs of requests of one size in ms on an idle GPU."""

    encode_ms: float
    prefill_ms: float
    weight: float = 1.0

    @property
    def total_ms(self) -> float:
        return self.encode_ms + self.prefill_ms


@dataclass(frozen=True)
class Bound:
    """Limits for a mix of sizes at a rate. Rates per second; NaN where the rate is beyond what can be served."""

    max_rate_overlap: float
    max_rate_turns: float
    utilisation: float
    tpot_overlap_ms: float
    tpot_turns_ms: float
    ttft_ms: float
    decode_batch: float


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through ``points`` (sorted by x), held constant below the first, extended beyond the last."""
    if not points:
        raise ValueError("no points to interpolate")
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2], points[-1]
    return y1 + (y1 - y0) * (x - x1) / (x1 - x0)


def steady_decode(step_ms: Mapping[int, float], rate: float, output_len: int) -> tuple[float, float]:
    """Batch and step time (ms) at which ``rate`` requests per second of ``output_len`` tokens are in balance.

    Little's law: batch = rate x output_len x step(batch); solved by bisection on the measured steps, batch at least 1.
    (NaN, NaN) where the steps grow faster than the batch can.
    """
    points = sorted((float(batch), step) for batch, step in step_ms.items())

    def excess(batch: float) -> float:
        return rate * output_len * interpolate(points, batch) / 1e3 - batch

    if excess(1.0) <= 0:
        return 1.0, interpolate(points, 1.0)
    low, high = 1.0, 4096.0
    if excess(high) > 0:
        return math.nan, math.nan
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high, interpolate(points, high)


def bound(parts: Sequence[PartCosts], step_ms: Mapping[int, float], rate: float, output_len: int) -> Bound:
    """The limits for requests drawn from ``parts`` by weight. Raises ValueError without parts."""
    total_weight = sum(part.weight for part in parts)
    if total_weight <= 0:
        raise ValueError("no request sizes given")
    mean_s = sum(part.weight * part.total_ms for part in parts) / total_weight / 1e3
    batch, step = steady_decode(step_ms, rate, output_len)
    widest = max(step_ms)
    decode_s = output_len * step_ms[widest] / widest / 1e3
    rho = rate * mean_s
    return Bound(
        max_rate_overlap=1 / mean_s if mean_s > 0 else math.inf,
        max_rate_turns=1 / (mean_s + decode_s),
        utilisation=rho,
        tpot_overlap_ms=step,
        tpot_turns_ms=step / (1 - rho) if rho < 1 else math.nan,
        ttft_ms=smaller_first_ms(parts, rate) if rho < 1 else math.nan,
        decode_batch=batch,
    )


def smaller_first_ms(parts: Sequence[PartCosts], rate: float) -> float:
    """Mean time in ms from arrival to the end of E + P, all sizes together; ``rate`` per second below saturation."""
    total_weight = sum(part.weight for part in parts)
    sizes_s = sorted({part.total_ms / 1e3 for part in parts})
    below, square, mean_s = 0.0, 0.0, 0.0
    for size_s in sizes_s:
        share = sum(part.weight for part in parts if part.total_ms / 1e3 == size_s) / total_weight
        square += share * size_s**2
        upto = below + rate * share * size_s
        mean_s += share * (size_s / (1 - below) + rate * square / (2 * (1 - below) * (1 - upto)))
        below = upto
    return mean_s * 1e3


@dataclass(frozen=True)
class PartitionPoint:
    """Predicted figures of one partition: the encoder on ``num_sms`` SMs, decode on the rest while it runs."""

    num_sms: int
    tpot_ms: float
    ttft_ms: float


def partition_points(
    encode_ms: Mapping[int, float],
    decode_beside_ms: Mapping[int, float],
    decode_alone_ms: float,
    prefill_ms: float,
    rate: float,
) -> list[PartitionPoint]:
    """TPOT and TTFT for each number of encoder SMs, where prefill takes the whole GPU in turns with decode.

    ``encode_ms`` and ``decode_beside_ms`` are keyed by the encoder's SMs (``decode_beside_ms``: a decode step while the
    encoder runs on them). A step takes the time-weighted mean of beside and alone, stretched by the share that prefill
    takes: ``(rho_e d_beside + (1 - rho_e) d_alone) / (1 - rate P)``. TTFT is encode + prefill + the M/D/1 wait for the
    encoder. Partitions that cannot keep up are left out.
    """
    points = []
    for num_sms in sorted(set(encode_ms) & set(decode_beside_ms)):
        encode_s, prefill_s = encode_ms[num_sms] / 1e3, prefill_ms / 1e3
        busy, prefill_share = rate * encode_s, rate * prefill_s
        if busy >= 1 or prefill_share >= 1:
            continue
        step = (busy * decode_beside_ms[num_sms] + (1 - busy) * decode_alone_ms) / (1 - prefill_share)
        wait_s = busy * encode_s / (2 * (1 - busy))
        points.append(PartitionPoint(num_sms, step, (wait_s + encode_s + prefill_s) * 1e3))
    return points


def tpot_at_ttft(points: Sequence[PartitionPoint], ttft_ms: float) -> PartitionPoint | None:
    """The partition with the least TPOT whose TTFT is within ``ttft_ms``; None where none is."""
    return min((p for p in points if p.ttft_ms <= ttft_ms), key=lambda p: p.tpot_ms, default=None)
