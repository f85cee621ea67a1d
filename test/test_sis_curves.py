"""Curves, shapes and the roofline estimate, held against the documented measurements."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceserve.sis import curves_for, device_spec, estimate_curves, find_curves, shape_from_hf_config
from spaceserve.sis.curves import CONTENTION_CASES, CURVE_AXES, Curve, DeviceCurves, isotonic, shipped_files
from spaceserve.sis.roofline import KNOWN_DEVICES
from spaceserve.sis.shapes import QWEN2_VL_7B, ModelShape, shape_from_model_path
from spaceserve.sis.standin import (
    DECODE_BATCH,
    DECODE_BESIDE_MS,
    DECODE_CONTEXT,
    DECODE_MS,
    ENCODER_MS,
    standin_curves,
)

pytestmark = pytest.mark.cpu

QWEN2_VL_7B_CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN2_5_VL_7B_CONFIG: dict[str, Any] = {
    **{k: v for k, v in QWEN2_VL_7B_CONFIG.items() if k != "vision_config"},
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def errors(curves: DeviceCurves) -> list[float]:
    predicted = [(curves.at(n).encoder_batch_ms([p]), ms) for p, row in ENCODER_MS.items() for n, ms in row.items()]
    predicted += [(curves.at(n).decode_step_ms(DECODE_BATCH, DECODE_CONTEXT), ms) for n, ms in DECODE_MS.items()]
    return [abs(p - ms) / ms for p, ms in predicted]


def test_roofline_reproduces_the_measurements_it_was_fitted_to() -> None:
    found = errors(estimate_curves(QWEN2_VL_7B, KNOWN_DEVICES["NVIDIA H200"]))
    assert len(found) == 12
    assert statistics.median(found) < 0.10
    assert max(found) < 0.25


def test_standin_curves_are_what_was_measured() -> None:
    curves = standin_curves()
    assert statistics.median(errors(curves)) < 0.05
    assert max(errors(curves)) < 0.10
    assert "Stand-ins, not SGLang's kernels" in curves.provenance
    for n, (masked, unmasked) in DECODE_BESIDE_MS.items():
        alone = curves.at(132 - n).decode_step_ms(DECODE_BATCH, DECODE_CONTEXT)
        assert alone * curves.contention_factor("decode_beside_encoder_masked", n) == pytest.approx(masked, rel=0.02)
        assert alone * curves.contention_factor("decode_beside_encoder_unmasked", n) == pytest.approx(
            unmasked, rel=0.02
        )


@pytest.mark.parametrize("file", shipped_files(), ids=lambda file: file.name)
def test_shipped_curves_are_whole_profiles(file: Path) -> None:
    """Measured, validated on held-out sizes, with each side beside the other, and with prefill beside decode."""
    curves = DeviceCurves.load(file)
    assert curves.source == "profiled"
    assert set(curves.curves) == set(CURVE_AXES)
    assert all(curves.validation["errors"][phase]["num_points"] > 0 for phase in ("encoder", "decode", "prefill"))
    assert not curves.validation.get("failed_parts")
    assert set(curves.contention) == set(CONTENTION_CASES)
    assert {row["mode"] for row in curves.sharing} == {"both unmasked", "both masked", "prefill masked"}
    assert curves.min_decoder_units < curves.total_units // 2


def test_curves_for_takes_the_shipped_file_and_else_an_estimate_that_says_so() -> None:
    assert curves_for("NVIDIA H200", 132, QWEN2_VL_7B).source == "profiled"
    other = curves_for("NVIDIA L40S", 142, QWEN2_VL_7B)
    assert other.source == "roofline"
    assert "ESTIMATE" in other.provenance
    assert "guessed" in device_spec("Some GPU", 60).name
    assert find_curves("NVIDIA H200", 132, "another model") is None


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_estimates_are_monotone_on_every_known_device(name: str) -> None:
    device = KNOWN_DEVICES[name]
    curves = estimate_curves(QWEN2_VL_7B, device)
    units = range(8, device.num_sms + 1)
    for of in (
        lambda c: c.encoder_batch_ms([5329, 1024]),
        lambda c: c.decode_step_ms(16, 3000),
        lambda c: c.prefill_chunk_ms(2048, 1000),
    ):
        times = [of(curves.at(n)) for n in units]
        assert all(a >= b * (1 - 1e-9) for a, b in pairwise(times))
    assert curves.at(64).encoder_batch_ms([8000]) > curves.at(64).encoder_batch_ms([4000, 4000])
    assert curves.at(64).decode_step_ms(16, 6000) > curves.at(64).decode_step_ms(16, 3000)


def test_shapes_come_from_configurations() -> None:
    assert shape_from_hf_config(QWEN2_VL_7B_CONFIG) == QWEN2_VL_7B
    nested = {
        "model_type": "qwen2_vl",
        "vision_config": QWEN2_VL_7B_CONFIG["vision_config"],
        "text_config": QWEN2_VL_7B_CONFIG,
    }
    assert shape_from_hf_config(nested).fingerprint() == QWEN2_VL_7B.fingerprint()
    windowed = shape_from_hf_config(QWEN2_5_VL_7B_CONFIG).encoder
    assert (windowed.gated, windowed.window_patches, windowed.full_layers, windowed.out_hidden_size) == (
        True,
        64,
        4,
        3584,
    )
    assert windowed != QWEN2_VL_7B.encoder
    # Linear weights of Qwen2-VL-7B's decoder with lm_head: 7.07 billion, by hand from its configuration.
    weights = sum(g.n * g.k * g.count for g in QWEN2_VL_7B.decoder.gemms())
    assert weights == 28 * (3584 * 4608 + 3584 * 3584 + 3 * 3584 * 18944) + 152064 * 3584
    assert ModelShape.from_json(json.loads(json.dumps(QWEN2_VL_7B.to_json()))) == QWEN2_VL_7B


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "vision_config"),
        ({**QWEN2_VL_7B_CONFIG, "num_experts": 8}, "mixture"),
        ({**QWEN2_VL_7B_CONFIG, "vision_config": {"embed_dim": 1280, "hidden_size": 1}}, "lacks"),
    ],
)
def test_configurations_that_cannot_be_profiled_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        shape_from_hf_config(config)
    with pytest.raises(ValueError, match=r"config\.json"):
        shape_from_model_path(tmp_path)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.booleans())
def test_isotonic_is_monotone_keeps_the_mean_and_leaves_monotone_data_alone(
    values: list[float], increasing: bool
) -> None:
    fitted = isotonic(values, increasing)
    pairs = list(pairwise(fitted))
    assert all(a <= b + 1e-9 for a, b in pairs) if increasing else all(a >= b - 1e-9 for a, b in pairs)
    assert math.fsum(fitted) == pytest.approx(math.fsum(values), abs=1e-6)
    ordered = sorted(values, reverse=not increasing)
    assert isotonic(ordered, increasing) == pytest.approx(ordered)


@settings(deadline=None)
@given(
    st.floats(0.5, 3),
    st.floats(0.1, 2),
    st.floats(-1.5, -0.1),
    st.floats(1, 5000),
    st.floats(1, 5000),
    st.integers(1, 132),
)
def test_interpolation_and_extrapolation_are_exact_for_power_laws(
    a: float, b: float, c: float, x: float, y: float, units: int
) -> None:
    def ms(u: float, x: float, y: float) -> float:
        return 1e-3 * u**c * x**a * y**b

    us, xs, ys = (8, 32, 132), (4.0, 64.0, 1024.0), (1.0, 16.0, 512.0)
    curve = Curve.fit("decode_attention", us, xs, ys, [[[ms(u, v, w) for w in ys] for v in xs] for u in us])
    assert curve.at(units).ms(x, y) == pytest.approx(ms(units, x, y), rel=1e-6)


@given(st.data())
def test_fitted_tables_are_monotone_whatever_was_measured(data: st.DataObject) -> None:
    us, xs, ys = (8, 16, 64), (1.0, 4.0, 16.0), (2.0, 8.0)
    noisy = [[[data.draw(st.floats(0.1, 10)) for _ in ys] for _ in xs] for _ in us]
    curve = Curve.fit("decode_attention", us, xs, ys, noisy)
    for i in range(3):
        for j in range(2):
            assert all(a[i][j] >= b[i][j] * (1 - 1e-9) for a, b in pairwise(curve.ms))


def test_equal_images_stand_for_a_mixed_batch_of_the_same_rows_and_work() -> None:
    curves = standin_curves()
    at = curves.at(96)
    assert at.encoder_batch_ms([5329]) == at.encoder_batch_ms((5329,))
    two = at.encoder_batch_ms([3000, 3000])
    mixed = at.encoder_batch_ms([2000, 4000])
    assert two < mixed < at.encoder_batch_ms([6000])
    assert at.encoder_batch_ms([]) == 0


def test_files_round_trip_and_other_versions_are_refused(tmp_path: Path) -> None:
    curves = estimate_curves(QWEN2_VL_7B, KNOWN_DEVICES["NVIDIA L4"])
    curves = dataclasses.replace(curves, contention={"encoder_beside_decode_masked": {16: 1.25}}, _slices={})
    file = tmp_path / "curves.json"
    curves.save(file)
    again = DeviceCurves.load(file)
    assert again.to_json() == json.loads(json.dumps(curves.to_json()))
    assert again.at(24).decode_step_ms(8, 500) == pytest.approx(curves.at(24).decode_step_ms(8, 500), rel=1e-4)
    data = json.loads(file.read_text())
    for change, message in (
        ({"schema_version": 2}, "schema version"),
        ({"curves": {}}, "lack"),
        ({"device": {}}, "malformed"),
        ({"contention": {"wind": {"8": 1.0}}}, "contention"),
        ({"source": "guess"}, "source"),
    ):
        with pytest.raises(ValueError, match=message):
            DeviceCurves.from_json({**data, **change})
    file.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        DeviceCurves.load(file)


def test_malformed_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        Curve("decode_linear", (8, 8), (1.0,), (1.0,), (((1.0,),), ((1.0,),)))
    with pytest.raises(ValueError, match="shape"):
        Curve("decode_linear", (8,), (1.0, 2.0), (1.0,), (((1.0,),),))
    with pytest.raises(ValueError, match="above 0"):
        Curve("decode_linear", (8,), (1.0,), (1.0,), (((0.0,),),))
    with pytest.raises(ValueError, match="unknown curve"):
        Curve("sound", (8,), (1.0,), (1.0,), (((1.0,),),))
    assert set(CURVE_AXES) == set(standin_curves().curves)


def test_contention_is_interpolated_held_flat_and_never_carried_to_the_whole_device() -> None:
    curves = dataclasses.replace(
        standin_curves(), contention={"encoder_beside_decode_masked": {32: 1.2, 64: 1.4, 132: 9.0}}, _slices={}
    )
    factor = [curves.contention_factor("encoder_beside_decode_masked", n) for n in (8, 32, 48, 64, 128, 132)]
    assert factor == pytest.approx([1.2, 1.2, 1.3, 1.4, 1.4, 9.0])
    assert curves.contention_factor("encoder_beside_prefill_masked", 64) == 1.0
