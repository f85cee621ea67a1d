"""The estimate of TPOT at a given TTFT: known queues as limits of the simulation, and how good its policies are."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bound
from servebench import bound_model, metrics, tradeoff, tradeoff_report
from servebench.client import RequestRecord
from servebench.results import Results, write_atomic
from servebench.tradeoff import TURNS, Outcome, Pair, Policy, Sharing, Work
from servebench.tradeoff_report import MIXED, SHARED, Row
from servebench.workload import Workload, make_trace
from spaceserve.sis.curves import DeviceCurves, shipped_files

pytestmark = pytest.mark.cpu

STEP_MS = 5.0
SPACE = (*TURNS, Pair(0.74, 0.51, "both 100"), Pair(0.55, 0.69, "encoder 100"), Pair(0.36, 0.81, "encoder 68"))


class Plain(Sharing):
    """The same pairs and decode step in every state."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.step_ms = lambda batch: STEP_MS  # type: ignore[assignment]
        self.pairs = lambda phase, work, batch: tuple(pairs)  # type: ignore[assignment]


def poisson(count: int, rate: float, seed: int = 1) -> list[float]:
    """Arrivals in ms."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate / 1e3) for _ in range(count)))


def h200() -> DeviceCurves:
    (path,) = (path for path in shipped_files() if path.stem == "nvidia-h200_qwen2-vl-7b")
    return DeviceCurves.load(path)


def test_without_decode_it_is_the_queue_of_constant_service() -> None:
    """M/D/1: the mean wait is rho s / (2 (1 - rho))."""
    count, rate = 60_000, 2.0
    found = tradeoff.simulate(
        poisson(count, rate), [Work(200, 100)] * count, Plain(TURNS), tradeoff.greedy(1), output_len=1
    )
    assert found.ttft_ms == pytest.approx(300 + 0.6 * 300 / (2 * 0.4), rel=0.03)
    assert (found.tpot_ms, found.shares) == (0.0, {})


def test_without_decode_the_least_remaining_comes_first() -> None:
    count, rate = 60_000, 3.0
    rng = random.Random(2)
    works = rng.choices([Work(20, 20), Work(250, 110)], k=count)
    found = tradeoff.simulate(poisson(count, rate), works, Plain(TURNS), tradeoff.greedy(1), output_len=1)
    # Smaller first is a little slower than least remaining first.
    smaller_first = bound_model.smaller_first_ms([bound_model.PartCosts(20, 20), bound_model.PartCosts(250, 110)], rate)
    assert 0.9 * smaller_first < found.ttft_ms < 1.02 * smaller_first


def test_without_compute_decode_is_alone() -> None:
    found = tradeoff.simulate(poisson(300, 5), [Work(0, 0)] * 300, Plain(TURNS), tradeoff.fixed("compute alone"))
    assert (found.ttft_ms, found.tpot_ms) == pytest.approx((0.0, STEP_MS))


def test_in_turns_with_compute_first_decode_gets_what_the_queue_leaves() -> None:
    """c + d = 1. A request that enters decode finds the queue as arrivals do, N of s each, and waits N s / (1 - rho)
    for the first token's successor; its own x of decode is stretched by 1 / (1 - rho) as well (a busy period each)."""
    count, rate, service, tokens = 60_000, 2.0, 250.0, 100
    found = tradeoff.simulate(
        poisson(count, rate), [Work(150, 100)] * count, Plain(TURNS), tradeoff.greedy(0), output_len=tokens + 1
    )
    rho = rate * service / 1e3
    present = rho + rho**2 / (2 * (1 - rho))
    assert found.ttft_ms == pytest.approx(present / rate * 1e3, rel=0.03)
    assert found.tpot_ms == pytest.approx((present * service + tokens * STEP_MS) / (1 - rho) / tokens, rel=0.03)
    assert found.shares == {
        ("encode", "compute alone"): pytest.approx(0.6, abs=0.02),
        ("prefill", "compute alone"): pytest.approx(0.4, abs=0.02),
    }


