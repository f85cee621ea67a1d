"""Start, watch and stop the servers of an arm. Every server leads a session of its own and ends as a group."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from servebench.arms import Arm, ServerSpec
from servebench.environment import gpu_memory_used_mib, gpu_processes, scrub

HOST = "127.0.0.1"
LOG_TAIL_CHARS = 6000
STOP_GRACE_S = 15.0


class ServerFailed(RuntimeError):
    """A server died or did not become ready in time; the message ends with its log's tail."""


def http(url: str, *, method: str = "GET", timeout_s: float = 10.0) -> tuple[int, str]:
    """Status and text of a request; status 0 where nothing answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, ValueError):
        return 0, ""


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago."""
    import socket

    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


class ProcessLike(Protocol):
    """What a server's process is asked for: a child's Popen has it."""

    pid: int

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...


@dataclass
class Server:
    """A running server process group."""

    spec: ServerSpec
    url: str
    process: ProcessLike
    log: Path

    def tail(self) -> str:
        """The end of the log, without this machine's paths."""
        return scrub(self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:]) if self.log.exists() else ""

    def family(self) -> list[psutil.Process]:
        """The server's process and its descendants that still run."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def is_ready(self, deadline: float) -> bool:
        """Whether ``/health`` answers 200. Raises ServerFailed where the process has ended or the time is over."""
        if self.process.poll() is not None:
            raise ServerFailed(f"{self.spec.role} exited with {self.process.returncode}\n{self.tail()}")
        if http(f"{self.url}/health", timeout_s=5)[0] == 200:
            return True
        if time.monotonic() >= deadline:
            raise ServerFailed(f"{self.spec.role} was not ready in time\n{self.tail()}")
        return False

    def wait_ready(self, deadline: float) -> None:
        """Poll until it is ready. Raises ServerFailed."""
        while not self.is_ready(deadline):
            time.sleep(0.2)

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL after a grace period, to descendants in other sessions too."""
        family = self.family()
        for sig, grace_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, sig)
            if sig == signal.SIGKILL:
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            self._wait(family, grace_s)
            if not any(_alive(process) for process in family) and self.process.poll() is not None:
                return

    def _wait(self, family: list[psutil.Process], grace_s: float) -> None:
        end = time.monotonic() + grace_s
        while time.monotonic() < end:
            self.process.poll()
            if not any(_alive(process) for process in family):
                return
            time.sleep(0.2)


class OtherWork:
    """Cores that others kept busy since this was made: not the servers, not this process and the children it awaited.

    On a shared machine it says whether two runs can be compared.
    """

    def __init__(self, group: list[Server]) -> None:
        self._group = group
        self._start = self._read()

    def _read(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        busy_s = machine.user + machine.nice + machine.system
        own = os.times()
        busy_s -= own.user + own.system + own.children_user + own.children_system
        for process in (member for server in self._group for member in server.family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                busy_s -= times.user + times.system
        return time.monotonic(), busy_s

    def mean_cores(self) -> float:
        """Mean number of cores in use elsewhere."""
        now_s, busy_s = self._read()
        return max(0.0, (busy_s - self._start[1]) / (now_s - self._start[0]))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_server(spec: ServerSpec, log: Path, own_port: int, env: dict[str, str], values: dict[str, str]) -> Server:
    """Start one server that will listen on ``own_port``; returns at once."""
    command = spec.command(python=sys.executable, host=HOST, **values)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env, **spec.env}, start_new_session=True
        )
    return Server(spec, f"http://{HOST}:{own_port}", process, log)


def stop_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that servers, which lead sessions of their own, end with this process."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)


@contextlib.contextmanager
def work_folder(prefix: str, logs_to: Path | None) -> Iterator[Path]:
    """A temporary folder; in the end its logs are copied to ``logs_to``, which is made at once where it is missing."""
    if logs_to is not None:
        logs_to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            if logs_to is not None:
                for log in folder.glob("*.log"):
                    with contextlib.suppress(OSError):
                        shutil.copy(log, logs_to / log.name)


