"""A server under test, seen from outside: its status page, its log, and the processes that a fault is aimed at."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil

from servebench import servers
from servebench.environment import scrub

CONTROL = "nvidia-cuda-mps-control"
MPS_SERVER = "nvidia-cuda-mps-server"

Json = dict[str, Any]


class Watched:
    """A server under test: its status page and the processes that a fault is aimed at."""

    def __init__(self, server: servers.Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.pids: dict[int, float] = {}  # with their start times, so that a later process is not taken for one

    @property
    def url(self) -> str:
        return self.server.url

    def is_up(self) -> bool:
        return self.server.process.poll() is None

    def note_processes(self) -> None:
        """Remember every process of the server's, to know afterwards which are left."""
        for process in [*self.server.family(), *self.mps_processes(CONTROL), *self.mps_processes(MPS_SERVER)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.pids[process.pid] = process.create_time()

    def left_processes(self) -> list[str]:
        """Those that were remembered, or are MPS processes of this server, and still run."""
        found = {process.pid: process for process in self.mps_processes(CONTROL) + self.mps_processes(MPS_SERVER)}
        for pid, created in self.pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found[pid] = process
        names = []
        for process in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(servers.title(process))
        return names

    def status(self) -> Json:
        code, text = servers.http(f"{self.url}/spaceserve/status", timeout_s=5)
        found: Json = json.loads(text) if code == 200 else {}
        return found

    def metric(self, name: str) -> float | None:
        """Value of a metric, summed over its labels; None where it is not exported."""
        lines = servers.http(f"{self.url}/metrics", timeout_s=5)[1].splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(values) if values else None

    def encoder(self) -> psutil.Process | None:
        for process in self.server.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "spaceserve::encoder" in " ".join(process.cmdline()):
                    return process
        return None

    def mps_processes(self, program: str) -> list[psutil.Process]:
        """Running MPS processes of this server: by their pipe directory, the daemon's pid file, or the status page."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self.folder}".encode()
        named: set[int] = set()
        if program == CONTROL:
            for file in self.folder.glob(f"spaceserve-mps-*/pipe/{CONTROL}.pid"):
                with contextlib.suppress(OSError, ValueError):
                    named.add(int(file.read_text().strip()))
        elif self.is_up():
            named.update((self.status().get("mps") or {}).get("servers", []))
        found = []
        for process in psutil.process_iter():
            try:
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
                if not any(part.endswith(program.encode()) for part in command):
                    continue
                if program == CONTROL and b"-d" not in command:  # only asks the daemon something
                    continue
                is_own = process.pid in named or mark in Path(f"/proc/{process.pid}/environ").read_bytes()
                if is_own and servers._alive(process):
                    found.append(process)
            except OSError:
                continue
        return found

    def lines_with(self, text: str) -> list[str]:
        lines = self.server.log.read_text(errors="replace").splitlines()
        return [scrub(line)[:300] for line in lines if text in line]

    def trouble(self) -> Json:
        """For a part that went wrong: exit status, if it has ended, and the last lines that look like an error."""
        lines = self.server.log.read_text(errors="replace").splitlines()
        errors = [scrub(line)[:240] for line in lines if "rror" in line or "MPS" in line]
        return {"exit_status": self.server.process.poll(), "log": errors[-25:]}
