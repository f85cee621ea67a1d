"""What SIS is told before it chooses: the batch's images, and what the scheduler's state board says of its side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spaceserve.sis.policy import GpuState
from spaceserve.sis.state_board import DecodeState, StateBoardReader, StateBoardTornError

# A decode side that has written nothing for this long runs nothing.
STALE_DECODE_STATE_S = 0.5


def state_changed(before: GpuState, now: GpuState) -> bool:
    """Whether so much has changed beside a running batch that its SMs are worth another thought: decode or prefill
    has come or gone, or what decodes, or what waits for the encoder, has grown or shrunk by a fifth."""
    if (before.decode_batch == 0) != (now.decode_batch == 0) or (before.prefill_tokens == 0) != (
        now.prefill_tokens == 0
    ):
        return True
    pairs = ((before.decode_batch, now.decode_batch), (before.num_waiting, now.num_waiting))
    return not all(0.8 <= (new + 1) / (old + 1) <= 1.25 for old, new in pairs)


class GpuStateReader:
    """Reads the state of both sides. Not safe for two threads.

    board_name: state board of the scheduler, which may appear later; None for none.
    """

    def __init__(self, board_name: str | None) -> None:
        self._board_name = board_name
        self._board: StateBoardReader | None = None

    def read(self, patches: Sequence[int], num_waiting: int, encoder_load: float) -> GpuState:
        """The state as of now: `patches` of each image of the batch, requests that wait for the encoder (those of the
        batch too), and the share of the time that it was busy. The last two are left out where the scheduler is silent.
        """
        decode = self._decode_state()
        if decode is None:
            return GpuState(encoder_patches=tuple(patches))
        return GpuState(
            encoder_patches=tuple(patches),
            decode_batch=decode.running_batch,
            mean_context_tokens=decode.mean_context_tokens,
            prefill_tokens=decode.prefill_tokens_running,
            num_waiting=max(1, num_waiting),
            encoder_load=encoder_load,
        )

    def _decode_state(self) -> DecodeState | None:
        """None where the scheduler has said nothing, or not for a while."""
        if self._board is None and self._board_name is not None:
            try:
                self._board = StateBoardReader(self._board_name)
            except FileNotFoundError:
                return None
        try:
            state = self._board.read() if self._board is not None else None
        except StateBoardTornError:
            return None
        if state is None or state.is_stale(time.monotonic_ns(), int(STALE_DECODE_STATE_S * 1e9)):
            return None
        return state
