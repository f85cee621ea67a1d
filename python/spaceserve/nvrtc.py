"""CUDA sources compiled at run time with NVRTC, which comes with torch for CUDA: no compiler has to be installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spaceserve.partition.cuda_driver import check


class NvrtcUnavailable(RuntimeError):
    """There is no NVRTC, or no source."""


def compile_cubin(source: Path, arch: str, defines: Mapping[str, int] | None = None) -> bytes:
    """Machine code of a CUDA source without headers. Needs neither a GPU nor a driver.

    Args:
        source: the CUDA file.
        arch: real architecture, e.g. ``sm_90``.
        defines: macros and their values.

    Raises:
        NvrtcUnavailable: no such file, or no NVRTC.
        RuntimeError: the compiler's log.
    """
    if not source.is_file():
        raise NvrtcUnavailable(f"the CUDA source {source} is not there")
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise NvrtcUnavailable(f"NVRTC cannot be imported ({error})") from error
    program = check(
        nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []), "nvrtcCreateProgram"
    )
    macros = [f"-D{name}={value}".encode() for name, value in (defines or {}).items()]
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", *macros]
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result[0]) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        raise RuntimeError(f"{source} does not compile for {arch}:\n{log.decode(errors='replace')}")
    cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    check(nvrtc.nvrtcDestroyProgram(program), "nvrtcDestroyProgram")
    return cubin
