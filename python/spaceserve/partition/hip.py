"""CU groups on AMD: streams with a compute-unit mask, through the HIP runtime that torch has loaded.

Written against HIP's documented ``hipExtStreamCreateWithCUMask``; not run on AMD hardware so far.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from .base import PartitionUnavailable
from .ladder import enabled_mask_words, make_rungs, unit_range
from .stream_group import StreamLane, StreamPartitioner, gpu_device

_LIBRARY_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")


def load_hip() -> Any:
    """The HIP runtime with the signatures used here set.

    Raises:
        PartitionUnavailable: no library, or one without CU masks.
    """
    for name in _LIBRARY_NAMES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        raise PartitionUnavailable("libamdhip64.so cannot be loaded")
    try:
        library.hipExtStreamCreateWithCUMask.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_uint32,
            ctypes.POINTER(ctypes.c_uint32),
        ]
        library.hipStreamDestroy.argtypes = [ctypes.c_void_p]
    except AttributeError as error:
        raise PartitionUnavailable(f"the HIP runtime has no CU masks ({error})") from error
    return library


def check_hip(status: int, call: str) -> None:
    """Raise RuntimeError unless ``status`` is hipSuccess."""
    if status != 0:
        raise RuntimeError(f"{call} failed with HIP error {status}")


class CuMaskLane(StreamLane):
    """Streams with one CU mask: 32-bit words in which a set bit enables a CU."""

    def __init__(self, library: Any, mask_words: Sequence[int], device: torch.device) -> None:
        self._library = library
        self._words = (ctypes.c_uint32 * len(mask_words))(*mask_words)
        self._device = device
        self._handles: list[int] = []
        self.stream = self.new_stream()

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """``priority`` is not used: HIP has no call that takes a mask and a priority."""
        handle = ctypes.c_void_p()
        status = self._library.hipExtStreamCreateWithCUMask(ctypes.byref(handle), len(self._words), self._words)
        check_hip(status, "hipExtStreamCreateWithCUMask")
        assert handle.value is not None
        self._handles.append(handle.value)
        return torch.cuda.ExternalStream(handle.value, device=self._device)

    def destroy(self) -> None:
        while self._handles:
            check_hip(self._library.hipStreamDestroy(self._handles.pop()), "hipStreamDestroy")


class HipCuMaskPartitioner(StreamPartitioner):
    """Ladder of CU masks on one AMD GPU.

    Args:
        device: ``cuda`` or ``cuda:N`` (torch's name for AMD GPUs too).
        min_units: smallest group and complement in CUs, 8 by default.
        step: distance of the rungs in CUs, 8 by default.

    Raises:
        PartitionUnavailable: torch is not a ROCm build, or there is no GPU or no HIP runtime.
    """

    backend = "hip_cu_mask"
    unit_name = "CUs"

    def __init__(
        self, *, device: str | torch.device = "cuda", min_units: int | None = None, step: int | None = None
    ) -> None:
        if torch.version.hip is None:
            raise PartitionUnavailable("torch is not a ROCm build")
        resolved = gpu_device(device)
        self._library = load_hip()
        total = torch.cuda.get_device_properties(resolved).multi_processor_count
        min_units = 8 if min_units is None else min_units
        rungs = make_rungs(total, min_units=min_units, step=8 if step is None else step)
        super().__init__(device=resolved, total_units=total, rungs=rungs, min_complement=min_units)

    def _make_lane(self, *, granted: int, is_complement: bool) -> CuMaskLane:
        units = unit_range(self.total_units, granted, is_complement=is_complement)
        with torch.cuda.device(self.device):
            return CuMaskLane(self._library, enabled_mask_words(units, self.total_units), self.device)
