"""Both sides masked: the decoder's ladder, the choice before each step, what the encoder says, and the capture."""

from __future__ import annotations

import inspect
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from spaceserve.config import SmPartition, SpaceServeConfig
from spaceserve.encoder.units_in_use import UnitsInUse
from spaceserve.hooks import check_signature
from spaceserve.partition import SimulatedPartitioner
from spaceserve.scheduler import decode_graphs as module
from spaceserve.scheduler.decode_graphs import (
    DecodeGraphs,
    decode_graph_hooks,
    decode_graphs,
    decoder_groups,
    obstacle,
    step_counter,
)
from spaceserve.scheduler.encoder_watch import ATTACH_NS, STALE_NS, EncoderWatch
from spaceserve.scheduler.side_lanes import PrefillLanes
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.sis.prefill_share import PrefillShare
from spaceserve.sis.standin import standin_curves
from spaceserve.sis.state_board import (
    EncoderBoardReader,
    EncoderBoardWriter,
    EncoderState,
    StateBoardReader,
    StateBoardWriter,
    _path,
)

pytestmark = pytest.mark.cpu

# The encoder's groups on an H200.
H200_RUNGS = (*range(20, 117, 8), 132)
LADDER = DecoderLadder(total_units=132, rungs=(32, 48, 64))


@pytest.fixture
def name() -> str:
    return f"spaceserve-test-{uuid.uuid4().hex}"


# ---- the ladder


def test_decode_keeps_clear_of_what_runs_beside_it() -> None:
    by_beside = {0: 132, 1: 64, 20: 64, 68: 64, 69: 48, 76: 48, 84: 48, 85: 32, 100: 32, 101: 132, 116: 132, 117: 132}
    assert {beside: LADDER.units(beside) for beside in by_beside} == by_beside
    for beside in range(133):
        units = LADDER.units(beside)
        assert units == 132 or units + beside <= 132
    none = DecoderLadder(total_units=132, reason="why not")
    assert {none.units(beside) for beside in range(133)} == {132}


def test_sis_may_use_rungs_whose_complement_has_graphs() -> None:
    assert LADDER.encoder_rungs(H200_RUNGS) == (68, 84, 100, 132)
    assert DecoderLadder(total_units=132).encoder_rungs(H200_RUNGS) == (132,)
    for units in (0, 1, 68, 100):
        LADDER.check(units)
    for units in (101, 117, 132):
        with pytest.raises(ValueError, match=r"32, 48, 64 SMs, which leave the encoder 100 at most"):
            LADDER.check(units)
    with pytest.raises(ValueError, match="why not"):
        DecoderLadder(reason="why not").check(0)


def test_the_ladder_travels_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "decoder.json"
    assert DecoderLadder.read(path) is None
    LADDER.write(path, steps={"48": 3})
    assert DecoderLadder.read(path) == LADDER
    assert json.loads(path.read_text())["steps"] == {"48": 3}


