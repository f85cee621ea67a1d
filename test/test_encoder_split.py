"""Where encoder batches run: modes, their change at run time, the choice between layers, metrics and the routes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from sglang.srt.utils.auth import add_api_key_middleware
from torch import nn

from spaceserve import status
from spaceserve.channels import Channels
from spaceserve.config import SmPartition, SpaceServeConfig
from spaceserve.encoder.gpu_state import state_changed
from spaceserve.encoder.split import EncoderSplit, make_split
from spaceserve.encoder.split_metrics import SplitMetrics
from spaceserve.encoder.split_mode import SplitModes
from spaceserve.partition import SimulatedPartitioner
from spaceserve.sis import DecodeState, GpuState, SpaceInferenceScheduler, StateBoardWriter
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.sis.delay import DECODE_WEIGHT
from spaceserve.sis.standin import TOTAL_SMS, standin_curves
from spaceserve.sis.state_board import EncoderBoardReader

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
IMAGE = (5329,)


class Bench:
    """A split of 132 simulated SMs, with the state board that its SIS reads and the one that it writes."""

    def __init__(self, name: str, mode: str, **settings: Any) -> None:
        self.partitioner = SimulatedPartitioner(total_units=TOTAL_SMS, min_units=16, step=8)
        self.board = StateBoardWriter(name)
        self.own_board = f"{name}-own"
        self.registry = CollectorRegistry()
        self.split = EncoderSplit(
            CPU,
            mode,
            partitioner_factory=lambda: self.partitioner,
            sis_factory=lambda rungs, mask_mode: SpaceInferenceScheduler(standin_curves(), rungs, mask_mode=mask_mode),
            board_name=name,
            own_board_name=self.own_board,
            **settings,
        )
        self.split.metrics = SplitMetrics({"model_name": "m"}, self.registry)

    def decode(self, batch: int, context: int = 2000) -> None:
        """The decode side says that it runs a batch."""
        self.board.publish(
            DecodeState(
                timestamp_ns=time.monotonic_ns(), step=1, running_batch=batch, context_tokens_sum=batch * context
            )
        )

    def encode(self, patches: tuple[int, ...] = IMAGE) -> int:
        """Run a batch. Returns the units that it ran on."""
        with self.split.for_batch(patches) as timing:
            timing.start()
            active = self.partitioner.active
            timing.stop()
        return TOTAL_SMS if active is None else active.granted

    def said(self) -> tuple[int, bool]:
        """What the scheduler reads: units of the batch that runs, and whether decode is to keep to the others."""
        with EncoderBoardReader(self.own_board) as reader:
            state = reader.read()
        assert state is not None
        return state.encoder_units, state.decoder_masked

    def close(self) -> None:
        self.board.close()
        self.split._in_use.close()

    def value(self, name: str, **more: str) -> float | None:
        return self.registry.get_sample_value(f"spaceserve:{name}", {"model_name": "m", **more})


@pytest.fixture
def make_bench(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(mode: str, **settings: Any) -> Bench:
        made.append(Bench(f"spaceserve-test-{id(request)}-{len(made)}", mode, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def test_modes_are_read_and_others_refused() -> None:
    assert SmPartition.parse("auto") == SmPartition(kind="auto", mask_mode="both", is_default=True)
    assert SmPartition.parse("static:64") == SmPartition(kind="static", num_sms=64)
    assert SmPartition.parse("sis") == SmPartition(kind="sis")
    assert SmPartition.parse("sis:0.5") == SmPartition(kind="sis", decode_weight=0.5)
    assert SmPartition.parse("sis:8:4") == SmPartition(kind="sis", decode_weight=8.0, reconsider_layers=4)
    numbers = ("sis:", "sis:0", "sis:-1", "sis:nan", "sis:inf", "sis:1:", "sis:1:x", "sis:1:2:3")
    odd = ("sis:1\n", "sis: 1", "sis:1_0", "sis:\uff15")  # float() takes them
    for bad in ("", "half", "static:", "static:x", "static:0", "static:1:2", "off:1", *numbers, *odd):
        with pytest.raises(ValueError, match="--sm-partition"):
            SmPartition.parse(bad)
    with pytest.raises(ValueError, match="--sm-reconsider-layers"):
        SpaceServeConfig(sm_reconsider_layers=-1)


def test_every_mode_puts_batches_where_it_says(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("off")
    assert bench.encode() == TOTAL_SMS
    assert bench.partitioner.active is None
    bench.split.set_mode("static:60")
    assert bench.encode() == 64
    bench.split.set_mode("sis")
    assert bench.encode() == TOTAL_SMS  # nobody decodes
    bench.decode(32)
    one_waits = bench.encode()
    bench.split.num_waiting = lambda: 50
    chosen = bench.encode()
    assert 16 <= one_waits < chosen < TOTAL_SMS  # whoever waits counts
    bench.split.set_mode("sis:50")
    assert bench.encode() < chosen  # answers whose delay weighs more keep more for the decoder
    bench.split.set_mode("sis")
    assert bench.encode() == chosen
    bench.split.set_mode("off")
    assert bench.encode() == TOTAL_SMS


def test_a_mode_that_cannot_be_had_leaves_the_old_one(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("static:32")
    with pytest.raises(ValueError, match="132"):
        bench.split.set_mode("static:133")
    with pytest.raises(ValueError, match="--sm-partition"):
        bench.split.set_mode("dynamic")
    assert bench.encode() == 32
    assert bench.split.snapshot()["mode"] == "static:32"


def test_metrics_tell_what_was_chosen_and_what_came_of_it(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("sis")
    bench.encode()
    bench.decode(32)
    units = bench.encode()
    bench.encode()
    assert bench.value("encoder_sms") == units
    assert bench.value("encoder_batches_total", sms=str(units)) == 2
    assert bench.value("encoder_batches_total", sms=str(TOTAL_SMS)) == 1
    assert bench.value("sis_decisions_total", rule="decoder_idle") == 1
    chosen = [bench.value("sis_decisions_total", rule=rule) or 0 for rule in ("least_delay", "hysteresis")]
    assert sum(chosen) == 2
    assert bench.value("sis_decisions_total", rule="tpot_missed") == 0
    assert bench.value("sm_partition_switches_total") == bench.split.snapshot()["num_switches"] == 1
    for name in ("encode_seconds", "predicted_encode_seconds", "encode_prediction_ratio"):
        assert bench.value(f"{name}_count") == 3
    assert bench.value("predicted_decode_step_seconds_count") == 2
    expected = sum(d["split"]["predicted_encoder_ms"] for d in bench.split.snapshot()["decisions"]) / 1e3
    assert bench.value("predicted_encode_seconds_sum") == pytest.approx(expected)
    bench.split.set_mode("static:64")
    bench.encode()
    assert bench.value("encoder_sms") == 64
    assert bench.value("encode_seconds_count") == 4
    assert bench.value("predicted_encode_seconds_count") == 3  # nobody predicted it


def test_threads_that_choose_and_observe_do_not_disturb_each_other(make_bench: Callable[..., Bench]) -> None:
    """On a GPU a batch's time is seen in another thread while the next batch is chosen."""
    bench = make_bench("sis")
    bench.decode(32)
    waits: list[Any] = []
    failures: list[BaseException] = []

    def observe() -> None:
        try:
            for _ in range(300):
                while not waits:
                    time.sleep(0)
                waits.pop()(1.0)
                bench.split.snapshot()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=observe)
    thread.start()
    for _ in range(300):
        with bench.split.for_batch(IMAGE) as timing:
            waits.append(timing.observe)
    thread.join(timeout=60)
    assert not failures
    assert bench.value("encode_seconds_count") == 300


