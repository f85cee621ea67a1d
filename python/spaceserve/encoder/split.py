"""Runs encoder batches on the units (SMs, cores) that are chosen for them, and tells SIS how long they took there.

How units are chosen (`split_mode.py`) can be changed while the server runs, which is how splits are compared on one
server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spaceserve.encoder.gpu_state import GpuStateReader, state_changed
from spaceserve.encoder.long_attention import usual_groups
from spaceserve.encoder.split_mode import SisFactory, SplitMode, SplitModes, sis_factory
from spaceserve.encoder.timing import BatchTiming
from spaceserve.encoder.units_in_use import UnitsInUse
from spaceserve.partition import Partitioner, UnitGroup, serving_partitioner
from spaceserve.sis.busy_share import BusyShare
from spaceserve.sis.policy import GpuState, Split

if TYPE_CHECKING:
    from spaceserve.config import SpaceServeConfig
    from spaceserve.encoder.split_metrics import SplitMetrics

logger = logging.getLogger(__name__)


@dataclass
class _Running:
    """A batch whose kernels are being launched, or run. To its end it keeps the mode in which it began."""

    mode: SplitMode
    state: GpuState
    group: UnitGroup | None = None
    split: Split | None = None  # of SIS, where it chose
    number: int | None = None  # of the batch in `UnitsInUse`, once its kernels are launched
    num_changes: int = 0
    marks: list[torch.cuda.Event] = field(default_factory=list)  # one before each block that reconsiders


class EncoderSplit:
    """Chooses the units of each batch and runs it on them.

    Args:
        device: of the encoder.
        mode: "off" (no mask: the whole device, on a stream of the encoder's own), "static:N" (N units for every
            batch), "sis", "sis:W" or "sis:W:K" (SIS chooses for each batch, with decode weight W, and before every K-th
            block again, from what `board_name`'s writer says of the decode side). After "both+" decode keeps to the
            other units meanwhile.
        partitioner_factory, sis_factory: make what a mode needs, at its first use; the latter from rungs and mask mode.
        board_name: state board of the scheduler; it may appear later.
        own_board_name: state board to write for the scheduler.
        ladder_path: where the scheduler says which groups decode has; it may appear later.
        reconsider_layers: K where the mode names none; 0 for once a batch.

    Raises:
        ValueError: an unknown mode, or units that the device cannot grant.
    """

    def __init__(
        self,
        device: torch.device,
        mode: str = "off",
        *,
        partitioner_factory: Callable[[], Partitioner] | None = None,
        sis_factory: SisFactory | None = None,
        board_name: str | None = None,
        own_board_name: str | None = None,
        ladder_path: Path | None = None,
        reconsider_layers: int = 0,
    ) -> None:
        self._device = device
        self._modes = SplitModes(
            device,
            partitioner_factory=partitioner_factory,
            sis_factory=sis_factory,
            ladder_path=ladder_path,
            reconsider_layers=reconsider_layers,
        )
        self._state = GpuStateReader(board_name)
        self._in_use = UnitsInUse(own_board_name)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # SIS takes one caller at a time: batches are chosen, and their times observed, in two threads.
        self._lock = threading.Lock()
        self._busy = BusyShare()
        self._running: _Running | None = None
        self._followed: tuple[int, int] | None = None
        self._mode_error: str | None = None
        self._num_reconsidered = 0
        self._num_changes = 0
        self.metrics: SplitMetrics | None = None
        self.num_waiting: Callable[[], int] = lambda: 1  # requests that wait for the encoder, those of the batch too
        # The scheduler captures its graphs when this worker is up: until then the encoder alone is masked.
        self._take_over(self._modes.find_at_start(mode))

    # ---- how units are chosen

    def set_mode(self, mode: str) -> None:
        """Choose the units of later batches in another way (see the class).

        Raises:
            ValueError: an unknown mode, units that the device cannot grant, or both sides to be masked where decode has
                no group beside these units; the mode stays as it was.
        """
        self._take_over(self._modes.find(mode))

    def _take_over(self, mode: SplitMode) -> None:
        with self._lock:
            self._mode = mode
            if mode.sis is not None:
                mode.sis.decode_weight = mode.decode_weight
        self._in_use.mask_decoder(mode.mask_mode == "both")

    def _mask_decoder_at_last(self) -> None:
        """Carry out a mode of the start that waited for the scheduler's graphs."""
        mode = self._modes.improved(self._mode)
        if mode is None:
            return
        self._take_over(mode)
        if mode.mask_error is not None:
            logger.warning("Only the encoder keeps to SMs of its own, not decode: %s", mode.mask_error)

    def follow(self, path: Path) -> None:
        """Take over the mode that is written in a file, if it changed since the last call (status.py writes it)."""
        self._in_use.beat()
        if self._mode.may_improve:
            self._mask_decoder_at_last()
        try:
            stat = path.stat()
        except FileNotFoundError:
            return
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen == self._followed:
            return
        self._followed = seen
        mode = path.read_text().strip()
        try:
            self.set_mode(mode)
        except (ValueError, RuntimeError) as error:
            self._mode_error = f"{mode}: {error}"
            logger.warning("The encoder's SMs stay %s: %s", self._mode.name, error)
        else:
            self._mode_error = None
            logger.info("The encoder's SMs are now %s", mode)

    # ---- batches

    def usual_groups(self) -> list[UnitGroup]:
        """Groups on which batches will run, for what is measured before; none where there is no partition."""
        mode = self._mode
        return [] if mode.partitioner is None else usual_groups(mode.partitioner, mode.static_units)

    @contextmanager
    def for_batch(self, patches: Sequence[int]) -> Iterator[BatchTiming]:
        """Run the block's work where this batch belongs. `patches`: of each image in it."""
        timing = BatchTiming(self._device)
        with self._lock:
            running = self._running = self._choose(patches)
        units = self._whole_device() if running.group is None else running.group.granted
        if self.metrics is not None:
            self.metrics.begin_batch(units, running.split)
        timing.observe = self._observer(running)
        timing.on_start = lambda: self._begin(running, units)
        timing.on_end = lambda: self._end(running)
        with self._place(running.group):
            try:
                yield timing
            finally:
                self._running = None
                if not timing.stopped:
                    self._end(running)
                if running.num_changes and running.group is not None:
                    # The group that was entered waits for the one that came last, and what follows waits for it.
                    running.group.make_current()

    def _begin(self, running: _Running, units: int) -> None:
        running.number = self._in_use.begin(units)

    def _end(self, running: _Running) -> None:
        if running.number is not None:
            self._in_use.end(running.number)

    def _choose(self, patches: Sequence[int]) -> _Running:
        mode, idle = self._mode, GpuState()
        if mode.partitioner is None:
            return _Running(mode, idle)
        if mode.static_units is not None:
            return _Running(mode, idle, mode.partitioner.group(mode.static_units))
        assert mode.sis is not None
        state = self._gpu_state(patches)
        split = mode.sis.decide(state)
        self._count(split)
        return _Running(mode, state, mode.partitioner.group(split.encoder_units), split)

    def _gpu_state(self, patches: Sequence[int]) -> GpuState:
        return self._state.read(patches, self.num_waiting(), self._busy.share(time.monotonic()))

    def _count(self, split: Split) -> None:
        if self.metrics is not None:
            self.metrics.add_decision(split)

    def _place(self, group: UnitGroup | None) -> AbstractContextManager[object]:
        if group is not None:
            return group.activate()
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _whole_device(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).multi_processor_count)
        return torch.get_num_threads()

    def _observer(self, running: _Running) -> Callable[[float], None]:
        def observe(elapsed_ms: float) -> None:
            if elapsed_ms <= 0:
                return
            # A batch that changed its units says nothing about one number of them.
            split = None if running.num_changes else running.split
            with self._lock:
                self._busy.add(time.monotonic(), elapsed_ms / 1000)
                if split is not None:
                    assert running.mode.sis is not None
                    running.mode.sis.observe(split, measured_encoder_ms=elapsed_ms)
            if self.metrics is not None:
                self.metrics.end_batch(elapsed_ms, split)

        return observe

    # ---- between the blocks of one batch

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Let SIS choose again between the encoder's blocks, where it is asked to (`reconsider_layers`)."""
        for index, block in enumerate(blocks):
            if index:
                block.register_forward_pre_hook(lambda module, arguments, i=index: self._between_blocks(i, len(blocks)))

    def _between_blocks(self, index: int, num_blocks: int) -> None:
        """Before block `index` of the running batch: it and what follows may go to another group's stream.

        Streams follow each other with events, so all work of the encode thread is in one order on the device whatever
        its streams: a block of memory that the allocator hands out again on one stream has been left by the others.
        """
        running = self._running
        if running is None:
            return  # a warm-up
        mode = running.mode
        if mode.sis is None or not mode.reconsider_layers or index % mode.reconsider_layers:
            return  # its units are not SIS's to choose, or not at this block
        assert mode.partitioner is not None
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            # The host is layers ahead of the device. Were it let run, it would decide for all blocks at the start.
            mark = torch.cuda.Event(blocking=True)
            mark.record()
            running.marks.append(mark)
            if len(running.marks) > 1:
                running.marks[-2].synchronize()
        with self._lock:
            state = self._gpu_state(running.state.encoder_patches)
            if not state_changed(running.state, state):
                return
            running.state = state
            split = mode.sis.reconsider(state, index / num_blocks)
            self._count(split)
            group = mode.partitioner.group(split.encoder_units)
            self._num_reconsidered += 1
            if split.switched:
                self._num_changes += 1
                running.num_changes += 1
        if split.switched:
            group.make_current()
            if running.number is not None:
                self._in_use.change(running.number, group.granted)

    def snapshot(self) -> dict[str, Any]:
        """The mode and the last decisions, newest last, for the status page."""
        with self._lock:
            mode = self._mode
            found: dict[str, Any] = {"mode": mode.name, "partition": "none"}
            if self._mode_error is not None:
                found["mode_error"] = self._mode_error
            if mode.mask_error is not None:
                found["mask_error"] = mode.mask_error
            if mode.partitioner is None:
                return found
            found["partition"] = mode.partitioner.describe()
            found["mask_mode"] = mode.mask_mode
            if mode.static_units is not None:
                found["static_units"] = mode.static_units
                return found
            assert mode.sis is not None
            found["decode_weight"] = mode.sis.decode_weight
            found["num_switches"] = mode.sis.num_switches
            found["num_reconsidered"] = self._num_reconsidered
            found["num_changes_within_batches"] = self._num_changes
            found["decisions"] = [asdict(decision) for decision in mode.sis.last_decisions()[-16:]]
            return found


def make_split(
    config: SpaceServeConfig,
    device: torch.device,
    model_path: str,
    board_name: str,
    *,
    own_board_name: str | None = None,
    ladder_path: Path | None = None,
) -> EncoderSplit:
    """The split that `--sm-partition` asks for; the last four arguments as of `EncoderSplit`.

    Raises:
        ValueError: `static:N` with an N that the device cannot grant.
    """
    return EncoderSplit(
        device,
        config.sm_partition,
        partitioner_factory=partial(serving_partitioner, str(device)),
        sis_factory=sis_factory(config, device, model_path),
        board_name=board_name,
        own_board_name=own_board_name,
        ladder_path=ladder_path,
        reconsider_layers=config.sm_reconsider_layers,
    )