def test_groups_of_the_decoder_on_several_devices() -> None:
    sizes = {}
    for total in (132, 108, 64, 8):
        step = 1 if total == 8 else 8
        partitioner = SimulatedPartitioner(total_units=total, min_units=min(16, total // 8), step=step)
        groups = decoder_groups(partitioner)
        assert all(group.is_complement and group.granted >= total * 0.24 for group in groups)
        sizes[total] = [group.granted for group in groups]
        assert sizes[total] == sorted(sizes[total], reverse=True)
        assert 1 <= len(groups) <= 3
    assert sizes[8] == [4, 3, 2]
    # As an H200 grants them: complements of 68, 84 and 100.
    like_h200 = SimulatedPartitioner(total_units=132, min_units=16, step=4)
    like_h200.rungs = H200_RUNGS
    assert [group.granted for group in decoder_groups(like_h200)] == [64, 48, 32]


# ---- modes


def test_modes_say_which_sides_are_masked() -> None:
    assert SmPartition.parse("both+static:84") == SmPartition(kind="static", num_sms=84, mask_mode="both")
    assert SmPartition.parse("both+sis:2:4") == SmPartition(
        kind="sis", decode_weight=2.0, reconsider_layers=4, mask_mode="both"
    )
    assert SmPartition.parse("both+auto").mask_mode == "both"
    assert SmPartition.parse("sis").mask_mode == "encoder"
    assert SpaceServeConfig(sm_partition="both+sis").sm_partition == "both+sis"
    for bad in ("both", "both+", "both+off", "both+both+sis", "encoder+sis", "both+static:0", "both sis"):
        with pytest.raises(ValueError, match="--sm-partition"):
            SmPartition.parse(bad)


def test_prefill_s_share_knows_what_a_masked_decode_costs() -> None:
    rows = [
        {"mode": "both unmasked", "prefill_units": 132, "decode_ms": 4.4, "prefill_ms": 7.4},
        {"mode": "prefill masked", "prefill_units": 100, "decode_ms": 1.6, "prefill_ms": 10.9},
        {"mode": "both masked", "prefill_units": 100, "decode_ms": 2.0, "prefill_ms": 9.0},
    ]
    curves = replace(
        standin_curves(), sharing=[{**row, "decode_alone_ms": 1.0, "prefill_alone_ms": 6.0} for row in rows]
    )
    assert PrefillShare(curves, (100,))._at(100) == (10.9 / 6.0, 1.6)
    assert PrefillShare(curves, (100,), "both")._at(100) == (9.0 / 6.0, 2.0)


def test_lanes_of_prefill_follow_the_mask_mode_and_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "the device's stream")
    made: list[str] = []
    noted: list[int] = []

    def share(partitioner: Any, mask_mode: str) -> Any:
        made.append(mask_mode)
        units = {"encoder": 92, "both": 84}[mask_mode]
        return SimpleNamespace(
            rungs=(units,),
            units=lambda **state: units,
            alone_ms=lambda tokens, prefix: 10.0,
            decode_weight=1.0,
        )

    partitioner: Any = SimpleNamespace(
        total_units=132, group=lambda n: SimpleNamespace(stream=f"stream of {n}", granted=n)
    )
    mode = tmp_path / "mode"
    lanes = PrefillLanes(132, "both+sis", mode, lambda: partitioner, share, noted.append)
    req = SimpleNamespace(seqlen=10)
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=[req]), waiting_queue=[])
    batch = SimpleNamespace(extend_num_tokens=5, prefix_lens=[0], reqs=[req])
    assert lanes.choose(scheduler, batch, 0.0, 0.0).num_sms == 84
    for number, (text, expected) in enumerate((("sis", 92), ("both+static:100", 100), ("static:1000", 132)), 1):
        mode.write_text(text + "\n")
        os.utime(mode, ns=(number, number))
        assert lanes.choose(scheduler, batch, 0.0, 0.0).num_sms == expected
    scheduler.running_batch.reqs = []
    assert lanes.choose(scheduler, batch, 0.0, 0.0).num_sms == 132
    assert noted == [84, 92, 100, 132, 132]
    scheduler.running_batch.reqs = [req]
    assert lanes.choose(scheduler, batch, 0.0, 20.0).num_sms == 132
    assert noted[-1] == 0, "a prefill that takes the host longer than the device is nothing to keep clear of"
    assert made == ["both", "encoder"]


# ---- the encoder's board


def test_the_oldest_batch_is_the_one_that_runs(name: str) -> None:
    in_use = UnitsInUse(name)
    with EncoderBoardReader(name) as reader:

        def said() -> tuple[int, bool]:
            state = reader.read()
            assert state is not None
            return state.encoder_units, state.decoder_masked

        assert said() == (0, False)
        first = in_use.begin(84)
        second = in_use.begin(100)  # launched while the first computes
        assert said() == (84, False)
        in_use.change(first, 68)
        in_use.mask_decoder(True)
        assert said() == (68, True)
        in_use.end(first)
        assert said() == (100, True)
        in_use.end(first)
        in_use.end(second)
        assert said() == (0, True)
        before = reader.read()
        assert before is not None
        in_use.beat()
        after = reader.read()
        assert after is not None
        assert after.timestamp_ns > before.timestamp_ns
    in_use.close()
    assert not _path(name).exists()
    UnitsInUse().begin(3)  # without a board nobody is told


