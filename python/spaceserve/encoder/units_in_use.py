"""On how many units the encoder runs now, told to the scheduler through a state board."""

from __future__ import annotations

import threading
import time

from spaceserve.sis.state_board import EncoderBoardWriter, EncoderState


class UnitsInUse:
    """Batches between their first kernel and their last, and the board that says where the oldest of them runs.

    Batches follow each other on the device, so the oldest that has not finished is the one that runs. Threads may call
    it at the same time: a batch begins in one and is seen to end in another.

    board_name: of the board to write; None for none.
    """

    def __init__(self, board_name: str | None = None) -> None:
        self._board = None if board_name is None else EncoderBoardWriter(board_name, replace=True)
        self._lock = threading.Lock()
        self._batches: dict[int, int] = {}  # units by number of the batch, in order
        self._next = 0
        self._decoder_masked = False
        self.beat()

    @property
    def units(self) -> int:
        """Units of the batch that runs; 0 where none does."""
        return next(iter(self._batches.values()), 0)

    def begin(self, units: int) -> int:
        """A batch's first kernel is about to be launched. Returns the batch's number."""
        with self._lock:
            number = self._next
            self._next += 1
            self._batches[number] = units
            self._publish()
            return number

    def change(self, number: int, units: int) -> None:
        """The rest of a batch runs elsewhere."""
        with self._lock:
            self._batches[number] = units
            self._publish()

    def end(self, number: int) -> None:
        """The batch has finished, or failed. A second call does nothing."""
        with self._lock:
            self._batches.pop(number, None)
            self._publish()

    def mask_decoder(self, masked: bool) -> None:
        """Whether decode is to keep to the other units from now on."""
        with self._lock:
            self._decoder_masked = masked
            self._publish()

    def beat(self) -> None:
        """Write again: a board that stays as it is for seconds is taken for a dead worker's."""
        with self._lock:
            self._publish()

    def _publish(self) -> None:
        if self._board is not None:
            self._board.publish(
                EncoderState(
                    timestamp_ns=time.monotonic_ns(), encoder_units=self.units, decoder_masked=self._decoder_masked
                )
            )

    def close(self) -> None:
        """Unlink the board."""
        if self._board is not None:
            self._board.close()
