"""The profiler's real loop on CPU cores, and its parts against numbers made by hand."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from spaceserve.partition import SimulatedPartitioner, UnitGroup, make_partitioner
from spaceserve.profile import sweep, validate
from spaceserve.profile.__main__ import main, profile
from spaceserve.profile.contention import PairTimer, measure_contention
from spaceserve.profile.kernels import choose_kernels
from spaceserve.profile.models import DecoderModel, EncoderModel
from spaceserve.profile.plot import plot_curves
from spaceserve.profile.timing import CpuTimer, Run, Timer
from spaceserve.profile.workloads import Workloads
from spaceserve.sis import DeviceCurves, GpuState, SpaceInferenceScheduler, shape_from_hf_config
from spaceserve.sis.shapes import ModelShape
from spaceserve.sis.standin import standin_curves

pytestmark = pytest.mark.cpu

TINY_CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
}
WINDOWED_CONFIG: dict[str, Any] = {
    **TINY_CONFIG,
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [2],
    },
}
TINY = shape_from_hf_config(TINY_CONFIG)
WINDOWED = shape_from_hf_config(WINDOWED_CONFIG)
CPU = torch.device("cpu")


class FormulaTimer(Timer):
    """Runs the work once and returns a time of a known law: 1 ms over the group's units."""

    def __init__(self) -> None:
        self.num_calls = 0

    def measure(self, run: Run, group: UnitGroup, budget_ms: float, *, long_graph: bool = False) -> float:
        run()
        self.num_calls += 1
        return 1.0 / group.granted


def tiny_work(shape: ModelShape) -> Workloads:
    return Workloads(shape, CPU, torch.float32, choose_kernels(CPU, torch.float32))


@pytest.mark.parametrize("shape", [TINY, WINDOWED], ids=["qwen2_vl", "qwen2_5_vl"])
def test_every_operator_of_the_grid_runs_and_curves_are_their_sums(shape: ModelShape) -> None:
    partitioner = SimulatedPartitioner(total_units=32, min_units=8, step=8)
    groups = sweep.Groups.of(partitioner, partitioner.rungs)
    assert list(groups.encoder) == [8, 16, 24, 32]
    assert list(groups.decoder) == [8, 16, 24, 32]
    operators = sweep.operators_of(shape, tiny_work(shape), sweep.CPU_QUICK)
    timer = FormulaTimer()
    ticks = itertools.count()
    tables = {}
    for op in operators:
        tables[(op.phase, op.name)], failed = sweep.measure_operator(op, groups, timer, 1.0, lambda: next(ticks))
        assert not failed
    assert next(ticks) == timer.num_calls == sweep.count_points(operators, groups)
    curves = sweep.sum_curves(operators, tables)
    # Every launch takes 1 / units ms, so a curve is the number of launches over the units.
    layers, full = shape.encoder.num_layers, shape.encoder.full_layers
    linear = 3 + 4 * layers + layers + (layers - full)  # embed and merger; products; pointwise; windowed attention
    for units in (8, 24):
        at = {name: curve.at(units) for name, curve in curves.items()}
        assert at["encoder_linear"].ms(16) == pytest.approx(linear / units)
        assert at["encoder_attention"].ms(16, 1) == pytest.approx(full / units)
        assert at["decode_linear"].ms(8) == pytest.approx((5 * 2 + 1) / units)
        assert at["decode_attention"].ms(8, 16) == pytest.approx(2 / units)
        assert at["prefill_attention"].ms(16, 0) == pytest.approx(2 / units)
    rows = sweep.operators_json(operators, tables)
    assert sum(len(r["points"]) for r in rows) == timer.num_calls
    json.dumps(rows)


def test_cells_beyond_the_bounds_are_scaled_by_their_work() -> None:
    def make(x: int, y: int | None) -> Run:
        return lambda: None

    def allowed(x: int, y: int | None) -> bool:
        return x * (y or 1) <= 100

    op = sweep.Operator("a", "encoder", "attention", 1, (10, 100), (1, 4, 16), make, allowed)
    table: dict[tuple[int, int, int | None], float] = {(8, 10, 1): 1.0, (8, 10, 4): 3.0, (8, 100, 1): 20.0}
    assert sweep._filled(op, table, 8, 10, 16) == pytest.approx(12.0)
    assert sweep._filled(op, table, 8, 100, 16) == pytest.approx(320.0)
    assert sweep._filled(op, table, 8, 10, 4) == 3.0


