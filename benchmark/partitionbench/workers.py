"""Runs a one-process section in a process of its own."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

from partitionbench.confine import confinement
from partitionbench.gpu import Json, guarded
from partitionbench.kernels import kernel_scaling
from partitionbench.switch import switching

SECTION_TIMEOUT_S = {"confine": 60.0, "switch": 60.0, "kernels": 90.0}


class Worker:
    """A process for one one-process section: a broken CUDA context ends with it.

    It imports torch at once, so that the imports of all sections overlap, and touches the GPU when told to.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(section, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, left_s: float) -> Json:
        """The section's result, within `left_s` seconds and the section's own limit."""
        timeout_s = max(0.0, min(SECTION_TIMEOUT_S[self._section], left_s))
        try:
            self._pipe.send("go")
            if not self._pipe.poll(timeout_s):
                return {"failed": f"no result within {timeout_s:.0f} s"}
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            return {"failed": f"the process died with status {self._process.exitcode}"}
        finally:
            self._process.join(5)
            if self._process.is_alive():
                self._process.kill()


def worker_main(section: str, pipe: Any) -> None:
    import torch  # noqa: F401

    pipe.recv()
    pipe.send(guarded({"confine": confinement, "switch": switching, "kernels": kernel_scaling}[section]))
