"""The simulator against what is known in closed form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spaceserve.encoder_schedule import EncodeItem
from twsrftbench import simulation as sim

pytestmark = pytest.mark.cpu


def test_curve_goes_through_its_points() -> None:
    curve = sim.CostCurve.fit(sim.STAND_IN_CURVE, 2.0)
    for num_patches, latency_ms in sim.STAND_IN_CURVE:
        assert curve.forward_ms([EncodeItem(b"x", num_patches)]) == pytest.approx(latency_ms)
    true = sim.CostCurve(3.0, 2e-3, 5e-7)
    points = [(n, true.forward_ms([EncodeItem(b"x", n)])) for n in (256, 1_024, 5_329, 21_316)]
    assert sim.CostCurve.fit(points, None).__dict__ == pytest.approx(true.__dict__)
    with pytest.raises(ValueError, match="points"):
        sim.CostCurve.fit([(1, 1.0)], 2.0)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_queue_of_one_size_waits_as_queueing_theory_says(load: float) -> None:
    """M/D/1: the mean wait is load * service / (2 (1 - load)) (Pollaczek and Khinchine), under any order."""
    curve = sim.CostCurve(0.0, 1.0, 0.0)  # a patch a millisecond, nothing fixed
    means = []
    for seed in range(5):
        trace = sim.make_trace("poisson", load, 3_000, seed, curve, side_shares={224: 1.0})
        for policy in ("fcfs", "srf", "twsrft", "slack"):
            latency_s = sim.simulate(trace, policy, 1.0, 1, curve)
            means.append(np.mean(list(latency_s.values())))
    service_s = 0.256
    expected_s = service_s + load * service_s / (2 * (1 - load))
    assert np.mean(means) == pytest.approx(expected_s, rel=0.05)


def test_hand_made_trace(tmp_path: Path) -> None:
    """A large image first, two small ones during its forward, one of them twice: 100 ms, then both in one batch."""
    path = tmp_path / "trace.jsonl"
    images = [(0.0, "big", 100), (0.01, "a", 6), (0.02, "b", 4), (0.03, "a", 6)]
    path.write_text(
        "\n".join(json.dumps({"arrival_s": t, "images": [{"key": key, "num_patches": n}]}) for t, key, n in images)
    )
    arrivals = sim.read_trace(path)
    latency_s = sim.simulate(arrivals, "twsrft", 1.0, 10, sim.CostCurve(1.0, 1.0, 0.0))
    assert latency_s == pytest.approx({"000000": 0.101, "000001": 0.102, "000002": 0.092, "000003": 0.082})


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_trace_has_the_load_it_names(kind: str) -> None:
    curve = sim.CostCurve.fit(sim.STAND_IN_CURVE, 2.0)
    work_s = time_s = 0.0
    for seed in range(10):
        trace = sim.make_trace(kind, 0.8, 2_000, seed, curve, multi_share=0.2)
        work_s += sum(curve.alone_ms(item.num_patches) for arrival in trace for item in arrival.items) / 1e3
        time_s += trace[-1].arrival_s
    assert work_s / time_s == pytest.approx(0.8, rel=0.07)
    assert sim.make_trace(kind, 0.8, 100, 3, curve) == sim.make_trace(kind, 0.8, 100, 3, curve)
