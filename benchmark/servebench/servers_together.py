"""Servers of several arms that are up at the same time on one machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servebench import kept as kept_servers
from servebench.arms import Arm
from servebench.servers import Server, ServerFailed, free_ports, mps_daemon, start_server


class ServersTogether:
    """Servers of several arms that start and run at once. Arms that fail are in ``failed`` (name to reason), those that
    are up in ``start_s`` (name to seconds of the start). ``kept``: a file that names servers of an earlier call."""

    def __init__(
        self, arms: Sequence[Arm], model: str, work_dir: Path, stack: contextlib.ExitStack, kept: Path | None = None
    ) -> None:
        self.groups: dict[str, list[Server]] = {}
        self.failed: dict[str, str] = {}
        self.start_s: dict[str, float] = {}
        self._kept = kept
        self._arms, self._model, self._work_dir = {arm.name: arm for arm in arms}, model, work_dir
        self._begin = time.monotonic()
        ports = free_ports(2 * len(arms))
        self._ports = {arm.name: (ports[2 * place], ports[2 * place + 1]) for place, arm in enumerate(arms)}
        self._env: dict[str, dict[str, str]] = {}
        if kept is not None:
            self.groups, self.start_s = kept_servers.load(kept, arms)
        for arm in arms:
            if arm.name in self.start_s:
                continue
            self.groups[arm.name] = []
            try:
                self._env[arm.name] = stack.enter_context(mps_daemon()) if arm.needs_mps else {}
                self._start_next(arm)
            except (ServerFailed, OSError, ValueError) as error:
                self._fail(arm.name, str(error))

    def _start_next(self, arm: Arm) -> None:
        group, (port, port2) = self.groups[arm.name], self._ports[arm.name]
        spec = arm.servers[len(group)]
        values = {"model": self._model, "port": str(port), "port2": str(port2)}
        log = self._work_dir / f"{arm.name}.{spec.role}.log"
        group.append(start_server(spec, log, port if spec.role == "server" else port2, self._env[arm.name], values))

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self.stop([name])

    def wait_ready(self, deadline: float) -> None:
        """Until every arm answers or has failed, as those have that are not ready at ``deadline`` (monotonic)."""
        waiting = [name for name in self._arms if name not in self.failed and name not in self.start_s]
        while waiting:
            for name in list(waiting):
                arm, group = self._arms[name], self.groups[name]
                try:
                    ready = group[-1].is_ready(deadline)
                    if ready and len(group) < len(arm.servers):
                        self._start_next(arm)
                    elif ready:
                        self.start_s[name] = round(time.monotonic() - self._begin, 1)
                        waiting.remove(name)
                        if self._kept is not None:
                            kept_servers.save(self._kept, self.groups, self.start_s)
                except (ServerFailed, OSError) as error:
                    self._fail(name, str(error))
                    waiting.remove(name)
            if waiting:
                time.sleep(0.2)

    def stop(self, names: Iterable[str]) -> None:
        """End these arms' servers, all at the same time."""
        ending = [server for name in names for server in self.groups[name]]
        with ThreadPoolExecutor(max(1, len(ending))) as pool:
            list(pool.map(Server.stop, ending))


@contextlib.contextmanager
def running_together(
    arms: Sequence[Arm], *, model: str, work_dir: Path, kept: Path | None = None
) -> Iterator[ServersTogether]:
    """Start all arms' servers at once; they are up after ``wait_ready``. All are stopped in the end, unless ``kept``
    names a file: then those that it names are used, and those that are up go on. Raises ValueError for arms that need
    an MPS daemon of the runner's, which ends with it, together with ``kept``."""
    if kept is not None and any(arm.needs_mps for arm in arms):
        raise ValueError("servers under the runner's MPS daemon cannot be kept")
    with contextlib.ExitStack() as stack:
        together = ServersTogether(arms, model, work_dir, stack, kept)
        try:
            yield together
        finally:
            # Before they were written down nobody would find them again.
            together.stop(name for name in list(together.groups) if kept is None or not together.start_s.get(name))
