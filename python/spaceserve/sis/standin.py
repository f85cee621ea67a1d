"""Measurements of stand-ins on one H200: what the roofline estimate is fitted to, and curves for tests.

Plain torch stand-ins in one process: the encoder is 32 layers of Qwen2-VL's shape with torch SDPA, the decoder a
Qwen2-VL-7B step of batch 16 and 3,000 tokens of context in a CUDA graph. SGLang's encoder (FA3) is faster: what serves
an H200 is the profile in curves/.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

from .curves import Curve, DeviceCurves
from .roofline import KNOWN_DEVICES, estimate_curves
from .shapes import QWEN2_VL_7B

DEVICE = "NVIDIA H200"
TOTAL_SMS = 132

# patches of one image -> {SMs: ms}
ENCODER_MS = {
    5329: {132: 26.5, 112: 30.9, 96: 34.5, 64: 49.3},
    21316: {132: 251.0, 112: 274.0, 96: 302.0, 64: 450.0},
}
DECODE_BATCH, DECODE_CONTEXT = 16, 3000
DECODE_MS = {132: 5.4, 68: 6.1, 36: 9.5, 20: 20.9}
# encoder SMs -> decode step in ms while the encoder runs, decoder masked to the rest / unmasked
DECODE_BESIDE_MS = {64: (6.65, 6.62), 96: (10.8, 10.6), 112: (23.8, 21.1)}


def _scaled(curve: Curve, residual: dict[int, float]) -> Curve:
    """The curve times a factor interpolated over log units between the measured ones, held flat outside them."""
    units = sorted(residual)

    def factor(n: int) -> float:
        if n <= units[0]:
            return residual[units[0]]
        for low, high in pairwise(units):
            if n <= high:
                w = math.log(n / low) / math.log(high / low)
                return residual[low] ** (1 - w) * residual[high] ** w
        return residual[units[-1]]

    table = [[[v * factor(n) for v in row] for row in plane] for n, plane in zip(curve.units, curve.ms, strict=True)]
    return Curve.fit(curve.name, curve.units, curve.x, curve.y, table)


def standin_curves() -> DeviceCurves:
    """Roofline curves of Qwen2-VL-7B on an H200, scaled at each number of SMs to the measurements there.

    The encoder's factor is the geometric mean over its two image sizes. Prefill was not measured and stays the
    roofline's; so does every split's effect on the encoder (factor 1.0).
    """
    base = estimate_curves(QWEN2_VL_7B, KNOWN_DEVICES[DEVICE])
    encoder_residual = {
        n: math.exp(
            sum(math.log(ENCODER_MS[p][n] / base.at(n).encoder_batch_ms([p])) for p in ENCODER_MS) / len(ENCODER_MS)
        )
        for n in ENCODER_MS[5329]
    }
    decode_residual = {n: ms / base.at(n).decode_step_ms(DECODE_BATCH, DECODE_CONTEXT) for n, ms in DECODE_MS.items()}
    curves = {
        name: _scaled(curve, encoder_residual)
        if name.startswith("encoder")
        else _scaled(curve, decode_residual)
        if name.startswith("decode")
        else curve
        for name, curve in base.curves.items()
    }
    return dataclasses.replace(
        base,
        curves=curves,
        source="stand-in",
        provenance=(
            "Stand-ins, not SGLang's kernels: plain torch modules of Qwen2-VL-7B's shape (encoder with torch SDPA, "
            "decode step of batch 16 and 3,000 tokens in a CUDA graph), measured on one NVIDIA H200 (driver 580, "
            "CUDA 13.0, torch 2.11.0) at 12 points; between and beyond those points the roofline's shape, scaled to "
            "them. Prefill is the roofline's estimate alone. The encoder's slow-down beside the decoder was not "
            "measured (factor 1)."
        ),
        versions={"driver": "580", "cuda": "13.0", "torch": "2.11.0"},
        contention={
            "decode_beside_encoder_masked": {
                n: round(m / DECODE_MS[TOTAL_SMS - n], 4) for n, (m, _) in DECODE_BESIDE_MS.items()
            },
            "decode_beside_encoder_unmasked": {
                n: round(u / DECODE_MS[TOTAL_SMS - n], 4) for n, (_, u) in DECODE_BESIDE_MS.items()
            },
        },
        _slices={},
    )
