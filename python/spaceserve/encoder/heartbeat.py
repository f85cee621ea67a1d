"""A sign of life that costs a memory write: the worker stores the time, the supervisor reads it."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

_BEAT = struct.Struct("<d?")


class Heartbeat:
    """Seconds on the machine-wide monotonic clock and whether the worker serves, in a file that two processes map."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._serving = threading.Event()

    def beat(self) -> None:
        """Say that this process is alive and serves."""
        self._serving.set()
        _BEAT.pack_into(self._memory, 0, time.monotonic(), True)

    def beat_while_starting(self, interval_s: float = 0.5) -> None:
        """Say from a thread that this process is alive, until the first `beat`."""

        def run() -> None:
            while not self._serving.wait(interval_s):
                _BEAT.pack_into(self._memory, 0, time.monotonic(), False)

        threading.Thread(target=run, name="starting", daemon=True).start()

    def reset(self) -> None:
        """Another worker starts: it has a beat's time from now, and does not serve yet."""
        _BEAT.pack_into(self._memory, 0, time.monotonic(), False)

    def age_s(self) -> float:
        """Seconds since the last beat."""
        last_s, _ = _BEAT.unpack_from(self._memory, 0)
        return time.monotonic() - float(last_s)

    def is_serving(self) -> bool:
        """Whether the worker has said that it serves."""
        _, serving = _BEAT.unpack_from(self._memory, 0)
        return bool(serving)
