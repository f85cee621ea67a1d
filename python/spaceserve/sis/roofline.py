"""Roofline estimate of the resource-utility curves, for a device that nobody has profiled yet.

This is an ESTIMATE. Peaks come from public data sheets and shapes from the model's configuration; the efficiency
factors were fitted to twelve measurements on one H200 (docs/sis.md, "Calibration") and are carried over to other
devices as fractions of their peaks. Run `python -m spaceserve.profile` for numbers of the device itself.

Each operator takes (t_compute**p + t_memory**p)**(1/p) with p = OVERLAP_EXPONENT: p -> infinity is the classic
roofline max(t_compute, t_memory) (Williams, Waterman and Patterson, CACM 2009); a finite p counts the imperfect
overlap near the ridge. With n SMs of N:

- compute rate = efficiency * peak * (n / N) / throttle(n), throttle(n) = (1 + (n / (N * CEILING))**q)**(1/q): at
  full use power and clocks cap the rate, so the last SMs bring less than the first ones;
- tensor-core work is quantised in waves: ceil(tiles / n) * n / tiles (NVIDIA, "Matrix Multiplication Background
  User's Guide", wave quantisation), where there are more tiles than SMs (split-K is assumed to fill fewer);
- memory bandwidth = ((n / N * SM_BANDWIDTH)**-r + BANDWIDTH**-r)**(-1/r): one SM can only keep so many bytes in
  flight, and a part of the SMs saturates the memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .curves import CURVE_AXES, Curve, DeviceCurves
from .shapes import BYTES_PER_ELEMENT, EncoderShape, GemmSpec, ModelShape


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Peaks of one device: dense bf16 tensor-core FLOP/s and memory bytes/s."""

    name: str
    num_sms: int
    peak_flops: float
    peak_bandwidth: float


_SPECS = (
    # name as in torch.cuda.get_device_name, SMs, dense bf16 TFLOP/s, TB/s
    ("NVIDIA H200", 132, 989.4, 4.8),
    ("NVIDIA H100 80GB HBM3", 132, 989.4, 3.35),
    ("NVIDIA H100 PCIe", 114, 756.0, 2.0),
    ("NVIDIA H100 NVL", 132, 835.0, 3.9),
    ("NVIDIA A100-SXM4-80GB", 108, 311.9, 2.039),
    ("NVIDIA A100-SXM4-40GB", 108, 311.9, 1.555),
    ("NVIDIA A100 80GB PCIe", 108, 311.9, 1.935),
    ("NVIDIA L40S", 142, 362.0, 0.864),
    ("NVIDIA A10", 72, 125.0, 0.6),
    ("NVIDIA L4", 58, 121.0, 0.3),
    ("NVIDIA GeForce RTX 4090", 128, 165.2, 1.008),
)

# Sources: NVIDIA's product data sheets for H200, H100, A100, L40S, A10, L4 (their "with sparsity" figures halved)
# and the Hopper, Ampere and Ada architecture white papers (SM counts; RTX 4090 with FP32 accumulation).
KNOWN_DEVICES: Mapping[str, DeviceSpec] = {
    name: DeviceSpec(name=name, num_sms=sms, peak_flops=tflops * 1e12, peak_bandwidth=tbs * 1e12)
    for name, sms, tflops, tbs in _SPECS
}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of a device's peaks, fitted on an H200 (docs/sis.md). `ceiling` is a share of the SMs."""

    gemm: float
    attention: float
    ceiling: float
    bandwidth: float
    sm_bandwidth: float
    overlap_exponent: float = 2.0
    throttle_exponent: float = 4.0
    bandwidth_exponent: float = 4.0


# Least squares of log error over the twelve stand-in measurements (standin.py): median error 3 %, worst 11 % on the
# points fitted; leaving each point out in turn, median 7 %, worst 22 %. benchmark/calibrate_roofline.py repeats it.
H200_EFFICIENCY = Efficiency(gemm=0.716, attention=0.437, ceiling=1.417, bandwidth=0.765, sm_bandwidth=1.494)

