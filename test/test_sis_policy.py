"""SIS policy: properties over random devices and states."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceserve.sis.curves import CURVE_AXES, Curve, DeviceCurves
from spaceserve.sis.policy import CORRECTION_BOUNDS, GpuState, MaskMode, Objective, SpaceInferenceScheduler, Split
from spaceserve.sis.standin import standin_curves

pytestmark = pytest.mark.cpu

Device = tuple[DeviceCurves, tuple[int, ...]]

# Not a global profile: other test files keep their own.
PROPERTY = settings(deadline=None, max_examples=100, derandomize=True)


def power_law_curves(
    total: int,
    encoder_exponent: float = -0.9,
    decode_exponent: float = -0.5,
    decode_scale: float = 1.0,
    min_decoder_units: int = 1,
    contention: dict[str, dict[int, float]] | None = None,
) -> DeviceCurves:
    """Times that are power laws of units and sizes, so that expectations can be computed by hand."""
    units = sorted({1, max(1, total // 2), total})

    def table(scale: float, exponent: float, y: bool) -> list[list[list[float]]]:
        return [[[scale * (u / total) ** exponent * x * ((v / 100) if y else 1.0) for v in (1, 100)[: 2 if y else 1]]
                 for x in (1, 100)] for u in units]  # fmt: skip

    curves = {}
    for name, (_, y_axis, offset) in CURVE_AXES.items():
        exponent = encoder_exponent if name.startswith("encoder") else decode_exponent
        scale = 0.01 if name.startswith("encoder") else 0.05 * decode_scale
        has_y = y_axis is not None and not offset
        curves[name] = Curve.fit(name, units, (1, 100), (1, 100) if has_y else (1,), table(scale, exponent, has_y))
    return DeviceCurves(
        device_name="test",
        total_units=total,
        model_fingerprint="0",
        curves=curves,
        source="stand-in",
        provenance="test",
        min_decoder_units=min_decoder_units,
        contention=contention or {},
    )


@st.composite
def devices(draw: st.DrawFn) -> Device:
    total = draw(st.integers(8, 132))
    step = draw(st.sampled_from([s for s in (1, 2, 8) if s < total]))
    rungs = (*range(step, total, step), total)
    contention = {}
    for case in ("decode_beside_encoder_masked", "decode_beside_encoder_unmasked", "encoder_beside_decode_unmasked"):
        picked = draw(st.lists(st.sampled_from(rungs), max_size=3))
        contention[case] = {n: draw(st.floats(0.8, 4.0)) for n in picked}
    curves = power_law_curves(
        total,
        draw(st.floats(-1.2, -0.1)),
        draw(st.floats(-1.2, -0.05)),
        draw(st.floats(0.1, 10)),
        draw(st.integers(1, max(1, total - step))),
        contention,
    )
    return curves, rungs


states = st.builds(
    GpuState,
    encoder_patches=st.lists(st.integers(1, 20000), max_size=4).map(tuple),
    decode_batch=st.integers(0, 64),
    mean_context_tokens=st.floats(0, 20000),
    prefill_tokens=st.integers(0, 8192),
    num_waiting=st.integers(1, 100),
    encoder_load=st.floats(0, 0.9),
)
busy_states = st.builds(
    GpuState,
    encoder_patches=st.lists(st.integers(1, 20000), min_size=1, max_size=4).map(tuple),
    decode_batch=st.integers(1, 64),
    mean_context_tokens=st.floats(1, 20000),
    num_waiting=st.integers(1, 100),
    encoder_load=st.floats(0, 0.9),
)
objectives = st.sampled_from(["least_delay", "least_time", "tpot"])
modes = st.sampled_from(["encoder", "both"])


@PROPERTY
@given(devices(), st.lists(states, min_size=1, max_size=8), objectives, modes, st.floats(0.1, 1000))
def test_split_is_a_rung_and_sides_fit(
    device: Device, sequence: list[GpuState], objective: Objective, mode: MaskMode, target: float
) -> None:
    curves, rungs = device
    sis = SpaceInferenceScheduler(curves, rungs, objective, target, mode)
    for state in sequence:
        split = sis.decide(state)
        total = curves.total_units
        if state.encoder_idle:
            assert (split.encoder_units, split.decoder_units) == (0, total)
            assert split.predicted_encoder_ms == 0
        elif state.decoder_idle:
            assert split.encoder_units == total
            assert split.predicted_decode_ms == 0
        else:
            assert split.encoder_units in sis.shared_rungs
            assert split.encoder_units in rungs
            if split.encoder_units < total:
                assert total - split.encoder_units >= curves.min_decoder_units
            expected = total if mode == "encoder" else total - split.encoder_units
            assert split.decoder_units == expected >= 1
        assert all(math.isfinite(v) for v in (split.predicted_encoder_ms, split.predicted_decode_ms))


def brute_force(
    curves: DeviceCurves, rungs: tuple[int, ...], mode: str, state: GpuState
) -> dict[int, tuple[float, float]]:
    """Encoder and decode ms for each rung, computed from the curves without the scheduler (no prefill)."""
    suffix = "masked" if mode == "both" else "unmasked"
    found = {}
    for n in rungs:
        rest = curves.total_units - n
        whole = n == curves.total_units
        if whole and not (mode == "encoder" and n in curves.contention.get("decode_beside_encoder_unmasked", {})):
            continue
        if not whole and rest < curves.min_decoder_units:
            continue
        encoder = curves.at(n).encoder_batch_ms(state.encoder_patches)
        decode = curves.at(rest or n).decode_step_ms(state.decode_batch, state.mean_context_tokens)
        encoder *= curves.contention_factor(f"encoder_beside_decode_{suffix}", n)
        decode *= curves.contention_factor(f"decode_beside_encoder_{suffix}", n)
        found[n] = (encoder, decode)
    return found


@PROPERTY
@given(devices(), busy_states, modes, st.floats(0, 20))
def test_least_delay_is_the_minimum(device: Device, state: GpuState, mode: MaskMode, weight: float) -> None:
    curves, rungs = device
    split = SpaceInferenceScheduler(curves, rungs, "least_delay", None, mode, decode_weight=weight).decide(state)
    alone_ms = curves.at(curves.total_units).decode_step_ms(state.decode_batch, state.mean_context_tokens)
    costs = {
        n: e * (state.num_waiting / (1 - state.encoder_load) + weight * state.decode_batch * max(0.0, 1 - alone_ms / d))
        for n, (e, d) in brute_force(curves, rungs, mode, state).items()
    }
    assert costs[split.encoder_units] <= min(costs.values()) * (1 + 1e-9)
    assert split.rule == "least_delay"


def test_least_delay_moves_with_who_waits_and_who_decodes() -> None:
    """A deeper queue never gets fewer units, more answers never leave the encoder more."""

    def units(waiting: int, decoding: int, load: float = 0.0) -> int:
        sis = SpaceInferenceScheduler(standin_curves(), (*range(20, 117, 8), 132), "least_delay")
        state = GpuState(
            encoder_patches=(21316,),
            decode_batch=decoding,
            mean_context_tokens=3000,
            num_waiting=waiting,
            encoder_load=load,
        )
        return sis.decide(state).encoder_units

    by_waiting = [units(waiting, 8) for waiting in (1, 4, 16, 64)]
    assert by_waiting == sorted(by_waiting)
    assert by_waiting[0] < by_waiting[-1]
    by_decoding = [units(4, decoding) for decoding in (1, 4, 16, 64)]
    assert by_decoding == sorted(by_decoding, reverse=True)
    assert by_decoding[0] > by_decoding[-1]
    by_load = [units(2, 4, load) for load in (0.0, 0.5, 0.9)]
    assert by_load == sorted(by_load)
    assert by_load[0] < by_load[-1]


@PROPERTY
@given(devices(), busy_states, modes, st.floats(0, 20))
def test_least_time_is_the_minimum(device: Device, state: GpuState, mode: MaskMode, weight: float) -> None:
    curves, rungs = device
    split = SpaceInferenceScheduler(curves, rungs, "least_time", None, mode, decode_weight=weight).decide(state)
    costs = {n: e + weight * d for n, (e, d) in brute_force(curves, rungs, mode, state).items()}
    assert costs[split.encoder_units] <= min(costs.values()) * (1 + 1e-9)
    assert split.predicted_encoder_ms + weight * split.predicted_decode_ms == pytest.approx(costs[split.encoder_units])


@PROPERTY
@given(devices(), busy_states, modes, st.floats(0.01, 5))
def test_target_is_met_whenever_a_rung_meets_it_else_least_harm(
    device: Device, state: GpuState, mode: MaskMode, relative: float
) -> None:
    curves, rungs = device
    options = brute_force(curves, rungs, mode, state)
    target = relative * sorted(d for _, d in options.values())[len(options) // 2]
    split = SpaceInferenceScheduler(curves, rungs, "tpot", target, mode).decide(state)
    meeting = [n for n, (_, d) in options.items() if d <= target]
    if meeting:
        assert split.predicted_decode_ms <= target
        assert split.encoder_units == max(meeting)
    else:
        assert split.predicted_decode_ms == pytest.approx(min(d for _, d in options.values()))


@PROPERTY
@given(devices(), busy_states, modes, st.floats(0.01, 100), st.floats(1, 10))
def test_a_looser_target_never_costs_the_encoder_share(
    device: Device, state: GpuState, mode: MaskMode, target: float, looser: float
) -> None:
    curves, rungs = device
    tight = SpaceInferenceScheduler(curves, rungs, "tpot", target, mode).decide(state)
    loose = SpaceInferenceScheduler(curves, rungs, "tpot", target * looser, mode).decide(state)
    if tight.predicted_decode_ms <= target:
        assert loose.encoder_units >= tight.encoder_units


@PROPERTY
@given(devices(), st.lists(busy_states, min_size=2, max_size=8), modes, st.floats(0, 50_000))
def test_hysteresis_never_loses_more_than_a_switch_costs(
    device: Device, sequence: list[GpuState], mode: MaskMode, cost_us: float
) -> None:
    curves, rungs = device
    sis = SpaceInferenceScheduler(curves, rungs, "least_time", None, mode, cost_us)
    previous: Split | None = None
    for state in sequence:
        split = sis.decide(state)
        costs = {n: e + d for n, (e, d) in brute_force(curves, rungs, mode, state).items()}
        best = min(costs.values())
        assert costs[split.encoder_units] <= best + cost_us * 1e-3 + 1e-9 * best
        if previous is not None:
            assert split.switched == (split.encoder_units != previous.encoder_units)
            if split.switched:
                assert costs[previous.encoder_units] - best > cost_us * 1e-3 * (1 - 1e-9) - 1e-9
        previous = split


@PROPERTY
@given(devices(), st.lists(busy_states, min_size=2, max_size=8), modes, st.floats(0.1, 100), st.floats(0, 50_000))
def test_hysteresis_never_breaks_a_target_that_a_rung_keeps(
    device: Device, sequence: list[GpuState], mode: MaskMode, target: float, cost_us: float
) -> None:
    curves, rungs = device
    sis = SpaceInferenceScheduler(curves, rungs, "tpot", target, mode, cost_us)
    for state in sequence:
        split = sis.decide(state)
        options = brute_force(curves, rungs, mode, state)
        if any(d <= target for _, d in options.values()):
            assert split.predicted_decode_ms <= target
            largest = max(n for n, (_, d) in options.items() if d <= target)
            gain = options[split.encoder_units][0] - options[largest][0]
            assert gain <= cost_us * 1e-3 + 1e-9 * options[largest][0]


@PROPERTY
@given(devices(), st.lists(states, min_size=1, max_size=6), objectives, modes)
def test_same_calls_same_splits(device: Device, sequence: list[GpuState], objective: Objective, mode: MaskMode) -> None:
    curves, rungs = device

    def run() -> list[Split]:
        sis = SpaceInferenceScheduler(curves, rungs, objective, 5.0, mode)
        splits = []
        for state in sequence:
            split = sis.decide(state)
            splits.append(split)
            sis.observe(split, split.raw_encoder_ms * 1.3 or None, split.raw_decode_ms * 0.9 or None)
        return splits

    assert run() == run()


@PROPERTY
@given(devices(), busy_states, modes, st.floats(0, 0.99))
def test_reconsider_scales_the_encoder_and_keeps_its_rung_for_small_gains(
    device: Device, state: GpuState, mode: MaskMode, progress: float
) -> None:
    curves, rungs = device
    sis = SpaceInferenceScheduler(curves, rungs, "least_time", None, mode, switch_cost_us=1e12)
    first = sis.decide(state)
    again = sis.reconsider(state, progress)
    assert again.encoder_units == first.encoder_units
    assert not again.switched
    assert again.predicted_encoder_ms == pytest.approx((1 - progress) * first.predicted_encoder_ms)


def make_sis(**kwargs: Any) -> SpaceInferenceScheduler:
    kwargs = {"objective": "least_time", **kwargs}
    return SpaceInferenceScheduler(power_law_curves(64), (*range(8, 64, 8), 64), **kwargs)


BUSY = GpuState(encoder_patches=(1000,), decode_batch=8, mean_context_tokens=50)


def test_between_layers_the_encoder_yields_when_decode_arrives_and_takes_all_when_it_ends() -> None:
    sis = make_sis(objective="tpot", tpot_target_ms=4.0)
    only_encoder = GpuState(encoder_patches=(1000,))
    assert sis.decide(only_encoder).encoder_units == 64
    beside = sis.reconsider(BUSY, 0.25)
    assert beside.encoder_units < 64
    assert beside.switched
    assert beside.predicted_decode_ms <= 4.0
    after = sis.reconsider(only_encoder, 0.5)
    assert after.encoder_units == 64
    assert after.switched
    assert sis.num_switches == 2


def test_a_broken_target_moves_the_encoder_whatever_a_switch_costs() -> None:
    sis = make_sis(objective="tpot", tpot_target_ms=2.0, switch_cost_us=1e9)
    light = GpuState(encoder_patches=(1000,), decode_batch=1, mean_context_tokens=50)
    assert sis.decide(light).encoder_units == 56
    heavy = sis.reconsider(dataclasses.replace(light, decode_batch=16), 0.1)
    assert (heavy.encoder_units, heavy.switched) == (40, True)
    assert heavy.predicted_decode_ms <= 2.0
    # Back again only the encoder would gain, and less than this switch costs.
    assert sis.reconsider(light, 0.2).encoder_units == 40


def test_a_new_batch_after_idling_chooses_freely() -> None:
    sis = make_sis(objective="tpot", tpot_target_ms=2.0, switch_cost_us=1e9)
    light = GpuState(encoder_patches=(1000,), decode_batch=1, mean_context_tokens=50)
    assert sis.decide(dataclasses.replace(light, decode_batch=16)).encoder_units == 40
    assert sis.decide(light).encoder_units == 40  # not worth a switch
    assert sis.decide(GpuState(decode_batch=1, mean_context_tokens=50)).encoder_units == 0
    fresh = sis.decide(light)
    assert (fresh.encoder_units, fresh.switched) == (56, False)
    assert sis.num_switches == 0


def test_prefill_counts_in_least_time_and_not_in_the_target() -> None:
    with_prefill = dataclasses.replace(BUSY, prefill_tokens=4000)
    assert make_sis().decide(with_prefill).encoder_units < make_sis().decide(BUSY).encoder_units
    tpot: dict[str, Any] = {"objective": "tpot", "tpot_target_ms": 6.0}
    assert make_sis(**tpot).decide(with_prefill).encoder_units == make_sis(**tpot).decide(BUSY).encoder_units
    # Prefill without decode is no idle decoder: the device is shared, whatever the objective.
    alone = GpuState(encoder_patches=(1000,), prefill_tokens=2000)
    assert make_sis(**tpot).decide(alone).encoder_units < 64


def test_the_whole_device_is_shared_only_where_its_contention_was_measured() -> None:
    curves = power_law_curves(64, contention={"decode_beside_encoder_unmasked": {64: 1.0}})
    rungs = (*range(8, 64, 8), 64)
    assert SpaceInferenceScheduler(curves, rungs, mask_mode="encoder").shared_rungs == rungs
    assert SpaceInferenceScheduler(curves, rungs, mask_mode="both").shared_rungs == rungs[:-1]
    assert make_sis().shared_rungs == rungs[:-1]


@PROPERTY
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_correction_is_bounded(ratios: list[float]) -> None:
    sis = make_sis()
    low, high = CORRECTION_BOUNDS
    for ratio in ratios:
        split = sis.decide(BUSY)
        sis.observe(split, split.raw_encoder_ms * ratio, split.raw_decode_ms / ratio)
        for n in sis.rungs:
            assert all(low <= f <= high for f in sis.correction(n))


def test_correction_converges_on_a_drift_and_is_shared_with_rungs_never_tried() -> None:
    sis = make_sis()
    for _ in range(80):
        split = sis.decide(BUSY)
        sis.observe(split, split.raw_encoder_ms * 1.4, split.raw_decode_ms * 0.8)
    assert split.predicted_encoder_ms == pytest.approx(1.4 * split.raw_encoder_ms, rel=0.02)
    assert split.predicted_decode_ms == pytest.approx(0.8 * split.raw_decode_ms, rel=0.02)
    untried = next(n for n in sis.shared_rungs if n != split.encoder_units)
    assert sis.correction(untried)[0] == pytest.approx(1.4, rel=0.25)


def test_one_outlier_moves_a_prediction_by_less_than_a_fifth() -> None:
    sis = make_sis()
    split = sis.decide(BUSY)
    sis.observe(split, split.raw_encoder_ms * 1e6)
    assert 1.0 < sis.correction(split.encoder_units)[0] < 2**0.3


def test_decisions_are_kept_in_a_ring_with_measured_times_and_become_json() -> None:
    sis = make_sis(log_size=3)
    first = sis.decide(BUSY)
    for _ in range(3):
        last = sis.decide(BUSY)
    sis.observe(first, 1.0, 1.0)  # no longer in the ring: not an error
    sis.observe(last, measured_encoder_ms=7.0)
    sis.observe(last, measured_decode_ms=2.0)
    kept = sis.last_decisions()
    assert [d.split.decision_id for d in kept] == [1, 2, 3]
    assert (kept[-1].measured_encoder_ms, kept[-1].measured_decode_ms) == (7.0, 2.0)
    assert kept[0].measured_encoder_ms is None
    assert json.loads(json.dumps([dataclasses.asdict(d) for d in kept]))[-1]["state"]["decode_batch"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "tpot"}, "tpot_target_ms"),
        ({"objective": "fast"}, "unknown objective"),
        ({"mask_mode": "none"}, "unknown mask mode"),
        ({"switch_cost_us": -1.0}, "negative"),
        ({"log_size": 0}, "log_size"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sis(**change)


def test_bad_rungs_states_and_measurements_are_refused() -> None:
    curves = power_law_curves(64)
    for rungs, message in (((64, 8), "ascending"), ((8, 16), "whole device"), ((), "ascending"), ((64,), "leaves")):
        with pytest.raises(ValueError, match=message):
            SpaceInferenceScheduler(curves, rungs)
    for bad in ({"decode_batch": -1}, {"mean_context_tokens": math.inf}, {"encoder_patches": (0,)}):
        with pytest.raises(ValueError, match=r"size|0 patches"):
            GpuState(**bad)
    sis = make_sis()
    split = sis.decide(BUSY)
    with pytest.raises(ValueError, match="measured_encoder_ms"):
        sis.observe(split, math.nan)
    with pytest.raises(ValueError, match="progress"):
        sis.reconsider(BUSY, 1.0)
