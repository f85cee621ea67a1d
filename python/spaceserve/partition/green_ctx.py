"""SM groups as CUDA green contexts: the default on NVIDIA.

A green context is a set of SMs of a device; kernels launched on its streams run on these SMs alone. It shares the
primary context's memory and modules, so torch works on its streams as on any other. Driver 12.4 or later.

For each rung the SMs are split once, ``cuDevSmResourceSplitByCount(1, all SMs, minCount=total - rung)``: the result is
the complement, the decoder's side, and the remainder the group. Not the other way round, because the driver spreads
what it splits off over the whole chip, while a remainder of few SMs sits in few of its clusters, and memory bandwidth
suffers: a bandwidth-bound product ran at 2.1 TB/s on 24 split-off SMs of an H200 and on a remainder of 36 alike. The
encoder is bound by computation. The driver picks the same physical SMs in every process that asks for the same split.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from .base import PartitionUnavailable
from .cuda_driver import CudaDriverError, check, load_driver
from .ladder import make_rungs
from .stream_group import StreamLane, StreamPartitioner, gpu_device

logger = logging.getLogger(__name__)

# Smallest group and alignment in SMs by compute capability, from the CUDA driver API's section on green contexts.
# Used where the driver does not tell: before CUDA 13.1 its resource has no such fields.
_GRANULARITY_BY_MAJOR = {6: (1, 1), 7: (2, 2), 8: (4, 2)}
_GRANULARITY_FROM_9 = (8, 8)

StreamFactory = Callable[[int, torch.device], torch.cuda.Stream]


def hardware_granularity(compute_capability_major: int) -> tuple[int, int]:
    """(smallest group, alignment) in SMs of green contexts on a compute capability, e.g. (8, 8) from Hopper on."""
    return _GRANULARITY_BY_MAJOR.get(compute_capability_major, _GRANULARITY_FROM_9)


def external_stream(address: int, device: torch.device) -> torch.cuda.Stream:
    """torch's view of a stream that the driver made; torch does not own it."""
    return torch.cuda.ExternalStream(address, device=device)


class GreenLane(StreamLane):
    """A green context with its streams; destroyed once, streams first."""

    def __init__(
        self, driver: Any, cu_device: Any, resource: Any, device: torch.device, make_stream: StreamFactory
    ) -> None:
        self._driver = driver
        self._device = device
        self._make_stream = make_stream
        self._handles: list[Any] = []
        self.num_sms = int(resource.sm.smCount)
        descriptor = check(driver.cuDevResourceGenerateDesc([resource], 1), "cuDevResourceGenerateDesc")
        flags = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        self._context: Any = check(driver.cuGreenCtxCreate(descriptor, cu_device, flags), "cuGreenCtxCreate")
        try:
            self.stream = self.new_stream()
        except Exception:
            self.destroy()
            raise

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = check(self._driver.cuGreenCtxStreamCreate(self._context, flags, priority), "cuGreenCtxStreamCreate")
        self._handles.append(handle)
        return self._make_stream(int(handle), self._device)

    def destroy(self) -> None:
        while self._handles:
            check(self._driver.cuStreamDestroy(self._handles.pop()), "cuStreamDestroy")
        context, self._context = self._context, None
        if context is not None:
            check(self._driver.cuGreenCtxDestroy(context), "cuGreenCtxDestroy")


class GreenCtxPartitioner(StreamPartitioner):
    """Ladder of green contexts on one CUDA device.

    Args:
        device: ``cuda`` or ``cuda:N``.
        min_units: the smallest group and complement in SMs; None takes the hardware's smallest group. Complements are
            multiples of ``step``, groups what is left of the device.
        step: distance of the rungs in SMs; None takes the hardware's alignment.

    Raises:
        PartitionUnavailable: no CUDA device, or its driver has no green contexts.
        ValueError: ``min_units`` or ``step`` does not fit the hardware's alignment.
    """

    backend = "green_ctx"

    def __init__(
        self, *, device: str | torch.device = "cuda", min_units: int | None = None, step: int | None = None
    ) -> None:
        self._driver, resolved = self._open(device)
        self._cu_device, self._all_sms, major = self._query(resolved)
        total = int(self._all_sms.sm.smCount)
        smallest, alignment = hardware_granularity(major)
        smallest = int(getattr(self._all_sms.sm, "minSmPartitionSize", 0)) or smallest
        alignment = int(getattr(self._all_sms.sm, "smCoscheduledAlignment", 0)) or alignment
        min_units = smallest if min_units is None else min_units
        step = alignment if step is None else step
        if step < 1 or step % alignment:
            raise ValueError(f"step {step}: green contexts on {resolved} come in multiples of {alignment} SMs")
        if min_units < smallest:
            raise ValueError(f"min_units {min_units}: green contexts on {resolved} have {smallest} SMs or more")
        self._splits: dict[int, tuple[Any, Any]] = {}
        for wanted in make_rungs(total, min_units=min_units, step=step)[:-1]:
            if total - wanted >= min_units:
                self._split(wanted, total)
        super().__init__(
            device=resolved, total_units=total, rungs=(*sorted(self._splits), total), min_complement=min_units
        )

    def _open(self, device: str | torch.device) -> tuple[Any, torch.device]:
        """Driver and device; a test overrides this and :meth:`_stream` to run on a driver of its own."""
        resolved = gpu_device(device)
        return load_driver(), resolved

    def _stream(self, address: int, device: torch.device) -> torch.cuda.Stream:
        return external_stream(address, device)

    def _query(self, device: torch.device) -> tuple[Any, Any, int]:
        """(CUdevice, resource of all SMs, major compute capability)."""
        driver = self._driver
        try:
            cu_device = check(driver.cuDeviceGet(device.index), "cuDeviceGet")
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            all_sms = check(driver.cuDeviceGetDevResource(cu_device, kind), "cuDeviceGetDevResource")
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            major = int(check(driver.cuDeviceGetAttribute(attribute, cu_device), "cuDeviceGetAttribute"))
        except (AttributeError, RuntimeError) as error:
            # AttributeError: a cuda-bindings without green contexts. RuntimeError: a driver without them.
            raise PartitionUnavailable(f"no green contexts on {device} ({error})") from error
        return cu_device, all_sms, major

    def _split(self, wanted: int, total: int) -> None:
        """Keep the split into ``wanted`` SMs for the decoder and the rest under the number of SMs in the rest."""
        try:
            groups, num_groups, remainder = check(
                self._driver.cuDevSmResourceSplitByCount(1, self._all_sms, 0, wanted), "cuDevSmResourceSplitByCount"
            )
        except CudaDriverError as error:
            logger.warning("no green context of %d of %d SMs: %s; rung left out", wanted, total, error)
            return
        granted = int(groups[0].sm.smCount) if int(num_groups) == 1 else 0
        if not wanted <= granted < total:
            logger.warning("asked for %d of %d SMs, granted %d; rung left out", wanted, total, granted)
            return
        self._splits.setdefault(total - granted, (remainder, groups[0]))

    def _make_lane(self, *, granted: int, is_complement: bool) -> GreenLane:
        group, complement = self._splits[self.total_units - granted if is_complement else granted]
        resource = complement if is_complement else group
        if int(resource.sm.smCount) != granted:
            raise CudaDriverError(f"the driver left {int(resource.sm.smCount)} SMs instead of {granted}", -1)
        return GreenLane(self._driver, self._cu_device, resource, self.device, self._stream)