def test_a_successor_s_board_takes_the_place_of_a_dead_worker_s(name: str) -> None:
    dead = EncoderBoardWriter(name, replace=True)
    dead.publish(EncoderState(timestamp_ns=1, encoder_units=84, decoder_masked=True))
    with pytest.raises(FileExistsError):
        EncoderBoardWriter(name)
    with EncoderBoardWriter(name, replace=True) as successor:
        successor.publish(EncoderState(timestamp_ns=2, encoder_units=0, decoder_masked=False))
        dead.close()  # late: leaves the other's
        with EncoderBoardReader(name) as reader:
            state = reader.read()
            assert state == EncoderState(timestamp_ns=2, encoder_units=0, decoder_masked=False)
    assert not _path(name).exists()


def test_boards_of_the_two_sides_are_not_confused(name: str) -> None:
    with EncoderBoardWriter(name), pytest.raises(ValueError, match="no state board"):
        StateBoardReader(name)
    with StateBoardWriter(name), pytest.raises(ValueError, match="no state board"):
        EncoderBoardReader(name)


class Clock:
    """Moves when told."""

    def __init__(self) -> None:
        self.ns = 10**12

    def __call__(self) -> int:
        return self.ns


def test_a_dead_worker_is_an_idle_one_and_its_successor_is_found(name: str) -> None:
    clock = Clock()
    watch = EncoderWatch(name, clock)
    assert watch.look() == (0, False)  # not there yet

    def say(writer: EncoderBoardWriter, units: int, masked: bool) -> None:
        writer.publish(EncoderState(timestamp_ns=clock.ns, encoder_units=units, decoder_masked=masked))

    with EncoderBoardWriter(name) as first:
        say(first, 84, True)
        assert watch.look() == (0, False)  # looked for only now and then
        clock.ns += ATTACH_NS
        watch.look()
        say(first, 84, True)
        clock.ns += STALE_NS
        assert watch.look() == (84, True)
        clock.ns += 1
        assert watch.look() == (0, True)
        say(first, 84, True)
        assert watch.look() == (84, True)
        with EncoderBoardWriter(name, replace=True) as second:
            clock.ns += STALE_NS + ATTACH_NS
            say(second, 68, False)
            watch.look()
            assert watch.look() == (68, False)
            assert second._map is not None
            second._map.words[1] += 1  # died inside a write
            assert watch.look() == (0, False)


# ---- the choice before each step


class Runner:
    """Has loaded a batch of a captured size."""

    def __init__(self) -> None:
        self._replay_graph_key: Any = None

    def load(self, size: int) -> str:
        self._replay_graph_key = SimpleNamespace(size=size, label="")
        return ""


def ready_graphs(tmp_path: Path, **changes: Any) -> tuple[DecodeGraphs, Any, Runner]:
    """Graphs of batches up to 8 on LADDER, and the state that they follow."""
    state = SimpleNamespace(encoder=0, masked=True, in_flight=False, counted=[])
    watch: Any = SimpleNamespace(look=lambda: (state.encoder, state.masked))
    graphs = DecodeGraphs(tmp_path / "decoder.json", watch, lambda: state.in_flight, state.counted.append, **changes)
    runner = Runner()
    graphs.ladder, graphs._runner = LADDER, runner
    graphs._keys = {
        (units, size): SimpleNamespace(size=size, label=f"sms{units}") for units in LADDER.rungs for size in (1, 8)
    }
    return graphs, state, runner


