"""The loop that prefills beside decode, driven with a scheduler of the test's own that records what happens to it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import io_struct
from torch import nn

from spaceserve.scheduler.side_lanes import lane_rungs
from spaceserve.scheduler.side_prefill import Lane, SidePrefill, obstacle
from spaceserve.sis.busy_share import MAX_SHARE, BusyShare
from spaceserve.sis.prefill_share import PrefillShare
from spaceserve.sis.standin import standin_curves

pytestmark = pytest.mark.cpu


class Req:
    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.to_finish: Any = None
        self.done = False

    def finished(self) -> bool:
        return self.done


class Batch:
    def __init__(self, reqs: list[Req], extend: bool) -> None:
        self.reqs = reqs
        self.forward_mode = SimpleNamespace(is_extend=lambda: extend)
        self.extend_num_tokens = 10 if extend else 0
        self.chunked_req: Req | None = None
        self.batch_is_full = True
        self.fits = True

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def copy(self) -> Batch:
        return self

    def filter_batch(self, chunked_req_to_exclude: list[Req]) -> None:
        self.reqs = [req for req in self.reqs if not req.finished() and req not in chunked_req_to_exclude]

    def merge_batch(self, other: Batch) -> None:
        self.reqs = self.reqs + other.reqs

    def check_decode_mem(self) -> bool:
        return self.fits


class Event:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Result:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.copy_done = Event()
        self.delay_sample_func = None


class Scheduler:
    """Prefills what waits, else decodes what runs; one pass of the loop at a time."""

    def __init__(self, side: SidePrefill, *, overlap: bool) -> None:
        self.side = side
        self.enable_overlap = overlap
        self.gracefully_exit = False
        self._engine_paused = False
        self.running_batch = Batch([], False)
        self.last_batch: Batch | None = None
        self.chunked_req: Req | None = None
        self.waiting: deque[Batch] = deque()
        self.inbox: list[Any] = []
        self.result_queue: deque[Any] = deque()
        self.log: list[str] = []
        self.layers = nn.ModuleList()
        self.backend = SimpleNamespace(forward_metadata="of nothing", workspace="shared")
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=self.backend, device_timer=None))
        self.request_receiver = SimpleNamespace(recv_requests=self._receive)

    def _receive(self) -> list[Any]:
        taken, self.inbox = self.inbox, []
        return taken

    def process_input_requests(self, requests: list[Any]) -> None:
        self.log += [f"input {type(request).__name__}" for request in requests]

    def get_next_batch_to_run(self, running_batch: Batch, last_batch: Batch | None) -> Any:
        assert last_batch is None
        batch: Batch | None = None
        if self.side.in_flight:
            assert self.chunked_req is None, "the chunk in flight must be hidden"
        elif self.waiting:
            batch = self.waiting.popleft()
        if batch is None and running_batch.reqs:
            batch = running_batch
            batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
        return SimpleNamespace(batch_to_run=batch, running_batch=running_batch)

    def run_batch(self, batch: Batch) -> Result:
        kind = "prefill" if batch.forward_mode.is_extend() else "decode"
        self.log.append(f"run {kind} {' '.join(req.rid for req in batch.reqs)}")
        for layer in self.layers:
            layer(torch.zeros(()))
        return Result(kind)

    def process_batch_result(self, batch: Batch, result: Result) -> None:
        self.log.append(f"process result of {result.kind}")

    def _apply_war_barrier(self) -> None: ...

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None: ...

    def on_idle(self) -> None:
        self.log.append("idle")


def pending(side: SidePrefill) -> Event:
    """Make the prefill in flight one that the device has not finished."""
    assert side._flight is not None
    event = Event()
    side._flight.done = event
    return event


def passes(scheduler: Scheduler, count: int = 1) -> list[str]:
    scheduler.log.clear()
    for _ in range(count):
        scheduler.side._pass()
    return list(scheduler.log)


@pytest.fixture(params=[False, True], ids=["turns", "overlap"])
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    side = SidePrefill()
    made = Scheduler(side, overlap=request.param)
    side.attach(made, None)
    return made


def test_decode_goes_on_until_the_prefill_is_finished(scheduler: Scheduler) -> None:
    scheduler.running_batch = Batch([Req("a")], False)
    scheduler.waiting.append(Batch([Req("b")], True))
    assert [line for line in passes(scheduler) if line.startswith("run")] == ["run prefill b", "run decode a"]
    event = pending(scheduler.side)
    assert [line for line in passes(scheduler, 3) if line.startswith("run")] == ["run decode a"] * 3
    assert "process result of prefill" not in scheduler.log
    event.is_done = True
    log = passes(scheduler)
    assert log.index("process result of prefill") < log.index("run decode a b")
    assert not scheduler.side.in_flight


def test_a_prefill_alone_becomes_the_running_batch(scheduler: Scheduler) -> None:
    scheduler.waiting.append(Batch([Req("a")], True))
    assert "idle" not in passes(scheduler)
    assert "run decode a" in passes(scheduler)


def test_one_prefill_at_a_time(scheduler: Scheduler) -> None:
    scheduler.waiting += [Batch([Req("a")], True), Batch([Req("b")], True)]
    passes(scheduler)
    event = pending(scheduler.side)
    assert not any("prefill" in line for line in passes(scheduler, 2))
    event.is_done = True
    assert [line for line in passes(scheduler) if line.startswith("run")] == ["run prefill b", "run decode a"]


def test_finished_and_chunked_requests_do_not_decode(scheduler: Scheduler) -> None:
    ended, chunked, other = Req("ended"), Req("chunked"), Req("other")
    batch = Batch([ended, chunked, other], True)
    batch.chunked_req = scheduler.chunked_req = chunked
    scheduler.running_batch = Batch([Req("a")], False)
    scheduler.waiting.append(batch)
    passes(scheduler)
    assert scheduler.chunked_req is chunked, "hidden only while SGLang chooses a batch"
    ended.done = True
    log = passes(scheduler)
    assert "run decode a other" in log
    assert not scheduler.running_batch.batch_is_full


@pytest.mark.parametrize(("everything", "ended"), [(False, ["r1"]), (True, ["r1", "s2"])])
def test_an_abort_reaches_the_prefill_in_flight(scheduler: Scheduler, everything: bool, ended: list[str]) -> None:
    reqs = [Req("r1"), Req("s2")]
    scheduler.waiting.append(Batch(reqs, True))
    passes(scheduler)
    scheduler.side.mark_aborted("r", everything)
    assert [req.rid for req in reqs if req.to_finish is not None] == ended


def test_control_messages_find_no_prefill_in_flight(scheduler: Scheduler) -> None:
    scheduler.waiting.append(Batch([Req("a")], True))
    passes(scheduler)
    event = pending(scheduler.side)
    scheduler.inbox = [io_struct.AbortReq(rid="x")]
    passes(scheduler)
    assert scheduler.side.in_flight
    scheduler.inbox = [io_struct.FlushCacheReqInput()]
    log = passes(scheduler)
    assert event.is_done
    assert log.index("process result of prefill") < log.index("input FlushCacheReqInput")


def test_memory_pressure_waits_for_the_prefill(scheduler: Scheduler) -> None:
    """What to retract is chosen among all requests, not among those that happen to decode."""
    scheduler.running_batch = Batch([Req("a")], False)
    scheduler.waiting.append(Batch([Req("b")], True))
    passes(scheduler)
    event = pending(scheduler.side)
    scheduler.running_batch.fits = False
    assert "run decode a b" in passes(scheduler)
    assert event.is_done


def layered(scheduler: Scheduler, count: int = 4) -> list[Any]:
    """Give the scheduler's model `count` layers before each of which decode may go on; results in order of launch."""
    scheduler.layers = nn.ModuleList(nn.Identity() for _ in range(count))
    for layer in scheduler.layers:
        layer.register_forward_pre_hook(scheduler.side._before_layer)
    results: list[Any] = []
    plain = scheduler.run_batch

    def run_batch(batch: Batch) -> Any:
        results.append(None)
        place = len(results) - 1
        results[place] = plain(batch)
        return results[place]

    scheduler.run_batch = run_batch  # type: ignore[method-assign]
    return results