@contextlib.contextmanager
def running_arm(arm: Arm, *, model: str, work_dir: Path, start_timeout_s: float) -> Iterator[list[Server]]:
    """Start the arm's servers in order and stop them in the end; yields them, the one to talk to last.

    Raises ServerFailed. Waits at the end until the GPU's memory is given back, so that the next arm starts clean.
    """
    before_mib = gpu_memory_used_mib()
    servers: list[Server] = []
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(mps_daemon()) if arm.needs_mps else {}
        try:
            port, port2 = free_ports(2)
            for spec in arm.servers:
                own_port = port if spec.role == "server" else port2
                log = work_dir / f"{arm.name}.{spec.role}.log"
                values = {"model": model, "port": str(port), "port2": str(port2)}
                server = start_server(spec, log, own_port, env, values)
                servers.append(server)
                server.wait_ready(time.monotonic() + start_timeout_s)
            yield servers
        finally:
            for server in reversed(servers):
                server.stop()
    wait_memory_returned(before_mib)


def wait_memory_returned(before_mib: int | None, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while before_mib is not None and time.monotonic() < end:
        now = gpu_memory_used_mib()
        if now is None or now <= before_mib + 1024:
            return
        time.sleep(0.5)


@contextlib.contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """An MPS control daemon for the arm; yields the environment of its clients. Raises ServerFailed without MPS."""
    from spaceserve.partition.mps import MpsDaemon

    with MpsDaemon() as daemon:
        if daemon.reason is not None:
            raise ServerFailed(f"this arm needs MPS: {daemon.reason}")
        yield daemon.client_environ


def flush(url: str, timeout_s: float = 30.0) -> bool:
    """Empty the server's caches; False where it refuses for ``timeout_s`` (requests still run)."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if http(f"{url}/flush_cache", method="POST")[0] == 200:
            return True
        time.sleep(0.5)
    return False


INFO_KEYS = (
    "max_total_num_tokens",
    "mem_fraction_static",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "attention_backend",
    "mm_attention_backend",
    "dtype",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "max_running_requests",
)


def describe_server(url: str) -> dict[str, Any]:
    """Settings that the server resolved (size of its KV cache, backends), and SpaceServe's own metrics and device
    memory of its encoder worker, where given."""
    status, text = http(f"{url}/server_info")
    info = json.loads(text) if status == 200 else {}
    status, text = http(f"{url}/metrics")
    own = [line for line in text.splitlines() if line.startswith("spaceserve:")] if status == 200 else []
    status, text = http(f"{url}/spaceserve/status")
    worker = json.loads(text) if status == 200 else {}
    return {
        "resolved": {key: info[key] for key in INFO_KEYS if key in info},
        "metrics": own,
        "encoder_gpu_memory": worker.get("gpu_memory"),
    }


def title(process: psutil.Process) -> str:
    """What the process calls itself, e.g. ``sglang::scheduler``, or the start of its command line, without paths."""
    command = [part for part in process.cmdline() if part.strip()]
    if len(command) > 1 and "python" in Path(command[0]).name:
        command = ["python", *command[1:]]
    return scrub(" ".join(command)).strip()[:60] or process.name()


def memory(servers: list[Server]) -> dict[str, Any]:
    """GPU memory in use, per process as nvidia-smi tells, and resident host memory per process of the servers.

    ``gpu_used_mib`` counts everything on the GPU, other arms' servers too where these are up; ``own`` says which
    processes belong to ``servers`` (MPS daemons count as everybody's).
    """
    host = []
    for server in servers:
        for process in server.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                rss_mib = process.memory_info().rss >> 20
                row = {"pid": process.pid, "role": server.spec.role, "name": title(process), "rss_mib": rss_mib}
                host.append(row)
    pids = {row["pid"] for row in host}
    gpu = [{**row, "own": row["pid"] in pids or "cuda-mps" in row["name"]} for row in gpu_processes()]
    return {"gpu_used_mib": gpu_memory_used_mib(), "gpu_processes": gpu, "host_processes": host}
