"""The least mean TPOT at a given mean TTFT, with the interference that was measured.

An estimate of the best attainable with the kernels as they are, not a theorem. Encoder and prefill ("compute") run one
request at a time, the one of least remaining work first; beside them decode runs. Everything has a rate relative to
itself alone on the whole device: compute c, decode d. Attainable pairs (``Sharing``) are

- turns: (1, 0) and (0, 1);
- the encoder masked to n SMs, decode unmasked or on the other SMs, or neither masked: SIS's curves with the measured
  factors of two processes beside each other (``contention``);
- prefill in the same three ways, as measured in one process (``sharing``);
- mixed chunks: prefill in chunks, each with one token of every decoding request in the same forward pass. Summed from
  the curves of prefill and decode, not measured as a whole; can be left out.

A policy picks a pair from the number of requests that wait for compute and the number that decode. ``simulate`` plays
arrivals through it, ``sweep`` tries two families of policies, each over a range of weights, and ``envelope`` keeps the
lower left of what they reach. By Little's law mean TTFT and TPOT are the mean numbers waiting and decoding over the
rate, so the best trade-off is that of a controlled queue; the first family comes within about 2 % of its optimum
(test_benchmark_tradeoff.py solves a small one by value iteration).

Time is a fluid: no decode steps, layers, host time, pre-processing or switches, so what is measured lies above by at
least those. Not tried: policies that know the future, encoder and prefill of several requests at once (both want the
same units: beside each other they add up to no more than one alone, see ``contention``), and gaps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from spaceserve.sis.curves import DeviceCurves

ENCODE, PREFILL = "encode", "prefill"
WEIGHTS = tuple(0.02 * 10 ** (i / 6) for i in range(24))
MIXED_CHUNKS = (128, 256, 384, 512, 768, 1024, 2048)


@dataclass(frozen=True)
class Pair:
    """Rates of compute and decode beside each other, relative to each alone on the whole device."""

    compute: float
    decode: float
    label: str


TURNS = (Pair(1.0, 0.0, "compute alone"), Pair(0.0, 1.0, "decode alone"))


@dataclass(frozen=True)
class Work:
    """Compute of one size of request: ms alone on the whole device, and the sizes from which they come."""

    encode_ms: float
    prefill_ms: float
    patches: tuple[int, ...] = ()  # of each image
    tokens: int = 0  # of the prompt

    @property
    def total_ms(self) -> float:
        return self.encode_ms + self.prefill_ms


def work_of(curves: DeviceCurves, images: Sequence[tuple[int, int]], text_tokens: int) -> Work:
    """The work of a request with ``images`` (width, height in pixels) and ``text_tokens`` of text, patches of 14."""
    whole = curves.at(curves.total_units)
    patches = tuple(4 * max(1, round(width / 28)) * max(1, round(height / 28)) for width, height in images)
    tokens = sum(patches) // 4 + text_tokens
    return Work(whole.encoder_batch_ms(patches), whole.prefill_chunk_ms(tokens, 0), patches, tokens)


class Sharing:
    """Pairs and decode steps for every state, from SIS's curves.

    Args:
        context_tokens: mean context of a decoding request.
        modes: which to use of "encoder" (encoder or prefill masked, decode not), "both" (both masked), "none", "turns"
            and "mixed" (mixed chunks).
    """

    MODES = ("encoder", "both", "none", "turns", "mixed")

    def __init__(self, curves: DeviceCurves, context_tokens: float, modes: Sequence[str] = MODES) -> None:
        self._curves, self._context, self._modes = curves, context_tokens, frozenset(modes)
        self._total = curves.total_units
        measured = [n for n in curves.contention.get("encoder_beside_decode_masked", {}) if n < self._total]
        profiled = curves.curves["encoder_linear"].units
        # Between measured sizes factors are interpolated; beyond them nothing is claimed.
        self._rungs = sorted(
            n
            for n in {*profiled, *measured}
            if measured and min(measured) <= n <= max(measured) and self._total - n >= curves.min_decoder_units
        )
        self.step_ms = lru_cache(maxsize=None)(self._step_ms)
        self.pairs = lru_cache(maxsize=None)(self._pairs)

    def _step_ms(self, batch: int) -> float:
        return self._curves.at(self._total).decode_step_ms(batch, self._context)

    def _pairs(self, phase: str, work: Work, batch: int) -> tuple[Pair, ...]:
        found = self._beside_encoder(work, batch) if phase == ENCODE else self._beside_prefill()
        if phase == PREFILL and "mixed" in self._modes:
            found += [self._mixed(work, batch, chunk) for chunk in MIXED_CHUNKS]
        return (*(TURNS if "turns" in self._modes else ()), *found)

    def _beside_encoder(self, work: Work, batch: int) -> list[Pair]:
        curves, total, found = self._curves, self._total, []
        alone_ms, factor = curves.at(total).encoder_batch_ms(work.patches), curves.contention_factor
        for mode, case in (("encoder", "unmasked"), ("both", "masked")):
            for n in self._rungs if mode in self._modes else ():
                encode_ms = curves.at(n).encoder_batch_ms(work.patches) * factor(f"encoder_beside_decode_{case}", n)
                beside_ms = curves.at(total - n).decode_step_ms(batch, self._context)
                beside_ms *= factor(f"decode_beside_encoder_{case}", n)
                found.append(Pair(alone_ms / encode_ms, self.step_ms(batch) / beside_ms, f"{mode} {n}"))
        if "none" in self._modes and curves.has_contention("decode_beside_encoder_unmasked", total):
            slower, beside = (
                factor(f"{case}_unmasked", total) for case in ("encoder_beside_decode", "decode_beside_encoder")
            )
            found.append(Pair(1 / slower, 1 / beside, "none"))
        return found

    def _beside_prefill(self) -> list[Pair]:
        names = {"prefill masked": "encoder", "both masked": "both", "both unmasked": "none"}
        whole = next((row for row in self._curves.sharing if row["mode"] == "both unmasked"), None)
        if whole is None:
            return []
        found = []
        for row in self._curves.sharing:
            mode, units = names[row["mode"]], row["prefill_units"]
            if mode not in self._modes or 0 < self._total - units < self._curves.min_decoder_units:
                continue
            compute, decode = (whole[f"{side}_alone_ms"] / row[f"{side}_ms"] for side in ("prefill", "decode"))
            found.append(Pair(compute, decode, mode if mode == "none" else f"{mode} {units}"))
        return found

    def _mixed(self, work: Work, batch: int, chunk: int) -> Pair:
        slices = self._curves.at(self._total).slices
        starts = range(0, work.tokens, chunk)
        decode_ms = slices["decode_attention"].ms(batch, self._context) if batch else 0.0
        mixed_ms = sum(
            slices["prefill_linear"].ms(min(chunk, work.tokens - start) + batch)
            + slices["prefill_attention"].ms(min(chunk, work.tokens - start), start)
            + decode_ms
            for start in starts
        )
        return Pair(work.prefill_ms / mixed_ms, len(starts) * self.step_ms(batch) / mixed_ms, f"mixed {chunk}")


# (pairs, requests that wait for compute or are computed, requests that decode, share of time compute needs alone)
Policy = Callable[[Sequence[Pair], int, int, float], Pair]


def greedy(weight: float) -> Policy:
    """Most progress now: ``c q + w b d``."""
    return lambda pairs, waiting, batch, load: max(pairs, key=lambda p: p.compute * waiting + weight * batch * p.decode)


def least_delay(weight: float) -> Policy:
    """SIS's least delay: ``(q / (1 - r) + w b (1 - d)) / c``, with r the share of time that compute is busy at c."""

    def choose(pairs: Sequence[Pair], waiting: int, batch: int, load: float) -> Pair:
        able = [pair for pair in pairs if pair.compute > 0]
        queue = waiting / (1 - min(0.9, load))
        return min(able, key=lambda p: (queue + weight * batch * (1 - p.decode)) / p.compute)

    return choose