def test_each_step_replays_the_graph_that_is_clear_of_encoder_and_prefill(tmp_path: Path) -> None:
    graphs, state, runner = ready_graphs(tmp_path)

    def step(size: int = 8) -> str:
        with graphs.loading(runner):
            runner.load(size)
        assert runner._replay_graph_key.size == size
        return str(runner._replay_graph_key.label)

    assert step() == ""  # nothing beside it
    state.encoder = 84
    assert step() == step(1) == "sms48"
    graphs.note_lane(100)
    assert step() == "sms48"  # that prefill has not been launched yet
    state.in_flight = True
    assert step() == "sms32"  # the larger of the two
    state.encoder = 0
    assert step() == "sms32"
    graphs.note_lane(132)
    assert step() == ""  # a prefill on the whole device
    state.in_flight = False
    state.encoder = 68
    assert step() == "sms64"
    assert step(16) == ""  # no graph of that size
    state.masked = False
    assert step() == ""
    counts = {units: state.counted.count(units) for units in set(state.counted)}
    assert counts == {132: 4, 48: 3, 32: 2, 64: 1}
    graphs._write()
    assert json.loads((tmp_path / "decoder.json").read_text())["steps"] == {"32": 2, "48": 3, "64": 1, "132": 4}


def test_attention_is_planned_for_the_sms_of_the_graph(tmp_path: Path) -> None:
    graphs, state, runner = ready_graphs(tmp_path)
    planned: list[tuple[int, int]] = []

    def plan(*, batch_size: int, num_heads_k: int, sm_margin: int = 0) -> None:
        planned.append((batch_size, sm_margin))

    backend = SimpleNamespace(_get_scheduler_metadata=plan)
    graphs._plan_attention(backend)

    def step(size: int = 8, kv_heads: int = 4) -> None:
        with graphs.loading(runner):
            runner.load(size)
            backend._get_scheduler_metadata(batch_size=size, num_heads_k=kv_heads)

    step()
    state.encoder = 84
    step()
    step(16)  # no graph of that size
    step(kv_heads=28)  # may make more splits than the graph has room for
    answers = iter([(84, True), (100, True)])
    graphs._watch = SimpleNamespace(look=lambda: next(answers))  # type: ignore[assignment]
    step()
    assert runner._replay_graph_key.label == "sms48", (
        "looked up once: the graph is that for which attention was planned"
    )
    backend._get_scheduler_metadata(batch_size=8, num_heads_k=4)  # a step without graphs
    assert planned == [(8, 0), (8, 84), (16, 0), (8, 0), (8, 84), (8, 0)]

    def refuse(*, batch_size: int, num_heads_k: int, sm_margin: int = 0) -> str:
        if sm_margin:
            raise RuntimeError("no such argument")
        return "planned for all"

    graphs._watch = SimpleNamespace(look=lambda: (84, True))  # type: ignore[assignment]
    other = SimpleNamespace(_get_scheduler_metadata=refuse)
    graphs._plan_attention(other)
    with graphs.loading(runner):
        assert other._get_scheduler_metadata(batch_size=8, num_heads_k=4) == "planned for all"
    assert other._get_scheduler_metadata is refuse, "it is not tried again"
    without = SimpleNamespace(_get_scheduler_metadata=None)
    graphs._plan_attention(without)
    assert without._get_scheduler_metadata is None


def test_another_runner_s_graphs_are_left_alone(tmp_path: Path) -> None:
    graphs, state, _ = ready_graphs(tmp_path)
    state.encoder = 84
    other = Runner()
    with graphs.loading(other):
        assert graphs.idle_units(8) == 0
        other.load(8)
    assert other._replay_graph_key.label == ""
    assert state.counted == []


def test_a_choice_costs_microseconds(tmp_path: Path, name: str) -> None:
    """Not asserted: printed with -s. What is asserted is that it reads the real board."""
    graphs, _, runner = ready_graphs(tmp_path)
    in_use = UnitsInUse(name)
    in_use.mask_decoder(True)
    in_use.begin(84)
    graphs._watch = EncoderWatch(name)
    graphs._watch.look()
    began = time.perf_counter()
    for _ in range(2000):
        with graphs.loading(runner):
            runner.load(8)
    print(f"{(time.perf_counter() - began) / 2000 * 1e6:.1f} us a step")
    assert runner._replay_graph_key.label == "sms48"
    in_use.close()


