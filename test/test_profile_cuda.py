"""The profiler's CUDA timers on a stand-in of torch.cuda whose work runs at once: what they call, in which order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import gpu_profile
from spaceserve.partition import SimulatedPartitioner
from spaceserve.profile import contention, sweep, validate
from spaceserve.profile.contention import CudaPairTimer, measure_contention, measure_sharing
from spaceserve.profile.timing import CudaTimer
from spaceserve.sis import DeviceCurves
from spaceserve.sis.curves import CONTENTION_CASES
from spaceserve.sis.standin import standin_curves

pytestmark = pytest.mark.cpu


class FakeStream:
    """A stream with a clock of its own, in seconds: work moves it on, and waiting for another catches up with it."""

    made: ClassVar[list[FakeStream]] = []

    def __init__(self, device: object = None, priority: int = 0) -> None:
        FakeStream.made.append(self)
        self.cuda_stream = len(FakeStream.made)
        self.device = torch.device("cuda", 0)
        self.is_capturing = False
        self.now = 0.0

    def synchronize(self) -> None:
        assert not self.is_capturing, "a capturing stream must not be waited for"

    def wait_stream(self, other: FakeStream) -> None:
        self.now = max(self.now, other.now)

    def wait_event(self, event: FakeEvent) -> None:
        self.now = max(self.now, event.at)


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.at = enable_timing, 0.0

    def record(self) -> None:
        self.at = torch.cuda.current_stream().now  # type: ignore[attr-defined]

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timed, "an event without timing has no time"
        assert other.timed, "an event without timing has no time"
        return (other.at - self.at) * 1e3


def synchronize_all(device: object = None) -> None:
    latest = max(stream.now for stream in FakeStream.made)
    for stream in FakeStream.made:
        stream.now = latest


class FakeCuda:
    """What the timers use of torch.cuda. A graph notes what it captured and runs it at each replay."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._default = FakeStream()
        self.live_graphs = 0
        self.fail_captures = False
        fake = self

        class FakeGraph:
            def __init__(self) -> None:
                self.launches = 0

            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                assert capture_error_mode == "thread_local"
                fake.current.is_capturing = True
                fake.launched = 0

            def capture_end(self) -> None:
                fake.current.is_capturing = False
                if fake.fail_captures:
                    raise RuntimeError("operation not permitted when stream is capturing\nand a page more")
                self.launches = fake.launched
                fake.live_graphs += 1

            def replay(self) -> None:
                assert not fake.current.is_capturing
                fake.current.now += self.launches * fake.launch_s

            def reset(self) -> None:
                fake.live_graphs -= 1

        self.graph_type = FakeGraph
        self.launched = 0
        self.launch_s = 1e-4

    @property
    def current(self) -> FakeStream:
        return getattr(self._local, "stream", self._default)

    def run(self) -> None:
        self.launched += 1
        if not self.current.is_capturing:
            self.current.now += self.launch_s

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    replaced: dict[str, Any] = {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "CUDAGraph": made.graph_type,
        "current_stream": lambda device=None: made.current,
        "stream": made.stream,
        "synchronize": synchronize_all,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


class StreamedPartitioner(SimulatedPartitioner):
    """Simulated groups with a stand-in stream each."""

    def group(self, requested: int) -> Any:
        return self._with_stream(super().group(requested))

    def complement_of(self, requested: int) -> Any:
        found = super().complement_of(requested)
        return None if found is None else self._with_stream(found)

    def _with_stream(self, group: Any) -> Any:
        if "_fake_stream" not in group.__dict__:
            group._fake_stream = FakeStream()
            group.__class__ = type("Streamed", (type(group),), {"stream": property(lambda self: self._fake_stream)})
        return group


def test_short_work_is_timed_from_graphs_which_are_given_back(fake: FakeCuda) -> None:
    partitioner = SimulatedPartitioner(total_units=4, min_units=1, step=1)
    timer = CudaTimer()
    assert timer.measure(fake.run, partitioner.group(2), budget_ms=2.0) == pytest.approx(0.1)
    assert fake.live_graphs == 0
    fake.launch_s = 2e-3
    assert timer.measure(fake.run, partitioner.group(2), budget_ms=2.0) == pytest.approx(2.0)
    assert timer.measure(fake.run, partitioner.group(2), budget_ms=2.0, long_graph=True) == pytest.approx(2.0)
    assert fake.live_graphs == 0
    assert timer.check_graphs(fake.run, partitioner.group(1)) == pytest.approx(1.0)


def test_work_that_cannot_be_captured_is_timed_without_a_graph(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail_captures = True
    partitioner = SimulatedPartitioner(total_units=4, min_units=1, step=1)
    assert CudaTimer().measure(fake.run, partitioner.group(2), budget_ms=1.0) == pytest.approx(0.1)
    assert "operation not permitted when stream is capturing)" in caplog.text  # the first line alone


def test_both_sides_run_beside_each_other_in_every_mode(fake: FakeCuda) -> None:
    partitioner = StreamedPartitioner(total_units=32, min_units=8, step=8)
    pair = CudaPairTimer({"encoder": fake.run, "decode": fake.run, "prefill": fake.run}, True, budget_ms=1.0)
    factors = measure_contention(partitioner, partitioner.rungs, pair, lambda: None)
    assert set(factors) == set(CONTENTION_CASES)
    assert set(factors["decode_beside_encoder_unmasked"]) == {8, 16, 24, 32}
    rows = measure_sharing(partitioner, [8, 16], pair, lambda: None)
    assert [(row["mode"], row["decode_units"], row["prefill_units"]) for row in rows] == [
        ("both unmasked", 32, 32),
        ("both masked", 8, 24),
        ("prefill masked", 32, 24),
        ("both masked", 16, 16),
        ("prefill masked", 32, 16),
    ]
    assert contention.count_sharing([8, 16]) == len(rows)
    pair.close()


def test_a_pair_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(contention.PairTimer):
        def alone(self, side: str, group: Any) -> float:
            return 1.0

        def beside(self, side: str, group: Any, other: str, other_group: Any) -> float:
            if other == "prefill" or side == "prefill":
                raise RuntimeError("CUDA error")
            return 2.0

        def close(self) -> None: ...

    partitioner = SimulatedPartitioner(total_units=32, min_units=8, step=8)
    factors = measure_contention(partitioner, [8, 32], Failing(), lambda: None)
    assert set(factors) == {c for c in CONTENTION_CASES if "prefill" not in c}
    assert measure_sharing(partitioner, [8], Failing(), lambda: None) == []
    assert "CUDA error" in caplog.text


def test_small_complements_are_profiled_for_decode_alone() -> None:
    partitioner = SimulatedPartitioner(total_units=128, min_units=16, step=8)
    assert sweep.small_decode_units(partitioner) == [16, 24, 32, 48, 64]
    groups = sweep.Groups.of(partitioner, (16, 64, 128), sweep.small_decode_units(partitioner))
    assert list(groups.of_phase("encoder")) == [16, 64, 128]
    assert list(groups.of_phase("prefill")) == [64, 128], "the encoder's side, a third of the device and more"
    assert list(groups.of_phase("decode")) == [16, 24, 32, 48, 64, 112, 128]
    assert sweep.small_decode_units(SimulatedPartitioner(total_units=4, min_units=1, step=1)) == []


def test_half_of_the_validated_groups_were_not_profiled() -> None:
    partitioner = SimulatedPartitioner(total_units=132, min_units=16, step=8)
    profiled = sweep.pick_rungs(partitioner, 9)
    groups = validate.pick_groups(partitioner, profiled, 4, 16)
    assert len(groups.encoder) == len(groups.decoder) == 4
    assert len(set(groups.encoder) - set(profiled)) == 2
    complements = {rest.granted for n in profiled if (rest := partitioner.complement_of(n)) is not None} | {132}
    assert len(set(groups.decoder) - complements) == 2
    every = validate.pick_groups(partitioner, partitioner.rungs, 4, 16)
    assert (min(every.encoder), max(every.encoder), len(every.encoder)) == (16, 132, 4)


def test_the_gpu_script_prints_the_tables_of_a_curve_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "mode": "both masked",
        "decode_units": 24,
        "prefill_units": 108,
        "decode_alone_ms": 1.0,
        "prefill_alone_ms": 3.0,
    }
    row |= {"decode_ms": 1.25, "prefill_ms": 3.5}
    data = {**standin_curves().to_json(), "sharing": [row]}
    DeviceCurves.from_json(data).save(tmp_path / "curves.json")
    gpu_profile.print_curves(tmp_path / "curves.json")
    printed = capsys.readouterr().out
    assert "decode on  24: 1.000 -> 1.250" in printed
    assert "decode_beside_encoder_masked" in printed
    assert len([line for line in printed.splitlines() if line.strip().startswith(("16 ", "132 "))]) == 2
