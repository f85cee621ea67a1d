"""Tells the encoder worker what the decode side is doing, through the state board."""

from __future__ import annotations

import time
from typing import Any

from spaceserve.sis.state_board import DecodeState, StateBoardWriter


class DecodePublisher:
    """Writes the scheduler's state after every scheduling pass; a few microseconds each."""

    def __init__(self, board_name: str) -> None:
        self._board = StateBoardWriter(board_name)
        self._step = 0

    def publish(self, scheduler: Any, prefill_tokens: int) -> None:
        """Write what runs in `scheduler` now; `prefill_tokens`: of the prefill in flight or about to be launched."""
        running = scheduler.running_batch.reqs
        self._board.publish(
            DecodeState(
                timestamp_ns=time.monotonic_ns(),
                step=self._step,
                running_batch=len(running),
                context_tokens_sum=sum(req.seqlen for req in running),
                prefill_tokens_running=prefill_tokens,
            )
        )
        self._step += 1
