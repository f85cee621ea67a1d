"""The encoder worker's fused forward computes what SGLang's vision layers compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spaceserve.encoder.fused import add_layer_norm, fused_hooks, quick_gelu, rotate_queries_and_keys
from spaceserve.families import FAMILIES
from spaceserve.hooks import Hook, check_signature

pytestmark = pytest.mark.cpu

HEADS, HEAD_DIM, TOKENS = 4, 16, 24
DIM = HEADS * HEAD_DIM


def angles(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.rand(tokens, head_dim // 2) * 6
    full = torch.cat((half, half), dim=-1)
    return full.cos(), full.sin()


def hook_of(name: str, architecture: str = "Qwen2VLForConditionalGeneration") -> Hook:
    hooks = fused_hooks(FAMILIES[architecture], compile_with=lambda function: function)
    (found,) = [hook for hook in hooks if hook.target.endswith(name)]
    return found


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.architecture)
def test_the_hooks_fit_sglang(family: Any) -> None:
    hooks = fused_hooks(family, compile_with=lambda function: function)
    for hook in hooks:
        check_signature(hook)
    assert len(hooks) == (4 if family.quick_gelu_block else 3)


def test_rotation_is_sglangs() -> None:
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_pos_emb_native_eager

    torch.manual_seed(0)
    for kv_heads in (HEADS, 2):
        qkv = torch.randn(TOKENS, (HEADS + 2 * kv_heads) * HEAD_DIM)
        cos, sin = angles(TOKENS, HEAD_DIM)
        queries, keys = rotate_queries_and_keys(qkv, HEADS, kv_heads, cos, sin)
        q, k, _ = qkv.split([DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM], dim=-1)
        expected = apply_rotary_pos_emb_native_eager(
            q.view(TOKENS, HEADS, HEAD_DIM), k.view(TOKENS, kv_heads, HEAD_DIM), cos, sin
        )
        assert queries.is_contiguous()
        assert keys.is_contiguous()
        torch.testing.assert_close((queries, keys), expected)


def test_gelu_and_norm_are_those_of_the_block() -> None:
    from sglang.srt.layers.activation import QuickGELU

    torch.manual_seed(0)
    x, residual = torch.randn(TOKENS, 1, DIM), torch.randn(TOKENS, 1, DIM)
    norm = nn.LayerNorm(DIM, eps=1e-6)
    nn.init.normal_(norm.weight)
    total, normed = add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, norm(x + residual))
    torch.testing.assert_close(quick_gelu(x), QuickGELU.forward_native(None, x))


class Parallel(nn.Module):
    """A parallel linear layer that is no plain product of one rank: only its call counts."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain, self.quant_method, self.tp_size = plain, object(), 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.plain(x), None


