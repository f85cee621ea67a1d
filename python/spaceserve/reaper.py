"""Cleans up after a server, also one that was killed with SIGKILL.

The launcher starts this file as a process of its own session, with only the standard library, and holds the other end
of its standard input. When that closes, the launcher is gone, however it went: what it left is ended and removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHM_DIR = Path("/dev/shm")
GRACE_S = 2.0
# Set in the launcher's environment, and so in that of every process it starts.
RUN_DIR_VARIABLE = "SPACESERVE_RUN_DIR"


class Reaper:
    """The launcher's handle on the reaper process.

    Args:
        shm_prefix: start of the names in /dev/shm that belong to the server.
        run_dir: folder that belongs to the server.
    """

    def __init__(self, shm_prefix: str, run_dir: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, shm_prefix, run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # The first process only forks: SGLang ends whole process trees, and the reaper must not be in one.
        self._process.wait(timeout=30)

    def remove_too(self, path: str) -> None:
        """Let the reaper remove another file or folder of the server's at the end."""
        assert self._process.stdin is not None
        self._process.stdin.write(path.encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let it do its work now, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()


def _processes_left(run_dir: str) -> list[int]:
    """Processes that were started for the server whose folder is `run_dir`, by the mark in their environment."""
    mark = f"{RUN_DIR_VARIABLE}={run_dir}".encode()
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                left.append(int(entry.name))
        except OSError:  # it has ended, or is not ours
            continue
    return left


def _remove(shm_prefix: str, paths: list[str]) -> None:
    for path in SHM_DIR.glob(f"{shm_prefix}*"):
        path.unlink(missing_ok=True)
    for path in map(Path, paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def main(shm_prefix: str, run_dir: str) -> None:
    """Wait for the launcher's end, then end its processes and remove its files."""
    if os.fork():
        os._exit(0)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    paths = [run_dir, *sys.stdin.read().splitlines()]
    deadline_s = time.monotonic() + GRACE_S
    while (left := _processes_left(run_dir)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _remove(shm_prefix, paths)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
