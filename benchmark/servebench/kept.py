"""Servers that outlive the call that started them, so that the next call need not start them again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from servebench.arms import Arm, ServerSpec
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
    """Write down the servers of the arms in ``start_s``, which are up, beside what the file has of other arms."""
    arms: dict[str, Any] = read(path)
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
    """The servers of ``arms`` that still run with the same command, and how long their start took. Those of an arm
    whose command is another now are stopped."""
    stored = read(path)
    groups: dict[str, list[Server]] = {}
    start_s: dict[str, float] = {}
    for arm in arms:
        rows = stored.get(arm.name, {"servers": []})["servers"]
        if [row["template"] for row in rows] != [spec.template for spec in arm.servers]:
            stop_rows(rows)
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
    count = sum(stop_rows(entry["servers"]) for entry in read(path).values())
    path.unlink(missing_ok=True)
    return count


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def stop_rows(rows: Iterable[dict[str, Any]]) -> int:
    """End those that still run; how many there were."""
    count = 0
    for row in rows:
        process = FoundProcess(row["pid"], row["created_s"])
        if process.poll() is None:
            Server(ServerSpec("server", row["template"]), row["url"], process, Path(row["log"])).stop()
            count += 1
    return count
