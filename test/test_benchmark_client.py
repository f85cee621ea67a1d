"""The load client and the metrics computed from its records. Clocks are scripted: nothing here depends on speed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from servebench import metrics
from servebench.bodies import APIS, build_body
from servebench.client import RequestRecord, read_events, run_job
from servebench.fake_server import Script, make_app
from servebench.workload import Workload, make_trace

pytestmark = pytest.mark.cpu


class ScriptedStream:
    """Lines with the instant (s) at which each arrives; ``clock`` tells the instant of the line just read."""

    def __init__(self, lines: list[tuple[float, bytes]]) -> None:
        self.lines, self.now = lines, 0.0

    def clock(self) -> float:
        return self.now

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at, line in self.lines:
            self.now = at
            yield line


def native(count: int, text: str = "") -> bytes:
    meta = {"id": "r", "prompt_tokens": 90, "completion_tokens": count, "cached_tokens": 12, "e2e_latency": 1.5}
    return b"data: " + json.dumps({"text": text, "meta_info": meta}, separators=(",", ":")).encode() + b"\n"


def chat(content: str, count: int | None) -> bytes:
    data: dict[str, Any] = {"id": "r", "choices": [{"index": 0, "delta": {"content": content}}]}
    if count is not None:
        data["usage"] = {"prompt_tokens": 90, "completion_tokens": count, "reasoning_tokens": 0}
    return b"data: " + json.dumps(data).encode() + b"\n"


def read(lines: list[tuple[float, bytes]], start: float = 0.0) -> RequestRecord:
    record, stream = RequestRecord(0, 0.0), ScriptedStream(lines)
    asyncio.run(read_events(stream, record, stream.clock, start))
    return record


def test_token_times_of_the_native_stream() -> None:
    record = read(
        [
            (10.25, native(1, "a")),
            (10.25, b"\n"),
            (10.26, native(2, "ab")),
            (10.31, native(4, "abcd")),
            (10.32, native(5, "abcde")),
            (10.32, b"data: [DONE]\n"),
        ],
        start=10.0,
    )
    assert record.events_ms == pytest.approx([250, 260, 310, 320])
    assert record.event_tokens == [1, 1, 2, 1]
    assert (record.prompt_tokens, record.cached_tokens, record.text) == (90, 12, "abcde")
    assert metrics.ttft_ms(record) == pytest.approx(250)
    assert metrics.tpot_ms(record) == pytest.approx(70 / 4)
    assert metrics.gaps_ms(record) == pytest.approx([10, 50, 10])
    assert metrics.itl_ms(record) == pytest.approx([10, 50, 0, 10])


def test_token_times_of_a_chat_stream() -> None:
    role = b'data: {"id":"r","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n'
    final = b'data: {"id":"r","choices":[],"usage":{"prompt_tokens":90,"completion_tokens":4}}\n'
    counted = read([(0.1, role), (0.1, chat("a", 1)), (0.2, chat("b", 3)), (0.3, final), (0.3, b"data: [DONE]\n")])
    assert counted.events_ms == pytest.approx([100, 200, 300])
    assert counted.event_tokens == [1, 2, 1]
    assert (counted.text, counted.prompt_tokens) == ("ab", 90)
    # A server that sends no counts: one token per event with content.
    uncounted = read([(0.1, role), (0.1, chat("a", None)), (0.2, chat("b", None)), (0.3, b"data: [DONE]\n")])
    assert (uncounted.events_ms, uncounted.event_tokens) == (pytest.approx([100, 200]), [1, 1])


def test_an_error_in_the_stream_is_an_error_of_the_request() -> None:
    record = read([(0.1, native(1)), (0.2, b'data: {"error":{"message":"gone"}}\n'), (0.3, native(2))])
    assert "gone" in record.error
    assert record.event_tokens == [1]


def serve(script: Script, body: Callable[[str], Any]) -> Any:
    async def inside() -> Any:
        async with TestServer(make_app(script)) as server:
            return await body(str(server.make_url("")).rstrip("/"))

    return asyncio.run(inside())


@pytest.mark.parametrize("api", sorted(APIS))
@pytest.mark.parametrize("concurrency", [None, 3])
def test_every_request_is_sent_once_and_read_to_the_end(api: str, concurrency: int | None) -> None:
    trace = make_trace(Workload.parse("fixed:56@200x8"), 1, output_len=5)
    bodies = [build_body(request, api=api, model="m") for request in trace.requests]
    script = Script()
    arrivals = [request.arrival_s for request in trace.requests]
    records = serve(
        script, lambda url: run_job(url + APIS[api], bodies, arrivals, concurrency=concurrency, timeout_s=30)
    )
    assert len(script.seen) == len(set(script.seen)) == 8
    assert [record.error for record in records] == [""] * 8
    assert [record.num_tokens for record in records] == [5] * 8
    assert all(record.prompt_tokens > 64 for record in records)
    for record in records:
        assert record.events_ms == sorted(record.events_ms)
        assert record.sent_ms >= record.planned_ms
        assert len(record.text.split()) == 5


def test_refused_and_unanswered_requests_are_recorded_as_such() -> None:
    trace = make_trace(Workload.parse("text@500x3"), 1, output_len=2)
    bodies = [build_body(request, api="generate", model="m") for request in trace.requests]
    records = serve(
        Script(fail=(0,)), lambda url: run_job(url + "/generate", bodies, [0.0] * 3, concurrency=1, timeout_s=30)
    )
    assert records[0].error.startswith("HTTP 400")
    assert [record.error for record in records[1:]] == ["", ""]
    never = serve(
        Script(ttft_ms=60_000),
        lambda url: run_job(url + "/generate", bodies, [0.0] * 3, concurrency=None, timeout_s=0.3),
    )
    assert [record.error for record in never] == ["timeout"] * 3
    figures = metrics.summarise(never)
    assert (figures["num_failed"], figures["ttft_mean_ms"]) == (3, None)
    closed = asyncio.run(run_job("http://127.0.0.1:9/generate", bodies, [0.0] * 3, concurrency=None, timeout_s=5))
    assert all(record.error and record.error != "timeout" for record in closed)


def record_of(number: int, planned: float, first: float, gaps: list[float], error: str = "") -> RequestRecord:
    events = [first]
    for gap in gaps:
        events.append(events[-1] + gap)
    return RequestRecord(number, planned, planned + 0.5, events, [1] * len(events), 100, 0, events[-1], error)


def test_figures_of_known_records() -> None:
    records = [
        record_of(0, 0, 100, [10, 10, 10]),
        record_of(1, 1000, 300, [10, 500, 10]),
        record_of(2, 2000, 6000, [5, 5, 5]),
        record_of(3, 2500, 50, [5], error="timeout"),
    ]
    figures = metrics.summarise(records, limits_ms=((5000, 15), (5000, 1000)))
    assert figures["num_failed"] == 1
    assert figures["offered_rate"] == pytest.approx(3 / 2.5)
    # The last token comes at 2000 + 6015 ms.
    assert figures["served_rate"] == pytest.approx(3 / 8.015, rel=1e-3)
    assert figures["output_tokens_per_s"] == pytest.approx(12 / 8.015, rel=1e-3)
    assert figures["ttft_mean_ms"] == pytest.approx((100 + 300 + 6000) / 3, abs=0.01)
    assert figures["ttft_p50_ms"] == 300
    assert figures["tpot_mean_ms"] == pytest.approx((10 + 520 / 3 + 5) / 3, abs=0.01)
    assert figures["longest_gap_ms"] == 500
    assert figures["longest_gap_mean_ms"] == pytest.approx((10 + 500 + 5) / 3, abs=0.01)
    assert figures["goodput_ttft5000_tpot15"] == pytest.approx(1 / 8.015, rel=1e-3)
    assert figures["goodput_ttft5000_tpot1000"] == pytest.approx(2 / 8.015, rel=1e-3)
    assert figures["client_was_late"] is False
    json.dumps(figures, allow_nan=False)


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    values = [3.0, 1.0, 7.5, 2.0, 9.0, 4.0]
    for percent in (0, 1, 50, 90, 99, 100):
        assert metrics.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert math.isnan(metrics.percentile([], 50))


def test_saturation_leaves_out_ramp_and_drain() -> None:
    # Two requests per second for 100 s, but a slow start and a slow end.
    finishes = [5000.0, *(5000 + 500.0 * i for i in range(1, 200)), 150_000.0]
    assert metrics.saturation_rate(finishes, 4) == pytest.approx(2.0)
    assert math.isnan(metrics.saturation_rate(finishes[:11], 4))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 3)), max_size=40))
def test_compact_records_expand_to_the_same_times(steps: list[tuple[float, int]]) -> None:
    events = sorted(at for at, _ in steps)
    record = RequestRecord(
        4, 123.4, 123.6, events, [tokens for _, tokens in steps], 9, 3, events[-1] if events else 0.0
    )
    again = metrics.expand(json.loads(json.dumps(metrics.compact(record))))
    assert again.event_tokens == record.event_tokens
    # Rounding does not add up along the stream.
    assert again.events_ms == pytest.approx(record.events_ms, abs=0.0501)
    assert (again.planned_ms, again.prompt_tokens, again.cached_tokens) == (123.4, 9, 3)
