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
        self._last_ns = time.monotonic_ns()

    def publish(self, scheduler: Any) -> None:
        """Write what runs and waits in `scheduler` now."""
        now_ns = time.monotonic_ns()
        running = scheduler.running_batch.reqs
        chunked = scheduler.chunked_req
        self._board.publish(
            DecodeState(
                timestamp_ns=now_ns,
                step=self._step,
                running_batch=len(running),
                context_tokens_sum=sum(req.seqlen for req in running),
                prefill_tokens_running=0 if chunked is None else len(chunked.origin_input_ids),
                last_step_ms=(now_ns - self._last_ns) / 1e6,
            )
        )
        self._step += 1
        self._last_ns = now_ns
