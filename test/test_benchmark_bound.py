"""Bounds, timelines and dummy model configurations of the benchmark."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

import bound
import dummy_model
import timeline
from servebench import bound_model, report
from servebench.bound_model import PartCosts
from servebench.fake_server import Script, make_app
from servebench.results import Results
from servebench.servers import free_ports
from spaceserve.sis.curves import shipped_files
from timeline import Interval

pytestmark = pytest.mark.cpu


def test_bound_of_one_size() -> None:
    limit = bound_model.bound([PartCosts(251, 130)], {1: 5.0, 16: 5.4}, 2.0, 128)
    assert limit.max_rate_overlap == pytest.approx(1 / 0.381)
    assert limit.max_rate_turns == pytest.approx(1 / (0.381 + 128 * 5.4e-3 / 16))
    assert limit.utilisation == pytest.approx(0.762)
    # M/D/1: rho s / (2 (1 - rho))
    assert limit.ttft_ms == pytest.approx(381 + 0.762 * 381 / (2 * 0.238))
    assert limit.tpot_turns_ms == pytest.approx(limit.tpot_overlap_ms / 0.238)
    # Little's law at the batch found.
    assert limit.decode_batch == pytest.approx(2.0 * 128 * limit.tpot_overlap_ms / 1e3, rel=1e-6)
    beyond = bound_model.bound([PartCosts(251, 130)], {1: 5.0}, 3.0, 128)
    assert math.isnan(beyond.ttft_ms)
    with pytest.raises(ValueError, match="sizes"):
        bound_model.bound([], {1: 5.0}, 1.0, 128)


def test_the_wait_of_a_mix_is_that_of_a_simulated_queue() -> None:
    """Pre-emptive smaller-first queue, simulated with the same sizes; within the simulation's error."""
    parts, rate = [PartCosts(20, 20), PartCosts(250, 110)], 3.0
    mixed = bound_model.bound(parts, {1: 5.0}, rate, 128)
    assert mixed.max_rate_overlap == pytest.approx(5.0)
    rng = random.Random(1)
    clock, total = 0.0, 0.0
    queues: list[list[list[float]]] = [[], []]  # [arrival, remaining] per size, first come first served
    count = 60_000
    for _ in range(count):
        gap = rng.expovariate(rate)
        while gap > 0 and (queue := queues[0] or queues[1]):
            step = min(gap, queue[0][1])
            clock, gap, queue[0][1] = clock + step, gap - step, queue[0][1] - step
            if queue[0][1] <= 1e-12:
                total += clock - queue.pop(0)[0]
        clock += gap
        size = rng.randrange(2)
        queues[size].append([clock, (0.04, 0.36)[size]])
    left = sum(map(len, queues))
    assert mixed.ttft_ms == pytest.approx(total / (count - left) * 1e3, rel=0.05)
    one_size = bound_model.bound([PartCosts(135, 65)], {1: 5.0}, rate, 128)
    assert one_size.ttft_ms == pytest.approx(200 + 0.6 * 200 / (2 * 0.4))


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 50), st.integers(1, 256), st.floats(1, 20), st.floats(0, 0.5))
def test_the_steady_batch_balances_or_there_is_none(rate: float, length: int, first: float, slope: float) -> None:
    steps = {1: first, 64: first + slope * 63}
    batch, step = bound_model.steady_decode(steps, rate, length)
    if math.isnan(batch):
        assert rate * length * slope / 1e3 > 0.9
    else:
        assert batch == pytest.approx(max(1.0, rate * length * step / 1e3), rel=1e-3)


def test_partitions_trade_tpot_for_ttft() -> None:
    encode = {64: 450.0, 96: 302.0, 112: 274.0}
    beside = {64: 6.65, 96: 10.8, 112: 23.8}
    points = bound_model.partition_points(encode, beside, 5.4, 130, 2.0)
    assert [point.num_sms for point in points] == [64, 96, 112]
    assert [p.tpot_ms for p in points] == sorted(p.tpot_ms for p in points)
    assert [p.ttft_ms for p in points] == sorted((p.ttft_ms for p in points), reverse=True)
    first = points[0]
    assert first.tpot_ms == pytest.approx((0.9 * 6.65 + 0.1 * 5.4) / (1 - 0.26))
    best = bound_model.tpot_at_ttft(points, 900)
    assert best is not None
    assert best.num_sms == 96
    assert bound_model.tpot_at_ttft(points, 10) is None
    assert [p.num_sms for p in bound_model.partition_points(encode, beside, 5.4, 130, 3.0)] == [96, 112]


def test_interpolation_keeps_to_its_points() -> None:
    points = [(1.0, 2.0), (3.0, 6.0), (5.0, 6.0)]
    assert [bound_model.interpolate(points, x) for x in (0, 1, 2, 3, 4, 9)] == [2, 2, 4, 6, 6, 6]
    with pytest.raises(ValueError, match="points"):
        bound_model.interpolate([], 1.0)