class Attention(nn.Module):
    """SGLang's VisionAttention as far as the hook reads it, with a backend that records what it is given."""

    def __init__(self, backend: str = "fa3") -> None:
        super().__init__()
        self.projection = nn.Linear(DIM, 3 * DIM)
        self.output = nn.Linear(DIM, DIM)
        self.qkv_proj, self.proj = Parallel(self.projection), Parallel(self.output)
        self.use_qkv_parallel, self.qkv_backend_name = True, backend
        self.head_size, self.q_size, self.kv_size, self.softmax_scale = HEAD_DIM, DIM, DIM, None
        self.num_attention_heads_per_partition = self.num_attention_kv_heads_per_partition = HEADS
        self.customized_position_embedding_applier = None
        self.sinks: torch.Tensor | None = None
        self.qk_normalization = self.qk_normalization_by_head_size = False
        self.qkv_backend = SimpleNamespace(forward=self.attend)
        self.seen: dict[str, Any] = {}

    def attend(self, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        self.seen = rest
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def test_attention_equals_the_plain_formula() -> None:
    torch.manual_seed(0)
    attention = Attention()
    x = torch.randn(1, TOKENS, DIM)
    cos, sin = angles(TOKENS, HEAD_DIM)
    lengths = torch.tensor([0, TOKENS])
    metadata = object()

    def original(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("this case is the fused one's")

    result = hook_of("VisionAttention.forward").function(
        original, attention, x, cu_seqlens=lengths, position_embeddings=(cos, sin), forward_metadata=metadata
    )
    q, k, v = attention.projection(x[0]).view(TOKENS, 3, HEADS, HEAD_DIM).unbind(1)

    def turn(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    scores = torch.einsum("qhd,khd->hqk", turn(q), turn(k)) / HEAD_DIM**0.5
    expected = attention.output(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(1, TOKENS, DIM))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert attention.seen["cu_seqlens"] is lengths
    assert attention.seen["forward_metadata"] is metadata


@pytest.mark.parametrize("change", ["backend", "norm", "sinks", "angles"])
def test_other_attention_is_left_to_sglang(change: str) -> None:
    attention = Attention("triton_attn" if change == "backend" else "fa3")
    attention.qk_normalization = change == "norm"
    if change == "sinks":
        attention.sinks = torch.zeros(1)
    position = angles(TOKENS, HEAD_DIM // 2 if change == "angles" else HEAD_DIM)
    function = hook_of("VisionAttention.forward").function
    assert function(lambda *args, **kwargs: "original", attention, torch.zeros(1, 2), position_embeddings=position) == (
        "original"
    )


ENCODE_TWICE = """
import sys
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import prepare_server_args
from spaceserve.encoder import fused
from spaceserve.encoder.model import VisionEncoder, encoder_only_hooks
from spaceserve.families import find_family
from spaceserve.hooks import install

fused.STRIDED_BACKENDS = ("sdpa",)
args = prepare_server_args(["--model-path", sys.argv[1], "--device", "cpu", "--disable-overlap-schedule"])
family = find_family(ModelConfig.from_server_args(args).hf_config.architectures)
install(encoder_only_hooks(family))
encoder = VisionEncoder(args, sys.argv[2])
vision = encoder.hf_config.vision_config
patch_dim = vision.in_chans * vision.temporal_patch_size * vision.patch_size**2
grids = [(1, 4, 6), (1, 2, 2), (2, 6, 4)]
torch.manual_seed(0)
pixels = [torch.randn(t * h * w, patch_dim) for t, h, w in grids]
plain = encoder.encode(pixels, grids).clone()
functions = []
install(fused.fused_hooks(family, compile_with=lambda function: functions.append(function) or function))
torch.testing.assert_close(encoder.encode(pixels, grids), plain)
assert len(functions) == 4
calls = []
original = fused.linear
fused.linear = lambda layer, x: calls.append(type(layer).__name__) or original(layer, x)
encoder.encode(pixels, grids)
assert len(calls) == 4 * len(encoder.blocks()), calls


@torch.library.impl(fused.library, "packed_attention", "CPU")
def attend(q, k, v, starts, longest, scale):
    attended.append(int(longest))
    parts = []
    for begin, end in zip(starts.tolist(), starts[1:].tolist()):
        part = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(*part, scale=scale).transpose(0, 1))
    return torch.cat(parts)


attended, graphs = [], []


def count(graph, inputs):
    graphs.append(graph)
    return graph.forward


# Whole layers: as they are, and as torch.compile traces them; all layers and batches share one graph.
for compile_with in (lambda function: function, lambda function: fused._compiled(function, backend=count)):
    calls.clear(), attended.clear()
    hooks = fused.fused_hooks(family, compile_with=compile_with, whole_layers=True)
    (layer,) = [hook for hook in hooks if hook.target.endswith("Block.forward")]
    type(encoder.blocks()[0]).forward = layer.function  # SGLang applies hooks to a target once
    torch.testing.assert_close(encoder.encode(pixels, grids), plain)
    torch.testing.assert_close(encoder.encode(pixels[:1], grids[:1]), plain[:6])
    assert not calls, calls
    assert set(attended) == {24}, attended
    assert len(attended) == 2 * len(encoder.blocks())
assert len(graphs) == 1, graphs
print("equal")
"""


def test_the_demo_model_s_features_are_sglang_s(tmp_path: Path) -> None:
    model = Path(__file__).parent.parent / "python" / "spaceserve" / "demo" / "model"
    command = [sys.executable, "-c", ENCODE_TWICE, str(model), str(tmp_path / "init")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "equal" in result.stdout


def test_longest_sequence_is_found_on_the_host() -> None:
    function = hook_of("prepare_vision_attention_metadata").function
    seen: list[Any] = []
    function(lambda *args, **kwargs: seen.append(kwargs), torch.tensor([0, 3, 10, 12]), device="cpu")
    function(lambda *args, **kwargs: seen.append(kwargs), torch.tensor([0, 3]), device="cpu", max_seqlen=9)
    assert [kwargs["max_seqlen"] for kwargs in seen] == [7, 9]


def test_angles_are_computed_once_for_a_grid() -> None:
    function = hook_of("rot_pos_emb").function
    calls: list[list[int]] = []

    def original(self: None, grid: torch.Tensor) -> torch.Tensor:
        calls.append(grid.flatten().tolist())
        return torch.tensor(float(grid.sum()))

    grids = [torch.tensor([[1, 4, 4]]), torch.tensor([[1, 4, 4], [1, 2, 2]]), torch.tensor([[1, 4, 4]])]
    assert [function(original, None, grid).item() for grid in grids] == [9.0, 14.0, 9.0]
    assert len(calls) == 2
    for side in range(2, 80, 2):  # more grids than are kept
        function(original, None, torch.tensor([[1, side, 2]]))
    function(original, None, grids[0])
    assert calls[-1] == [1, 4, 4]
