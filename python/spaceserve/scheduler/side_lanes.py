"""Where a prefill beside decode runs: streams on SM groups, and the choice among them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from spaceserve.config import SpaceServeConfig
from spaceserve.partition import Partitioner, make_partitioner
from spaceserve.scheduler.side_prefill import Lane
from spaceserve.sis import curves_for
from spaceserve.sis.prefill_share import PrefillShare

logger = logging.getLogger(__name__)

# cuBLAS failed in a remainder of 12 SMs of an H200 and worked in one of 20.
MIN_GPU_UNITS = 16


class PrefillLanes:
    """Lanes of one GPU. Not thread-safe.

    Args:
        num_sms: of the device.
        partitioner: makes the SM groups; None where no mask is wanted.
        static_sms: the same group for every prefill beside decode.
        share: chooses the group from curves, where `static_sms` is None.
    """

    def __init__(
        self, num_sms: int, partitioner: Partitioner | None, static_sms: int | None, share: PrefillShare | None
    ) -> None:
        # With nothing to decode a prefill may use every SM.
        self._whole = Lane(torch.cuda.Stream(), num_sms)
        self._partitioner = partitioner
        self._static_sms = static_sms
        self._share = share
        self._lanes: dict[int, Lane] = {num_sms: self._whole}

    def choose(self, scheduler: Any, batch: Any) -> Lane:
        """The lane for the prefill `batch` beside what `scheduler` decodes now."""
        running = scheduler.running_batch.reqs
        if not running or self._partitioner is None:
            return self._whole
        num_sms = self._static_sms
        if num_sms is None:
            assert self._share is not None
            num_sms = self._share.units(
                prefill_tokens=batch.extend_num_tokens,
                prefix_tokens=max(batch.prefix_lens, default=0),
                num_waiting=len(batch.reqs) + len(scheduler.waiting_queue),
                decode_batch=len(running),
                mean_context_tokens=sum(req.seqlen for req in running) / len(running),
            )
        return self._lane(num_sms)

    def _lane(self, num_sms: int) -> Lane:
        assert self._partitioner is not None
        if num_sms not in self._lanes:
            group: Any = self._partitioner.group(num_sms)
            self._lanes[num_sms] = Lane(group.stream, group.granted)
        return self._lanes[num_sms]


def lanes_for(config: SpaceServeConfig, scheduler: Any) -> PrefillLanes | None:
    """Lanes as `--sm-partition` asks for; None on the CPU."""
    if scheduler.device == "cpu":
        return None
    device = torch.device("cuda", scheduler.ps.gpu_id)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if config.sm_partition == "off":
        return PrefillLanes(num_sms, None, None, None)
    partitioner = make_partitioner(device=str(device), min_units=MIN_GPU_UNITS)
    static_sms = config.static_sms()
    if static_sms is not None or len(partitioner.rungs) < 2:
        return PrefillLanes(num_sms, partitioner, static_sms or num_sms, None)
    from spaceserve.sis.shapes import shape_from_model_path

    name = torch.cuda.get_device_name(device)
    curves = curves_for(name, num_sms, shape_from_model_path(scheduler.server_args.model_path))
    share = PrefillShare(curves, partitioner.rungs)
    logger.info("Prefill runs beside decode on %s to %s of %s SMs", share.rungs[0], share.rungs[-1], num_sms)
    return PrefillLanes(num_sms, partitioner, None, share)
