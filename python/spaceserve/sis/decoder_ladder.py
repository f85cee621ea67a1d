"""The decoder's groups where both sides are masked: which there are, and which one keeps clear of the encoder's.

The scheduler has CUDA graphs of decode for a few groups only, and leaves a file that says which; the encoder worker
reads it before it lets SIS count on them. Pure but for that file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DecoderLadder:
    """Groups of the decoder, each the complement of a group of the encoder.

    Attributes:
        total_units: of the device (SMs, cores).
        rungs: sizes of the decoder's groups, ascending; empty where it has none.
        reason: why it has none.
    """

    total_units: int = 0
    rungs: tuple[int, ...] = ()
    reason: str = ""

    def units(self, beside: int) -> int:
        """The largest group beside `beside` units of encoder or prefill; the whole device where there is none.

        Complements of larger groups lie within those of smaller ones, so the next smaller group is clear as well. With
        nothing beside it (0), or where the other side has the device, decode keeps the device.
        """
        if not 0 < beside < self.total_units:
            return self.total_units
        free = self.total_units - beside
        return max((units for units in self.rungs if units <= free), default=self.total_units)

    def encoder_rungs(self, rungs: Sequence[int]) -> tuple[int, ...]:
        """Of the encoder's `rungs`, those beside which decode has exactly a group of its own, and the whole device."""
        return tuple(n for n in rungs[:-1] if self.total_units - n in self.rungs) + tuple(rungs[-1:])

    def check(self, encoder_units: int) -> None:
        """Raises ValueError where the decoder has no group beside `encoder_units`; the message says why."""
        if not self.rungs:
            raise ValueError(self.reason)
        most = self.total_units - self.rungs[0]
        if encoder_units > most:
            sizes = ", ".join(map(str, self.rungs))
            raise ValueError(
                f"beside {encoder_units} of {self.total_units} SMs decode has no group of its own: its CUDA graphs are "
                f"for {sizes} SMs, which leave the encoder {most} at most"
            )

    def write(self, path: Path, **more: Any) -> None:
        """Leave the ladder, and `more` for the status page, as JSON."""
        fields = {"total_sms": self.total_units, "decoder_sms": list(self.rungs), "reason": self.reason, **more}
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(fields))
        scratch.replace(path)

    @staticmethod
    def read(path: Path) -> DecoderLadder | None:
        """What `write` left; None where nothing has been."""
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return DecoderLadder(
            total_units=found["total_sms"], rungs=tuple(found["decoder_sms"]), reason=str(found["reason"])
        )
