"""Where a prefill beside decode runs: streams on SM groups, and the choice among them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spaceserve.config import SmPartition, SpaceServeConfig
from spaceserve.partition import Partitioner, serving_partitioner
from spaceserve.scheduler.side_prefill import Lane
from spaceserve.sis import curves_for
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.sis.delay import DECODE_WEIGHT
from spaceserve.sis.policy import MaskMode
from spaceserve.sis.prefill_share import PrefillShare
from spaceserve.sis.shapes import shape_from_model_path

logger = logging.getLogger(__name__)

# PyTorch's allocator keeps a prefill's memory for the next one on the same stream, so each lane may hold a gigabyte.
MAX_LANES = 3
# Of the device, for decode beside a lane or the encoder: 32 of an H200's 132 SMs. With less a step takes twice as long.
MIN_DECODER_SHARE = 0.24


def lane_rungs(rungs: Sequence[int], min_decoder_units: int = 1) -> tuple[int, ...]:
    """The SMs that lanes beside decode have: MAX_LANES of the ladder's upper half, spread; without the whole device.

    (68, 92, 116) of an H200's (20, 28, ..., 116, 132), (68, 84, 108) where decode needs 24.
    """
    usable = [n for n in rungs[:-1] if rungs[-1] - n >= min_decoder_units]
    upper = [n for n in usable if 2 * n >= rungs[-1]] or usable
    if len(upper) <= MAX_LANES:
        return tuple(upper)
    return tuple(upper[round(i * (len(upper) - 1) / (MAX_LANES - 1))] for i in range(MAX_LANES))


def lanes_beside_decode(rungs: Sequence[int]) -> tuple[int, ...]:
    """The SMs that lanes have on a server. Where decode is masked it has a group beside each of them."""
    return lane_rungs(rungs, math.ceil(MIN_DECODER_SHARE * rungs[-1]))


class PrefillLanes:
    """Lanes of one GPU. Not thread-safe.

    Args:
        num_sms: of the device.
        mode: as `--sm-partition`, which partitions the encoder alike.
        mode_path: the file in which a changed mode is written while the server runs (status.py).
        partitioner_factory, share_factory: make what a mode needs, at its first use; the latter for a mask mode.
        chosen: called with the SMs of each lane that decode should keep clear of; 0 for none.
        num_ready: how many requests wait for a prefill and for nothing else.
    """

    def __init__(
        self,
        num_sms: int,
        mode: str,
        mode_path: Path,
        partitioner_factory: Callable[[], Partitioner],
        share_factory: Callable[[Partitioner, MaskMode], PrefillShare],
        chosen: Callable[[int], None] = lambda num_sms: None,
        num_ready: Callable[[], int] = lambda: 0,
    ) -> None:
        self._num_ready = num_ready
        self._chosen = chosen
        # With nothing to decode a prefill may use every SM.
        self._whole = Lane(torch.cuda.Stream(), num_sms)
        self._mode = SmPartition.parse(mode)
        self._mode_path = mode_path
        self._mode_seen_ns = 0
        self._partitioner_factory = partitioner_factory
        self._share_factory = share_factory
        self._partitioner: Partitioner | None = None
        self._shares: dict[MaskMode, PrefillShare] = {}
        self._lanes: dict[int, Lane] = {num_sms: self._whole}
        if self._mode.kind != "off":
            self._prepare()

    def choose(self, scheduler: Any, batch: Any, prefill_load: float, host_ms: float) -> Lane:
        """The lane for the prefill `batch` beside what `scheduler` decodes now; the others as in PrefillShare."""
        self._follow()
        running = scheduler.running_batch.reqs
        if not running or self._mode.kind == "off":
            lane, to_avoid = self._whole, self._whole.num_sms
        else:
            partitioner, share = self._prepare()
            lane = self._beside(partitioner, share, running, batch, prefill_load, host_ms)
            # A prefill that the host cannot launch as fast as the device runs it leaves its SMs idle most of the time.
            is_launch_bound = share.alone_ms(batch.extend_num_tokens, max(batch.prefix_lens, default=0)) < host_ms
            to_avoid = 0 if is_launch_bound else lane.num_sms
        self._chosen(to_avoid)
        return lane

    def _beside(
        self,
        partitioner: Partitioner,
        share: PrefillShare,
        running: Sequence[Any],
        batch: Any,
        prefill_load: float,
        host_ms: float,
    ) -> Lane:
        if self._mode.num_sms is not None:
            # The encoder worker refuses more than there are, a moment later.
            return self._lane(partitioner, min(self._mode.num_sms, partitioner.total_units))
        share.decode_weight = self._mode.decode_weight or DECODE_WEIGHT
        num_sms = share.units(
            prefill_tokens=batch.extend_num_tokens,
            prefix_tokens=max(batch.prefix_lens, default=0),
            num_waiting=len(batch.reqs) + self._num_ready(),
            prefill_load=prefill_load,
            decode_batch=len(running),
            mean_context_tokens=sum(req.seqlen for req in running) / len(running),
            host_ms=host_ms,
        )
        return self._lane(partitioner, num_sms)

    def _follow(self) -> None:
        """Take over a mode that was changed while the server runs; the encoder worker reports a bad one."""
        try:
            changed_ns = self._mode_path.stat().st_mtime_ns
            if changed_ns != self._mode_seen_ns:
                self._mode_seen_ns = changed_ns
                self._mode = SmPartition.parse(self._mode_path.read_text().strip())
        except (FileNotFoundError, ValueError):
            return

    def _prepare(self) -> tuple[Partitioner, PrefillShare]:
        if self._partitioner is None:
            self._partitioner = self._partitioner_factory()
        mask_mode = self._mode.mask_mode
        if mask_mode not in self._shares:
            share = self._shares[mask_mode] = self._share_factory(self._partitioner, mask_mode)
            logger.info("Prefill runs beside decode on one of %s SMs", ", ".join(map(str, share.rungs)))
        return self._partitioner, self._shares[mask_mode]

    def _lane(self, partitioner: Partitioner, num_sms: int) -> Lane:
        if num_sms not in self._lanes:
            group: Any = partitioner.group(num_sms)
            self._lanes[num_sms] = Lane(group.stream, group.granted)
        return self._lanes[num_sms]


def lanes_for(
    config: SpaceServeConfig,
    mode_path: Path,
    scheduler: Any,
    *,
    num_ready: Callable[[], int],
    ladder: Callable[[], DecoderLadder] = DecoderLadder,
    chosen: Callable[[int], None] = lambda num_sms: None,
) -> PrefillLanes | None:
    """Lanes as `--sm-partition` asks for; None on the CPU.

    Args:
        num_ready: how many requests wait for a prefill and for nothing else.
        ladder: groups of decode, if it has any.
        chosen: called with the SMs of each prefill's lane that decode should keep clear of; 0 for none.
    """
    if scheduler.device == "cpu":
        return None
    device = torch.device("cuda", scheduler.ps.gpu_id)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def share_of(partitioner: Partitioner, mask_mode: MaskMode) -> PrefillShare:
        shape = shape_from_model_path(scheduler.server_args.model_path)
        # The same lanes in both mask modes: each may hold a gigabyte.
        return PrefillShare(
            curves_for(torch.cuda.get_device_name(device), num_sms, shape),
            lanes_beside_decode(partitioner.rungs),
            mask_mode if ladder().rungs else "encoder",
        )

    return PrefillLanes(
        num_sms,
        config.sm_partition,
        mode_path,
        partial(serving_partitioner, str(device), prepare="nothing"),
        share_of,
        chosen,
        num_ready,
    )
