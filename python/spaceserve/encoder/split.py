"""Which SMs an encoder batch runs on, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class BatchTiming:
    """Measures one batch on the stream that is current at `start` and at `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start_s = 0.0
        if self._on_gpu:
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._stop_event = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """The batch's first kernel follows."""
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
            return lambda: elapsed_ms
        self._stop_event.record()

        def wait() -> float:
            self._stop_event.synchronize()
            return float(self._start_event.elapsed_time(self._stop_event))

        return wait


class EncoderSplit:
    """The whole device for every batch, on a stream of the encoder's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def for_batch(self, patches: Sequence[int]) -> Iterator[BatchTiming]:
        """Run the block's work where this batch belongs. `patches`: of each image in it."""
        with torch.cuda.stream(self._stream):
            yield BatchTiming(self._device)
