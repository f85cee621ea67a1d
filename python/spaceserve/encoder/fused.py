"""The encoder's forward with less memory traffic and no waits of the host, on CUDA: hooks into SGLang's vision layers.

Products are SGLang's, and so is attention but for long images (long_attention.py); what changes is what stands between
them:

- QuickGELU is three kernels over the widest activations in SGLang. Here it is one.
- The queries and keys that rotary embedding makes are contiguous whatever comes in: the copies of q, k and v before it
  go, and attention reads v where the projection wrote it.
- The residual and the layer norm that follows it are one kernel.
- A layer is ten launches and little Python. SGLang's takes 0.6 ms of the host for each (measured on an H200's host),
  20 ms for 32 layers, which is more than the device needs for an image of less than 1024 x 1024.
- The longest sequence, and the rotary angles of a grid, are known on the host. SGLang asks the device for the first
  and copies the second for each batch, so that the host could not launch a batch while the one before computes.

The kernels come from torch.compile, which computes in float32 between loads and stores; SGLang rounds to bfloat16
after each step. Results differ by such roundings and no more (test_encoder_fused.py).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from spaceserve.encoder.long_attention import LongAttention, fa3
from spaceserve.families import Family
from spaceserve.hooks import Hook

# Attention that takes v with any stride between tokens.
STRIDED_BACKENDS = ("fa3", "fa4")
MAX_CACHED_ANGLES = 32
NO_WINDOW = (-1, -1)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the activation of CLIP and of Qwen2-VL's encoder."""
    return x * torch.sigmoid(1.702 * x)


