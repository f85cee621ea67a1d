"""Where an encoder batch runs: the units (SMs, cores) that SIS chooses for it, and how long it took there.

How they are chosen can be changed while the server runs (`set_mode`), which is how splits are compared on one server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spaceserve.config import SmPartition
from spaceserve.encoder.timing import BatchTiming
from spaceserve.encoder.units_in_use import UnitsInUse
from spaceserve.partition import Partitioner, UnitGroup, serving_partitioner
from spaceserve.sis.busy_share import BusyShare
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.sis.policy import GpuState, MaskMode, Objective, SpaceInferenceScheduler, Split
from spaceserve.sis.state_board import StateBoardReader, StateBoardTornError

if TYPE_CHECKING:
    from spaceserve.config import SpaceServeConfig
    from spaceserve.encoder.split_metrics import SplitMetrics
    from spaceserve.sis.curves import DeviceCurves

logger = logging.getLogger(__name__)

# Of `sis` without a weight: the delay of an answer that streams counts as much as that of a request that waits.
DEFAULT_DECODE_WEIGHT = 1.0
OBJECTIVES: dict[str, Objective] = {"delay": "least_delay", "time": "least_time"}
# A decode side that has written nothing for this long runs nothing.
STALE_DECODE_STATE_S = 0.5
NO_LADDER = DecoderLadder(reason="the scheduler has not said yet for which SMs it has CUDA graphs of decode")

SisFactory = Callable[[Sequence[int], MaskMode], SpaceInferenceScheduler]


def state_changed(before: GpuState, now: GpuState) -> bool:
    """Whether so much has changed beside a running batch that its SMs are worth another thought: decode or prefill
    has come or gone, or what decodes, or what waits for the encoder, has grown or shrunk by a fifth."""
    if (before.decode_batch == 0) != (now.decode_batch == 0) or (before.prefill_tokens == 0) != (
        now.prefill_tokens == 0
    ):
        return True
    pairs = ((before.decode_batch, now.decode_batch), (before.num_waiting, now.num_waiting))
    return not all(0.8 <= (new + 1) / (old + 1) <= 1.25 for old, new in pairs)


@dataclass
class _Running:
    """The batch whose kernels are being launched."""

    state: GpuState
    group: UnitGroup | None
    split: Split | None
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
        self._partitioner_factory = partitioner_factory
        self._sis_factory = sis_factory
        self._partitioner: Partitioner | None = None
        self._sis: SpaceInferenceScheduler | None = None
        self._sis_of: dict[MaskMode, SpaceInferenceScheduler] = {}
        self._in_use = UnitsInUse(own_board_name)
        self._ladder_path = ladder_path
        self._mask_mode: MaskMode = "encoder"
        self._mask_error: str | None = None  # why only the encoder is masked though both were asked for at the start
        self._mask_later = False
        self._board_name = board_name
        self._board: StateBoardReader | None = None
        self._reconsider_layers = self._default_reconsider_layers = reconsider_layers
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
        self._set_mode(mode, self._ladder(), may_wait=True)

    # ---- how units are chosen

    def set_mode(self, mode: str) -> None:
        """Choose the units of later batches in another way (see the class).

        Raises:
            ValueError: an unknown mode, units that the device cannot grant, or both sides to be masked where decode has
                no group beside these units; the mode stays as it was.
        """
        self._set_mode(mode, self._ladder() or NO_LADDER, may_wait=False)

    def _set_mode(self, mode: str, ladder: DecoderLadder | None, *, may_wait: bool) -> None:
        """`ladder` None: not known yet. may_wait: where decode has no group (yet), mask the encoder alone."""
        asked = SmPartition.parse(mode)
        kind = asked.kind
        if kind == "auto":
            kind = "sis" if self._device.type == "cuda" else "off"
        mask_mode: MaskMode = "encoder" if kind == "off" else asked.mask_mode
        mask_error = None
        try:
            static_units, sis = self._choices(mode, kind, asked.num_sms, mask_mode, ladder or NO_LADDER)
        except ValueError as error:
            if mask_mode == "encoder" or not may_wait:
                raise
            mask_mode, mask_error = "encoder", str(error)
            static_units, sis = self._choices(mode, kind, asked.num_sms, mask_mode, NO_LADDER)
        with self._lock:
            self._mode, self._kind, self._static_units = mode, kind, static_units
            self._mask_mode, self._mask_error = mask_mode, mask_error
            self._mask_later = mask_error is not None and ladder is None
            if sis is not None:
                self._sis = sis
                self._sis.decode_weight = DEFAULT_DECODE_WEIGHT if asked.decode_weight is None else asked.decode_weight
            layers = asked.reconsider_layers
            self._reconsider_layers = self._default_reconsider_layers if layers is None else layers
        self._in_use.mask_decoder(mask_mode == "both")

    def _choices(
        self, mode: str, kind: str, num_sms: int | None, mask_mode: MaskMode, ladder: DecoderLadder
    ) -> tuple[int | None, SpaceInferenceScheduler | None]:
        """Units of every batch, or who chooses them; neither without a partition. Raises ValueError as `set_mode`."""
        if kind == "off":
            return None, None
        partitioner = self._made_partitioner()
        if num_sms is not None and num_sms > partitioner.total_units:
            unit_name = partitioner.unit_name
            raise ValueError(f"--sm-partition {mode}: the device has {partitioner.total_units} {unit_name}")
        if mask_mode == "both":
            ladder.check(0 if num_sms is None else partitioner.group(num_sms).granted)
        if num_sms is not None:
            return num_sms, None
        if len(partitioner.rungs) < 2:
            logger.warning("No SM partition: %s; SIS has nothing to choose from", partitioner.describe())
            return partitioner.total_units, None
        if mask_mode not in self._sis_of:
            assert self._sis_factory is not None, "the mode sis needs a sis_factory"
            rungs = partitioner.rungs if mask_mode == "encoder" else ladder.encoder_rungs(partitioner.rungs)
            self._sis_of[mask_mode] = self._sis_factory(rungs, mask_mode)
        return None, self._sis_of[mask_mode]

    def _ladder(self) -> DecoderLadder | None:
        return None if self._ladder_path is None else DecoderLadder.read(self._ladder_path)

    def _mask_decoder_at_last(self) -> None:
        """Carry out a mode of the start that waited for the scheduler's graphs."""
        ladder = self._ladder()
        if ladder is None:
            return
        self._set_mode(self._mode, ladder, may_wait=True)
        if self._mask_error is not None:
            logger.warning("Only the encoder keeps to SMs of its own, not decode: %s", self._mask_error)

    def _made_partitioner(self) -> Partitioner:
        if self._partitioner is None:
            if self._partitioner_factory is None:
                raise ValueError("this encoder was made without SM partitions")
            self._partitioner = self._partitioner_factory()
        return self._partitioner

    def follow(self, path: Path) -> None:
        """Take over the mode that is written in a file, if it changed since the last call (status.py writes it)."""
        self._in_use.beat()
        if self._mask_later:
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
            logger.warning("The encoder's SMs stay %s: %s", self._mode, error)
        else:
            self._mode_error = None
            logger.info("The encoder's SMs are now %s", mode)

    # ---- batches

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
        idle = GpuState()
        if self._kind == "off":
            return _Running(idle, None, None)
        assert self._partitioner is not None
        if self._static_units is not None:
            return _Running(idle, self._partitioner.group(self._static_units), None)
        assert self._sis is not None
        state = self._gpu_state(patches)
        split = self._sis.decide(state)
        self._count(split)
        return _Running(state, self._partitioner.group(split.encoder_units), split)

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
                    assert self._sis is not None
                    self._sis.observe(split, measured_encoder_ms=elapsed_ms)
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
        running, every = self._running, self._reconsider_layers
        if not every or index % every or running is None or running.split is None:
            return  # not asked to, or a warm-up, or a batch whose units are not SIS's to choose
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
            assert self._sis is not None
            assert self._partitioner is not None
            state = self._gpu_state(running.state.encoder_patches)
            if not state_changed(running.state, state):
                return
            running.state = state
            split = self._sis.reconsider(state, index / num_blocks)
            self._count(split)
            group = self._partitioner.group(split.encoder_units)
            self._num_reconsidered += 1
            if split.switched:
                self._num_changes += 1
                running.num_changes += 1
        if split.switched:
            group.make_current()
            if running.number is not None:
                self._in_use.change(running.number, group.granted)

    # ---- what is known

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
            num_waiting=max(1, self.num_waiting()),
            encoder_load=self._busy.share(time.monotonic()),
        )

    def snapshot(self) -> dict[str, Any]:
        """The mode and the last decisions, newest last, for the status page."""
        with self._lock:
            found: dict[str, Any] = {"mode": self._mode, "partition": "none"}
            if self._mode_error is not None:
                found["mode_error"] = self._mode_error
            if self._kind == "off" or self._partitioner is None:
                return found
            found["partition"] = self._partitioner.describe()
            found["mask_mode"] = self._mask_mode
            if self._mask_error is not None:
                found["mask_error"] = self._mask_error
            if self._static_units is not None:
                found["static_units"] = self._static_units
                return found
            assert self._sis is not None
            found["decode_weight"] = self._sis.decode_weight
            found["num_switches"] = self._sis.num_switches
            found["num_reconsidered"] = self._num_reconsidered
            found["num_changes_within_batches"] = self._num_changes
            found["decisions"] = [asdict(decision) for decision in self._sis.last_decisions()[-16:]]
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

    def new_sis(rungs: Sequence[int], mask_mode: MaskMode) -> SpaceInferenceScheduler:
        return SpaceInferenceScheduler(
            _curves(device, rungs[-1], model_path),
            rungs,
            objective="tpot" if config.tpot_target_ms is not None else OBJECTIVES[config.sis_objective],
            tpot_target_ms=config.tpot_target_ms,
            mask_mode=mask_mode,
        )

    return EncoderSplit(
        device,
        config.sm_partition,
        partitioner_factory=partial(serving_partitioner, str(device)),
        sis_factory=new_sis,
        board_name=board_name,
        own_board_name=own_board_name,
        ladder_path=ladder_path,
        reconsider_layers=config.sm_reconsider_layers,
    )


def _curves(device: torch.device, total_units: int, model_path: str) -> DeviceCurves:
    from spaceserve.sis import curves_for
    from spaceserve.sis.shapes import shape_from_model_path

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    curves = curves_for(name, total_units, shape_from_model_path(model_path))
    # What they are worth says their provenance: measured on this device, with stand-ins, or an estimate.
    logger.info("SIS uses curves of %s (%s): %s", name, curves.source, curves.provenance)
    # The estimate keeps 20 SMs for a decoder, since cuBLAS fails on fewer; cores know no such limit.
    return curves if device.type == "cuda" else replace(curves, min_decoder_units=1)
