"""Where an encoder batch runs: the units (SMs, cores) that SIS chooses for it, and how long it took there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from spaceserve.partition import Partitioner, make_partitioner
from spaceserve.sis.policy import GpuState, SpaceInferenceScheduler, Split
from spaceserve.sis.state_board import StateBoardReader, StateBoardTornError

if TYPE_CHECKING:
    from spaceserve.config import SpaceServeConfig
    from spaceserve.sis.curves import DeviceCurves

logger = logging.getLogger(__name__)

# cuBLAS failed in a remainder of 12 SMs of an H200 and worked in one of 20.
MIN_GPU_UNITS = 16
# A decode side that has written nothing for this long runs nothing.
STALE_DECODE_STATE_S = 0.5


class BatchTiming:
    """Measures one batch on the stream that is current at `start` and at `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start_s = 0.0
        if self._on_gpu:
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._stop_event = torch.cuda.Event(enable_timing=True)
        self.observe: Callable[[float], None] = lambda elapsed_ms: None

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
            self.observe(elapsed_ms)
            return lambda: elapsed_ms
        self._stop_event.record()

        def wait() -> float:
            self._stop_event.synchronize()
            elapsed_ms = float(self._start_event.elapsed_time(self._stop_event))
            self.observe(elapsed_ms)
            return elapsed_ms

        return wait


class EncoderSplit:
    """Chooses the units of each batch and runs it on them.

    Args:
        device: of the encoder.
        partitioner: None for no mask: every batch on the whole device, on a stream of the encoder's own.
        static_units: the same units for every batch.
        sis: chooses for each batch, from what `board_name`'s writer says of the decode side.
        board_name: state board of the scheduler; it may appear later.
    """

    def __init__(
        self,
        device: torch.device,
        partitioner: Partitioner | None = None,
        static_units: int | None = None,
        sis: SpaceInferenceScheduler | None = None,
        board_name: str | None = None,
    ) -> None:
        self._device = device
        self._partitioner = partitioner
        self._static_units = static_units
        self._sis = sis
        self._board_name = board_name
        self._board: StateBoardReader | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def for_batch(self, patches: Sequence[int]) -> Iterator[BatchTiming]:
        """Run the block's work where this batch belongs. `patches`: of each image in it."""
        timing = BatchTiming(self._device)
        if self._partitioner is None:
            with torch.cuda.stream(self._stream):
                yield timing
            return
        units = self._static_units
        if units is None:
            assert self._sis is not None
            split = self._sis.decide(self._gpu_state(patches))
            units = split.encoder_units
            timing.observe = self._observer(split)
        with self._partitioner.group(units).activate():
            yield timing

    def _observer(self, split: Split) -> Callable[[float], None]:
        assert self._sis is not None
        sis = self._sis

        def observe(elapsed_ms: float) -> None:
            if elapsed_ms > 0:
                sis.observe(split, measured_encoder_ms=elapsed_ms)

        return observe

    def _gpu_state(self, patches: Sequence[int]) -> GpuState:
        if self._board is None and self._board_name is not None:
            try:
                self._board = StateBoardReader(self._board_name)
            except FileNotFoundError:
                return GpuState(encoder_patches=tuple(patches))
        try:
            state = self._board.read() if self._board is not None else None
        except StateBoardTornError:
            state = None
        if state is None or state.is_stale(time.monotonic_ns(), int(STALE_DECODE_STATE_S * 1e9)):
            return GpuState(encoder_patches=tuple(patches))
        return GpuState(
            encoder_patches=tuple(patches),
            decode_batch=state.running_batch,
            mean_context_tokens=state.mean_context_tokens,
            prefill_tokens=state.prefill_tokens_running + state.prefill_tokens_waiting,
        )

    def snapshot(self) -> dict[str, Any]:
        """The last decisions, newest last, for the status page."""
        if self._partitioner is None:
            return {"partition": "none"}
        found: dict[str, Any] = {"partition": self._partitioner.describe()}
        if self._sis is not None:
            found["num_switches"] = self._sis.num_switches
            found["decisions"] = [asdict(decision) for decision in self._sis.last_decisions()[-16:]]
        else:
            found["static_units"] = self._static_units
        return found


def make_split(config: SpaceServeConfig, device: torch.device, model_path: str, board_name: str) -> EncoderSplit:
    """The split that `--sm-partition` asks for.

    Raises:
        ValueError: `static:N` with an N that the device cannot grant.
    """
    mode = config.sm_partition
    if mode == "auto":
        mode = "sis" if device.type == "cuda" else "off"
    if mode == "off":
        return EncoderSplit(device)
    on_gpu = device.type == "cuda"
    partitioner = make_partitioner(device=str(device), min_units=MIN_GPU_UNITS if on_gpu else None)
    static_units = config.static_sms()
    if static_units is not None:
        if static_units > partitioner.total_units:
            raise ValueError(f"--sm-partition {mode}: the device has {partitioner.total_units} {partitioner.unit_name}")
        return EncoderSplit(device, partitioner, static_units=static_units)
    if len(partitioner.rungs) < 2:
        logger.warning("No SM partition: %s; SIS has nothing to choose from", partitioner.describe())
        return EncoderSplit(device, partitioner, static_units=partitioner.total_units)
    sis = SpaceInferenceScheduler(
        _curves(device, partitioner, model_path),
        partitioner.rungs,
        objective="least_time" if config.tpot_target_ms is None else "tpot",
        tpot_target_ms=config.tpot_target_ms,
    )
    return EncoderSplit(device, partitioner, sis=sis, board_name=board_name)


def _curves(device: torch.device, partitioner: Partitioner, model_path: str) -> DeviceCurves:
    from spaceserve.sis import curves_for
    from spaceserve.sis.shapes import shape_from_model_path

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    curves = curves_for(name, partitioner.total_units, shape_from_model_path(model_path))
    # What they are worth says their provenance: measured on this device, with stand-ins, or an estimate.
    logger.info("SIS uses curves of %s (%s): %s", name, curves.source, curves.provenance)
    # The estimate keeps 20 SMs for a decoder, since cuBLAS fails on fewer; cores know no such limit.
    return curves if device.type == "cuda" else replace(curves, min_decoder_units=1)
