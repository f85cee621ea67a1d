"""A sign of life that costs a memory write: the worker stores the time, the supervisor reads it."""

from __future__ import annotations

import mmap
import os
import struct
import time

_TIME = struct.Struct("<d")


class Heartbeat:
    """Seconds on the machine-wide monotonic clock, in a file that two processes map."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)

    def beat(self) -> None:
        """Say that this process is alive now."""
        _TIME.pack_into(self._memory, 0, time.monotonic())

    def age_s(self) -> float:
        """Seconds since the last beat."""
        (last_s,) = _TIME.unpack_from(self._memory, 0)
        return time.monotonic() - float(last_s)