def test_a_group_on_which_an_operator_fails_is_left_out_and_named() -> None:
    class Failing(FormulaTimer):
        def measure(self, run: Run, group: UnitGroup, budget_ms: float, *, long_graph: bool = False) -> float:
            if group.granted == 8 and group.is_complement:
                raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
            return super().measure(run, group, budget_ms)

    partitioner = SimulatedPartitioner(total_units=32, min_units=8, step=8)
    groups = sweep.Groups.of(partitioner, partitioner.rungs)
    operators = sweep.operators_of(TINY, tiny_work(TINY), sweep.CPU_QUICK)
    tables, failed = {}, set()
    for op in operators:
        tables[(op.phase, op.name)], bad = sweep.measure_operator(op, groups, Failing(), 1.0, lambda: None)
        failed |= bad
    assert failed == {8}
    curves = sweep.sum_curves(operators, tables)
    assert min(curves["decode_linear"].units) == 16
    assert min(curves["encoder_linear"].units) == 8


def test_rungs_of_the_quick_mode_are_spread_and_keep_both_ends() -> None:
    partitioner = SimulatedPartitioner(total_units=132, min_units=16, step=8)
    picked = sweep.pick_rungs(partitioner, 7)
    assert (picked[0], picked[-1], len(picked)) == (16, 132, 7)
    assert set(picked) <= set(partitioner.rungs)
    assert sweep.pick_rungs(partitioner, None) == partitioner.rungs


@pytest.mark.parametrize("shape", [TINY, WINDOWED], ids=["qwen2_vl", "qwen2_5_vl"])
def test_whole_forwards_have_the_shapes_of_the_model(shape: ModelShape) -> None:
    kernels = choose_kernels(CPU, torch.float32)
    encoder = EncoderModel(shape, CPU, torch.float32, kernels)
    assert encoder.forward_fn([64, 32])().shape == (24, 64)
    decoder = DecoderModel(shape, CPU, torch.float32, kernels)
    assert decoder.decode_fn(3, 10)().shape == (3, 256)
    assert decoder.prefill_fn(5, 7)().shape == (1, 256)


