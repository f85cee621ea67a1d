"""Finding and ending the processes of an MPS daemon, by what /proc says of them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"

_KILL_TIMEOUT_S = 3.0


class MpsError(RuntimeError):
    """The control daemon did not do what it was told."""


def end_processes(pipe_directory: Path, server_pids: list[int]) -> None:
    """Wait for the MPS processes of a pipe directory to end; signal those that do not.

    Raises:
        MpsError: one survives SIGKILL.
    """
    remaining: list[int] = []
    for pause_s, signal_number in ((_KILL_TIMEOUT_S, signal.SIGTERM), (_KILL_TIMEOUT_S, signal.SIGKILL)):
        remaining = _wait_for_end(pipe_directory, server_pids, pause_s)
        if not remaining:
            return
        logger.warning("MPS: processes %s did not end and get %s", remaining, signal_number.name)
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
    remaining = _wait_for_end(pipe_directory, server_pids, _KILL_TIMEOUT_S)
    if remaining:
        raise MpsError(f"processes {remaining} of {pipe_directory} cannot be ended")


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name: state first. None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def identity(pid: int) -> str:
    """Process id with its start time, which tells a process from a later one of the same number."""
    fields = _stat_fields(pid)
    return f"{pid} {fields[19]}" if fields and fields[0] != "Z" else f"{pid} gone"


def process_space() -> str:
    """Names the boot and the process id namespace in which process ids mean what they mean here."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def is_running(pid: int) -> bool:
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def _is_mps_process(pid: int, pipe_directory: Path) -> bool:
    """Whether ``pid`` is an MPS control daemon or server of this pipe directory: by command and environment."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    variable = f"{PIPE_VARIABLE}={pipe_directory}".encode()
    return b"nvidia-cuda-mps-" in command and variable in environ.split(b"\0")


def daemon_pids(pipe_directory: Path) -> list[int]:
    """MPS processes of a pipe directory, the one named by the daemon's pid file first."""
    pids = [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and is_running(int(entry)) and _is_mps_process(int(entry), pipe_directory)
    ]
    with contextlib.suppress(OSError, ValueError):
        named = int((pipe_directory / f"{CONTROL}.pid").read_text().strip())
        if named in pids:
            pids.remove(named)
            pids.insert(0, named)
    return pids


def _wait_for_end(pipe_directory: Path, server_pids: list[int], timeout_s: float) -> list[int]:
    """MPS processes of the directory that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        servers = [pid for pid in server_pids if is_running(pid) and _is_mps_process(pid, pipe_directory)]
        remaining = sorted({*daemon_pids(pipe_directory), *servers})
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.02)