def fixed(label: str) -> Policy:
    """One pair whenever it is there, else compute alone: a static split."""
    return lambda pairs, waiting, batch, load: next((pair for pair in pairs if pair.label == label), pairs[0])


FAMILIES: Mapping[str, Callable[[float], Policy]] = {"least delay": least_delay, "greedy": greedy}


@dataclass(frozen=True)
class Outcome:
    """Means over requests. ``shares``: of the time in which both sides had work, by phase and pair."""

    ttft_ms: float
    tpot_ms: float
    policy: str = ""
    shares: Mapping[tuple[str, str], float] = field(default_factory=dict)


def simulate(
    arrivals_ms: Sequence[float],
    works: Sequence[Work],
    sharing: Sharing,
    policy: Policy,
    *,
    output_len: int = 128,
) -> Outcome:
    """Play requests (ascending arrivals, one of ``works`` each) through a policy until the last token is out.

    The first token comes with the end of prefill; ``output_len - 1`` more are decoded. TPOT is 0 without any.
    Raises ValueError without requests, for arrivals out of order or other than one for each of ``works``.
    """
    if not works or len(arrivals_ms) != len(works) or any(b < a for a, b in itertools.pairwise(arrivals_ms)):
        raise ValueError("every request needs one arrival, in order, and its work")
    count, tokens = len(works), output_len - 1
    span_ms = arrivals_ms[-1] if count > 1 else math.inf
    load = sum(work.total_ms for work in works) / span_ms if span_ms > 0 else 0.9
    chosen: dict[tuple[str, Work, int, int], Pair] = {}
    left = [[work.encode_ms, work.prefill_ms] for work in works]
    queue: list[tuple[float, int]] = []  # (remaining ms, request), the least first
    decoding: deque[tuple[float, float]] = deque()  # (token count at which it is done, time of the first token)
    use: dict[tuple[str, str], float] = defaultdict(float)
    now, done_tokens, coming, answered = 0.0, 0.0, 0, 0
    ttft_sum, decode_sum = 0.0, 0.0
    while answered < count:
        batch, waiting = len(decoding), len(queue)
        pair, phase, until_phase = TURNS[1], "", math.inf
        if waiting:
            head = queue[0][1]
            stage = 0 if left[head][0] > 0 else 1
            phase = PREFILL if stage else ENCODE
            pair = TURNS[0]
            if batch:
                key = (phase, works[head], waiting, batch)
                if key not in chosen:
                    chosen[key] = policy(sharing.pairs(phase, works[head], batch), waiting, batch, load)
                pair = chosen[key]
            until_phase = left[head][stage] / pair.compute if pair.compute else math.inf
        speed = pair.decode / sharing.step_ms(batch) if batch else 0.0
        until_done = (decoding[0][0] - done_tokens) / speed if speed else math.inf
        until_arrival = arrivals_ms[coming] - now if coming < count else math.inf
        elapsed = max(0.0, min(until_phase, until_done, until_arrival))
        now += elapsed
        done_tokens += speed * elapsed
        if waiting:
            left[head][stage] -= pair.compute * elapsed
            if batch:
                use[phase, pair.label] += elapsed
            if until_phase <= elapsed:
                left[head][stage] = 0.0
            heapq.heapreplace(queue, (sum(left[head]), head))
            if not left[head][1] and not left[head][0]:
                heapq.heappop(queue)
                ttft_sum += now - arrivals_ms[head]
                if tokens > 0:
                    decoding.append((done_tokens + tokens, now))
                else:
                    answered += 1
        if until_done <= elapsed:
            _, first_ms = decoding.popleft()
            decode_sum += now - first_ms
            answered += 1
        if until_arrival <= elapsed:
            heapq.heappush(queue, (works[coming].total_ms, coming))
            coming += 1
    total = sum(use.values()) or 1.0
    shares = {key: value / total for key, value in sorted(use.items(), key=lambda item: -item[1])}
    return Outcome(ttft_sum / count, decode_sum / count / max(1, tokens), shares=shares)


