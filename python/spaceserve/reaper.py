"""Cleans up after a server, also one that was killed with SIGKILL.

The launcher starts this file as a process of its own session, with only the standard library, and holds the other end
of its standard input. When that closes, the launcher is gone, however it went: what it left is ended and removed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHM_DIR = Path("/dev/shm")
GRACE_S = 2.0
MPS_MARK = "mps:"
OWNER_VARIABLE = "SPACESERVE_OWNER"
MPS_TIMEOUT_S = 15.0
POLL_S = 1.0
POLLS_BETWEEN_MAPS = 5
PROC = Path("/proc")


class Reaper:
    """The launcher's handle on the reaper process.

    Args:
        shm_prefix: start of the names in /dev/shm that belong to the server.
        run_dir: folder that belongs to the server.
    """

    def __init__(self, shm_prefix: str, run_dir: str) -> None:
        # What the launcher starts from now on inherits it, and is known by it whoever its parent is at the end.
        os.environ[OWNER_VARIABLE] = shm_prefix
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), shm_prefix, run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # The first process only forks: SGLang ends whole process trees, and the reaper must not be in one.
        self._process.wait(timeout=30)

    def remove_too(self, path: str) -> None:
        """Let the reaper remove another file or folder of the server's at the end."""
        self._write(path)

    def end_mps(self, pipe_directory: str) -> None:
        """Let the reaper end the MPS daemon of this pipe directory, which is nobody's child."""
        self._write(MPS_MARK + pipe_directory)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let it do its work now, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        os.environ.pop(OWNER_VARIABLE, None)
        self._process.stdout.close()


def _parents_and_start_times() -> dict[int, tuple[int, str]]:
    """Of every process that runs its parent, and its start in clock ticks since boot: with the pid that names it for
    ever. One that has ended and not been waited for yet is none."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The command's name is in parentheses and may hold anything.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    found[int(entry.name)] = int(fields[1]), fields[19]
            except (OSError, IndexError):  # it has ended
                continue
    return found


def _descendants(launcher_pid: int) -> dict[int, str]:
    """Start times of all processes below the launcher, by pid."""
    processes = _parents_and_start_times()
    below = {launcher_pid}
    while more := {pid for pid, (parent, _) in processes.items() if parent in below} - below:
        below |= more
    return {pid: processes[pid][1] for pid in below - {launcher_pid}}


def _semaphores(pid: int) -> set[str]:
    """Named semaphores that the process has mapped; Python leaves its own behind in a process that is killed.

    By their inodes: what maps shows is the temporary name under which the C library made the file.
    """
    try:
        lines = (PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    mapped = {int(line.split(maxsplit=5)[4]) for line in lines if f"{SHM_DIR}/sem." in line}
    found = set()
    for path in SHM_DIR.glob("sem.*") if mapped else ():
        try:
            if path.stat().st_ino in mapped:
                found.add(str(path))
        except FileNotFoundError:
            continue
    return found


def _watch(launcher_pid: int) -> tuple[dict[int, str], set[str]]:
    """Remember the launcher's processes and files until it is gone.

    Returns:
        Start times of the processes by pid, and paths to remove.
    """
    seen: dict[int, str] = {}
    paths: set[str] = set()
    written = b""
    polls = 0
    while True:
        alive = _descendants(launcher_pid)
        # Until its first process has ended, the reaper is below the launcher itself.
        alive.pop(os.getpid(), None)
        seen.update(alive)
        if polls % POLLS_BETWEEN_MAPS == 0:
            for pid in (launcher_pid, *alive):
                paths |= _semaphores(pid)
        polls += 1
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable:
            chunk = os.read(0, 65536)
            if not chunk:
                for pid in _left_of(seen):  # a worker may have come up since
                    paths |= _semaphores(pid)
                return seen, paths | set(os.fsdecode(written).splitlines())
            written += chunk


def _marked(owner: str) -> dict[int, str]:
    """Start times of processes that were started with the server's mark, by pid, this one left out.

    They make up for what was started just before the launcher's end. Processes that have taken a title have
    overwritten their environment, but those were below the launcher long enough to be seen there.
    """
    mark = f"{OWNER_VARIABLE}={owner}".encode()
    found = {}
    for pid, (_, started) in _parents_and_start_times().items():
        try:
            if pid != os.getpid() and mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found[pid] = started
        except OSError:  # another user's, or ended
            continue
    return found


def _left_of(seen: dict[int, str]) -> list[int]:
    processes = _parents_and_start_times()
    return [pid for pid, started in seen.items() if pid in processes and processes[pid][1] == started]


def _end_mps(pipe_directory: str) -> None:
    environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipe_directory}
    try:
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            input=b"quit\n",
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MPS_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # it has ended already, or the next server's start ends it


def _remove(shm_prefix: str, paths: list[str]) -> None:
    for path in SHM_DIR.glob(f"{shm_prefix}*"):
        path.unlink(missing_ok=True)
    for path in map(Path, paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def main(launcher_pid: int, shm_prefix: str, run_dir: str) -> None:
    """Wait for the launcher's end, then end its processes and remove its files."""
    if os.fork():
        os._exit(0)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    seen, paths = _watch(launcher_pid)
    seen.update(_marked(shm_prefix))
    deadline_s = time.monotonic() + GRACE_S
    while (left := _left_of(seen)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for line in paths:
        if line.startswith(MPS_MARK):
            _end_mps(line[len(MPS_MARK) :])
    _remove(shm_prefix, [run_dir, *(path for path in paths if not path.startswith(MPS_MARK))])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
