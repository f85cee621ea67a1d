"""State board across real processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from spaceserve.sis.state_board import (
    DecodeState,
    StateBoardReader,
    StateBoardTornError,
    StateBoardWriter,
    _path,
)

pytestmark = pytest.mark.cpu


@pytest.fixture
def name() -> str:
    return f"spaceserve-test-{uuid.uuid4().hex}"


def consistent_state(i: int) -> DecodeState:
    """Every field follows from the step, so that a torn copy shows."""
    return DecodeState(
        timestamp_ns=i * 7,
        step=i,
        running_batch=i % 251,
        context_tokens_sum=i * 3,
        prefill_tokens_running=i % 8192,
    )


def test_states_round_trip_and_the_creator_unlinks(name: str) -> None:
    with StateBoardWriter(name) as writer:
        with StateBoardReader(name) as reader:
            assert reader.read() is None
            for i in (1, 2, 1 << 50):
                writer.publish(consistent_state(i))
                assert reader.read() == consistent_state(i)
        assert _path(name).exists()  # a reader that closes leaves the board
        late = StateBoardReader(name)
    assert not _path(name).exists()
    assert late.read() == consistent_state(1 << 50)  # mapped still
    late.close()
    late.close()
    writer.close()
    with pytest.raises(FileNotFoundError):
        StateBoardReader(name)
    with pytest.raises(ValueError, match="closed"):
        writer.publish(consistent_state(1))
    with pytest.raises(ValueError, match="closed"):
        late.read()


def test_mean_context_and_staleness() -> None:
    state = DecodeState(timestamp_ns=1_000, step=1, running_batch=4, context_tokens_sum=1000)
    assert state.mean_context_tokens == 250.0
    assert DecodeState(timestamp_ns=0, step=0, running_batch=0, context_tokens_sum=0).mean_context_tokens == 0.0
    assert not state.is_stale(now_ns=1_500, max_age_ns=500)
    assert state.is_stale(now_ns=1_501, max_age_ns=500)


def test_names_are_taken_once_and_checked(name: str) -> None:
    with StateBoardWriter(name):
        with pytest.raises(FileExistsError):
            StateBoardWriter(name)
        assert _path(name).stat().st_mode & 0o777 == 0o600
    for bad in ("", "a/b", "..", ".hidden"):
        with pytest.raises(ValueError, match="name"):
            StateBoardWriter(bad)


def test_files_that_are_no_board_are_refused(name: str) -> None:
    file = _path(name)
    try:
        for content in (b"", bytes(128), b"x" * 4096):
            file.write_bytes(content)
            with pytest.raises(ValueError, match="no state board"):
                StateBoardReader(name)
    finally:
        file.unlink()


def test_a_state_that_does_not_fit_leaves_the_last_one(name: str) -> None:
    with StateBoardWriter(name) as writer, StateBoardReader(name) as reader:
        writer.publish(consistent_state(5))
        with pytest.raises(ValueError, match="does not fit"):
            writer.publish(DecodeState(timestamp_ns=0, step=-1, running_batch=0, context_tokens_sum=0))
        assert reader.read() == consistent_state(5)


def test_half_written_and_damaged_boards_are_never_returned(name: str) -> None:
    with StateBoardWriter(name) as writer, StateBoardReader(name) as reader:
        writer.publish(consistent_state(9))
        assert writer._map is not None
        writer._map.words[1] += 1  # a writer that died inside a write
        with pytest.raises(StateBoardTornError):
            reader.read(max_tries=20)
        writer._map.words[1] -= 1
        assert reader.read() == consistent_state(9)
        writer._map.view[24] ^= 1  # stores reordered: the sequence is even, the payload is not yet whole
        with pytest.raises(StateBoardTornError):
            reader.read(max_tries=20)
        writer._map.view[24] ^= 1
        writer._map.words[1] += 2  # whole payload under another sequence
        with pytest.raises(StateBoardTornError):
            reader.read(max_tries=20)


def _write_for_ever(name: str, ready: Event, stop: Event) -> None:
    with StateBoardWriter(name) as writer:
        writer.publish(consistent_state(1))
        ready.set()
        i = 1
        while not stop.is_set():
            for _ in range(500):
                i += 1
                writer.publish(consistent_state(i))


def test_no_torn_read_beside_a_writer_in_another_process(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=_write_for_ever, args=(name, ready, stop))
    process.start()
    try:
        assert ready.wait(30)
        with StateBoardReader(name) as reader:
            last, distinct, num_reads = 0, 0, 0
            deadline = time.monotonic() + 120  # on a busy machine the writer may not run for a while
            while num_reads < 30_000 or distinct <= 10:
                assert time.monotonic() < deadline, "the writer hardly wrote between two reads: nothing was tested"
                num_reads += 1
                state = reader.read(max_tries=100_000)
                assert state is not None
                assert state == consistent_state(state.step)
                assert state.step >= last
                distinct += state.step > last
                last = state.step
    finally:
        stop.set()
        process.join(30)
    assert process.exitcode == 0
    assert not _path(name).exists()


def test_an_attacher_neither_unlinks_nor_warns_at_exit(name: str) -> None:
    code = (
        "import sys; from spaceserve.sis.state_board import StateBoardReader\n"
        "print(StateBoardReader(sys.argv[1]).read().step)"  # never closed, as after a crash
    )
    root = Path(__file__).parents[1] / "python"
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "always"}
    with StateBoardWriter(name) as writer:
        writer.publish(consistent_state(42))
        done = subprocess.run(
            [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "42", "")
        assert _path(name).exists()
