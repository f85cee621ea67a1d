"""Where videos are cut, and that Qwen2-VL's encoder gives the same features for the pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spaceserve.encoder_schedule import batch_capacity_from_curve, split_video

pytestmark = pytest.mark.cpu


@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 60), st.integers(1, 5_000))
def test_pieces_cover_the_video_fit_and_are_few_and_even(t: int, h: int, w: int, capacity: int) -> None:
    pieces = split_video((t, h, w), capacity)
    assert [slice_ for start, end in pieces for slice_ in range(start, end)] == list(range(t))
    lengths = [end - start for start, end in pieces]
    assert all(length == 1 or length * h * w <= capacity for length in lengths)
    assert max(lengths) - min(lengths) <= 1
    fewer = len(pieces) - 1
    if fewer:  # some piece of a cut into fewer would have more slices than fit
        assert -(-t // fewer) > max(1, capacity // (h * w))


def test_examples() -> None:
    assert split_video((1, 146, 146), 4_096) == [(0, 1)]  # an image, too large: never cut
    assert split_video((10, 16, 16), 1_024) == [(0, 3), (3, 6), (6, 10)]
    assert split_video((10, 16, 16), 2_560) == [(0, 10)]


@pytest.mark.parametrize(("grid", "capacity"), [((0, 2, 2), 4), ((1, 2), 4), ((1, 2, 2), 0)])
def test_bad_input_is_refused(grid: tuple[int, ...], capacity: int) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        split_video(grid, capacity)


PATCH_SIZE = 4


def qwen2_encoder() -> torch.nn.Module:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=24, num_heads=2, patch_size=PATCH_SIZE)
    return Qwen2VisionTransformerPretrainedModel(config)


def qwen2_5_encoder() -> torch.nn.Module:
    """With windows smaller than a slice in one layer, and attention over the whole slice in the other."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=32,
        out_hidden_size=24,
        intermediate_size=48,
        num_heads=2,
        patch_size=PATCH_SIZE,
        window_size=4 * PATCH_SIZE,
        fullatt_block_indexes=[1],
    )
    return Qwen2_5_VisionTransformerPretrainedModel(config)


@pytest.mark.parametrize("make", [qwen2_encoder, qwen2_5_encoder])
def test_pieces_have_the_features_of_the_whole(make: Callable[[], torch.nn.Module]) -> None:
    """On the reference implementations with random weights: each piece equals its rows of the whole video's features.

    Cutting inside a slice would not: the counter-test cuts by rows of patches and must differ.
    """
    torch.manual_seed(0)
    encoder = make().eval()
    for name, weight in encoder.named_parameters():
        if "qkv" in name:  # as initialised, attention is nearly uniform, and what it attends to would hardly matter
            weight.data *= 10
    t, h, w = 7, 4, 12
    pixels = torch.randn(t * h * w, 3 * 2 * PATCH_SIZE**2)

    def features(rows: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = encoder(rows, grid_thw=torch.tensor([grid])).pooler_output
            return found

    whole = features(pixels, (t, h, w))
    assert whole.shape == (t * h * w // 4, 24)
    pieces = split_video((t, h, w), 3 * h * w)
    assert len(pieces) == 3
    parts = [features(pixels[a * h * w : b * h * w], (b - a, h, w)) for a, b in pieces]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)

    half = features(pixels[: h * w // 2], (1, h // 2, w))
    assert not torch.allclose(half, whole[: len(half)], rtol=1e-2, atol=1e-3)


def test_capacity_is_the_knee_of_the_curve() -> None:
    curve = [(8_192, 80.0), (256, 10.0), (1_024, 14.0), (4_096, 40.0), (2_048, 21.0), (16_384, 250.0)]
    assert batch_capacity_from_curve(curve, tolerance=0.0) == 4_096
    assert batch_capacity_from_curve(curve, tolerance=0.1) == 2_048
    assert batch_capacity_from_curve([(256, 3.0)]) == 256
    for bad in ([], [(0, 1.0)], [(256, 0.0)]):
        with pytest.raises(ValueError, match="curve"):
            batch_capacity_from_curve(bad)
    with pytest.raises(ValueError, match="tolerance"):
        batch_capacity_from_curve(curve, tolerance=1.0)
