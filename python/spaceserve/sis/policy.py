"""SIS, the space inference scheduler: from curves and the present state to a split of the device's units.

Pure and typed: no torch, no clock, no thread. The same calls in the same order give the same splits. One caller at
a time: several threads need a lock around every method.

Objectives, over the rungs n of the partitioner's ladder, N units in all:

- "least_delay": n* = argmin_n [ T_E(n) * (q / (1 - r) + w * b * (1 - T_D(N) / T_D(N - n))) ], with q requests that
  wait for the encoder (this batch's and those behind it), r the share of time that the encoder is busy, and b requests
  that decode. While the batch runs, each of the q waits T_E(n), and so does who comes before the queue is empty, 1 /
  (1 - r) for each of them (the mean number served in a busy period; Kleinrock, Queueing Systems I, 5.9). Each of the b
  makes tokens every T_D(N - n) instead of every T_D(N) alone, and falls behind by the bracket's share of T_E(n). It is
  the delay summed over requests; w weighs a streaming answer's against a waiting one's. So a deep queue, and a load
  near what the encoder can do, take SMs from a few answers; many answers keep them from one image. Ours.
- "least_time": n* = argmin_n [ T_E(n) + w * (T_D(N - n) + T_P(N - n)) ], with T_E the encoder batch (what is left of
  it), T_D one decode step, T_P the prefill chunk at hand (0 where there is none), w = `decode_weight`. With w = 1 and
  no prefill it is the paper's choice as far as its public summary says (Li et al., "SpaceServe", NeurIPS 2025: an
  offline cost model gives encoder and decoder time over SM count, and the scheduler takes the split of least
  predicted encoder + decoder time). One decode step weighs as much as one encoder batch there, so long batches get
  most of the device; a larger w counts the several steps that one batch delays.
- "tpot": the largest n whose predicted decode step stays within `tpot_target_ms`; where no rung does, the rung of
  the least predicted decode step (least harm). Prefill is outside the target: chunk size bounds it, not SMs.

For the rest of a batch, a share r of it, T_E is the rest's and w is r * w.

Every time includes what the other side does to it (contention factors of the curves) and the online correction.
Ties go to fewer encoder units under least_delay and least_time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from .curves import DeviceCurves
from .delay import DECODE_WEIGHT, summed_delay_ms

Objective = Literal["least_delay", "least_time", "tpot"]
MaskMode = Literal["encoder", "both"]

# Why a split was chosen, in one word for counters; `Split.reason` says it with numbers.
Rule = Literal["encoder_idle", "decoder_idle", "least_delay", "least_time", "tpot_kept", "tpot_missed", "hysteresis"]
RULES: tuple[Rule, ...] = get_args(Rule)

CORRECTION_BOUNDS = (0.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What waits and runs now.

    encoder_patches: patches of each image of the encoder batch; empty where there is nothing to encode.
    decode_batch, mean_context_tokens: running decode requests and their mean context.
    prefill_tokens: tokens of prefill running or about to be launched.
    num_waiting: requests that wait for the encoder, those of this batch among them; encoder_load: share of time that
    the encoder was busy lately, below 1.
    """

    encoder_patches: tuple[int, ...] = ()
    decode_batch: int = 0
    mean_context_tokens: float = 0.0
    prefill_tokens: int = 0
    num_waiting: int = 1
    encoder_load: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.encoder_patches, self.decode_batch, self.mean_context_tokens, self.prefill_tokens)
        if any(not math.isfinite(v) or v < 0 for v in (*numbers, self.num_waiting)):
            raise ValueError(f"GPU state has a negative or infinite size: {self}")
        if not 0.0 <= self.encoder_load < 1.0:
            raise ValueError(f"encoder_load must be in [0, 1), not {self.encoder_load}")
        if any(p == 0 for p in self.encoder_patches):
            raise ValueError("an image of 0 patches cannot be encoded")

    @property
    def encoder_idle(self) -> bool:
        return not self.encoder_patches

    @property
    def decoder_idle(self) -> bool:
        return self.decode_batch == 0 and self.prefill_tokens == 0


