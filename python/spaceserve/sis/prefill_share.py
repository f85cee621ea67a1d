"""How many units a prefill gets while requests decode beside it.

Pure: curves and sizes in, units out.

While a prefill of T_P(n) ms runs on n of N units, its requests and those behind it wait T_P(n); each decoding request
makes a token every T_D(N - n) instead of every T_D(N) ms and so loses T_P(n) * (1 - T_D(N) / T_D(N - n)). The choice
is the n of the least delay summed over all requests,

    T_P(n) * (waiting + w * decoding * (1 - T_D(N) / T_D(N - n))),

with w = `decode_weight` for what a streaming answer's delay counts against a waiting one's.
"""

from __future__ import annotations

from collections.abc import Sequence

from spaceserve.sis.curves import DeviceCurves


class PrefillShare:
    """See the module. `rungs`: units that a group can have, ascending; those that leave decode fewer than the curves'
    `min_decoder_units` are not used.

    Raises:
        ValueError: no rung is left.
    """

    DEFAULT_WEIGHT = 1.0

    def __init__(self, curves: DeviceCurves, rungs: Sequence[int]) -> None:
        self._curves = curves
        self.decode_weight = self.DEFAULT_WEIGHT
        self.rungs = tuple(n for n in rungs if curves.total_units - n >= curves.min_decoder_units)
        if not self.rungs:
            raise ValueError(f"no rung of {list(rungs)} leaves decode {curves.min_decoder_units} units")

    def units(
        self,
        *,
        prefill_tokens: int,
        prefix_tokens: int,
        num_waiting: int,
        decode_batch: int,
        mean_context_tokens: float,
    ) -> int:
        """The rung for a prefill of `prefill_tokens` after `prefix_tokens` cached ones.

        Args:
            num_waiting: requests that this prefill serves, and those that wait behind it.
            decode_batch, mean_context_tokens: what decodes meanwhile.
        """
        total = self._curves.total_units
        alone_ms = self._curves.at(total).decode_step_ms(decode_batch, mean_context_tokens)

        def delay(units: int) -> float:
            beside_ms = self._curves.at(total - units).decode_step_ms(decode_batch, mean_context_tokens)
            lost = max(0.0, 1.0 - alone_ms / beside_ms) if beside_ms > 0 else 0.0
            prefill_ms = self._curves.at(units).prefill_chunk_ms(prefill_tokens, prefix_tokens)
            return prefill_ms * (num_waiting + self.decode_weight * decode_batch * lost)

        return min(self.rungs, key=delay)