def rotate_queries_and_keys(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (half-split) of the queries and keys in a fused projection.

    Args:
        qkv: `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]`.
        cos, sin: `[tokens, head_dim]`.

    Returns:
        Contiguous queries `[tokens, num_heads, head_dim]` and keys `[tokens, num_kv_heads, head_dim]` in qkv's dtype.
    """
    tokens, head_dim = qkv.shape[0], cos.shape[-1]
    heads = qkv[:, : (num_heads + num_kv_heads) * head_dim].view(tokens, num_heads + num_kv_heads, head_dim).float()
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cos.float().unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.float().unsqueeze(1)
    turned = turned.to(qkv.dtype)
    return turned[:, :num_heads].contiguous(), turned[:, num_heads:].contiguous()


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of two tensors, and its layer norm over the last dimension."""
    total = x + residual
    return total, nn.functional.layer_norm(total, weight.shape, weight, bias, eps)


def is_plain(layer: Any) -> bool:
    """Whether a parallel linear layer of SGLang is a plain product of one rank."""
    return (
        type(layer.quant_method).__name__ == "UnquantizedLinearMethod"
        and layer.tp_size == 1
        and not layer.skip_bias_add
    )


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A parallel linear layer of SGLang; without its dispatch where it is a plain product of one rank."""
    if is_plain(layer):
        return nn.functional.linear(x, layer.weight, layer.bias)
    output: torch.Tensor = layer(x)[0]
    return output


# Attention as an operator that torch.compile takes as it is. The longest sequence is a tensor on the host: of a number
# torch.compile would make a constant.
library = torch.library.Library("spaceserve", "DEF")
library.define("packed_attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor longest, float? scale) -> Tensor")


@torch.library.impl(library, "packed_attention", "CUDA")
def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return fa3(q, k, v, starts, int(longest), scale)


@torch.library.register_fake("spaceserve::packed_attention", lib=library)
def _packed_attention_shape(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


@functools.lru_cache(maxsize=256)
def _on_the_host(number: int) -> torch.Tensor:
    return torch.tensor(number)


def quick_gelu_layer(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    starts: torch.Tensor,
    longest: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: tuple[float, float],
    num_heads: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """A whole layer of Qwen2-VL's encoder.

    Args:
        x: `[tokens, 1, dim]`.
        cos, sin: `[tokens, head_dim]`.
        starts: of each image's tokens, and their end, int32; longest: tokens of the largest image, on the host.
        weights: weight and bias of the first norm, the projections to queries, keys and values and from attention, the
            second norm, the MLP's two layers.
        eps: of both norms.
        num_heads: of queries; of keys and values.
        scale: of attention's scores; None: 1 / sqrt(head_dim).
    """
    norm1, norm1_bias, to_qkv, qkv_bias, proj, proj_bias, norm2, norm2_bias, up, up_bias, down, down_bias = weights
    heads, kv_heads = num_heads
    h = x[:, 0]
    normed = nn.functional.layer_norm(h, norm1.shape, norm1, norm1_bias, eps[0])
    qkv = nn.functional.linear(normed, to_qkv, qkv_bias)
    queries, keys = rotate_queries_and_keys(qkv, heads, kv_heads, cos, sin)
    head_dim = cos.shape[-1]
    values = qkv[:, (heads + kv_heads) * head_dim :].unflatten(-1, (kv_heads, head_dim))
    attended = torch.ops.spaceserve.packed_attention(queries, keys, values, starts, longest, scale)
    attended = nn.functional.linear(attended.reshape(-1, heads * head_dim), proj, proj_bias)
    h, normed = add_layer_norm(h, attended, norm2, norm2_bias, eps[1])
    h = h + nn.functional.linear(quick_gelu(nn.functional.linear(normed, up, up_bias)), down, down_bias)
    return h.unsqueeze(1)


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def _compiled(function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Kernels for any number of rows, the other sizes fixed: with all sizes unknown, index arithmetic costs more."""
    compiled = torch.compile(function, backend=backend)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        for arg in args:
            # Images of a batch differ in number too, which the length of a list of one dimension says.
            if isinstance(arg, torch.Tensor) and (arg.dim() > 1 or arg.dtype == torch.int32):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return compiled(*args)

    return call


def _is_plain_attention(attention: Any, angles: Any) -> bool:
    """Whether SGLang's VisionAttention is projections, rotary embedding and softmax attention, and nothing else."""
    return (
        angles is not None
        and attention.use_qkv_parallel
        and attention.qkv_backend_name in STRIDED_BACKENDS
        and angles[0].shape[-1] == attention.head_size
        and attention.customized_position_embedding_applier is None
        and not (attention.qk_normalization or attention.qk_normalization_by_head_size)
        and attention.sinks is None
    )


def fused_hooks(
    family: Family,
    compile_with: Compile = _compiled,
    *,
    whole_layers: bool = False,
    long_attention: LongAttention | None = None,
) -> list[Hook]:
    """Hooks for the encoder worker's process on CUDA; installed before the model is made.

    Args:
        compile_with: makes kernels of the functions above; the identity in tests.
        whole_layers: compile whole layers, where they are plain, instead of their pieces: one call of compiled code for
            each layer, not three. Not measured on a GPU yet (benchmark/encoder_kernels.py does), so off.
        long_attention: says which batches take FA4's attention; None: SGLang's for all.
    """
    gelu, rotate, add_norm = (compile_with(f) for f in (quick_gelu, rotate_queries_and_keys, add_layer_norm))
    layer = compile_with(quick_gelu_layer)

    def attention(original: Callable[..., Any], self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        angles: Any = kwargs.get("position_embeddings")
        if args or not _is_plain_attention(self, angles):
            return original(self, x, *args, **kwargs)
        batch, length = (1, x.shape[0]) if x.dim() == 2 else (x.shape[0], x.shape[1])
        qkv = linear(self.qkv_proj, x.reshape(batch * length, -1))
        heads, kv_heads = self.num_attention_heads_per_partition, self.num_attention_kv_heads_per_partition
        queries, keys = rotate(qkv, heads, kv_heads, angles[0], angles[1])
        output = self.qkv_backend.forward(
            q=queries,
            k=keys,
            v=qkv[:, self.q_size + self.kv_size :].unflatten(-1, (kv_heads, self.head_size)),
            bsz=batch,
            seq_len=length,
            cu_seqlens=kwargs.get("cu_seqlens"),
            forward_metadata=kwargs.get("forward_metadata"),
            softmax_scale=self.softmax_scale,
        )
        return linear(self.proj, output.reshape(batch, length, -1))

    def qwen2_block(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        first, second, mlp = self.norm1, self.norm2, self.mlp
        attn, metadata = self.attn, kwargs.get("forward_metadata")
        angles: Any = kwargs.get("position_embeddings")
        if (
            whole_layers
            and metadata is not None
            and not getattr(metadata, "takes_fa4", False)
            and x.shape[1] == 1
            and _is_plain_attention(attn, angles)
            and all(map(is_plain, (attn.qkv_proj, attn.proj, mlp.fc1, mlp.fc2)))
        ):
            parts = (first, attn.qkv_proj, attn.proj, second, mlp.fc1, mlp.fc2)
            whole: torch.Tensor = layer(
                x,
                *angles,
                metadata.cu_seqlens,
                _on_the_host(metadata.max_seqlen),
                [tensor for part in parts for tensor in (part.weight, part.bias)],
                (first.eps, second.eps),
                (attn.num_attention_heads_per_partition, attn.num_attention_kv_heads_per_partition),
                attn.softmax_scale,
            )
            return whole
        normed = nn.functional.layer_norm(x, first.normalized_shape, first.weight, first.bias, first.eps)
        attended = self.attn.forward(normed.transpose(0, 1), *args, **kwargs).transpose(0, 1)
        x, normed = add_norm(x, attended, second.weight, second.bias, second.eps)
        return x + linear(mlp.fc2, gelu(linear(mlp.fc1, normed)))

    def metadata(original: Callable[..., Any], cu_seqlens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if cu_seqlens.device.type != "cpu":
            return original(cu_seqlens, *args, **kwargs)
        lengths = cu_seqlens.diff().tolist()
        if kwargs.get("max_seqlen") is None:
            kwargs["max_seqlen"] = max(lengths)
        found = original(cu_seqlens, *args, **kwargs)
        if long_attention is not None and long_attention.takes(lengths):
            found.takes_fa4 = True  # for all layers that are given these sequences
        return found

    def flash_attention(
        original: Callable[..., Any],
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = kwargs.get("forward_metadata")
        is_plain = not args and kwargs.get("s_aux") is None and kwargs.get("window_size", NO_WINDOW) == NO_WINDOW
        if long_attention is not None and is_plain and getattr(found, "takes_fa4", False):
            assert found is not None
            scale = kwargs.get("softmax_scale")
            output = long_attention.attend(q, k, v, found.cu_seqlens, found.max_seqlen, scale)
            if output is not None:
                return output
        return original(self, q, k, v, *args, **kwargs)

    vision = "sglang.srt.layers.attention.vision"
    hooks = [
        Hook(
            target=f"{vision}.VisionAttention.forward",
            function=attention,
            kind="around",
            why="one kernel between projection and attention",
            parameters=("x", "cu_seqlens", "position_embeddings", "forward_metadata"),
        ),
        Hook(
            target=f"{family.module}.prepare_vision_attention_metadata",
            function=metadata,
            kind="around",
            why="the longest sequence without asking the device",
            parameters=("cu_seqlens", "device", "max_seqlen"),
        ),
        Hook(
            target=f"{family.target(family.vision_class)}.rot_pos_emb",
            function=_cached_by_grid(),
            kind="around",
            why="rotary angles of a grid without a copy from the host",
            parameters=("grid_thw",),
        ),
    ]
    if long_attention is not None:
        hooks.append(
            Hook(
                target=f"{vision}.VisionFlash3Attention.forward",
                function=flash_attention,
                kind="around",
                why="FA4 for long images, where it is quicker",
                parameters=("q", "k", "v", "softmax_scale", "forward_metadata"),
            )
        )
    if family.quick_gelu_block is not None:
        hooks += [
            Hook(
                target=f"{family.target(family.quick_gelu_block)}.forward",
                function=qwen2_block,
                kind="replace",
                why="a layer of few kernels and little Python",
                parameters=("x", "cu_seqlens", "position_embeddings", "forward_metadata"),
            ),
        ]
    return hooks


def _cached_by_grid() -> Callable[..., Any]:
    """Keeps what `rot_pos_emb` returned for the last grids. One thread; all its streams run in one order."""
    kept: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def angles(original: Callable[..., Any], self: Any, grid_thw: torch.Tensor) -> Any:
        key = tuple(grid_thw.flatten().tolist())
        if key not in kept:
            kept[key] = original(self, grid_thw)
        kept.move_to_end(key)
        while len(kept) > MAX_CACHED_ANGLES:
            kept.popitem(last=False)
        return kept[key]

    return functools.wraps(angles)(angles)