@dataclass(frozen=True, kw_only=True)
class Split:
    """A decision. `decoder_units` is what the decode side may use: the complement when it is masked, else all.

    Predicted times are corrected; `raw_*` are the curves' own, against which measurements are held.
    """

    encoder_units: int
    decoder_units: int
    predicted_encoder_ms: float
    predicted_decode_ms: float
    predicted_prefill_ms: float
    raw_encoder_ms: float
    raw_decode_ms: float
    switched: bool
    rule: Rule
    reason: str
    decision_id: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A split, the state it came from, and what was measured afterwards (None until observed)."""

    state: GpuState
    progress: float
    split: Split
    measured_encoder_ms: float | None = None
    measured_decode_ms: float | None = None


@dataclass(frozen=True)
class _Option:
    units: int
    raw_encoder_ms: float
    raw_decode_ms: float
    encoder_ms: float
    decode_ms: float
    prefill_ms: float
    left: float  # share of the batch that `encoder_ms` is the time of, in (0, 1]


@dataclass
class OnlineCorrection:
    """Bounded ratio measured / predicted of one side.

    factor(n) = shared * own(n), both exponentially weighted means of the log ratio. The shared part takes what all
    rungs have in common (clocks, other kernels than those profiled), so that a rung never tried is not favoured over
    the one just measured; the rung's own part takes the rest, more slowly. Each observation and the product stay
    within CORRECTION_BOUNDS: one outlier moves nothing by more than a factor of 2**alpha.
    """

    shared_alpha: float = 0.2
    own_alpha: float = 0.05
    _log_shared: float = 0.0
    _log_own: dict[int, float] = field(default_factory=dict)

    def factor(self, units: int) -> float:
        low, high = CORRECTION_BOUNDS
        return min(high, max(low, math.exp(self._log_shared + self._log_own.get(units, 0.0))))

    def observe(self, units: int, ratio: float) -> None:
        """`ratio` is measured / raw predicted. Raises ValueError unless finite and above 0."""
        if not math.isfinite(ratio) or ratio <= 0:
            raise ValueError(f"measured / predicted must be finite and above 0, not {ratio}")
        low, high = CORRECTION_BOUNDS
        log_ratio = math.log(min(high, max(low, ratio)))
        own = self._log_own.get(units, 0.0)
        self._log_shared += self.shared_alpha * (log_ratio - own - self._log_shared)
        self._log_own[units] = own + self.own_alpha * (log_ratio - self._log_shared - own)


class SpaceInferenceScheduler:
    """Chooses encoder units for each encoder batch, and again within one.

    rungs: encoder units to choose from, ascending; the last is the whole device. total units come from the curves.
    objective: see the module; "tpot" needs `tpot_target_ms`.
    mask_mode: "encoder" (the decoder may use every unit) or "both" (the decoder keeps to the complement).
    switch_cost_us: what a change of partition costs. A change is made only if it is predicted to gain more than that.
    decode_weight: w of the least_delay and least_time objectives.
    prefill_chunk_tokens: largest prefill chunk of the decode side.

    While both sides work a rung is eligible if its complement has at least `curves.min_decoder_units`; the whole
    device is eligible only in mode "encoder" and only where the curves hold its contention (plain sharing).
    Raises ValueError for bad arguments and where no rung is eligible.
    """

    def __init__(
        self,
        curves: DeviceCurves,
        rungs: Sequence[int],
        objective: Objective = "least_delay",
        tpot_target_ms: float | None = None,
        mask_mode: MaskMode = "encoder",
        switch_cost_us: float = 50.0,
        *,
        decode_weight: float = DECODE_WEIGHT,
        prefill_chunk_tokens: int = 2048,
        log_size: int = 256,
    ) -> None:
        total = curves.total_units
        if not rungs or any(n < 1 for n in rungs) or any(b <= a for a, b in pairwise(rungs)):
            raise ValueError(f"rungs must be ascending and at least 1: {list(rungs)}")
        if rungs[-1] != total:
            raise ValueError(f"the last rung must be the whole device ({total} units), not {rungs[-1]}")
        if objective not in ("least_delay", "least_time", "tpot"):
            raise ValueError(f"unknown objective {objective!r}: least_delay, least_time or tpot")
        if mask_mode not in ("encoder", "both"):
            raise ValueError(f"unknown mask mode {mask_mode!r}: encoder or both")
        if objective == "tpot" and not (tpot_target_ms and math.isfinite(tpot_target_ms) and tpot_target_ms > 0):
            raise ValueError("objective tpot needs tpot_target_ms above 0")
        if switch_cost_us < 0 or decode_weight < 0 or prefill_chunk_tokens < 1 or log_size < 1:
            raise ValueError(
                "switch_cost_us and decode_weight cannot be negative, prefill_chunk_tokens and log_size not 0"
            )
        self.curves = curves
        self.rungs = tuple(rungs)
        self.objective: Objective = objective
        self.tpot_target_ms = tpot_target_ms
        self.mask_mode: MaskMode = mask_mode
        self.switch_cost_ms = switch_cost_us * 1e-3
        self.decode_weight = decode_weight
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.num_switches = 0
        self._mask_suffix = "masked" if mask_mode == "both" else "unmasked"
        self._shared = [n for n in self.rungs if self._eligible(n)]
        if not self._shared:
            raise ValueError(f"no rung of {list(rungs)} leaves the decoder {curves.min_decoder_units} of {total} units")
        self._current: int | None = None  # rung of the running encoder batch; None after idling
        self._next_id = 0
        self._encoder_correction = OnlineCorrection()
        self._decode_correction = OnlineCorrection()
        self._log: deque[Decision] = deque(maxlen=log_size)

    def _eligible(self, units: int) -> bool:
        total = self.curves.total_units
        if units == total:
            return self.mask_mode == "encoder" and self.curves.has_contention("decode_beside_encoder_unmasked", total)
        return total - units >= self.curves.min_decoder_units

    @property
    def shared_rungs(self) -> tuple[int, ...]:
        """Rungs that may be chosen while both sides work."""
        return tuple(self._shared)

    def _predict(self, state: GpuState, units: int, remaining: float) -> _Option:
        """Times of both sides at a split, raw and corrected; `remaining` is the share of the batch still to do."""
        curves, total = self.curves, self.curves.total_units
        encoder = remaining * curves.at(units).encoder_batch_ms(state.encoder_patches) if units else 0.0
        chunk = min(state.prefill_tokens, self.prefill_chunk_tokens)
        # Decode factors are relative to the complement; beside an encoder on the whole device, to the whole.
        side = curves.at(total - units if 0 < units < total else total)
        decode = side.decode_step_ms(state.decode_batch, state.mean_context_tokens)
        prefill = side.prefill_chunk_ms(chunk, 0)
        if units and encoder:
            suffix = self._mask_suffix
            decode *= curves.contention_factor(f"decode_beside_encoder_{suffix}", units)
            prefill *= curves.contention_factor(f"prefill_beside_encoder_{suffix}", units)
            # Decode and prefill take turns on their side: the encoder meets each for its share of the time.
            if decode + prefill:
                share = prefill / (decode + prefill)
                encoder *= (1 - share) * curves.contention_factor(f"encoder_beside_decode_{suffix}", units) + (
                    share * curves.contention_factor(f"encoder_beside_prefill_{suffix}", units)
                )
        return _Option(
            units=units,
            raw_encoder_ms=encoder,
            raw_decode_ms=decode,
            encoder_ms=encoder * self._encoder_correction.factor(units),
            decode_ms=decode * self._decode_correction.factor(units),
            prefill_ms=prefill * self._decode_correction.factor(units),
            left=remaining if units else 1.0,
        )

    def cost_ms(self, option_encoder_ms: float, option_decode_ms: float, option_prefill_ms: float) -> float:
        """Value of the least_time objective."""
        return option_encoder_ms + self.decode_weight * (option_decode_ms + option_prefill_ms)

    def _cost(self, option: _Option, state: GpuState) -> float:
        if self.objective == "least_delay":
            whole = self.curves.at(self.curves.total_units)
            return summed_delay_ms(
                option.encoder_ms,
                num_waiting=state.num_waiting,
                load=state.encoder_load,
                decode_batch=state.decode_batch,
                alone_ms=whole.decode_step_ms(state.decode_batch, state.mean_context_tokens),
                beside_ms=option.decode_ms,
                decode_weight=self.decode_weight,
            )
        # The rest of a batch delays as many fewer steps as it is shorter: while nothing changes, neither does the best.
        return self.cost_ms(option.encoder_ms, option.left * option.decode_ms, option.left * option.prefill_ms)

    def decide(self, state: GpuState) -> Split:
        """Split for a new encoder batch (or for an idle encoder)."""
        return self._decide(state, progress=0.0)

    def reconsider(self, state: GpuState, progress: float) -> Split:
        """Split for what is left of the running batch, between two layers; `progress` is the share done, in [0, 1)."""
        if not 0.0 <= progress < 1.0:
            raise ValueError(f"progress must be in [0, 1), not {progress}")
        return self._decide(state, progress)

    def _decide(self, state: GpuState, progress: float) -> Split:
        total = self.curves.total_units
        if state.encoder_idle:
            self._current = None
            reason = "nothing to encode: the decoder has the device"
            return self._record(state, progress, self._predict(state, 0, 0.0), total, False, "encoder_idle", reason)
        if state.decoder_idle:
            option = self._predict(state, total, 1.0 - progress)
            reason = "nothing to decode: the encoder has the device"
            return self._commit(state, progress, option, "decoder_idle", reason)
        options = {n: self._predict(state, n, 1.0 - progress) for n in self._shared}
        # With no decode step there is no TPOT to keep; prefill and encoder then share by least time.
        by_target = self.objective == "tpot" and state.decode_batch > 0
        best, rule, reason = self._best_tpot(options) if by_target else self._best_cost(options, state)
        current = options.get(self._current) if self._current is not None else None
        if current is not None and current.units != best.units and not self._worth(current, best, state, by_target):
            reason = f"stay at {current.units}: {best.units} gains less than a switch costs"
            return self._commit(state, progress, current, "hysteresis", reason)
        return self._commit(state, progress, best, rule, reason)

    def _best_cost(self, options: dict[int, _Option], state: GpuState) -> tuple[_Option, Rule, str]:
        costs = {units: self._cost(option, state) for units, option in options.items()}
        units = min(costs, key=lambda n: (costs[n], n))
        if self.objective == "least_delay":
            return options[units], "least_delay", f"least delay, summed over requests, {costs[units]:.3g} ms"
        return options[units], "least_time", f"least encoder + decoder time, {costs[units]:.3g} ms"

    def _best_tpot(self, options: dict[int, _Option]) -> tuple[_Option, Rule, str]:
        assert self.tpot_target_ms is not None
        meeting = [o for o in options.values() if o.decode_ms <= self.tpot_target_ms]
        if meeting:
            best = max(meeting, key=lambda o: o.units)
            return best, "tpot_kept", f"largest share within {self.tpot_target_ms:g} ms per token"
        best = min(options.values(), key=lambda o: (o.decode_ms, o.units))
        reason = f"no rung keeps {self.tpot_target_ms:g} ms per token: least harm, {best.decode_ms:.3g} ms"
        return best, "tpot_missed", reason

    def _worth(self, current: _Option, best: _Option, state: GpuState, by_target: bool) -> bool:
        """Whether leaving `current` gains more than a switch costs. A target that only `best` keeps always does."""
        if not by_target:
            delayed = state.num_waiting if self.objective == "least_delay" else 1
            return self._cost(current, state) - self._cost(best, state) > self.switch_cost_ms * delayed
        assert self.tpot_target_ms is not None
        if current.decode_ms <= self.tpot_target_ms:
            return current.encoder_ms - best.encoder_ms > self.switch_cost_ms
        if best.decode_ms <= self.tpot_target_ms:
            return True
        return current.decode_ms - best.decode_ms > self.switch_cost_ms

    def _commit(self, state: GpuState, progress: float, option: _Option, rule: Rule, reason: str) -> Split:
        switched = self._current is not None and self._current != option.units
        self.num_switches += switched
        self._current = option.units
        total = self.curves.total_units
        decoder_units = total if self.mask_mode == "encoder" or state.decoder_idle else total - option.units
        return self._record(state, progress, option, decoder_units, switched, rule, reason)

    def _record(
        self,
        state: GpuState,
        progress: float,
        option: _Option,
        decoder_units: int,
        switched: bool,
        rule: Rule,
        reason: str,
    ) -> Split:
        split = Split(
            encoder_units=option.units,
            decoder_units=decoder_units,
            predicted_encoder_ms=option.encoder_ms,
            predicted_decode_ms=option.decode_ms,
            predicted_prefill_ms=option.prefill_ms,
            raw_encoder_ms=option.raw_encoder_ms,
            raw_decode_ms=option.raw_decode_ms,
            switched=switched,
            rule=rule,
            reason=reason,
            decision_id=self._next_id,
        )
        self._next_id += 1
        self._log.append(Decision(state=state, progress=progress, split=split))
        return split

    def observe(
        self, split: Split, measured_encoder_ms: float | None = None, measured_decode_ms: float | None = None
    ) -> None:
        """Report what a split brought. The encoder time is that of the work predicted (after `progress`).

        Mutates the correction factors and the decision's log entry (if it is still in the ring). Raises ValueError
        for a time that is not finite and above 0.
        """
        for name, ms in (("measured_encoder_ms", measured_encoder_ms), ("measured_decode_ms", measured_decode_ms)):
            if ms is not None and (not math.isfinite(ms) or ms <= 0):
                raise ValueError(f"{name} must be finite and above 0, not {ms}")
        if measured_encoder_ms is not None and split.raw_encoder_ms > 0:
            self._encoder_correction.observe(split.encoder_units, measured_encoder_ms / split.raw_encoder_ms)
        if measured_decode_ms is not None and split.raw_decode_ms > 0:
            self._decode_correction.observe(split.encoder_units, measured_decode_ms / split.raw_decode_ms)
        for i, decision in enumerate(self._log):
            if decision.split.decision_id == split.decision_id:
                self._log[i] = Decision(
                    state=decision.state,
                    progress=decision.progress,
                    split=decision.split,
                    measured_encoder_ms=measured_encoder_ms
                    if measured_encoder_ms is not None
                    else decision.measured_encoder_ms,
                    measured_decode_ms=measured_decode_ms
                    if measured_decode_ms is not None
                    else decision.measured_decode_ms,
                )
                break

    def correction(self, units: int) -> tuple[float, float]:
        """Encoder and decode factors in use at a rung."""
        return self._encoder_correction.factor(units), self._decode_correction.factor(units)

    def last_decisions(self) -> list[Decision]:
        """The last decisions, oldest first (`dataclasses.asdict` makes each JSON)."""
        return list(self._log)
