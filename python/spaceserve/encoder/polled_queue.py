"""What threads hand to a loop that sleeps in a poll."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class PolledQueue(Generic[T]):
    """Any thread puts, one takes. `wakeup_fd` is readable while there is something that has not been taken."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, item: T) -> None:
        self._items.put(item)
        os.eventfd_write(self.wakeup_fd, 1)

    def take_all(self) -> list[T]:
        """What was put since the last call, in order; does not wait."""
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return []
        items = []
        while True:
            try:
                items.append(self._items.get_nowait())
            except queue.Empty:
                return items
