"""The scheduler's sockets to and from the encoder worker."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import zmq

from spaceserve.channels import Channels
from spaceserve.messages import (
    ToScheduler,
    ToWorker,
    WorkerDown,
    WorkerUp,
    decode_to_scheduler,
    encode,
)

# A worker that has not come up in this time never will; loading large checkpoints from slow disks takes minutes.
START_TIMEOUT_S = 1800.0


class EncoderLink:
    """Sends to the encoder worker and receives from it; only the entry rank of a scheduler has one."""

    def __init__(self, channels: Channels, dp_rank: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.address = channels.features(dp_rank)
        self.inbox = context.socket(zmq.PULL)
        self.inbox.set_hwm(0)
        self.inbox.bind(self.address)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.setsockopt(zmq.LINGER, 0)
        self._outbox.connect(channels.requests)
        self._put_back: list[ToScheduler] = []

    def send(self, message: ToWorker) -> None:
        """Hand a message to the encoder worker; never blocks."""
        self._outbox.send(encode(message))

    def drain(self) -> Iterator[ToScheduler]:
        """Messages that have arrived, oldest first."""
        while self._put_back:
            yield self._put_back.pop(0)
        while True:
            try:
                yield decode_to_scheduler(self.inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def wait_for_worker(self) -> None:
        """Block until the encoder worker is up and has taken its memory; its message stays for `drain`.

        Raises:
            RuntimeError: the worker cannot be started, or the parent process has died.
        """
        parent = os.getppid()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.inbox.poll(500):
                message = decode_to_scheduler(self.inbox.recv())
                self._put_back.append(message)
                if isinstance(message, WorkerUp):
                    return
                if isinstance(message, WorkerDown):
                    raise RuntimeError(f"the encoder worker did not start: {message.reason}")
            if os.getppid() != parent:
                raise RuntimeError("the parent process died while the encoder worker was starting")
        raise RuntimeError(f"the encoder worker did not start within {START_TIMEOUT_S:.0f} s")