def test_prefill_attention_is_causal_with_the_queries_at_the_end() -> None:
    kernels = choose_kernels(CPU, torch.float32)
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = kernels.prefill_attention(q, k, v, torch.tensor([0, 3]), torch.tensor([0, 5]))
    for i in range(3):
        for head in range(4):
            keys = k[: 3 + i, head // 2]
            weights = torch.softmax(keys @ q[i, head] * 8**-0.5, 0)
            torch.testing.assert_close(out[i, head], weights @ v[: 3 + i, head // 2])


def test_decode_attention_reads_every_key_of_its_group() -> None:
    kernels = choose_kernels(CPU, torch.float32)
    q, k, v = torch.randn(2, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    out = kernels.decode_attention(q, k, v, torch.tensor([6, 6]))
    weights = torch.softmax(k[1, :, 1] @ q[1, 3] * 8**-0.5, 0)
    torch.testing.assert_close(out[1, 3], weights @ v[1, :, 1])


class FormulaPair(PairTimer):
    """Alone 1 ms; beside, 10 ms for the encoder and 20 ms for the other, one more where the neighbour is everywhere."""

    def alone(self, side: str, group: UnitGroup) -> float:
        return 1.0

    def beside(self, side: str, group: UnitGroup, other: str, other_group: UnitGroup) -> float:
        return (10.0 if side == "encoder" else 20.0) + (group.is_whole_device or other_group.is_whole_device)

    def close(self) -> None:
        pass


def test_contention_names_each_case_and_shares_the_whole_device_only_unmasked() -> None:
    partitioner = SimulatedPartitioner(total_units=32, min_units=8, step=8)
    found = measure_contention(partitioner, partitioner.rungs, FormulaPair(), lambda: None)
    assert found["encoder_beside_decode_masked"] == {8: 10.0, 16: 10.0, 24: 10.0}
    assert found["encoder_beside_prefill_unmasked"] == {8: 11.0, 16: 11.0, 24: 11.0, 32: 11.0}
    assert found["decode_beside_encoder_masked"] == {8: 20.0, 16: 20.0, 24: 20.0}
    assert found["prefill_beside_encoder_unmasked"] == {8: 21.0, 16: 21.0, 24: 21.0, 32: 21.0}


def test_a_spent_budget_leaves_the_middle_rungs_out_and_is_told(model_folder: Path) -> None:
    partitioner = SimulatedPartitioner(total_units=32, min_units=8, step=8)
    left = iter([False, False, False, True])
    found = measure_contention(partitioner, partitioner.rungs, FormulaPair(), lambda: None, lambda: next(left))
    assert set(found["encoder_beside_decode_unmasked"]) == {8, 32, 16}
    with (
        make_partitioner("simulated", device="cpu", total_units=16, min_units=4, step=4) as small,
        torch.inference_mode(),
    ):
        curves = profile(TINY, small, CPU, quick=True, budget_s=0.0, show_progress=False)
    assert curves.contention == {}
    assert "no time was left" in curves.validation["failed_parts"]["contention"]


def test_validation_sizes_are_in_no_grid() -> None:
    for held_out, grids in (
        (validate.GPU_HELD_OUT, (sweep.FULL, sweep.QUICK)),
        (validate.CPU_HELD_OUT, (sweep.CPU_FULL, sweep.CPU_QUICK)),
    ):
        for grid in grids:
            for batch in held_out.encoder_batches:
                assert sum(batch) not in grid.patches
                assert not set(batch) & set(grid.lengths)
            assert not {b for b, _ in held_out.decode_steps} & set(grid.batches)
            assert not {t for t, _ in held_out.prefill_chunks} & set(grid.tokens)


def test_validation_errors_are_relative_to_what_was_measured() -> None:
    make = lambda p, m: validate.Comparison(phase="decode", size="x", units=8, predicted_ms=p, measured_ms=m)  # noqa: E731
    found = [make(1.0, 2.0), make(3.0, 2.0), make(2.2, 2.0)]
    assert validate.summary(found)["errors"]["all"] == {"median_error": 0.5, "worst_error": 0.5, "num_points": 3}
    assert "median error 50.0%" in validate.table(found)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    return tmp_path


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a split needs two cores")
def test_the_real_loop_on_two_cores_gives_curves_that_sis_takes(model_folder: Path) -> None:
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    out = model_folder / "curves.json"
    arguments = [
        "--model-path",
        str(model_folder),
        "--device",
        "cpu",
        "--backend",
        "cpu_affinity",
        "--total-units",
        "2",
    ]
    assert main([*arguments, "--quick", "--validate", "--out", str(out)]) == 0
    assert os.sched_getaffinity(0) == affinity
    assert torch.get_num_threads() == threads
    curves = DeviceCurves.load(out)
    assert (curves.source, curves.unit_kind, curves.total_units, curves.min_decoder_units) == ("profiled", "core", 2, 1)
    assert curves.model_fingerprint == TINY.fingerprint()
    assert curves.versions["torch"] == torch.__version__
    assert set(curves.contention["encoder_beside_decode_masked"]) == {1}
    assert set(curves.contention["decode_beside_encoder_unmasked"]) == {1, 2}
    assert curves.validation["errors"]["all"]["num_points"] == 14
    sis = SpaceInferenceScheduler(curves, (1, 2), mask_mode="both")
    state = GpuState(encoder_patches=(64,), decode_batch=2, mean_context_tokens=50)
    assert sis.decide(state).encoder_units == 1
    assert sis.decide(GpuState(encoder_patches=(64,))).encoder_units == 2


def test_curves_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot")
    plot_curves(standin_curves(), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_simulated_units_profile_without_confinement(model_folder: Path) -> None:
    partitioner = make_partitioner("simulated", device="cpu", total_units=16, min_units=4, step=4)
    with torch.inference_mode():
        curves = profile(TINY, partitioner, CPU, quick=True, with_contention=False, show_progress=False)
    assert curves.curves["encoder_linear"].units == (4, 16)
    assert curves.contention == {}


def test_cpu_timer_takes_the_median_of_calls_inside_the_group() -> None:
    partitioner = SimulatedPartitioner(total_units=4, min_units=1, step=1)
    seen = []
    assert CpuTimer().measure(lambda: seen.append(partitioner.active), partitioner.group(2), 0.001) >= 0.0
    assert len(seen) >= 2
    assert all(group is partitioner.group(2) for group in seen)


def test_errors_for_users_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", str(tmp_path), "--device", "cpu"]) == 2
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["--model-path", str(tmp_path), "--device", "cpu"]) == 2
    assert "vision_config" in capsys.readouterr().err
