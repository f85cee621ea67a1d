"""SM groups through libsmctrl, where the user has it: TPC masks on streams.

libsmctrl (Bakita and Anderson, RTAS 2023) is opened at run time and only its documented functions are called:
``libsmctrl_set_stream_mask`` (64 TPCs at most) and ``libsmctrl_set_stream_mask_ext`` (128). A set bit disables a
thread processing cluster, two SMs. The library reaches into the driver's private data and *ends the process* on a
driver that it does not know, so it is tried in a child process first.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from typing import Any

import torch

from .base import PartitionUnavailable
from .cuda_driver import check, load_driver
from .green_ctx import external_stream
from .ladder import disabled_tpc_mask, make_rungs, unit_range
from .stream_group import StreamLane, StreamPartitioner, gpu_device

LIBRARY_VARIABLE = "SPACESERVE_LIBSMCTRL"
SMS_PER_TPC = 2
_PROBE_TIMEOUT_S = 60.0


def library_path() -> str:
    """The file to open: the environment's ``SPACESERVE_LIBSMCTRL``, else ``libsmctrl.so`` by the loader's rules."""
    return os.environ.get(LIBRARY_VARIABLE) or "libsmctrl.so"


class Libsmctrl:
    """The functions of an opened libsmctrl.

    Raises:
        PartitionUnavailable: the library cannot be opened, or lacks the function that ``num_tpcs`` needs.
    """

    def __init__(self, path: str, *, num_tpcs: int) -> None:
        if num_tpcs > 128:
            raise PartitionUnavailable(f"libsmctrl masks 128 TPCs at most, the device has {num_tpcs}")
        self._is_wide = num_tpcs > 64
        if self._is_wide and platform.machine() not in ("x86_64", "AMD64"):
            # The 128-bit argument is passed as two 64-bit registers, which is the calling convention of x86-64 only.
            raise PartitionUnavailable("libsmctrl with more than 64 TPCs needs x86-64")
        name = "libsmctrl_set_stream_mask_ext" if self._is_wide else "libsmctrl_set_stream_mask"
        try:
            self._set_mask = getattr(ctypes.CDLL(path), name)
        except (OSError, AttributeError) as error:
            raise PartitionUnavailable(f"libsmctrl cannot be used ({error})") from error
        num_words = 2 if self._is_wide else 1
        self._set_mask.argtypes = [ctypes.c_void_p] + [ctypes.c_uint64] * num_words
        self._set_mask.restype = None

    def set_stream_mask(self, stream: int, disabled_tpcs: int) -> None:
        """Confine later launches on ``stream`` (its address) to the TPCs whose bit is clear in ``disabled_tpcs``."""
        low, high = disabled_tpcs & (2**64 - 1), disabled_tpcs >> 64
        if self._is_wide:
            self._set_mask(stream, low, high)
        else:
            assert high == 0
            self._set_mask(stream, low)


class SmctrlLane(StreamLane):
    """Streams with one TPC mask. They are made for this lane: torch's pooled streams are shared."""

    def __init__(self, driver: Any, library: Libsmctrl, disabled_tpcs: int, device: torch.device) -> None:
        self._driver = driver
        self._library = library
        self._disabled_tpcs = disabled_tpcs
        self._device = device
        self._handles: list[Any] = []
        self.stream = self.new_stream()

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with torch.cuda.device(self._device):
            handle = check(self._driver.cuStreamCreateWithPriority(flags, priority), "cuStreamCreateWithPriority")
        self._handles.append(handle)
        self._library.set_stream_mask(int(handle), self._disabled_tpcs)
        return external_stream(int(handle), self._device)

    def destroy(self) -> None:
        while self._handles:
            check(self._driver.cuStreamDestroy(self._handles.pop()), "cuStreamDestroy")


class LibsmctrlPartitioner(StreamPartitioner):
    """Ladder of TPC masks on one NVIDIA GPU.

    Args:
        device: ``cuda`` or ``cuda:N``.
        min_units: smallest group and complement in SMs, 8 by default; even.
        step: distance of the rungs in SMs, 8 by default; even.

    Raises:
        PartitionUnavailable: no GPU, no libsmctrl, or one that does not work with this driver.
        ValueError: ``min_units`` or ``step`` is odd.
    """

    backend = "libsmctrl"

    def __init__(
        self, *, device: str | torch.device = "cuda", min_units: int | None = None, step: int | None = None
    ) -> None:
        min_units = 8 if min_units is None else min_units
        step = 8 if step is None else step
        if min_units % SMS_PER_TPC or step % SMS_PER_TPC:
            raise ValueError(f"libsmctrl masks TPCs of {SMS_PER_TPC} SMs: min_units {min_units} or step {step} is odd")
        resolved = gpu_device(device)
        total = torch.cuda.get_device_properties(resolved).multi_processor_count
        if total % SMS_PER_TPC:
            raise PartitionUnavailable(f"{total} SMs do not fill TPCs of {SMS_PER_TPC}")
        path = library_path()
        self._library = Libsmctrl(path, num_tpcs=total // SMS_PER_TPC)
        self._driver = load_driver()
        _try_in_child(path, resolved.index, total // SMS_PER_TPC)
        rungs = make_rungs(total, min_units=min_units, step=step)
        super().__init__(device=resolved, total_units=total, rungs=rungs, min_complement=min_units)

    def _make_lane(self, *, granted: int, is_complement: bool) -> SmctrlLane:
        units = unit_range(self.total_units, granted, is_complement=is_complement)
        mask = disabled_tpc_mask(units, self.total_units, units_per_tpc=SMS_PER_TPC)
        return SmctrlLane(self._driver, self._library, mask, self.device)


def _try_in_child(path: str, device_index: int, num_tpcs: int) -> None:
    """Set a mask and launch under it in a process that may die.

    Raises:
        PartitionUnavailable: it died, failed or hung.
    """
    command = [sys.executable, "-m", "spaceserve.partition.libsmctrl", path, str(device_index), str(num_tpcs)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise PartitionUnavailable("libsmctrl hung when it was tried") from error
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise PartitionUnavailable(f"libsmctrl does not work with this driver ({last_line})")


def _child_main(path: str, device_index: int, num_tpcs: int) -> None:
    device = torch.device("cuda", device_index)
    torch.zeros(1, device=device)
    lane = SmctrlLane(load_driver(), Libsmctrl(path, num_tpcs=num_tpcs), (1 << num_tpcs) - 2, device)
    with torch.cuda.stream(lane.stream):
        torch.ones(1 << 16, device=device).sum().item()
    lane.destroy()


if __name__ == "__main__":
    _child_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
