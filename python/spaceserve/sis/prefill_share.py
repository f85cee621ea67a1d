"""How many units a prefill gets while requests decode beside it.

Pure: curves and sizes in, units out.

While a prefill of T_P(n) ms runs on n of N units, its requests and those behind it wait T_P(n), and so does who comes
before the queue is empty; each decoding request makes a token d(n) times as slowly as alone and so loses
T_P(n) * (1 - 1 / d(n)). The choice is the n of the least delay summed over requests, as SIS's for the encoder
(policy.py, "least_delay"):

    max(T_P(n), h) * q / (1 - r) + w * T_P(n) * b * (1 - 1 / d(n)),

h the host's time to launch a prefill, below which no group makes it quicker, q requests waiting for a prefill alone, r
the share of time that prefill is busy, b requests decoding, and w = `decode_weight` for what a streaming answer's delay
counts against a waiting one's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spaceserve.sis.curves import DeviceCurves
from spaceserve.sis.delay import DECODE_WEIGHT, summed_delay_ms
from spaceserve.sis.policy import MaskMode


class PrefillShare:
    """See the module.

    Where the curves hold measurements of decode beside prefill in one process (`sharing`), T_P and d come from them,
    and the whole device is among the choices, where prefill is quickest and decode suffers most. Without them decode is
    taken to have the complement to itself.

    Args:
        rungs: units that a group can have, ascending, without the whole device; those that leave decode fewer than the
            curves' `min_decoder_units` are not used.
        mask_mode: "both" where decode keeps to the units that the prefill's group leaves.

    Raises:
        ValueError: no rung is left.
    """

    def __init__(self, curves: DeviceCurves, rungs: Sequence[int], mask_mode: MaskMode = "encoder") -> None:
        self._curves = curves
        self._total = curves.total_units
        self.decode_weight = DECODE_WEIGHT
        self.rungs = tuple(n for n in rungs if self._total - n >= max(1, curves.min_decoder_units))
        if not self.rungs:
            raise ValueError(f"no rung of {list(rungs)} leaves decode {curves.min_decoder_units} units")
        self._beside = _beside(curves.sharing, self._total, mask_mode)
        if self._beside is not None:
            self.rungs = (*self.rungs, self._total)

    def alone_ms(self, prefill_tokens: int, prefix_tokens: int) -> float:
        """Time of a prefill alone on the whole device."""
        return self._curves.at(self._total).prefill_chunk_ms(prefill_tokens, prefix_tokens)

    def units(
        self,
        *,
        prefill_tokens: int,
        prefix_tokens: int,
        num_waiting: int,
        prefill_load: float,
        decode_batch: int,
        mean_context_tokens: float,
        host_ms: float = 0.0,
    ) -> int:
        """The rung for a prefill of `prefill_tokens` after `prefix_tokens` cached ones.

        Args:
            num_waiting: requests that this prefill serves, and those that wait behind it.
            prefill_load: share of time that prefill was busy lately, in [0, 1).
            decode_batch, mean_context_tokens: what decodes meanwhile.
            host_ms: the host's time to launch a prefill.
        """
        alone_ms = self._curves.at(self._total).decode_step_ms(decode_batch, mean_context_tokens)

        def delay(units: int) -> float:
            if self._beside is None:
                prefill_ms = self._curves.at(units).prefill_chunk_ms(prefill_tokens, prefix_tokens)
                beside_ms = self._curves.at(self._total - units).decode_step_ms(decode_batch, mean_context_tokens)
            else:
                factor, slowdown = self._at(units)
                prefill_ms = factor * self._curves.at(self._total).prefill_chunk_ms(prefill_tokens, prefix_tokens)
                beside_ms = slowdown * alone_ms
            return summed_delay_ms(
                prefill_ms,
                num_waiting=num_waiting,
                load=prefill_load,
                decode_batch=decode_batch,
                alone_ms=alone_ms,
                beside_ms=beside_ms,
                decode_weight=self.decode_weight,
                latency_ms=host_ms,
            )

        return min(self.rungs, key=delay)

    def _at(self, units: int) -> tuple[float, float]:
        """Factors at `units`, between measured sizes by their logarithms, beyond them as at the nearest."""
        assert self._beside is not None
        if units in self._beside:
            return self._beside[units]
        sizes = sorted(n for n in self._beside if n < self._total)
        low = max((n for n in sizes if n < units), default=sizes[0])
        high = min((n for n in sizes if n > units), default=sizes[-1])
        if low == high or not low < units < high:
            return self._beside[low if units >= low else high]
        share = (units - low) / (high - low)
        pairs = zip(self._beside[low], self._beside[high], strict=True)
        prefill, decode = (math.exp((1 - share) * math.log(a) + share * math.log(b)) for a, b in pairs)
        return prefill, decode


def _beside(
    rows: Sequence[Mapping[str, Any]], total: int, mask_mode: MaskMode
) -> dict[int, tuple[float, float]] | None:
    """By units of the prefill: (its time over alone on the whole device, decode's over alone); None if not measured."""
    whole = next((row for row in rows if row["mode"] == "both unmasked"), None)
    masked = [row for row in rows if row["mode"] == ("both masked" if mask_mode == "both" else "prefill masked")]
    if whole is None or not masked:
        return None
    found = {
        int(row["prefill_units"]): (
            row["prefill_ms"] / whole["prefill_alone_ms"],
            row["decode_ms"] / whole["decode_alone_ms"],
        )
        for row in (*masked, whole)
    }
    assert total in found, "unmasked is on the whole device"
    return found
