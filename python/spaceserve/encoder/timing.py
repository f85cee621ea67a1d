"""How long an encoder batch took on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class BatchTiming:
    """Measures one batch on the stream that is current at `start` and at `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start_s = 0.0
        if self._on_gpu:
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._stop_event = torch.cuda.Event(enable_timing=True)
        self.observe: Callable[[float], None] = lambda elapsed_ms: None  # gets the batch's milliseconds
        self.on_start: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None  # the device has finished the batch, or failed
        self.stopped = False

    def start(self) -> None:
        """The batch's first kernel follows."""
        self.on_start()
        if self._on_gpu:
            self._start_event.record()
        self._start_s = time.perf_counter()

    def stop(self) -> Callable[[], float]:
        """The batch's last kernel has been launched.

        Returns:
            A function that waits until the device has finished it and returns the batch's milliseconds.
        """
        if not self._on_gpu:
            elapsed_ms = (time.perf_counter() - self._start_s) * 1000
            self.stopped = True
            self.on_end()
            self.observe(elapsed_ms)
            return lambda: elapsed_ms
        self._stop_event.record()
        self.stopped = True

        def wait() -> float:
            try:
                self._stop_event.synchronize()
            finally:
                self.on_end()
            elapsed_ms = float(self._start_event.elapsed_time(self._stop_event))
            self.observe(elapsed_ms)
            return elapsed_ms

        return wait
