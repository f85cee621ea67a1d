"""Whole encoder, decode step and prefill chunk of real shape: for validation and for load beside the other side.

Every layer has weights of its own, as in a model, so that nothing but the operators' sum is assumed by a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from spaceserve.sis.shapes import GemmSpec, ModelShape

from .kernels import Kernels, rotary

Tensor = torch.Tensor


def _random_weights(
    specs: Sequence[GemmSpec], side: str, device: torch.device, dtype: torch.dtype
) -> Callable[[str], Tensor]:
    """Makes a new weight [n, k] for the product `side`_`name` at each call with a name."""
    by_name = {spec.name: spec for spec in specs}

    def weight(name: str) -> Tensor:
        spec = by_name[f"{side}_{name}"]
        return torch.randn(spec.n, spec.k, device=device, dtype=dtype) * spec.k**-0.5

    return weight


class EncoderModel:
    """`num_layers` of the encoder (all by default), patch embedding and merger."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        num_layers: int | None = None,
    ) -> None:
        self.shape, self.device, self.dtype, self.kernels = shape.encoder, device, dtype, kernels
        self.num_layers = num_layers or self.shape.num_layers
        weight = _random_weights(self.shape.gemms(), "encoder", device, dtype)
        names = ("qkv", "proj", "up", "down")
        self.layers = [{name: weight(name) for name in names} for _ in range(self.num_layers)]
        self.patch_embed, self.merger_in, self.merger_out = (
            weight("patch_embed"),
            weight("merger_in"),
            weight("merger_out"),
        )
        self.norm = torch.ones(self.shape.hidden_size, device=device, dtype=dtype)

    def forward_fn(self, patches: Sequence[int]) -> Callable[[], Tensor]:
        """A call that encodes images of these patch counts (equal ones on the SDPA path: it has no packing)."""
        e = self.shape
        total = sum(patches)
        pixels = torch.randn(total, e.patch_dim, device=self.device, dtype=self.dtype)
        cosine = torch.randn(total, 1, e.head_dim, device=self.device, dtype=self.dtype)
        ends = torch.tensor([0, *patches], device=self.device).cumsum(0).to(torch.int32)
        window = e.window_patches
        first_full = self.num_layers - min(self.num_layers, e.full_layers)
        if window:
            rest = total % window
            edges = [*range(0, total, window), total] if rest else [*range(0, total + 1, window)]
            window_ends = torch.tensor(edges, device=self.device, dtype=torch.int32)

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            if window and layer < first_full:
                if self.kernels.attention == "sdpa" and total % window:
                    raise ValueError("torch SDPA needs whole windows: take a multiple of the window")
                return self.kernels.encoder_attention(q, k, v, window_ends, window)
            if self.kernels.attention == "sdpa" and len(set(patches)) > 1:
                parts = zip(q.split(list(patches)), k.split(list(patches)), v.split(list(patches)), strict=True)
                return torch.cat([self.kernels.encoder_attention(a, b, c, ends, a.shape[0]) for a, b, c in parts])
            return self.kernels.encoder_attention(q, k, v, ends, max(patches), patches)

        def forward() -> Tensor:
            h = F.linear(pixels, self.patch_embed)
            for i, layer in enumerate(self.layers):
                y = F.layer_norm(h, self.norm.shape, self.norm, self.norm)
                qkv = F.linear(y, layer["qkv"]).view(total, 3, e.num_heads, e.head_dim)
                qk = rotary(qkv[:, :2], cosine.unsqueeze(1))
                h = h + F.linear(attend(qk[:, 0], qk[:, 1], qkv[:, 2], i).reshape(total, -1), layer["proj"])
                up = F.linear(F.layer_norm(h, self.norm.shape, self.norm, self.norm), layer["up"])
                act = self.kernels.silu_and_mul(up) if e.gated else F.gelu(up, approximate="tanh")
                h = h + F.linear(act, layer["down"])
            rows = total // e.merge_factor
            merged = F.linear(h[: rows * e.merge_factor].view(rows, -1), self.merger_in)
            return F.linear(merged, self.merger_out)

        return forward


class DecoderModel:
    """`num_layers` of the decoder (all by default) and lm_head."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        num_layers: int | None = None,
    ) -> None:
        self.shape, self.device, self.dtype, self.kernels = shape.decoder, device, dtype, kernels
        self.num_layers = num_layers or self.shape.num_layers
        weight = _random_weights(self.shape.gemms(), "decoder", device, dtype)
        names = ("qkv", "o", "gate_up", "down")
        self.layers = [{name: weight(name) for name in names} for _ in range(self.num_layers)]
        self.lm_head = weight("lm_head")
        self.norm = torch.ones(self.shape.hidden_size, device=device, dtype=dtype)

    def _forward(
        self,
        tokens: int,
        rows_out: int,
        attend: Callable[[Tensor, Tensor, Tensor, int], Tensor],
        linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
    ) -> Callable[[], Tensor]:
        d = self.shape
        start = torch.randn(tokens, d.hidden_size, device=self.device, dtype=self.dtype)
        cosine = torch.randn(tokens, 1, d.head_dim, device=self.device, dtype=self.dtype)

        def forward() -> Tensor:
            h = start
            for i, layer in enumerate(self.layers):
                qkv = linear(self.kernels.rms_norm(h, self.norm), layer["qkv"])
                qkv = qkv.view(tokens, d.num_heads + 2 * d.num_kv_heads, d.head_dim)
                qk = rotary(qkv[:, : d.num_heads + d.num_kv_heads], cosine)
                out = attend(qk[:, : d.num_heads], qk[:, d.num_heads :], qkv[:, d.num_heads + d.num_kv_heads :], i)
                h = h + linear(out.reshape(tokens, -1), layer["o"])
                gate_up = linear(self.kernels.rms_norm(h, self.norm), layer["gate_up"])
                h = h + linear(self.kernels.silu_and_mul(gate_up), layer["down"])
            return linear(h[-rows_out:], self.lm_head)

        return forward

    def decode_fn(self, batch: int, context: int) -> Callable[[], Tensor]:
        """One decode step; every layer reads a key-value cache of its own (written elsewhere)."""
        d = self.shape
        size = (self.num_layers, 2, batch, context, d.num_kv_heads, d.head_dim)
        cache = torch.zeros(size, device=self.device, dtype=self.dtype)
        lengths = torch.full((batch,), context, device=self.device, dtype=torch.int32)
        return self._forward(
            batch,
            batch,
            lambda q, k, v, i: self.kernels.decode_attention(q, cache[i, 0], cache[i, 1], lengths),
            self.kernels.decode_linear,
        )

    def prefill_fn(self, tokens: int, prefix: int) -> Callable[[], Tensor]:
        """One prefill chunk of one sequence after `prefix` cached tokens."""
        d = self.shape
        cache = torch.zeros(2, prefix + tokens, d.num_kv_heads, d.head_dim, device=self.device, dtype=self.dtype)
        cu_q = torch.tensor([0, tokens], device=self.device, dtype=torch.int32)
        cu_k = torch.tensor([0, prefix + tokens], device=self.device, dtype=torch.int32)
        return self._forward(
            tokens, 1, lambda q, k, v, i: self.kernels.prefill_attention(q, cache[0], cache[1], cu_q, cu_k)
        )
