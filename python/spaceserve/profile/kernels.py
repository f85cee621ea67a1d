"""The kernels that are timed: SGLang's own where they can be imported and run here, torch's otherwise.

Only times matter. Values are random, and where a fused kernel needs tables that a profile has no use for (rotary
embedding), an operation that reads and writes the same bytes stands in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from spaceserve.encoder.long_attention import LongAttention, fa3

logger = logging.getLogger(__name__)

Tensor = torch.Tensor


def rotary(x: Tensor, cosine: Tensor) -> Tensor:
    """Stands in for a fused rotary embedding: one read and one write of x, `cosine` broadcast."""
    return x * cosine


@dataclass(frozen=True)
class Kernels:
    """Fused norms and activations, which attention is used ("fa3" or "sdpa"), what multiplies in a decode step, and
    which images take the encoder's other attention (none until it has chosen)."""

    attention: str
    pointwise: str
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    decode_linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    # Units of the device that the current stream does not have: decode's attention splits its work for the others.
    idle_units: Callable[[], int] = lambda: 0
    long_attention: LongAttention = field(default_factory=LongAttention)

    def encoder_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, length: int, lengths: Sequence[int] = ()
    ) -> Tensor:
        """Images packed one after another. q, k, v: [patches, heads, head_dim].

        Args:
            length: patches of the largest image.
            lengths: of each, where they differ.
        """
        if self.attention == "fa3":
            output = None
            if self.long_attention.takes(lengths or (length,)):
                output = self.long_attention.attend(q, k, v, cu_seqlens, length, None)
            return fa3(q, k, v, cu_seqlens, length, None) if output is None else output
        # [images, heads, length, head_dim] views: no copy for equal lengths, which is what a profile measures.
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)

    def decode_attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """One query per sequence. q: [batch, heads, head_dim]; k, v: [batch, context, kv_heads, head_dim]."""
        if self.attention == "fa3":
            from sgl_kernel.flash_attn import flash_attn_with_kvcache

            return flash_attn_with_kvcache(
                q.unsqueeze(1), k, v, cache_seqlens=lengths, causal=True, sm_margin=self.idle_units()
            )
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=q.shape[1] != k.shape[2]
        )
        return out.squeeze(2)

    def prefill_attention(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        """Causal, the queries at the end of the keys. q: [tokens, heads, d]; k, v: [prefix + tokens, kv_heads, d]."""
        if self.attention == "fa3":
            from sgl_kernel.flash_attn import flash_attn_varlen_func

            return flash_attn_varlen_func(q, k, v, cu_q, cu_k, q.shape[0], k.shape[0], causal=True)
        from torch.nn.attention.bias import causal_lower_right

        queries = q.transpose(0, 1).unsqueeze(0)
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.transpose(0, 1).unsqueeze(0).repeat_interleave(repeat, dim=1) for x in (k, v))
        mask = causal_lower_right(q.shape[0], k.shape[0])
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).squeeze(0).transpose(0, 1)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight)


def _torch_silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    decode_linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
    idle_units: Callable[[], int] = lambda: 0,
) -> Kernels:
    """The kernels of this device; each of SGLang's is tried once on small inputs, and a failure is logged."""
    plain = Kernels("sdpa", "torch", _torch_rms_norm, _torch_silu_and_mul, decode_linear)
    if device.type != "cuda":
        return plain
    attention, pointwise, norm, act = plain.attention, plain.pointwise, plain.rms_norm, plain.silu_and_mul
    try:
        q = torch.randn(256, 2, 80, device=device, dtype=dtype)
        cu = torch.tensor([0, 128, 256], device=device, dtype=torch.int32)
        one = torch.tensor([0, 256], device=device, dtype=torch.int32)
        fa3 = Kernels("fa3", "", norm, act)
        fa3.encoder_attention(q, q, q, cu, 128)
        kv = torch.randn(2, 64, 1, 128, device=device, dtype=dtype)
        lengths = torch.tensor([64, 64], device=device, dtype=torch.int32)
        fa3.decode_attention(torch.randn(2, 2, 128, device=device, dtype=dtype), kv, kv, lengths)
        wide = torch.randn(256, 2, 128, device=device, dtype=dtype)
        fa3.prefill_attention(wide, wide, wide, one, one)
        torch.cuda.synchronize(device)
        attention = "fa3"
    except Exception as error:
        logger.warning("FA3 of sgl_kernel does not run here (%s): attention is timed with torch SDPA", error)
    try:
        from sgl_kernel import silu_and_mul

        # The operator itself: sgl_kernel.rmsnorm compiles FlashInfer's at its first call, which takes a minute.
        norm_operator = torch.ops.sgl_kernel.rmsnorm.default

        def fused_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
            out = torch.empty_like(x)
            norm_operator(out, x, weight, 1e-6, False)
            return out

        def fused_silu_and_mul(x: Tensor) -> Tensor:
            # Its vectors of 16 bytes must not straddle the two halves (Qwen2.5-VL's encoder: 3,420 columns each).
            return silu_and_mul(x) if x.shape[-1] * x.element_size() % 32 == 0 else _torch_silu_and_mul(x)

        x = torch.randn(4, 256, device=device, dtype=dtype)
        fused_rms_norm(x, x[0].contiguous())
        fused_silu_and_mul(x)
        torch.cuda.synchronize(device)
        pointwise, norm, act = "sgl_kernel", fused_rms_norm, fused_silu_and_mul
    except Exception as error:
        logger.warning("fused norms of sgl_kernel do not run here (%s): timed with torch's", error)
    return Kernels(attention, pointwise, norm, act, decode_linear, idle_units)