GEMM_TILE_ROWS, GEMM_TILE_COLUMNS = 128, 256
SMALL_GEMM_ROWS = 64  # the least tensor-core tile on Hopper (wgmma m64): fewer rows cost as much
ATTENTION_TILE_ROWS = 128
LAUNCH_US = 2.0  # a kernel's least time inside a CUDA graph


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Operator times of one device on `num_units` of its SMs. Pure arithmetic; all results in ms."""

    device: DeviceSpec
    efficiency: Efficiency = H200_EFFICIENCY

    def _compute_ms(self, flops: float, fraction_of_peak: float, num_units: float) -> float:
        e = self.efficiency
        share = num_units / self.device.num_sms
        throttle = (1.0 + (share / e.ceiling) ** e.throttle_exponent) ** (1.0 / e.throttle_exponent)
        return 1e3 * flops * throttle / (fraction_of_peak * self.device.peak_flops * share)

    def _memory_ms(self, num_bytes: float, num_units: float) -> float:
        e, peak = self.efficiency, self.device.peak_bandwidth
        own = num_units / self.device.num_sms * e.sm_bandwidth * peak
        r = e.bandwidth_exponent
        return 1e3 * num_bytes * (own**-r + (e.bandwidth * peak) ** -r) ** (1.0 / r)

    def _combine(self, compute_ms: float, memory_ms: float) -> float:
        p = self.efficiency.overlap_exponent
        return (compute_ms**p + memory_ms**p) ** (1.0 / p) + LAUNCH_US * 1e-3

    @staticmethod
    def _waves(tiles: float, num_units: float) -> float:
        return math.ceil(tiles / num_units) * num_units / tiles if tiles > num_units else 1.0

    def gemm_ms(self, rows: float, spec: GemmSpec, num_units: float) -> float:
        """2 * rows * n * k FLOPs; bytes of both operands and the result (one launch)."""
        num_bytes = BYTES_PER_ELEMENT * (rows * spec.k + spec.n * spec.k + rows * spec.n)
        padded = max(rows, SMALL_GEMM_ROWS)
        tiles = math.ceil(padded / GEMM_TILE_ROWS) * math.ceil(spec.n / GEMM_TILE_COLUMNS)
        waves = 1.0 if rows <= SMALL_GEMM_ROWS else self._waves(tiles, num_units)
        compute = self._compute_ms(2.0 * padded * spec.n * spec.k * waves, self.efficiency.gemm, num_units)
        return self._combine(compute, self._memory_ms(num_bytes, num_units))

    def encoder_attention_ms(self, length: float, count: float, shape: EncoderShape, num_units: float) -> float:
        """4 * length**2 * hidden FLOPs for each of `count` images, one layer, no causal mask."""
        tiles = max(1.0, count) * shape.num_heads * math.ceil(length / ATTENTION_TILE_ROWS)
        flops = 4.0 * count * length**2 * shape.hidden_size * self._waves(tiles, num_units)
        num_bytes = BYTES_PER_ELEMENT * 4 * count * length * shape.hidden_size
        return self._combine(
            self._compute_ms(flops, self.efficiency.attention, num_units), self._memory_ms(num_bytes, num_units)
        )

    def decode_attention_ms(self, batch: float, context: float, model: ModelShape, num_units: float) -> float:
        """Reads each sequence's keys and values once; one layer."""
        d = model.decoder
        flops = 4.0 * batch * context * d.num_heads * d.head_dim
        num_bytes = batch * context * d.kv_bytes_per_token_per_layer()
        return self._combine(
            self._compute_ms(flops, self.efficiency.attention, num_units), self._memory_ms(num_bytes, num_units)
        )

    def prefill_attention_ms(self, tokens: float, prefix: float, model: ModelShape, num_units: float) -> float:
        """Causal: 4 * heads * head_dim * (tokens * prefix + tokens**2 / 2) FLOPs; one layer."""
        d = model.decoder
        tiles = d.num_heads * math.ceil(tokens / ATTENTION_TILE_ROWS)
        flops = 4.0 * d.num_heads * d.head_dim * tokens * (prefix + tokens / 2) * self._waves(tiles, num_units)
        num_bytes = (tokens + prefix) * d.kv_bytes_per_token_per_layer()
        num_bytes += 2 * BYTES_PER_ELEMENT * tokens * d.num_heads * d.head_dim
        return self._combine(
            self._compute_ms(flops, self.efficiency.attention, num_units), self._memory_ms(num_bytes, num_units)
        )

    def encoder_linear_ms(self, patches: float, model: ModelShape, num_units: float) -> float:
        shape = model.encoder
        total = sum(g.count * self.gemm_ms(g.rows(patches, 1), g, num_units) for g in shape.gemms())
        total += shape.num_layers * self._memory_ms(patches * shape.pointwise_bytes_per_patch(), num_units)
        windowed = shape.num_layers - shape.full_layers
        if windowed:
            window = float(shape.window_patches)
            total += windowed * self.encoder_attention_ms(window, max(1.0, patches / window), shape, num_units)
        return total

    def decoder_linear_ms(self, tokens: float, sequences: float, model: ModelShape, num_units: float) -> float:
        shape = model.decoder
        total = sum(g.count * self.gemm_ms(g.rows(tokens, sequences), g, num_units) for g in shape.gemms())
        return total + shape.num_layers * self._memory_ms(tokens * shape.pointwise_bytes_per_token(), num_units)

    def curve_ms(self, name: str, x: float, y: float, model: ModelShape, num_units: float) -> float:
        """One point of the curve `name` (see curves.CURVE_AXES), all layers."""
        if name == "encoder_linear":
            return self.encoder_linear_ms(x, model, num_units)
        if name == "encoder_attention":
            return model.encoder.full_layers * self.encoder_attention_ms(x, y, model.encoder, num_units)
        if name == "decode_linear":
            return self.decoder_linear_ms(x, x, model, num_units)
        if name == "decode_attention":
            return model.decoder.num_layers * self.decode_attention_ms(x, y, model, num_units)
        if name == "prefill_linear":
            return self.decoder_linear_ms(x, 1, model, num_units)
        if name == "prefill_attention":
            return model.decoder.num_layers * self.prefill_attention_ms(x, y, model, num_units)
        raise ValueError(f"unknown curve {name!r}")