def test_decode_steps_run_between_the_layers_of_a_prefill(scheduler: Scheduler) -> None:
    layered(scheduler)
    scheduler.running_batch = Batch([Req("a")], False)
    scheduler.waiting.append(Batch([Req("b")], True))
    log = passes(scheduler)
    steps = log.index("process result of decode")
    assert log[:2] == ["run prefill b", "run decode a"]
    # Where results are ready at once, a step before each layer; else one step ahead, whose result nobody awaits.
    assert log.count("run decode a") == (3 if scheduler.enable_overlap else 5)
    assert steps > 1
    assert "process result of prefill" not in log


# Without overlap a step ends where it is launched.
@pytest.mark.parametrize("scheduler", [True], ids=["overlap"], indirect=True)
def test_a_step_between_layers_is_launched_when_the_one_before_has_ended(scheduler: Scheduler) -> None:
    results = layered(scheduler, 8)
    scheduler.running_batch = Batch([Req("a")], False)
    passes(scheduler)
    scheduler.waiting.append(Batch([Req("b")], True))

    def ready(*args: Any) -> None:
        results[0].copy_done.is_done = True  # the step before the prefill

    scheduler.layers[5].register_forward_pre_hook(ready, prepend=True)
    log = passes(scheduler)
    assert log == [
        "run prefill b",
        "run decode a",  # before the first layer: the device has work while the step before is not over
        "process result of decode",  # before the sixth
        "run decode a",
        "process result of decode",  # the loop goes on with one step pending
        "run decode a",
        "process result of decode",
    ]
    assert len(scheduler.result_queue) == 1


