"""The results folder: ``traces/`` and ``slices/``, both JSON, written atomically: a killed run leaves no half file.

A slice is one workload run on two or more arms in one go on one machine. Its name says all that: model, workload,
arms, repeat. A slice whose file says ``done`` is not run again.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servebench.workload import Trace, Workload, load_trace, make_trace

DONE = "done"
FAILED = "failed"


def write_atomic(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def dump_slice(data: dict[str, Any]) -> str:
    """Indented JSON, with each request's record on one line."""
    rows: list[str] = []
    shallow = dict(data)
    shallow["arms"] = []
    for arm in data["arms"]:
        shallow["arms"].append({**arm, "requests": f"@rows{len(rows)}@"})
        lines = ",\n".join("   " + json.dumps(row, separators=(",", ":")) for row in arm["requests"])
        rows.append(f"[\n{lines}\n  ]" if lines else "[]")
    text = json.dumps(shallow, indent=1, allow_nan=False)
    for number, block in enumerate(rows):
        text = text.replace(f'"@rows{number}@"', block)
    return text + "\n"


@dataclass(frozen=True)
class SliceKey:
    """Identity of a slice. ``arms`` are names, sorted, so that the order of running does not matter."""

    model: str
    workload: str
    arms: tuple[str, ...]
    repeat: int

    @property
    def name(self) -> str:
        safe = [re.sub(r"[^A-Za-z0-9.-]", "_", part) for part in (self.model, Workload.parse(self.workload).slug)]
        return f"{safe[0]}__{safe[1]}__{'+'.join(sorted(self.arms))}__r{self.repeat}"


class Results:
    """A results folder of one machine type."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: list[Path] = []

    def slice_path(self, key: SliceKey) -> Path:
        return self.root / "slices" / f"{key.name}.json"

    def status(self, key: SliceKey) -> str | None:
        """``done``, ``failed``, or None where it was never run."""
        path = self.slice_path(key)
        return json.loads(path.read_text())["status"] if path.exists() else None

    def save_slice(self, key: SliceKey, data: dict[str, Any]) -> Path:
        path = self.slice_path(key)
        write_atomic(path, dump_slice(data))
        self.written.append(path)
        return path

    def slices(self, status: str | None = DONE) -> list[dict[str, Any]]:
        """All stored slices with ``status``, by name."""
        loaded = [json.loads(path.read_text()) for path in sorted((self.root / "slices").glob("*.json"))]
        return [data for data in loaded if status is None or data["status"] == status]

    def saturation(self, model: str, workload: Workload) -> float | None:
        """S in requests per second: the best stock arm's median over the repeats measured so far; None if unknown.

        A slice in which another arm failed counts too.
        """
        rates: dict[str, list[float]] = {}
        wanted = Workload.parse(workload.saturation_name)
        for data in self.slices(None):
            measured = Workload.parse(data["workload"])
            if data["model"] != model or (measured.kind, measured.size) != (wanted.kind, wanted.size):
                continue
            for arm in data["arms"]:
                rate = arm["summary"].get("saturation_rate")
                if not arm["ours"] and rate:
                    rates.setdefault(arm["arm"], []).append(rate)
        return max((statistics.median(values) for values in rates.values()), default=None)

    def trace(self, model: str, workload: Workload, repeat: int, *, seed: int, **options: Any) -> Trace:
        """The stored trace, drawn and stored first if there is none.

        Relative rates are settled here once: later slices reuse the stored arrivals even if S is measured again.
        Raises ValueError where S is unknown or the stored trace was drawn with other options.
        """
        prefix = f"{model}__" if workload.relative else ""
        path = self.root / "traces" / f"{prefix}{workload.slug}__r{repeat}.json"
        if path.exists():
            stored = load_trace(path)
            rate = stored.rate if workload.relative else None
            if stored.digest != make_trace(workload, seed + repeat, rate=rate, **options).digest:
                raise ValueError(f"{path.name} was drawn with other options (seed, output length, scale): remove it")
            return stored
        rate = None
        if workload.relative:
            saturation = self.saturation(model, workload)
            if saturation is None:
                raise ValueError(f"{workload.name}: run {workload.saturation_name} first, S is unknown")
            rate = round(workload.rate * saturation, 4)
        trace = make_trace(workload, seed + repeat, rate=rate, **options)
        write_atomic(path, trace.to_json())
        self.written.append(path)
        return trace

    def bundle(self, path: Path) -> None:
        """Pack what this run wrote; unpack it with ``tar xzf FILE -C RESULTS``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with tarfile.open(temporary, "w:gz") as archive:
            for file in dict.fromkeys(self.written):
                archive.add(file, arcname=str(file.relative_to(self.root)))
        temporary.replace(path)