_PATCHES = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_GRIDS: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    "encoder_linear": (_PATCHES, (1,)),
    "encoder_attention": (_PATCHES, (1, 2, 4, 8, 16, 64)),
    "decode_linear": ((1, 2, 4, 8, 16, 32, 64, 128, 256), (1,)),
    "decode_attention": ((1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 256, 1024, 4096, 16384, 65536)),
    "prefill_linear": ((32, 128, 512, 1024, 2048, 4096, 8192), (1,)),
    "prefill_attention": ((32, 128, 512, 1024, 2048, 4096, 8192), (0, 512, 2048, 8192, 32768)),
}


def estimate_curves(
    model: ModelShape, device: DeviceSpec, units: Sequence[int] | None = None, efficiency: Efficiency = H200_EFFICIENCY
) -> DeviceCurves:
    """Curves of `model` on `device` by the roofline: an estimate, and `source` and `provenance` say so.

    `units` are the numbers of SMs tabulated; by default every multiple of 4 from 4 and the whole device. No
    contention is estimated (factor 1.0): two sides that never share SMs are assumed not to slow each other.
    """
    roofline = Roofline(device=device, efficiency=efficiency)
    ladder = sorted({*(units or range(4, device.num_sms, 4)), device.num_sms} if units is None else set(units))
    curves = {
        name: Curve.fit(
            name,
            ladder,
            xs,
            ys,
            [[[roofline.curve_ms(name, x, y, model, n) for y in ys] for x in xs] for n in ladder],
        )
        for name, (xs, ys) in _GRIDS.items()
    }
    assert set(curves) == set(CURVE_AXES)
    return DeviceCurves(
        device_name=device.name,
        total_units=device.num_sms,
        model_fingerprint=model.fingerprint(),
        model=model.to_json(),
        curves=curves,
        source="roofline",
        provenance=(
            f"ESTIMATE, not measured: roofline of {device.name} ({device.num_sms} SMs, "
            f"{device.peak_flops / 1e12:.0f} TFLOP/s dense bf16, {device.peak_bandwidth / 1e12:.2f} TB/s) with "
            "efficiency factors fitted on one H200. Profile the device instead: "
            "python -m spaceserve.profile --model-path ..."
        ),
        # 20 SMs are the least on which cuBLAS was seen to work in a green context's remainder (12 failed).
        min_decoder_units=min(20, device.num_sms),
    )


def device_spec(name: str, num_sms: int) -> DeviceSpec:
    """Peaks of a known device; for an unknown one an H100's peaks per SM (a guess, said in its name)."""
    known = KNOWN_DEVICES.get(name)
    if known is not None and known.num_sms == num_sms:
        return known
    base = known or KNOWN_DEVICES["NVIDIA H100 80GB HBM3"]
    scale = num_sms / base.num_sms
    return DeviceSpec(
        name=name if known else f"{name} (unknown: peaks guessed from {base.name} per SM)",
        num_sms=num_sms,
        peak_flops=base.peak_flops * scale,
        peak_bandwidth=base.peak_bandwidth * scale,
    )