def test_one_pair_stretches_both_sides() -> None:
    """A request that decodes all the while, and a second one that is computed beside it."""
    half = Plain([Pair(0.5, 0.8, "static")])
    found = tradeoff.simulate([0.0, 100.0], [Work(50, 50), Work(60, 40)], half, tradeoff.fixed("static"))
    # 200 ms of compute beside the first, during which it gets 160 ms of decode; then both alone.
    assert found.ttft_ms == pytest.approx((100 + 200) / 2)
    assert found.tpot_ms == pytest.approx(((127 * STEP_MS + 40) + 127 * STEP_MS) / 2 / 127)


def test_requests_must_come_in_order_and_have_work() -> None:
    for arrivals, works in (([], []), ([1.0], []), ([2.0, 1.0], [Work(1, 1)] * 2)):
        with pytest.raises(ValueError, match="in order"):
            tradeoff.simulate(arrivals, works, Plain(TURNS), tradeoff.greedy(1))


def test_more_pairs_never_raise_the_envelope() -> None:
    run = (poisson(400, 2.0), [Work(190, 110)] * 400)
    turns, space = (tradeoff.envelope(tradeoff.sweep([run], Plain(pairs))) for pairs in (TURNS, SPACE))
    gains = []
    for ttft_ms in np.linspace(space[0].ttft_ms + 1, 2000, 20):
        before, after = tradeoff.tpot_at(turns, ttft_ms), tradeoff.tpot_at(space, ttft_ms)
        # Policies are good, not optimal: a choice more can mislead one by little.
        assert not after > 1.02 * before
        gains.append(after / before)
    assert min(gains) < 0.9


def test_the_envelope_is_the_lower_left_hull() -> None:
    points = [
        Outcome(100, 20),
        Outcome(120, 21),
        Outcome(200, 10),
        Outcome(150, 16),
        Outcome(400, 8),
        Outcome(300, 9.5),
    ]
    front = tradeoff.envelope(points)
    assert [(o.ttft_ms, o.tpot_ms) for o in front] == [(100, 20), (200, 10), (400, 8)]
    assert math.isnan(tradeoff.tpot_at(front, 99))
    assert math.isnan(tradeoff.ttft_at(front, 7.9))
    assert tradeoff.tpot_at(front, 150) == pytest.approx(15)
    assert tradeoff.ttft_at(front, 15) == pytest.approx(150)
    assert tradeoff.tpot_at(front, 300) == pytest.approx(9)
    assert tradeoff.ttft_at(front, 9) == pytest.approx(300)
    assert (tradeoff.tpot_at(front, 1e9), tradeoff.ttft_at(front, 1e9)) == (8, 100)