def test_state_of_the_prefill_is_put_back(scheduler: Scheduler) -> None:
    layered(scheduler, 1)
    plain = scheduler.run_batch
    seen: dict[str, Any] = {}

    def run_batch(batch: Batch) -> Any:
        if not batch.forward_mode.is_extend():
            scheduler.backend.forward_metadata = "of decode"
            return plain(batch)
        scheduler.backend.forward_metadata = "of prefill"
        result = plain(batch)
        seen["metadata"] = scheduler.backend.forward_metadata
        return result

    scheduler.run_batch = run_batch  # type: ignore[method-assign]
    scheduler.running_batch = Batch([Req("a")], False)
    chunk = Batch([Req("b")], True)
    chunk.chunked_req = scheduler.chunked_req = chunk.reqs[0]
    scheduler.waiting.append(chunk)
    passes(scheduler)
    assert seen == {"metadata": "of prefill"}
    assert scheduler.chunked_req is chunk.chunked_req


def test_a_prefill_that_is_over_with_its_launch_joins_the_next_step(scheduler: Scheduler) -> None:
    scheduler.running_batch = Batch([Req("a")], False)
    scheduler.side._launch(Batch([Req("b")], True))
    event = pending(scheduler.side)
    scheduler.side._finish_if_quick()
    assert scheduler.side.in_flight, "the device is still busy with it"
    event.is_done = True
    scheduler.side._finish_if_quick()
    assert not scheduler.side.in_flight
    assert [req.rid for req in scheduler.running_batch.reqs] == ["a", "b"]


