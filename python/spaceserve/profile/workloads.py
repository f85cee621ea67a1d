"""Operators of a model as callables on the device, with inputs of real shape and random values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from spaceserve.sis.shapes import GemmSpec, ModelShape

from .kernels import Kernels, rotary

Run = Callable[[], object]


def cold_copies(num_bytes: int, device: torch.device, at_most: int = 64) -> int:
    """How many tensors of this size exceed twice the L2 cache together; one where there is no such cache."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return max(1, min(at_most, -(-2 * l2_bytes // max(1, num_bytes))))


def cold_weights(spec: GemmSpec, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Weights [n, k] of a product to be used in turn, so that none is in the cache when its turn comes."""
    copies = cold_copies(spec.n * spec.k * dtype.itemsize, device)
    return [torch.randn((spec.n, spec.k), device=device, dtype=dtype) for _ in range(copies)]


class Workloads:
    """Makes a callable for each operator and size. Tensors live as long as the callable.

    Weights rotate through copies that together exceed twice the L2 cache: in a model every layer's weights come
    from memory, and a loop over one small matrix would time the cache.
    """

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self._weights: tuple[str, list[torch.Tensor]] | None = None

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def _weights_of(self, spec: GemmSpec) -> list[torch.Tensor]:
        if self._weights is None or self._weights[0] != spec.name:
            self._weights = None  # the last operator's go first: lm_head alone is a gigabyte
            self._weights = (spec.name, cold_weights(spec, self.device, self.dtype))
        return self._weights[1]

    def gemm(self, spec: GemmSpec, rows: int) -> Run:
        """One product [rows, k] x [k, n] (F.linear without bias)."""
        weights = itertools.cycle(self._weights_of(spec))
        x, out = self._random(rows, spec.k), torch.empty(rows, spec.n, device=self.device, dtype=self.dtype)
        return lambda: torch.mm(x, next(weights).t(), out=out)

    def decode_gemm(self, spec: GemmSpec, rows: int) -> Run:
        """The same product in a decode step, with the kernel that decode takes where it runs."""
        weights, x = itertools.cycle(self._weights_of(spec)), self._random(rows, spec.k)
        return lambda: self.kernels.decode_linear(x, next(weights))

    def encoder_attention(self, length: int, count: int) -> Run:
        """One layer's attention over `count` images of `length` patches."""
        e = self.shape.encoder
        q, k, v = (self._random(length * count, e.num_heads, e.head_dim) for _ in range(3))
        cu = torch.arange(count + 1, device=self.device, dtype=torch.int32) * length
        return lambda: self.kernels.encoder_attention(q, k, v, cu, length)

    def decode_attention(self, batch: int, context: int) -> Run:
        """One layer's attention of one new token for each of `batch` sequences."""
        d = self.shape.decoder
        q = self._random(batch, d.num_heads, d.head_dim)
        copies = cold_copies(batch * context * d.kv_bytes_per_token_per_layer(), self.device, at_most=16)
        kv = [self._random(2, batch, context, d.num_kv_heads, d.head_dim) for _ in range(copies)]
        lengths = torch.full((batch,), context, device=self.device, dtype=torch.int32)
        caches = itertools.cycle(kv)

        def run() -> object:
            k, v = next(caches)
            return self.kernels.decode_attention(q, k, v, lengths)

        return run

    def prefill_attention(self, tokens: int, prefix: int) -> Run:
        """One layer's causal attention of a chunk after `prefix` cached tokens."""
        d = self.shape.decoder
        q = self._random(tokens, d.num_heads, d.head_dim)
        k, v = self._random(2, prefix + tokens, d.num_kv_heads, d.head_dim)
        cu_q = torch.tensor([0, tokens], device=self.device, dtype=torch.int32)
        cu_k = torch.tensor([0, prefix + tokens], device=self.device, dtype=torch.int32)
        return lambda: self.kernels.prefill_attention(q, k, v, cu_q, cu_k)

    def encoder_pointwise(self, patches: int) -> Run:
        """One layer's norms, rotary embedding, activation and residual sums."""
        e = self.shape.encoder
        h, up = self._random(patches, e.hidden_size), self._random(patches, e.intermediate_size * (2 if e.gated else 1))
        q, cosine = self._random(patches, 2, e.hidden_size), self._random(patches, 1, e.hidden_size)
        y, weight = torch.empty_like(h), self._random(e.hidden_size)

        def run() -> None:
            for _ in range(2):
                F.layer_norm(h, (e.hidden_size,), weight, weight)
                torch.add(h, y)
            rotary(q, cosine)
            if e.gated:
                self.kernels.silu_and_mul(up)
            else:
                F.gelu(up, approximate="tanh")

        return run

    def decoder_pointwise(self, tokens: int) -> Run:
        """One layer's norms, rotary embedding, SwiGLU product and residual sums."""
        d = self.shape.decoder
        h, gate_up = self._random(tokens, d.hidden_size), self._random(tokens, 2 * d.intermediate_size)
        qk = self._random(tokens, d.num_heads + d.num_kv_heads, d.head_dim)
        cosine, weight, y = self._random(tokens, 1, d.head_dim), self._random(d.hidden_size), torch.empty_like(h)

        def run() -> None:
            for _ in range(2):
                self.kernels.rms_norm(h, weight)
                torch.add(h, y)
            rotary(qk, cosine)
            self.kernels.silu_and_mul(gate_up)

        return run

    def window_attention(self, patches: int) -> Run:
        """One windowed layer's attention over `patches` in whole windows."""
        window = self.shape.encoder.window_patches
        return self.encoder_attention(window, max(1, round(patches / window)))