def test_steps_are_counted_for_prometheus() -> None:
    count = step_counter({"model_name": "graphs-test"})
    for units in (48, 48, 132):
        count(units)
    values = [
        REGISTRY.get_sample_value("spaceserve:decode_steps_total", {"model_name": "graphs-test", "sms": sms})
        for sms in ("48", "132", "64")
    ]
    assert values == [2.0, 1.0, None]


# ---- the capture


class DecodeCudaGraphRunner:
    """Stands for SGLang's: notes on which stream each shape was captured."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.enable_torch_compile = False
        self.capture_bs = [1, 2, 4, 8, 64, 72, 256]
        self.seq_len_fill_value = 1
        self.buffers = SimpleNamespace(
            seq_lens=torch.zeros(4), seq_lens_cpu=torch.zeros(4), reset_index_buffers=lambda: None
        )
        self.backend: Any = FullCudaGraphBackend()
        self.attn_backend = SimpleNamespace(
            _get_scheduler_metadata=lambda *, batch_size, num_heads_k, sm_margin: sm_margin
        )
        self.captured: list[tuple[Any, int]] = []
        self.kv_pool: Any = SimpleNamespace(alt_stream=None)
        self.alt_streams: set[Any] = set()
        self.fail_at = fail_at

    def _make_graph_key(self, size: int, stream_idx: Any = None, variant_label: Any = None) -> Any:
        return (size, stream_idx, variant_label)

    def capture_one_shape(self, size: int, forward: Any, stream_idx: Any = None, variant_label: Any = None) -> None:
        assert self.buffers.seq_lens.tolist() == [1.0] * 4
        if len(self.captured) == self.fail_at:
            raise RuntimeError("out of something")
        self.captured.append((self.backend.stream, size))
        self.alt_streams.add(self.kv_pool.alt_stream)
        self.backend._graphs[size, stream_idx, variant_label] = "graph"
        self.backend._outputs[size, stream_idx, variant_label] = "out"


class FullCudaGraphBackend:
    def __init__(self) -> None:
        self._graphs: dict[Any, Any] = {(8, None, None): "SGLang's"}
        self._outputs: dict[Any, Any] = {(8, None, None): "SGLang's"}
        self.stream: Any = None

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = None

    def can_run(self, forward_batch: Any, key: Any) -> bool:
        return key in self._graphs


def model_runner(runner: Any, **changes: Any) -> Any:
    args = {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "enable_lora": False,
        "enable_pdmux": False,
        "enable_two_batch_overlap": False,
        "enable_memory_saver": False,
        "enable_cudagraph_gc": False,
        "get_attention_backends": lambda: ("fa3", "fa3"),
    }
    fields: dict[str, Any] = {
        "device": "cuda",
        "gpu_id": 0,
        "is_draft_worker": False,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "model": SimpleNamespace(forward=lambda: None),
        "token_to_kv_pool": SimpleNamespace(alt_stream=None),
        "decode_cuda_graph_runner": runner,
    }
    fields |= {name: value for name, value in changes.items() if name in fields}
    args |= {name: value for name, value in changes.items() if name in args}
    return SimpleNamespace(server_args=SimpleNamespace(**args), **fields)


def test_what_stands_in_the_way() -> None:
    assert obstacle(model_runner(DecodeCudaGraphRunner())) is None
    compiled, breakable = DecodeCudaGraphRunner(), DecodeCudaGraphRunner()
    compiled.enable_torch_compile = True
    breakable.backend = SimpleNamespace()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (DecodeCudaGraphRunner(), {"device": "cpu"}, "no CUDA graphs on the device cpu"),
        (DecodeCudaGraphRunner(), {"tp_size": 2}, "ranks"),
        (DecodeCudaGraphRunner(), {"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
        (DecodeCudaGraphRunner(), {"enable_lora": True}, "LoRA"),
        (DecodeCudaGraphRunner(), {"get_attention_backends": lambda: ("fa3", "flashinfer")}, "flashinfer"),
        (None, {}, "without CUDA graphs"),
        (compiled, {}, "torch.compile"),
        (breakable, {}, "SimpleNamespace"),
    ]
    for runner, changes, word in cases:
        reason = obstacle(model_runner(runner, **changes))
        assert reason is not None
        assert word in reason


class FakePartitioner(SimulatedPartitioner):
    """H200's rungs, groups with streams."""

    def __init__(self, device: str) -> None:
        super().__init__(total_units=132, min_units=16, step=4)
        self.rungs = H200_RUNGS
        self.backend = "green_ctx"
        assert device == "cuda:0"

    def complement_of(self, requested: int) -> Any:
        group: Any = super().complement_of(requested)
        return SimpleNamespace(
            granted=group.granted, stream=SimpleNamespace(name=f"stream of {group.granted}", synchronize=lambda: None)
        )


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda and SGLang's process-wide capture state, replaced; `free` is what the device has left."""
    state = SimpleNamespace(free=8 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (state.free, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_executor.runner_utils import capture_mode

    @contextmanager
    def graph_capture(stream: Any) -> Iterator[Any]:
        yield SimpleNamespace(stream=stream)

    @contextmanager
    def model_capture_mode() -> Iterator[None]:
        yield

    monkeypatch.setattr(parallel_state, "graph_capture", graph_capture)
    monkeypatch.setattr(capture_mode, "model_capture_mode", model_capture_mode)
    return state


def captured_graphs(tmp_path: Path) -> DecodeGraphs:
    watch: Any = SimpleNamespace(look=lambda: (84, True))
    return DecodeGraphs(tmp_path / "decoder.json", watch, lambda: False, partitioner_factory=FakePartitioner)


def test_sglang_s_sizes_are_captured_on_every_group(tmp_path: Path, on_a_gpu: SimpleNamespace) -> None:
    graphs, runner = captured_graphs(tmp_path), DecodeCudaGraphRunner()
    kv_pool = SimpleNamespace(alt_stream="another stream")
    runner.kv_pool = kv_pool
    entered: list[tuple[int, str, int]] = []

    @contextmanager
    def on_group(units: int, stream: Any) -> Iterator[None]:
        before = len(runner.captured)
        yield
        entered.append((units, stream.name, len(runner.captured) - before))

    graphs.on_group = on_group
    graphs.capture(model_runner(runner, token_to_kv_pool=kv_pool))
    assert entered == [(units, f"stream of {units}", 5) for units in (64, 48, 32)]
    assert runner.alt_streams == {None}  # what is captured there would run on all SMs
    assert kv_pool.alt_stream == "another stream"
    sizes = [64, 8, 4, 2, 1]  # SGLang's, within the bound, the largest first
    assert [(stream.name, size) for stream, size in runner.captured] == [
        (f"stream of {units}", size) for units in (64, 48, 32) for size in sizes
    ]
    assert graphs.ladder == LADDER == DecoderLadder.read(tmp_path / "decoder.json")
    page = json.loads((tmp_path / "decoder.json").read_text())
    assert page["batch_sizes"] == [1, 2, 4, 8, 64]
    assert page["capture_mib"] == 0
    with graphs.loading(runner):
        runner._replay_graph_key = SimpleNamespace(size=8)  # type: ignore[attr-defined]
        assert runner.attn_backend._get_scheduler_metadata(batch_size=8, num_heads_k=4) == 84
    assert runner._replay_graph_key == (8, None, "sms48")  # type: ignore[attr-defined]
    assert runner.backend._graphs[runner._replay_graph_key] == "graph"  # type: ignore[attr-defined]
    assert runner.backend._graphs[8, None, None] == "SGLang's"


def test_a_capture_that_fails_leaves_sglang_s_graphs(
    tmp_path: Path, on_a_gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, runner = captured_graphs(tmp_path), DecodeCudaGraphRunner(fail_at=7)
    with caplog.at_level("WARNING"):
        graphs.capture(model_runner(runner))
    (record,) = caplog.records
    assert "only the encoder: capturing the graphs failed: RuntimeError: out of something" in record.message
    assert runner.backend._graphs == {(8, None, None): "SGLang's"} == runner.backend._outputs
    left = DecoderLadder.read(tmp_path / "decoder.json")
    assert left is not None
    assert left.rungs == ()
    assert "out of something" in left.reason
    runner._replay_graph_key = key = SimpleNamespace(size=8)  # type: ignore[attr-defined]
    with graphs.loading(runner):
        pass
    assert runner._replay_graph_key is key  # type: ignore[attr-defined]


def test_too_little_memory_is_no_reason_to_fail(tmp_path: Path, on_a_gpu: SimpleNamespace) -> None:
    on_a_gpu.free = 1 << 29
    graphs, runner = captured_graphs(tmp_path), DecodeCudaGraphRunner()
    graphs.capture(model_runner(runner))
    assert runner.captured == []
    assert "no memory is left" in graphs.ladder.reason


def test_another_back_end_s_groups_are_not_captured(tmp_path: Path, on_a_gpu: SimpleNamespace) -> None:
    graphs, runner = captured_graphs(tmp_path), DecodeCudaGraphRunner()

    def unmasked(device: str) -> Any:
        made = FakePartitioner(device)
        made.backend = "none"
        return made

    graphs._partitioner_factory = unmasked
    graphs.capture(model_runner(runner))
    assert runner.captured == []
    assert "back end none" in graphs.ladder.reason


def test_a_server_that_was_not_asked_says_how_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "decoder.json"
    assert decode_graphs("sis", path, "unused", lambda: False, None, on_gpu=True) is None
    left = DecoderLadder.read(path)
    assert left is not None
    with pytest.raises(ValueError, match=r"start the server with --sm-partition auto, both\+sis or"):
        left.check(0)
    for mode in ("both+sis", "auto"):
        graphs = decode_graphs(mode, path, "unused", lambda: False, None, on_gpu=True)
        assert graphs is not None
        assert graphs.was_asked_for == (mode != "auto")
    assert decode_graphs("auto", path, "unused", lambda: False, None, on_gpu=False) is None


def test_sglang_has_what_the_hooks_and_the_capture_rely_on(tmp_path: Path) -> None:
    import sglang
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner as Theirs
    from sglang.srt.model_executor.runner.shape_key import ShapeKey
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend as Backend

    for hook in decode_graph_hooks(captured_graphs(tmp_path)):
        check_signature(hook)
    assert list(inspect.signature(Theirs.capture_one_shape).parameters)[1:] == [
        "size",
        "forward",
        "stream_idx",
        "variant_label",
    ]
    assert "stream" in inspect.signature(graph_capture).parameters
    assert list(inspect.signature(Backend.capture_session).parameters) == ["self", "stream"]
    assert Theirs._make_graph_key(None, 8, None, "sms48") == ShapeKey(8, None, "sms48")
    packages = Path(sglang.__file__).parent.parent
    backend = (packages / "sglang/srt/layers/attention/flashattention_backend.py").read_text()
    planning = backend[backend.index("def _compute_scheduler_metadata(") :].partition("\n    def ")[0]
    assert "return self._get_scheduler_metadata(\n            batch_size=batch_size,\n" in planning
    assert "num_heads_k=self.num_kv_heads,\n" in planning
    assert "sm_margin" not in planning, "which is ours to give"
    fa3 = (packages / "sgl_kernel/flash_attn.py").read_text()
    assert "sm_margin: int = 0" in fa3[fa3.index("def get_scheduler_metadata(") :]
    load = inspect.getsource(Theirs.load_batch)
    assert load.index("attn_backend.init_forward_metadata_out_graph(") < load.rindex("self._replay_graph_key = ")
    assert "self.attn_backend = " in inspect.getsource(Theirs.__init__)
    execute = inspect.getsource(Theirs.execute)
    assert execute.index("self.load_batch(") < execute.index("self.backend.replay(self._replay_graph_key")
    assert "variant_label" not in inspect.getsource(Theirs.capture_prepare)
    assert Theirs.__name__ == DecodeCudaGraphRunner.__name__
    assert Backend.__name__ == FullCudaGraphBackend.__name__
    assert module.SHARING_ATTENTION_BACKENDS == ("fa3",)