def test_nothing_is_waited_for_while_the_device_has_no_decode_step(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spaceserve.scheduler.side_prefill.QUICK_WAIT_S", 60.0)
    scheduler.side._launch(Batch([Req("b")], True))
    pending(scheduler.side)
    step = Result("decode")
    step.copy_done.is_done = True
    scheduler.result_queue.append((Batch([Req("a")], False), step))
    scheduler.side._finish_if_quick()
    assert scheduler.side.in_flight


@pytest.mark.parametrize("timed", [False, True])
def test_which_layers_let_decode_go_on(scheduler: Scheduler, timed: bool) -> None:
    """On the CPU the middle one; none where SGLang times its forwards, which must not be nested then."""
    from sglang.srt.environ import envs

    before = envs.SGLANG_EAGER_INPUT_NO_COPY.get()
    scheduler.tp_worker.model_runner.device_timer = "a timer" if timed else None
    layers = nn.ModuleList(nn.Identity() for _ in range(5))
    try:
        scheduler.side.decode_between(list(layers))
        assert envs.SGLANG_EAGER_INPUT_NO_COPY.get()
    finally:
        envs.SGLANG_EAGER_INPUT_NO_COPY.set(before)
    hooked = [number for number, layer in enumerate(layers) if layer._forward_pre_hooks]
    assert hooked == ([] if timed else [2])


def test_no_step_between_layers_without_memory_for_it(scheduler: Scheduler) -> None:
    layered(scheduler)
    scheduler.running_batch = Batch([Req("a")], False)
    scheduler.running_batch.fits = False
    scheduler.side._launch(Batch([Req("b")], True))
    assert scheduler.log == ["run prefill b"]


def test_decode_s_own_layers_start_nothing(scheduler: Scheduler) -> None:
    layered(scheduler)
    scheduler.running_batch = Batch([Req("a")], False)
    assert passes(scheduler).count("run decode a") == 1


def test_run_batch_finds_the_lane_s_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prefill is launched the scheduler's streams are the lane's; afterwards its own again."""

    class Stream:
        def __init__(self) -> None:
            self.waited_for: list[Any] = []

        def wait_stream(self, other: Any) -> None:
            self.waited_for.append(other)

    class RecordedEvent(Event):
        def record(self, stream: Any) -> None:
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", RecordedEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("context", stream))
    side, lane = SidePrefill(), Lane(Stream(), 64)
    scheduler: Any = Scheduler(side, overlap=True)
    decode_stream = Stream()
    theirs = {
        "forward_stream": decode_stream,
        "forward_stream_ctx": "c",
        "copy_stream": "s",
        "copy_stream_ctx": "d",
        "batch_record_buf": [1, 2],
        "batch_record_ct": 1,
    }
    for name, value in theirs.items():
        setattr(scheduler, name, value)
    seen: dict[str, Any] = {}

    def run_batch(batch: Batch) -> str:
        time.sleep(0.02)
        side._between_s += 0.01  # as a decode step between its layers does
        seen.update({name: getattr(scheduler, name) for name in theirs})
        return "result"

    scheduler.run_batch = run_batch
    given: list[float] = []

    def choose(scheduler: Any, batch: Batch, prefill_load: float, host_ms: float) -> Lane:
        given.append(host_ms)
        return lane

    side.attach(scheduler, SimpleNamespace(choose=choose))
    side._launch(Batch([Req("a")], True))
    assert seen["forward_stream"] is lane.stream
    assert seen["forward_stream_ctx"] == ("context", lane.stream)
    assert seen["copy_stream"] is side._copy_stream
    assert seen["batch_record_buf"] is not theirs["batch_record_buf"]
    assert {name: getattr(scheduler, name) for name in theirs} == theirs
    assert lane.stream.waited_for == [decode_stream]
    assert side._copy_stream.waited_for == [lane.stream]
    assert side._flight is not None
    assert side._flight.done.stream is side._copy_stream
    side._flight = None
    side._launch(Batch([Req("b")], True))
    assert given[0] == 0.0
    assert given[1] > 0.0, "the next lane is chosen with what this launch took"
    assert side.summary().startswith("last prefill: 64 SMs, 10 tokens launched in ")


def server(**changes: Any) -> Any:
    args = {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "enable_lora": False,
        "device": "cuda",
        "get_attention_backends": lambda: ("fa3", "fa3"),
    }
    state = {
        "is_generation": True,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "is_mixed_chunk": False,
        "enable_hierarchical_cache": False,
        "enable_priority_preemption": False,
        "is_hybrid_swa": False,
        "enable_overlap": True,
    }
    args.update({name: value for name, value in changes.items() if name in args})
    state.update({name: value for name, value in changes.items() if name in state})
    return SimpleNamespace(server_args=SimpleNamespace(**args), **state)


def test_obstacles() -> None:
    assert obstacle(server()) is None
    assert obstacle(server(device="cpu", enable_overlap=False)) is None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tp_size": 2}, "ranks"),
        ({"is_mixed_chunk": True}, "mixed"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_overlap": False}, "overlap"),
        ({"get_attention_backends": lambda: ("fa3", "flashinfer")}, "flashinfer"),
        ({"is_generation": False}, "generate"),
    ]
    for changes, word in cases:
        reason = obstacle(server(**changes))
        assert reason is not None
        assert word in reason


# Decode beside prefill as a profile stores it: the larger the prefill's group, the quicker it and the slower decode.
SHARING = [
    {
        "mode": mode,
        "decode_units": 132,
        "prefill_units": units,
        "decode_alone_ms": 1.0,
        "decode_ms": decode_ms,
        "prefill_alone_ms": 6.0,
        "prefill_ms": prefill_ms,
    }
    for mode, units, decode_ms, prefill_ms in [
        ("both unmasked", 132, 4.6, 7.4),
        ("both masked", 116, 9.9, 9.9),  # of another mode: not used
        ("prefill masked", 116, 2.0, 10.3),
        ("prefill masked", 84, 1.5, 12.5),
        ("prefill masked", 68, 1.3, 14.3),
    ]
]


@pytest.mark.parametrize("measured", [False, True])
def test_prefill_share_moves_with_the_load(measured: bool) -> None:
    """More that waits, or a busier prefill, gives prefill more units; more that decodes gives it fewer."""
    curves = replace(standin_curves(), sharing=SHARING if measured else [])
    share = PrefillShare(curves, range(52, 132, 16))
    assert share.rungs == ((52, 68, 84, 100, 132) if measured else (52, 68, 84, 100))

    def units(waiting: int, decoding: int, load: float = 0.0) -> int:
        return share.units(
            prefill_tokens=5329,
            prefix_tokens=0,
            num_waiting=waiting,
            prefill_load=load,
            decode_batch=decoding,
            mean_context_tokens=3000,
        )

    by_waiting = [units(waiting, 8) for waiting in (1, 4, 16, 64)]
    assert by_waiting == sorted(by_waiting)
    assert by_waiting[0] < by_waiting[-1] == share.rungs[-1]
    by_decoding = [units(4, decoding) for decoding in (1, 4, 16, 64)]
    assert by_decoding == sorted(by_decoding, reverse=True)
    assert by_decoding[0] > by_decoding[-1]
    by_load = [units(2, 8, load) for load in (0.0, 0.3, 0.6, 0.9)]
    assert by_load == sorted(by_load)
    assert by_load[0] < by_load[-1]


def test_a_prefill_bound_by_its_launch_gets_the_units_that_decode_feels_least() -> None:
    """No group makes it quicker than the host can launch it, so requests that wait gain nothing by more units."""
    share = PrefillShare(replace(standin_curves(), sharing=SHARING), range(52, 132, 16))

    def units(tokens: int, host_ms: float) -> int:
        return share.units(
            prefill_tokens=tokens,
            prefix_tokens=0,
            num_waiting=16,
            prefill_load=0.5,
            decode_batch=8,
            mean_context_tokens=200,
            host_ms=host_ms,
        )

    assert units(64, 0.0) == 132
    assert units(64, 20.0) < 100
    assert units(5329, 20.0) == 132, "this one is bound by the device"


def test_prefill_share_between_measured_sizes() -> None:
    share = PrefillShare(replace(standin_curves(), sharing=SHARING), (76, 100))
    assert share._at(84) == (12.5 / 6.0, 1.5)
    assert share._at(76) == pytest.approx(((12.5 * 14.3) ** 0.5 / 6.0, (1.5 * 1.3) ** 0.5))
    assert share._at(52) == (14.3 / 6.0, 1.3)
    assert share._at(124) == (10.3 / 6.0, 2.0)


def test_busy_share() -> None:
    busy = BusyShare(time_constant_s=5.0)
    assert busy.share(0.0) == 0.0
    for second in range(1, 61):
        busy.add(float(second), 0.5)
    assert busy.share(60.0) == pytest.approx(0.5, abs=0.01)
    assert busy.share(65.0) == pytest.approx(0.5 / 2.718, abs=0.01)
    for second in range(66, 166):
        busy.add(float(second), 3.0)  # works on several things at once: no more than always
    assert busy.share(165.0) == MAX_SHARE


def test_lanes_are_few() -> None:
    assert lane_rungs((*range(20, 117, 8), 132)) == (68, 92, 116)
    assert lane_rungs((*range(20, 117, 8), 132), 24) == (68, 84, 108)
    assert lane_rungs((60, 68, 132)) == (68,)
    assert lane_rungs((16, 132)) == (16,)


def test_prefill_share_needs_a_rung() -> None:
    curves = standin_curves()
    with pytest.raises(ValueError, match="leaves decode"):
        PrefillShare(curves, [132])