def markov_costs(policies: Sequence[Policy], weight: float) -> tuple[float, list[float]]:
    """Least mean of waiting + weight x decoding over all policies of the state, and that of each of ``policies``.

    The same queue with exponential work and answers, at most 25 of each; value iteration after uniformisation
    (Puterman, Markov Decision Processes, 8.5 and 11.5). Times in units of one request's compute.
    """
    most, load, answer = 25, 0.6, 2.0
    waiting, decoding = np.meshgrid(np.arange(most + 1), np.arange(most + 1), indexing="ij")
    cost, finish = waiting + weight * decoding, decoding / answer
    compute = np.array([pair.compute for pair in SPACE])
    decode = np.array([pair.decode for pair in SPACE])
    # With nothing on one side the other has the device.
    compute_rate = np.where(decoding[..., None] > 0, compute, 1.0) * (waiting[..., None] > 0)
    decode_rate = np.where(waiting[..., None] > 0, decode, 1.0) * finish[..., None]
    uniform = load + 1.0 + most / answer

    def solve(chosen: np.ndarray | None) -> float:
        value, before = np.zeros(cost.shape), math.nan
        for _ in range(200):
            for _ in range(50):
                arrive = np.vstack([value[1:], value[-1:]]) - value
                computed = np.pad(value, ((1, 0), (0, 1)), mode="edge")[:-1, 1:] - value
                ended = np.pad(value, ((0, 0), (1, 0)), mode="edge")[:, :-1] - value
                change = compute_rate * computed[..., None] + decode_rate * ended[..., None]
                acted = change.min(-1) if chosen is None else np.take_along_axis(change, chosen, -1)[..., 0]
                value = value + (cost + load * arrive + acted) / uniform
                mean = value[0, 0] * uniform
                value = value - value[0, 0]
            if abs(mean - before) < 1e-6:
                break
            before = mean
        return float(mean)

    costs = []
    for policy in policies:
        chosen = np.zeros((*cost.shape, 1), dtype=int)
        for q, b in itertools.product(range(1, most + 1), range(1, most + 1)):
            chosen[q, b, 0] = SPACE.index(policy(SPACE, q, b, load))
        costs.append(solve(chosen))
    return solve(None), costs


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_hardly_any_policy_of_the_state_does_better(weight: float) -> None:
    weights = [weight * factor for factor in (1, 2, 3, 4)]
    best, costs = markov_costs([tradeoff.least_delay(w) for w in weights], weight)
    assert best <= min(costs) * (1 + 1e-3)
    assert min(costs) <= 1.03 * best
    # Not every policy does.
    assert markov_costs([tradeoff.greedy(0)], weight)[1][0] > 1.03 * best


def test_pairs_are_those_of_the_curves() -> None:
    curves = h200()
    work = tradeoff.work_of(curves, [(2048, 2048)], 80)
    assert (work.patches, work.tokens) == ((21316,), 5409)
    sharing = Sharing(curves, 5000)
    encode = {pair.label: pair for pair in sharing.pairs("encode", work, 6)}
    alone, beside = curves.at(132), curves.at(100)
    both = encode["both 100"]
    assert both.compute == pytest.approx(
        alone.encoder_batch_ms(work.patches)
        / beside.encoder_batch_ms(work.patches)
        / curves.contention["encoder_beside_decode_masked"][100]
    )
    assert both.decode == pytest.approx(
        alone.decode_step_ms(6, 5000)
        / curves.at(32).decode_step_ms(6, 5000)
        / curves.contention["decode_beside_encoder_masked"][100]
    )
    assert encode["none"].compute == pytest.approx(1 / curves.contention["encoder_beside_decode_unmasked"][132])
    prefill = {pair.label: pair for pair in sharing.pairs("prefill", work, 6)}
    row = next(r for r in curves.sharing if (r["mode"], r["prefill_units"]) == ("prefill masked", 84))
    whole = next(r for r in curves.sharing if r["mode"] == "both unmasked")
    assert prefill["encoder 84"].decode == pytest.approx(whole["decode_alone_ms"] / row["decode_ms"])
    assert "encoder 116" in prefill
    fewer = Sharing(replace(curves, min_decoder_units=24), 5000).pairs("prefill", work, 6)
    assert "encoder 116" not in {pair.label for pair in fewer}  # 16 SMs are fewer than decode runs on
    # A chunk that holds the whole prompt costs little more than the prefill alone, and is one decode step.
    chunks = [pair for label, pair in prefill.items() if label.startswith("mixed")]
    assert [p.compute for p in chunks] == sorted(p.compute for p in chunks)
    assert chunks[-1].compute < 1
    assert {p.label for p in Sharing(curves, 5000, ("turns",)).pairs("encode", work, 6)} == {p.label for p in TURNS}


