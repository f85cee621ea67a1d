"""How the server's processes are started.

SGLang spawns each of its processes, and each imports PyTorch and SGLang anew: about 10 s of CPU time, four times, which
on two cores is most of the start. Without a GPU, where no process has a CUDA context that a fork would break, they are
forked instead from a server process that imported everything once (`multiprocessing`'s forkserver), while the main
process does its own imports.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import setproctitle

import spaceserve.quiet  # noqa: F401 - in every process, before SGLang: this module is the first that each imports
from spaceserve.hooks import Hook

PRELOADED = (
    "spaceserve.group_signals",
    "spaceserve.quiet",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.multimodal.processors.qwen_vl",
    "spaceserve.encoder.process",
    "spaceserve.encoder.service",
    "spaceserve.encoder.split",
    "spaceserve.scheduler.process",
)


class WithEnvironment:
    """A process's entry point that brings the parent's environment as it was when the process was started.

    The forkserver gives its children its own environment, which is older: SGLang sets variables on the way. Signals to
    the whole process group are left to the launcher.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._environment: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_function": self._function, "_environment": dict(os.environ)}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        # It looks for the place of the title when first called, and finds it by the environment as it was at the start.
        setproctitle.getproctitle()
        for name in set(os.environ) - set(self._environment):
            del os.environ[name]
        os.environ.update(self._environment)
        import spaceserve.group_signals  # noqa: F401 - importing it is what it is for

        self._function(*args, **kwargs)


def may_fork() -> bool:
    """Whether this machine has no accelerator whose driver a fork would break."""
    return not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists()


def start_forkserver(temp_dir: str) -> None:
    """Begin to import, in a process of its own, what every process of the server needs.

    Its socket lies in `temp_dir`: the folder that multiprocessing would make stays behind in a process that is killed.
    """
    os.mkdir(temp_dir)
    mp.current_process()._config["tempdir"] = temp_dir  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


def stop_forkserver() -> None:
    """End it: this server's processes are not forked after all. Does nothing where it was not started."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def context(*, forked: bool) -> mp.context.BaseContext:
    """The multiprocessing context in which the server's processes are made."""
    return mp.get_context("forkserver" if forked else "spawn")


def start_method_hook() -> Hook:
    """SGLang sets the start method for all of its processes; this one has the last word."""

    def keep_forkserver(result: Any, server_args: Any) -> None:
        mp.set_start_method("forkserver", force=True)

    return Hook(
        target="sglang.srt.entrypoints.engine._set_envs_and_config",
        function=keep_forkserver,
        kind="after",
        why="fork the processes from one that has imported everything",
        parameters=("server_args",),
    )