class Encoder(nn.Module):
    """Blocks between which SIS may choose again. Notes the units on which each ran; `between` is called in each."""

    def __init__(self, bench: Bench, between: Callable[[int], None], num_blocks: int = 8) -> None:
        super().__init__()
        self.seen: list[int] = []
        self._bench = bench
        self.blocks = nn.ModuleList(Block(self, bench, index, between) for index in range(num_blocks))
        bench.split.attach(list(self.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def run_batch(self) -> torch.Tensor:
        with self._bench.split.for_batch(IMAGE) as timing:
            timing.start()
            out = self(torch.zeros(1))
            timing.stop()
        assert isinstance(out, torch.Tensor)
        return out


class Block(nn.Module):
    def __init__(self, encoder: Encoder, bench: Bench, index: int, between: Callable[[int], None]) -> None:
        super().__init__()
        self._note = lambda: encoder.seen.append(TOTAL_SMS if (a := bench.partitioner.active) is None else a.granted)
        self._index, self._between = index, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._note()
        self._between(self._index)
        return x + 1


def test_the_next_layer_moves_when_the_decode_side_changes(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("sis", reconsider_layers=2)
    encoder = Encoder(bench, lambda index: bench.decode(32) if index == 3 else None)
    assert encoder.run_batch().item() == 8
    assert encoder.seen[:4] == [TOTAL_SMS] * 4
    assert len(set(encoder.seen[4:])) == 1
    assert encoder.seen[4] < TOTAL_SMS
    assert bench.partitioner.active is None  # what follows runs where it did before the batch
    snapshot = bench.split.snapshot()
    assert snapshot["num_reconsidered"] == 1
    assert snapshot["num_changes_within_batches"] == 1
    # The measured time belongs to two numbers of SMs: SIS must learn nothing from it.
    assert all(decision["measured_encoder_ms"] is None for decision in snapshot["decisions"])
    assert bench.value("encode_seconds_count") == 1
    assert not bench.value("encode_prediction_ratio_count")
    assert bench.value("sm_partition_switches_total") == 1


def test_a_running_batch_keeps_its_mode(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("sis")

    def between(index: int) -> None:
        if index == 1:
            bench.decode(32)
            bench.split.set_mode("sis:1:2")

    encoder = Encoder(bench, between)
    encoder.run_batch()
    assert encoder.seen == [TOTAL_SMS] * 8
    assert bench.encode() < TOTAL_SMS
    first, second = bench.split.snapshot()["decisions"]
    assert first["measured_encoder_ms"] is not None
    assert second["measured_encoder_ms"] is not None


def test_what_makes_a_running_batch_reconsider() -> None:
    base = GpuState(encoder_patches=IMAGE, decode_batch=20, num_waiting=4)
    for changes, expected in (
        ({}, False),
        ({"decode_batch": 23, "mean_context_tokens": 900.0}, False),
        ({"decode_batch": 30}, True),
        ({"decode_batch": 0}, True),
        ({"prefill_tokens": 100}, True),
        ({"num_waiting": 5}, False),
        ({"num_waiting": 9}, True),
        ({"num_waiting": 1}, True),
    ):
        assert state_changed(base, replace(base, **changes)) is expected, changes


def test_layers_stay_while_nothing_changes(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("sis", reconsider_layers=3)
    bench.decode(32)
    encoder = Encoder(bench, lambda index: None)
    encoder.run_batch()
    assert len(set(encoder.seen)) == 1
    assert bench.split.snapshot()["num_reconsidered"] == 0
    assert bench.split.snapshot()["num_changes_within_batches"] == 0
    assert bench.value("encode_prediction_ratio_count") == 1
    # Outside a batch, as in the warm-up, and in the other modes nothing is chosen.
    encoder(torch.zeros(1))
    bench.split.set_mode("static:32")
    encoder.run_batch()
    assert set(encoder.seen[-8:]) == {32}
    bench.split.set_mode("sis")
    assert bench.split.snapshot()["num_reconsidered"] == 0
    assert len(bench.split.snapshot()["decisions"]) == 1


def test_a_changed_decode_side_that_is_best_served_as_before_moves_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("sis", reconsider_layers=1)
    bench.decode(2)
    encoder = Encoder(bench, lambda index: bench.decode(3 - index % 2))
    encoder.run_batch()
    assert len(set(encoder.seen)) == 1
    assert bench.split.snapshot()["num_reconsidered"] == 7
    assert bench.split.snapshot()["num_changes_within_batches"] == 0


def test_on_a_gpu_the_host_waits_for_the_block_before_it_decides(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching thread must not run ahead of the device by more than two intervals of blocks."""
    log: list[str] = []

    class FakeEvent:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.name = "timing" if enable_timing else f"mark {sum(line.startswith('record mark') for line in log)}"

        def record(self) -> None:
            log.append(f"record {self.name}")

        def synchronize(self) -> None:
            log.append(f"wait for {self.name}")

    capturing = False
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    bench = make_bench("sis", reconsider_layers=2)
    bench.split._device = torch.device("cuda", 0)
    bench.decode(32)
    encoder = Encoder(bench, lambda index: log.append(f"block {index}"))
    encoder.run_batch()
    marks = [line for line in log if "timing" not in line]
    assert marks == [
        *("block 0", "block 1", "record mark 0"),
        *("block 2", "block 3", "record mark 1", "wait for mark 0"),
        *("block 4", "block 5", "record mark 2", "wait for mark 1"),
        *("block 6", "block 7"),
    ]
    # A graph that is being captured takes no wait, and its launches belong to no batch's decision.
    log.clear()
    capturing = True
    encoder.run_batch()
    assert not [line for line in log if "mark" in line]


def test_no_layer_reconsiders_by_default(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("sis")
    encoder = Encoder(bench, lambda index: bench.decode(32))
    encoder.run_batch()
    assert set(encoder.seen) == {TOTAL_SMS}
    # Until somebody asks for it on the running server.
    bench.split.set_mode("sis:1:4")
    bench.decode(0)
    encoder.run_batch()
    assert encoder.seen[8:12] == [TOTAL_SMS] * 4
    assert len(set(encoder.seen[12:])) == 1
    assert encoder.seen[12] < TOTAL_SMS
    bench.split.set_mode("sis:1")
    encoder.run_batch()
    assert len(set(encoder.seen[16:])) == 1


def test_the_command_line_reaches_the_split(tmp_path: Path) -> None:
    config = SpaceServeConfig(sm_partition="off", sm_reconsider_layers=4)
    split = make_split(config, CPU, str(tmp_path), "spaceserve-test-none")
    assert split._mode.reconsider_layers == 4
    assert split.snapshot() == {"mode": "off", "partition": "none"}


# ---- both sides masked

LADDER = DecoderLadder(total_units=TOTAL_SMS, rungs=(36, 52, 68))  # beside 96, 80 and 64 of the simulated rungs


def test_both_sides_are_masked_once_the_scheduler_has_its_graphs(
    make_bench: Callable[..., Bench], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bench = make_bench("both+sis", ladder_path=tmp_path / "decoder.json")
    no_file = tmp_path / "mode"
    bench.decode(32)
    bench.split.follow(no_file)
    assert bench.said() == (0, False)
    assert bench.split.snapshot()["mask_mode"] == "encoder"
    assert "has not said yet" in bench.split.snapshot()["mask_error"]
    with pytest.raises(ValueError, match="has not said yet"):
        bench.split.set_mode("both+static:64")
    LADDER.write(tmp_path / "decoder.json")
    bench.split.follow(no_file)
    assert bench.said() == (0, True)
    snapshot = bench.split.snapshot()
    assert (snapshot["mode"], snapshot["mask_mode"]) == ("both+sis", "both")
    assert "mask_error" not in snapshot
    for waiting in (1, 50):
        bench.split.num_waiting = lambda waiting=waiting: waiting  # type: ignore[misc]
        units = bench.encode()
        assert units in (64, 80, 96)
        (decision,) = bench.split.snapshot()["decisions"][-1:]
        assert decision["split"]["decoder_units"] == TOTAL_SMS - units  # what SIS counts on for decode
    # One running server, the modes against each other.
    bench.split.set_mode("sis")
    assert bench.said() == (0, False)
    bench.encode()
    assert bench.split.snapshot()["decisions"][-1]["split"]["decoder_units"] == TOTAL_SMS
    bench.split.set_mode("both+static:80")
    assert bench.encode() == 80
    assert bench.said() == (0, True)
    with pytest.raises(ValueError, match="leave the encoder 96 at most"):
        bench.split.set_mode("both+static:104")
    with pytest.raises(ValueError, match="leave the encoder 96 at most"):
        bench.split.set_mode("both+static:132")
    assert bench.encode() == 80
    bench.split.set_mode("off")
    assert bench.said() == (0, False)


def test_where_decode_has_no_graphs_the_encoder_alone_is_masked(
    make_bench: Callable[..., Bench], tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench("both+static:104", ladder_path=tmp_path / "decoder.json")
    DecoderLadder(reason="there are no CUDA graphs on the device cpu").write(tmp_path / "decoder.json")
    with caplog.at_level("WARNING"):
        for _ in range(3):
            bench.split.follow(tmp_path / "mode")
    (record,) = [r for r in caplog.records if "Only the encoder" in r.message]
    assert "no CUDA graphs on the device cpu" in record.message
    assert bench.encode() == 104
    assert bench.said() == (0, False)
    assert bench.split.snapshot()["mask_mode"] == "encoder"
    with pytest.raises(ValueError, match="no CUDA graphs on the device cpu"):
        bench.split.set_mode("both+sis")
    # The next worker finds the file at once; a split that decode has no group beside is no reason not to start.
    LADDER.write(tmp_path / "decoder.json")
    later = make_bench("both+static:104", ladder_path=tmp_path / "decoder.json")
    assert later.encode() == 104
    assert "at most" in later.split.snapshot()["mask_error"]
    assert make_bench("both+sis", ladder_path=tmp_path / "decoder.json").split.snapshot()["mask_mode"] == "both"


def test_auto_asks_for_decodes_groups_too_where_it_means_off(
    make_bench: Callable[..., Bench], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bench = make_bench("off", ladder_path=tmp_path / "decoder.json")
    DecoderLadder(reason="decode has no CUDA graphs for groups of SMs").write(tmp_path / "decoder.json")
    for mode in ("both+auto", "both+sis", "both+static:64"):
        with pytest.raises(ValueError, match="decode has no CUDA graphs for groups of SMs"):
            bench.split.set_mode(mode)
    bench.split.set_mode("auto")
    # At the start it is no reason to end, as with the others.
    snapshot = make_bench("both+auto", ladder_path=tmp_path / "decoder.json").split.snapshot()
    assert snapshot["mode"] == "both+auto"
    assert "decode has no CUDA graphs" in snapshot["mask_error"]


def test_the_default_masks_both_sides_where_that_can_be(tmp_path: Path) -> None:
    path = tmp_path / "decoder.json"

    def modes(device: str) -> SplitModes:
        return SplitModes(
            torch.device(device),
            partitioner_factory=lambda: SimulatedPartitioner(total_units=TOTAL_SMS, min_units=16, step=8),
            sis_factory=lambda rungs, mask_mode: SpaceInferenceScheduler(standin_curves(), rungs, mask_mode=mask_mode),
            ladder_path=path,
            reconsider_layers=0,
        )

    on_gpu = modes("cuda")
    first = on_gpu.find_at_start("auto")
    assert (first.mask_mode, first.mask_error, first.may_improve) == ("encoder", None, True)
    assert first.sis is not None
    assert first.decode_weight == DECODE_WEIGHT
    assert on_gpu.improved(first) is None
    LADDER.write(path)
    later = on_gpu.improved(first)
    assert later is not None
    assert (later.mask_mode, later.mask_error, later.may_improve) == ("both", None, False)
    assert later.sis is not first.sis
    assert on_gpu.find("sis:4").mask_mode == "encoder"
    assert on_gpu.find("sis:4").decode_weight == 4
    DecoderLadder(reason="not with several ranks").write(path)
    assert on_gpu.find("auto").mask_mode == "encoder"
    assert on_gpu.find("auto").mask_error is None
    assert modes("cpu").find_at_start("auto").partitioner is None


def test_the_scheduler_reads_where_the_batch_runs(
    make_bench: Callable[..., Bench], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bench = make_bench("static:64")
    with bench.split.for_batch(IMAGE) as timing:
        assert bench.said()[0] == 0  # its images are still being decoded
        timing.start()
        assert bench.said()[0] == 64
        timing.stop()
        assert bench.said()[0] == 0

    def break_down() -> None:
        with bench.split.for_batch(IMAGE) as timing:
            timing.start()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        break_down()
    assert bench.said()[0] == 0
    with bench.split.for_batch(IMAGE):
        pass  # nothing was left to encode
    assert bench.said()[0] == 0
    # Between layers.
    moving = make_bench("sis:1:2")
    heard: list[int] = []

    def between(index: int) -> None:
        if index == 3:
            moving.decode(32)
        heard.append(moving.said()[0])

    encoder = Encoder(moving, between)
    encoder.run_batch()
    assert heard == encoder.seen
    assert len(set(heard)) == 2


def test_on_a_gpu_a_batch_runs_until_the_device_has_finished_it(
    make_bench: Callable[..., Bench],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeEvent:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None:
            if failing:
                raise RuntimeError("the device is lost")

        def elapsed_time(self, other: FakeEvent) -> float:
            return 5.0

    failing = False
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    bench = make_bench("static:64")
    bench.split._device = torch.device("cuda", 0)
    waits = []
    for mode in ("static:64", "static:96"):
        bench.split.set_mode(mode)
        with bench.split.for_batch(IMAGE) as timing:
            timing.start()
            waits.append(timing.stop())
    assert bench.said()[0] == 64  # the second is launched, the first computes
    assert waits[0]() == 5.0
    assert bench.said()[0] == 96
    failing = True
    with pytest.raises(RuntimeError, match="lost"):
        waits[1]()
    assert bench.said()[0] == 0


# ---- the routes


@pytest.fixture
def channels(tmp_path: Path) -> Channels:
    return Channels(run_dir=str(tmp_path), shm_prefix="spaceserve-test-", dp_size=1)


@pytest.fixture
def client(channels: Channels, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    app = FastAPI()
    # SGLang's own module would be imported for seconds.
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", SimpleNamespace(app=app))
    monkeypatch.setattr(status, "TAKEN_OVER_TIMEOUT_S", 0.2)
    status.add_status_routes(channels, lambda: {"state": "running"})
    add_api_key_middleware(app, api_key=None, admin_api_key="secret")
    return TestClient(app, headers={"Authorization": "Bearer secret"})


@contextlib.contextmanager
def worker(channels: Channels, split: EncoderSplit) -> Iterator[None]:
    """Does, beside the block, what the encoder worker's loop does with the split."""
    ended = threading.Event()

    def run() -> None:
        path = Path(channels.status_file)
        while not ended.wait(0.01):
            split.follow(Path(channels.sm_partition_file))
            scratch = path.with_suffix(".scratch")
            scratch.write_text(json.dumps({"epoch": 0, "split": split.snapshot()}))
            scratch.replace(path)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_partition_is_changed_over_http(
    client: TestClient, channels: Channels, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "TAKEN_OVER_TIMEOUT_S", 10.0)
    assert client.get(status.STATUS_ROUTE).status_code == 503
    bench = make_bench("sis")
    with worker(channels, bench.split):
        answer = client.post(status.SM_PARTITION_ROUTE, json={"mode": "static:96"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["static_units"] == 96
        assert bench.encode() == 96
        page = client.get(status.STATUS_ROUTE).json()
        assert page["split"]["mode"] == "static:96"
        assert page["mps"] == {"state": "running"}
        assert page["decoder"] is None
        DecoderLadder(reason="decode has no graphs").write(Path(channels.decoder_sms_file))
        assert client.get(status.STATUS_ROUTE).json()["decoder"]["reason"] == "decode has no graphs"
        refused = client.post(status.SM_PARTITION_ROUTE, json={"mode": "both+static:80"})
        assert refused.status_code == 400
        assert "CUDA graphs of decode" in refused.json()["detail"]
        assert refused.json()["detail"].count("both+static:80") == 1
        refused = client.post(status.SM_PARTITION_ROUTE, json={"mode": "static:1000"})
        assert refused.status_code == 400
        assert refused.json()["detail"] == "--sm-partition static:1000: the device has 132 units"
        assert client.post(status.SM_PARTITION_ROUTE, json={"mode": "sometimes"}).status_code == 400
        # A worker that starts now takes what was chosen, not what was refused.
        later = make_bench("sis")
        later.split.follow(Path(channels.sm_partition_file))
        assert later.encode() == 96
        answer = client.post(status.SM_PARTITION_ROUTE, json={"mode": "sis:8"})
        assert answer.status_code == 200
        assert answer.json()["decode_weight"] == 8
        # At once: each caller is told of its own mode.
        modes = [f"static:{n}" for n in (32, 64, 96, 112)] + ["sis:2", "static:1000"]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(
                pool.map(lambda mode: client.post(status.SM_PARTITION_ROUTE, json={"mode": mode}).status_code, modes)
            )
        assert answers == [200] * 5 + [400]


def test_a_mode_of_the_start_that_was_not_had_is_refused_when_it_is_asked_for(
    client: TestClient, channels: Channels, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "TAKEN_OVER_TIMEOUT_S", 10.0)
    path = Path(channels.decoder_sms_file)
    DecoderLadder(reason="capturing the graphs failed").write(path)
    with worker(channels, make_bench("both+static:80", ladder_path=path).split):
        refused = client.post(status.SM_PARTITION_ROUTE, json={"mode": "both+static:80"})
        assert refused.status_code == 400
        assert "capturing the graphs failed" in refused.json()["detail"]
        assert client.post(status.SM_PARTITION_ROUTE, json={"mode": "static:80"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"off", b"{", b"[]", b'"off"', b"null", b"{}", b'{"Mode": "off"}', b'{"mode": 3}', b"\xff", b"[" * 9999],
)
def test_a_body_that_names_no_mode_is_told_what_is_expected(client: TestClient, body: bytes) -> None:
    answer = client.post(status.SM_PARTITION_ROUTE, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json() == {"detail": 'the body must be a JSON object with a mode, as {"mode": "static:64"}'}


def test_the_route_is_guarded_as_sglangs_own_and_a_silent_worker_is_said(client: TestClient) -> None:
    bare = {"Authorization": "Bearer wrong"}
    assert client.post(status.SM_PARTITION_ROUTE, json={"mode": "off"}, headers=bare).status_code == 401
    silent = client.post(status.SM_PARTITION_ROUTE, json={"mode": "off"})
    assert silent.status_code == 503
    assert "has not taken over off" in silent.json()["detail"]
