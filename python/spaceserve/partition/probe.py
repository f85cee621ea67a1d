"""The probe kernels of ``probe.cu``: compiled with NVRTC at run time, launched on any torch stream.

For tests and benchmarks of partitions; serving never loads them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .base import PartitionUnavailable
from .cuda_driver import check, load_driver

SOURCE = Path(__file__).with_name("probe.cu")

# The driver sets aside 1 KiB of shared memory for each resident block.
_RESERVED_SHARED_BYTES = 1024


def compile_cubin(arch: str, source: Path = SOURCE) -> bytes:
    """Machine code of the probe kernels. Needs NVRTC, but no GPU and no driver.

    Args:
        arch: real architecture, e.g. ``sm_90``.
        source: the CUDA file.

    Raises:
        PartitionUnavailable: no such file, or no NVRTC.
        RuntimeError: the compiler's log.
    """
    if not source.is_file():
        raise PartitionUnavailable(f"the CUDA source {source} is not there")
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise PartitionUnavailable(f"NVRTC cannot be imported ({error})") from error
    text = source.read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(text, b"probe.cu", 0, [], []), "nvrtcCreateProgram")
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result[0]) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        raise RuntimeError(f"{source} does not compile for {arch}:\n{log.decode(errors='replace')}")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    check(nvrtc.nvrtcDestroyProgram(program), "nvrtcDestroyProgram")
    return cubin


@dataclass
class Occupation:
    """What one launch of the occupier will have written once its stream is idle.

    Attributes:
        sm_ids: int32 [num_blocks], on the device: the SM of each block.
        start_ns, end_ns: int64 [num_blocks], on the device: nanoseconds of the GPU's global timer.
    """

    sm_ids: torch.Tensor
    start_ns: torch.Tensor
    end_ns: torch.Tensor

    def blocks_by_sm(self) -> dict[int, int]:
        """Number of blocks that ran on each SM. Waits for the device."""
        torch.cuda.synchronize(self.sm_ids.device)
        ids, counts = torch.unique(self.sm_ids.cpu(), return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))

    def sms(self) -> set[int]:
        """The SMs that ran a block. Waits for the device."""
        return set(self.blocks_by_sm())


class Probe:
    """Loaded probe kernels of one device.

    Raises:
        PartitionUnavailable: no NVRTC, or no driver.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None, f"{device} does not say which GPU"
        self.device = device
        self._driver = load_driver()
        torch.zeros(1, device=device)  # the module goes into the primary context
        properties = torch.cuda.get_device_properties(device)
        self._driver_module = None
        cubin = compile_cubin(f"sm_{properties.major}{properties.minor}")
        with torch.cuda.device(device):
            self._driver_module = check(self._driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        self._functions = {
            name: check(self._driver.cuModuleGetFunction(self._driver_module, name.encode()), "cuModuleGetFunction")
            for name in ("occupy", "stream_read")
        }
        self.threads_per_half_sm = min(1024, properties.max_threads_per_multi_processor // 2)
        self.shared_bytes_per_half_sm = self._raise_shared_memory()

    def _raise_shared_memory(self) -> int:
        """Allow the occupier half an SM's shared memory per block; returns the bytes."""
        driver = self._driver
        cu_device = check(driver.cuDeviceGet(self.device.index), "cuDeviceGet")
        attribute = driver.CUdevice_attribute
        per_sm, per_block = (
            int(check(driver.cuDeviceGetAttribute(which, cu_device), "cuDeviceGetAttribute"))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
                attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )
        shared_bytes = min(per_sm // 2 - _RESERVED_SHARED_BYTES, per_block)
        function_attribute = driver.CUfunction_attribute
        for which, value in (
            (function_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (function_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            check(driver.cuFuncSetAttribute(self._functions["occupy"], which, value), "cuFuncSetAttribute")
        return shared_bytes

    def _launch(
        self,
        name: str,
        stream: torch.cuda.Stream,
        num_blocks: int,
        num_threads: int,
        arguments: list[tuple[int, Any]],
        shared_bytes: int = 0,
    ) -> None:
        values = tuple(value for value, _ in arguments)
        types = tuple(ctype for _, ctype in arguments)
        with torch.cuda.device(self.device):
            check(
                self._driver.cuLaunchKernel(
                    self._functions[name],
                    num_blocks,
                    1,
                    1,
                    num_threads,
                    1,
                    1,
                    shared_bytes,
                    stream.cuda_stream,
                    (values, types),
                    0,
                ),
                f"cuLaunchKernel({name})",
            )

    def new_occupation(self, num_blocks: int) -> Occupation:
        """Buffers for :meth:`occupy`, made ahead where the launch is captured or timed."""
        ids = torch.full((num_blocks,), -1, dtype=torch.int32, device=self.device)
        times = torch.zeros((2, num_blocks), dtype=torch.int64, device=self.device)
        torch.cuda.synchronize(self.device)
        return Occupation(ids, times[0], times[1])

    def occupy(self, stream: torch.cuda.Stream, min_ns: int, occupation: Occupation) -> Occupation:
        """Launch one block per element of ``occupation``, each half an SM large, each staying ``min_ns``.

        Twice as many blocks as the stream has SMs fill them, so that no other kernel's block fits beside.
        """
        arguments: list[tuple[int, Any]] = [
            (tensor.data_ptr(), ctypes.c_void_p)
            for tensor in (occupation.sm_ids, occupation.start_ns, occupation.end_ns)
        ]
        arguments.append((min_ns, ctypes.c_ulonglong))
        self._launch(
            "occupy",
            stream,
            occupation.sm_ids.numel(),
            self.threads_per_half_sm,
            arguments,
            self.shared_bytes_per_half_sm,
        )
        return occupation

    def stream_read(self, stream: torch.cuda.Stream, source: torch.Tensor, repeats: int, sink: torch.Tensor) -> None:
        """Read a contiguous tensor ``repeats`` times; bandwidth-bound.

        Args:
            stream: where to launch.
            source: any dtype, a multiple of 16 bytes.
            sink: float32; its length, a multiple of 512, is the number of threads.
        """
        num_bytes = source.numel() * source.element_size()
        assert source.is_contiguous(), "a strided tensor is not read as one run of bytes"
        assert num_bytes % 16 == 0, num_bytes
        assert sink.numel() % 512 == 0, sink.shape
        arguments = [
            (source.data_ptr(), ctypes.c_void_p),
            (num_bytes // 16, ctypes.c_ulonglong),
            (repeats, ctypes.c_uint),
            (sink.data_ptr(), ctypes.c_void_p),
        ]
        self._launch("stream_read", stream, sink.numel() // 512, 512, arguments)

    def close(self) -> None:
        """Unload the kernels; the device must be idle."""
        module, self._driver_module = self._driver_module, None
        if module is not None:
            with torch.cuda.device(self.device):
                check(self._driver.cuModuleUnload(module), "cuModuleUnload")
