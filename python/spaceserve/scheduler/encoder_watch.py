"""What the encoder worker runs now, as the scheduler sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

from spaceserve.sis.state_board import EncoderBoardReader, StateBoardTornError

# The worker writes twice a second while its loop turns; one that has been silent for this long is dead or hangs.
STALE_NS = 3_000_000_000
# How often a board is looked for that is not there, or whose worker is silent: the next worker makes another.
ATTACH_NS = 500_000_000


class EncoderWatch:
    """Reads the encoder worker's board; a few microseconds a call.

    Args:
        board_name: of the worker's board; it may appear later, and be replaced by another worker's.
        clock_ns: the clock of the board's time stamps.
    """

    def __init__(self, board_name: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._name = board_name
        self._clock_ns = clock_ns
        self._reader: EncoderBoardReader | None = None
        self._sought_ns: int | None = None
        self._decoder_masked = False

    def look(self) -> tuple[int, bool]:
        """(units on which the encoder runs, whether decode is to keep to the others); 0 units where no worker lives.

        What a dead worker said last of the mask holds until the next one speaks: a prefill may still need it.
        """
        now_ns = self._clock_ns()
        state = None
        if self._reader is not None:
            try:
                state = self._reader.read()
            except StateBoardTornError:
                state = None  # it died inside a write
        if state is None or state.is_stale(now_ns, STALE_NS):
            self._attach(now_ns)
            return 0, self._decoder_masked
        self._decoder_masked = state.decoder_masked
        return state.encoder_units, state.decoder_masked

    def _attach(self, now_ns: int) -> None:
        if self._sought_ns is not None and now_ns - self._sought_ns < ATTACH_NS:
            return
        self._sought_ns = now_ns
        try:
            found = EncoderBoardReader(self._name)
        except (FileNotFoundError, ValueError):
            return
        if self._reader is not None:
            self._reader.close()
        self._reader = found
