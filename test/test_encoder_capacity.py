"""Batch capacity: what was asked for, what a profile says, and the default where there is none."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from spaceserve import sis
from spaceserve.config import SpaceServeConfig
from spaceserve.encoder.capacity import batch_capacity, capacity_from_profile
from spaceserve.encoder_schedule import DEFAULT_BATCH_CAPACITY_PATCHES
from spaceserve.sis import DeviceCurves
from spaceserve.sis.curves import Curve
from spaceserve.sis.standin import standin_curves

pytestmark = pytest.mark.cpu

CONFIG = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
}


def curves_with_fixed_cost(fixed_ms: float, ms_per_patch: float) -> DeviceCurves:
    """A device whose forward costs `fixed_ms` and so much per patch, with attention for nothing."""
    x = (256, 1024, 4096, 16384, 65536)
    linear = Curve.fit("encoder_linear", (132,), x, (1,), [[[fixed_ms + ms_per_patch * n] for n in x]])
    attention = Curve.fit("encoder_attention", (132,), (1, 65536), (1, 256), [[[1e-9, 1e-9], [1e-9, 1e-9]]])
    base = standin_curves()
    changed = {**base.curves, "encoder_linear": linear, "encoder_attention": attention}
    return dataclasses.replace(base, curves=changed, source="profiled", _slices={})


# At 0.001 ms a patch beside a fixed cost, n patches do n / (fixed + n / 1000) a ms.
@pytest.mark.parametrize(("fixed_ms", "expected"), [(0.0, 2048), (0.4, 4096), (10.0, 16384)])
def test_a_profile_gives_the_fewest_patches_that_are_nearly_as_fast(fixed_ms: float, expected: int) -> None:
    assert capacity_from_profile(curves_with_fixed_cost(fixed_ms, 0.001)) == expected


def test_where_the_number_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = str(tmp_path)
    assert batch_capacity(777, "NVIDIA H200", 132, path) == 777
    assert batch_capacity(None, None, 0, path) == 1024
    assert batch_capacity(None, "NVIDIA H200", 132, path) == DEFAULT_BATCH_CAPACITY_PATCHES
    monkeypatch.setattr(sis, "find_curves", lambda *_: standin_curves())
    assert (
        batch_capacity(None, "NVIDIA H200", 132, path) == DEFAULT_BATCH_CAPACITY_PATCHES
    )  # stand-ins are no measurement
    monkeypatch.setattr(sis, "find_curves", lambda *_: curves_with_fixed_cost(0.0, 0.001))
    assert batch_capacity(None, "NVIDIA H200", 132, path) == 2048


def test_the_option_takes_auto_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    SpaceServeConfig.add_cli_args(parser)

    def parsed(*arguments: str) -> int | None:
        return SpaceServeConfig.from_cli_args(parser.parse_args(arguments)).encoder_batch_capacity_patches

    name = "--encoder-batch-capacity-patches"
    assert parsed() is None
    assert parsed(name, "auto") is None
    assert parsed(name, "4096") == 4096
    with pytest.raises(SystemExit):
        parsed(name, "many")
    assert "expected auto or a whole number, got 'many'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=name):
        parsed(name, "0")
