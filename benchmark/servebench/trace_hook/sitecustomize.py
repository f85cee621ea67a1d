"""Lets processes of a server under test record what they compute, on a signal, without a change to the server.

Python imports this module at the start of every process that has its folder in PYTHONPATH. Where SPACESERVE_TRACE_DIR
names a folder, a thread of the encoder worker and of the scheduler waits there for the file ``go``, then records with
torch's profiler until the file ``stop`` appears, and leaves ``<process>-<pid>.json``: ``{"lane", "clock": "unix",
"device", "intervals_us": [[start, end, name, stream], ...]}``. On a GPU these are its kernels, copies and fills (the
profiler sees the whole process), on the CPU the operators of all threads. One recording for each folder.

Not part of SpaceServe: nothing imports it unless a benchmark says so.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

LANES = {"spaceserve::encoder": "encoder", "sglang::scheduler": "scheduler"}
POLL_S = 0.25
LONGEST_S = 30.0


def lane() -> str | None:
    """What this process is, by the title that it gave itself; None for those that compute nothing."""
    try:
        title = Path("/proc/self/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return next((name for start, name in LANES.items() if title.startswith(start)), None)


def wait_for(path: Path, timeout_s: float = float("inf")) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(POLL_S)


def record(folder: Path, name: str) -> dict[str, Any]:
    """Record between the two signals."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"activities": [ProfilerActivity.CUDA]}
    if not on_gpu:
        from torch._C._profiler import _ExperimentalConfig

        every_thread = _ExperimentalConfig(profile_all_threads=True)
        options = {"activities": [ProfilerActivity.CPU], "experimental_config": every_thread}
    profiler = profile(**options)
    profiler.start()
    (folder / f"ready-{name}-{os.getpid()}").touch()
    wait_for(folder / "stop", LONGEST_S)
    profiler.stop()
    inner: Any = profiler.profiler
    rows = [
        [event.start_ns() / 1e3, event.end_ns() / 1e3, event.name(), event.device_resource_id()]
        for event in inner.kineto_results.events()
        if event.duration_ns() > 0
        and (str(event.device_type()) == "DeviceType.CUDA") == on_gpu
        and not event.is_user_annotation()  # it spans kernels and is none
    ]
    return {"lane": name, "clock": "unix", "device": "cuda" if on_gpu else "cpu", "intervals_us": sorted(rows)}


def watch(folder: Path) -> None:
    wait_for(folder / "go")
    name = lane()
    if name is None:
        return
    target = folder / f"{name}-{os.getpid()}.json"
    try:
        text = json.dumps(record(folder, name))
    except Exception as error:  # the server must go on
        text = json.dumps({"lane": name, "error": f"{type(error).__name__}: {error}"})
    scratch = target.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(target)


def start() -> None:
    folder = os.environ.get("SPACESERVE_TRACE_DIR")
    if folder:
        threading.Thread(target=watch, args=(Path(folder),), daemon=True, name="trace-hook").start()


if "SPACESERVE_TRACE_DIR" in os.environ and "multiprocessing.resource_tracker" not in " ".join(sys.argv):
    start()
    os.register_at_fork(after_in_child=start)
