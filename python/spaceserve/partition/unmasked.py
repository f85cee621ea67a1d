"""No partition: every group is the whole device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .base import Partitioner, UnitGroup
from .stream_group import StreamLane, StreamPartitioner, gpu_device


class UnmaskedStreamPartitioner(StreamPartitioner):
    """One rung, the whole GPU, on a stream of its own.

    Raises:
        PartitionUnavailable: the device is no GPU.
    """

    backend = "none"

    def __init__(self, *, device: str | torch.device = "cuda") -> None:
        resolved = gpu_device(device)
        total = torch.cuda.get_device_properties(resolved).multi_processor_count
        super().__init__(device=resolved, total_units=total, rungs=(total,), min_complement=total)

    def _make_lane(self, *, granted: int, is_complement: bool) -> StreamLane:
        raise AssertionError("there is no rung below the whole device")


class UnmaskedGroup(UnitGroup):
    """The whole device; entering it changes nothing."""

    def activate(self) -> AbstractContextManager[UnitGroup]:
        return nullcontext(self)

    def make_current(self) -> None:
        """Nothing to do."""


class UnmaskedPartitioner(Partitioner):
    """One rung, the whole device, and no streams (CPU)."""

    backend = "none"
    unit_name = "cores"

    def __init__(self, *, total_units: int) -> None:
        super().__init__(total_units=total_units, rungs=(total_units,), min_complement=total_units)

    def _make_group(self, *, requested: int, granted: int, is_complement: bool) -> UnmaskedGroup:
        return UnmaskedGroup(
            requested=requested, granted=granted, total_units=self.total_units, is_complement=is_complement
        )
