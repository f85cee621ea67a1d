"""Servers that outlive the call that started them, so that the next call need not start them again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from servebench.arms import Arm
from servebench.results import write_atomic
from servebench.servers import Server, http


class FoundProcess:
    """A process that another call started, as far as ``Server`` needs it."""

    def __init__(self, pid: int, created_s: float) -> None:
        self.pid, self._created_s = pid, created_s
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while it runs; its exit status is not known to us, so -1 afterwards."""
        try:
            process = psutil.Process(self.pid)
            # The number may have gone to another process.
            alive = abs(process.create_time() - self._created_s) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            alive = False
        self.returncode = None if alive else -1
        return self.returncode


def save(path: Path, groups: dict[str, list[Server]], start_s: dict[str, float]) -> None:
    """Write down the servers of the arms in ``start_s``, which are those that are up."""
    arms: dict[str, Any] = {}
    for name, seconds in start_s.items():
        rows = []
        for server in groups[name]:
            if not psutil.pid_exists(server.process.pid):
                continue
            created_s = psutil.Process(server.process.pid).create_time()
            row = {"pid": server.process.pid, "created_s": created_s, "url": server.url, "log": str(server.log)}
            rows.append({**row, "template": server.spec.template})
        arms[name] = {"start_s": seconds, "servers": rows}
    write_atomic(path, json.dumps(arms, indent=1) + "\n")


def load(path: Path, arms: Iterable[Arm]) -> tuple[dict[str, list[Server]], dict[str, float]]:
    """The servers of ``arms`` that still run with the same command, and how long their start took."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    groups: dict[str, list[Server]] = {}
    start_s: dict[str, float] = {}
    for arm in arms:
        rows = stored.get(arm.name, {"servers": []})["servers"]
        if [row["template"] for row in rows] != [spec.template for spec in arm.servers]:
            continue
        group = [
            Server(spec, row["url"], FoundProcess(row["pid"], row["created_s"]), Path(row["log"]))
            for spec, row in zip(arm.servers, rows, strict=True)
        ]
        if all(server.process.poll() is None and http(f"{server.url}/health")[0] == 200 for server in group):
            groups[arm.name], start_s[arm.name] = group, stored[arm.name]["start_s"]
    return groups, start_s


def stop_all(path: Path) -> int:
    """End every server that the file names and that still runs, and remove the file; how many there were."""
    from servebench.arms import ServerSpec

    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    count = 0
    for entry in stored.values():
        for row in entry["servers"]:
            process = FoundProcess(row["pid"], row["created_s"])
            if process.poll() is None:
                Server(ServerSpec("server", row["template"]), row["url"], process, Path(row["log"])).stop()
                count += 1
    path.unlink(missing_ok=True)
    return count