def test_costs_from_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = shipped_files()[0]
    common = ["--results", str(tmp_path), "--model-name", "qwen2-vl-7b"]
    assert bound.main(["curves", "--curves", str(curves), *common]) == 0
    data = json.loads((tmp_path / "bounds" / "qwen2-vl-7b__curves.json").read_text())
    costs = [data["sizes"][str(size)]["encode_ms"] for size in (224, 448, 1024, 2048)]
    assert costs == sorted(costs)
    assert data["sizes"]["2048"]["prompt_tokens"] == 73 * 73 + 80
    partition = data["partitions"]["2048"]["encode_ms"]
    assert partition["8"] > partition["64"] > costs[-1]
    assert report.load_bounds(Results(tmp_path), "qwen2-vl-7b") == data
    assert report.load_bounds(Results(tmp_path), "other") is None
    capsys.readouterr()
    assert bound.main(["show", *common, "--workload", "fixed:2048", "--rates", "1", "9", "--ttft-ms", "2000"]) == 0
    out = capsys.readouterr().out
    assert "TPOT at least" in out
    assert "lies beyond it" in out
    assert "SMs, TPOT" in out


@pytest.fixture
def fake_url() -> Iterator[str]:
    """A scripted server in a thread."""
    port = free_ports(1)[0]
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(make_app(Script()))

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_measuring_stores_costs_of_equal_lengths(fake_url: str, tmp_path: Path) -> None:
    command = ["measure", "--url", fake_url, "--model-name", "tiny", "--results", str(tmp_path)]
    assert bound.main([*command, "--sizes", "56", "112", "--batches", "1", "2", "--samples", "3"]) == 0
    data = json.loads((tmp_path / "bounds" / "tiny__stock.json").read_text())
    assert set(data["sizes"]) == {"text", "56", "112"}
    for size in ("56", "112"):
        cost = data["sizes"][size]
        assert abs(cost["prompt_tokens"] - cost["text_prompt_tokens"]) <= 2
        assert cost["encode_ms"] >= 0
    assert data["measured"] is True
    assert set(data["decode_step_ms"]) == {"1", "2"}


def test_costs_are_differences_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scripted times: E is image less text of the same length, P is text less short text plus one step."""

    class Scripted(bound.Prober):
        def ttft_ms(self, samples: int, **options: Any) -> tuple[float, int]:
            if options.get("side"):
                return 400.0, 5400
            return {bound.SHORT_WORDS: 12.0, 64: 20.0}.get(options.get("num_words", bound.SHORT_WORDS), 140.0), 5400

        def decode_step_ms(self, batch: int, num_words: int) -> float:
            return 5.0 + batch / 16

        def words_for_tokens(self, tokens: int) -> int:
            return tokens - 10

    found = bound.measure(Scripted("http://x", api="generate", model="m"), [2048], [1, 16], 3, 64)
    assert found["sizes"]["2048"]["encode_ms"] == 260.0
    assert found["sizes"]["2048"]["prefill_ms"] == pytest.approx(140.0 - 12.0 + 5.0625, abs=1e-3)
    assert found["sizes"]["text"]["prefill_ms"] == pytest.approx(20.0 - 12.0 + 5.0625, abs=1e-3)


def test_overlap_of_lanes() -> None:
    one = [Interval(0, 10), Interval(5, 20), Interval(30, 40)]
    other = [Interval(15, 35), Interval(38, 50)]
    assert timeline.busy_us(one) == 30
    assert timeline.overlap_us(one, other) == timeline.overlap_us(other, one) == 5 + 5 + 2
    assert timeline.overlap_us(one, []) == 0
    window = timeline.cut({"a": one}, 8, 32)["a"]
    assert [(i.start_us, i.end_us) for i in window] == [(8, 10), (8, 20), (30, 32)]
    assert "at once: 0.01 ms" in timeline.summary({"encoder": one, "decoder": other})


def test_a_timeline_is_drawn_from_intervals_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "worker.json").write_text(json.dumps({"lane": "encoder", "intervals_us": [[1000, 3000, "layer 0"]]}))
    # The trace's own zero is 500 us after the common clock's.
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1500.0, "dur": 500.0, "name": "decode"},
        {"ph": "X", "cat": "cpu_op", "ts": 0.0, "dur": 9000.0, "name": "aten::mm"},
    ]
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        json.dump({"baseTimeNanoseconds": 500_000, "traceEvents": events}, file)
    out = tmp_path / "t.png"
    arguments = [str(out), "--intervals", str(tmp_path / "worker.json"), "--trace", f"decoder={tmp_path / 't.json.gz'}"]
    assert timeline.main(arguments) == 0
    assert out.stat().st_size > 3000
    assert "encoder and decoder at once: 0.50 ms (100% of the shorter)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no GPU activity"):
        timeline.read_trace({"traceEvents": events[1:]})
    with pytest.raises(ValueError, match="before it starts"):
        timeline.read_intervals({"lane": "x", "intervals_us": [[2, 1]]})


@pytest.mark.parametrize("name", sorted(dummy_model.SHAPES))
def test_dummy_configurations_are_read_by_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    with pytest.raises(ValueError, match="lacks"):
        dummy_model.write(name, tmp_path / "m", tokenizer)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / file).write_text("{}")
    dummy_model.write(name, tmp_path / "m", tokenizer)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    shape = dummy_model.SHAPES[name]
    text = config.get_text_config()
    assert (text.hidden_size, text.num_hidden_layers, text.num_key_value_heads) == (
        shape.hidden,
        shape.layers,
        shape.kv_heads,
    )
    vision = config.vision_config
    assert vision.depth == 32
    assert (vision.hidden_size if shape.family == "qwen2_vl" else vision.out_hidden_size) == shape.hidden
    with pytest.raises(ValueError, match="unknown model"):
        dummy_model.write("gpt", tmp_path / "m", tokenizer)
