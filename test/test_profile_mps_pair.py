"""Contention across two processes: the protocol between the profiler and its neighbour, on a stand-in of torch.cuda."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from spaceserve.partition import MpsDaemon
from spaceserve.profile import __main__ as main_module
from spaceserve.profile import mps_pair
from spaceserve.profile.contention import measure_contention
from spaceserve.profile.mps_pair import MpsPairTimer, Start, mps_if_possible, neighbour
from spaceserve.sis.curves import CONTENTION_CASES
from test_profile_cuda import FakeCuda, StreamedPartitioner, fake

pytestmark = pytest.mark.cpu

__all__ = ["fake"]  # the fixture


def in_a_thread(loads: Mapping[str, Callable[[], object]], ran: list[tuple[int, bool]]) -> Start:
    """A neighbour in a thread of this process, on groups of its own, that notes where it was sent."""

    class Noting(StreamedPartitioner):
        def group(self, requested: int) -> Any:
            ran.append((requested, False))
            return super().group(requested)

        def complement_of(self, requested: int) -> Any:
            ran.append((self.total_units - requested, True))
            return super().complement_of(requested)

    def start() -> tuple[Any, Callable[[], None]]:
        pipe, child = multiprocessing.Pipe()
        partitioner = Noting(total_units=32, min_units=8, step=8)
        thread = threading.Thread(target=neighbour, args=(child, loads, partitioner, True), daemon=True)
        thread.start()

        def join() -> None:
            thread.join(timeout=30)
            assert not thread.is_alive()

        return pipe, join

    return start


def test_the_neighbour_runs_the_other_side_where_it_is_told(fake: FakeCuda) -> None:
    ran: list[tuple[int, bool]] = []
    counts = {"encoder": 0, "decode": 0, "prefill": 0}

    def load(side: str) -> Callable[[], None]:
        def run() -> None:
            counts[side] += 1
            fake.run()

        return run

    loads = {side: load(side) for side in counts}
    partitioner = StreamedPartitioner(total_units=32, min_units=8, step=8)
    pair = MpsPairTimer(dict.fromkeys(counts, fake.run), True, in_a_thread(loads, ran), budget_ms=1.0)
    factors = measure_contention(partitioner, partitioner.rungs, pair, lambda: None)
    pair.close()
    assert set(factors) == set(CONTENTION_CASES)
    # The stand-in's streams do not disturb each other.
    assert all(factor == pytest.approx(1.0) for table in factors.values() for factor in table.values())
    assert {(8, False), (24, True), (32, False)} <= set(ran)
    assert all(count > 0 for count in counts.values())


def test_a_neighbour_that_fails_is_reported_and_the_pair_left_out(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: misaligned address\nand a page more")

    loads: dict[str, Callable[[], object]] = {"encoder": fake.run, "decode": fake.run, "prefill": fails}
    partitioner = StreamedPartitioner(total_units=32, min_units=8, step=8)
    own: dict[str, Callable[[], object]] = dict.fromkeys(loads, fake.run)
    pair = MpsPairTimer(own, True, in_a_thread(loads, []), budget_ms=1.0)
    assert pair.beside("encoder", partitioner.group(8), "decode", partitioner.group(32)) == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match=r"misaligned address$"):
        pair.beside("encoder", partitioner.group(8), "prefill", partitioner.group(32))
    pair.close()


def test_a_neighbour_that_does_not_start_is_an_error(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps_pair, "ANSWER_TIMEOUT_S", 0.05)
    ends: list[Any] = []

    def start() -> tuple[Any, Callable[[], None]]:
        pipe, child = multiprocessing.Pipe()
        ends.append(child)
        return pipe, lambda: None

    with pytest.raises(RuntimeError, match="no answer"):
        MpsPairTimer({"encoder": fake.run}, True, start)


def test_the_environment_is_as_before_once_the_profile_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Running:
        reason: str | None = None
        client_environ: ClassVar[dict[str, str]] = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}

        def __enter__(self) -> Running:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps_pair, "MpsDaemon", Running)
    with mps_if_possible() as runs:
        assert runs
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.setattr(mps_pair, "MpsDaemon", lambda: MpsDaemon(environ={"PATH": "/nowhere"}))
    with mps_if_possible() as runs:
        assert not runs


def test_the_profile_runs_below_the_process_that_has_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon can only end after its clients, and a process cannot give its CUDA context back."""
    commands: list[list[str]] = []

    class Result:
        returncode = 7

    def run(command: list[str], check: bool) -> Result:
        commands.append(command)
        return Result()

    monkeypatch.setattr(main_module, "gpu_is_present", lambda: True)
    monkeypatch.setattr(main_module, "mps_if_possible", lambda: contextlib.nullcontext(True))
    monkeypatch.setattr(main_module.subprocess, "run", run)
    arguments = ["--model-path", str(tmp_path), "--quick"]
    assert main_module.main(arguments) == 7
    assert commands[0][1:] == ["-m", "spaceserve.profile", *arguments, "--under-mps"]
    # Without a daemon, and without two sides to measure, it goes on in this process: here there is no model.
    assert main_module.main([*arguments, "--no-contention"]) == 2
    monkeypatch.setattr(main_module, "mps_if_possible", lambda: contextlib.nullcontext(False))
    assert main_module.main(arguments) == 2
    assert len(commands) == 1