def sweep(
    runs: Sequence[tuple[Sequence[float], Sequence[Work]]],
    sharing: Sharing,
    *,
    output_len: int = 128,
    weights: Sequence[float] = WEIGHTS,
) -> list[Outcome]:
    """Every family at every weight, each the mean over ``runs`` (arrivals in ms, works); shares of the first run."""
    found = []
    for family, make in FAMILIES.items():
        for weight in weights:
            played = [simulate(*run, sharing, make(weight), output_len=output_len) for run in runs]
            ttft_ms = sum(outcome.ttft_ms for outcome in played) / len(played)
            tpot_ms = sum(outcome.tpot_ms for outcome in played) / len(played)
            found.append(Outcome(ttft_ms, tpot_ms, f"{family}, w = {weight:.2g}", played[0].shares))
    return found


def envelope(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The lower left convex hull, by rising TTFT: alternating between two policies reaches what lies between them."""
    hull: list[Outcome] = []
    for point in sorted(outcomes, key=lambda o: (o.ttft_ms, o.tpot_ms)):
        if hull and point.tpot_ms >= hull[-1].tpot_ms:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: Outcome, b: Outcome) -> float:
    return (b.tpot_ms - a.tpot_ms) / (b.ttft_ms - a.ttft_ms) if b.ttft_ms > a.ttft_ms else -math.inf


def tpot_at(front: Sequence[Outcome], ttft_ms: float) -> float:
    """The least TPOT within ``ttft_ms`` on an ``envelope``; NaN where no policy is as quick."""
    if ttft_ms < front[0].ttft_ms:
        return math.nan
    for a, b in itertools.pairwise(front):
        if ttft_ms < b.ttft_ms:
            return a.tpot_ms + _slope(a, b) * (ttft_ms - a.ttft_ms)
    return front[-1].tpot_ms


def ttft_at(front: Sequence[Outcome], tpot_ms: float) -> float:
    """The least TTFT with at most ``tpot_ms`` on an ``envelope``; NaN where no policy has so little."""
    if tpot_ms < front[-1].tpot_ms:
        return math.nan
    for b, a in itertools.pairwise(reversed(front)):
        if tpot_ms < a.tpot_ms:
            return b.ttft_ms + (tpot_ms - b.tpot_ms) / _slope(a, b)
    return front[0].ttft_ms