def make_slice(results: Results, ttft_ms: Callable[[Any], float]) -> None:
    workload = Workload.parse("fixed:2048@2x20")
    trace = results.trace("qwen2-vl-7b", workload, 0, seed=1)
    records = [
        RequestRecord(id=r.id, planned_ms=r.arrival_s * 1e3, events_ms=[600.0, 610.0], event_tokens=[1, 1])
        for r in trace.requests
    ]
    arms = [
        {
            "arm": name,
            "ours": name == "spaceserve",
            "summary": {"ttft_mean_ms": ttft_ms(name), "tpot_mean_ms": 10.0},
            "requests": [metrics.compact(record) for record in records],
        }
        for name in ("spaceserve", "stock")
    ]
    data = {
        "model": "qwen2-vl-7b",
        "workload": workload.name,
        "repeat": 0,
        "status": "done",
        "environment": {"gpus": [{"name": "NVIDIA H200"}]},
        "arms": arms,
    }
    write_atomic(results.root / "slices" / "one.json", json.dumps(data))


def test_rows_of_a_results_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path)
    make_slice(results, lambda name: 650.0 if name == "stock" else 600.0)
    (row,) = (row for row in tradeoff_report.rows(results, "qwen2-vl-7b") if row.points)
    assert row.workload == "fixed:2048@2x20"
    alone_ms = tradeoff.work_of(h200(), [(2048, 2048)], 80).total_ms
    assert row.load == pytest.approx(2e-3 * alone_ms, rel=0.01)
    assert row.outside_ms == pytest.approx(600 - alone_ms, abs=0.2)
    assert row.fronts[MIXED][0].ttft_ms <= row.fronts[SHARED][0].ttft_ms + 1e-6
    assert bound.main(["tradeoff", "--results", str(tmp_path), "--model-name", "qwen2-vl-7b"]) == 0
    assert "spaceserve 10.0 / 600" in capsys.readouterr().out
    stored = json.loads((tmp_path / "tradeoff-qwen2-vl-7b.json").read_text())
    assert any(entry["workload"] == row.workload and entry["points"] for entry in stored)
    assert (tmp_path / "tradeoff-qwen2-vl-7b.png").stat().st_size > 10_000
    assert tradeoff_report.rows(results, "another") == []
    with pytest.raises(SystemExit):
        bound.main(["tradeoff", "--results", str(tmp_path), "--model-name", "another"])


@pytest.mark.parametrize(
    ("tpot_ms", "outside_ms", "verdict"),
    [
        (7.0, 0.0, "**lies beyond**"),
        (9.0, 0.0, "only with mixed chunks"),
        (11.0, 150.0, "within, but for time outside"),
        (11.0, 0.0, "within"),
    ],
)
def test_a_target_beyond_the_envelope_is_said_to_be(tpot_ms: float, outside_ms: float, verdict: str) -> None:
    fronts = {SHARED: [Outcome(100, 20), Outcome(300, 10)], MIXED: [Outcome(100, 18), Outcome(300, 8)]}
    row = Row("fixed:2048@2", 2.0, 0.6, fronts, [], tpot_ms, 300.0, outside_ms)
    assert row.verdict == verdict
    assert verdict in tradeoff_report.section([row])
    assert Row("fixed:2048@2", 2.0, 0.6, fronts, [], tpot_ms, None).verdict == "-"
    assert Row("fixed:2048@2", 2.0, 0.6, fronts, [], tpot_ms, 50.0).verdict == "**lies beyond**"


def test_a_workload_that_was_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (path for path in shipped_files() if path.stem == "nvidia-h200_qwen2-vl-7b")
    arguments = ["tradeoff", "--curves", str(path), "--workload", "mix", "--rates", "4", "--requests", "50"]
    assert bound.main(arguments) == 0
    assert "mix@4x50" in capsys.readouterr().out
    trace = make_trace(Workload.parse("mix@4x50"), 0)
    front = tradeoff_report.fronts_of(h200(), [trace])[SHARED]
    assert [o.ttft_ms for o in front] == sorted(o.ttft_ms for o in front)
