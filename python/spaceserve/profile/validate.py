"""Predicted against measured on sizes that the profile did not measure: whole forwards of real shape."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spaceserve.sis.curves import DeviceCurves
from spaceserve.sis.shapes import ModelShape

from .kernels import choose_kernels
from .models import DecoderModel, EncoderModel
from .sweep import Groups
from .timing import Run, Timer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Sizes of validation; none may be in a grid. Encoder batches are tuples of patches."""

    encoder_batches: Sequence[tuple[int, ...]]
    decode_steps: Sequence[tuple[int, int]]  # (batch, context)
    prefill_chunks: Sequence[tuple[int, int]]  # (tokens, prefix)
    num_units: int  # how many groups of each side
    budget_ms: float


GPU_HELD_OUT = HeldOut(
    encoder_batches=((1444,), (5476,), (21316,), (3136, 3136, 3136), (1444, 5476, 900)),
    decode_steps=((2, 700), (12, 3000), (24, 1200), (48, 5000)),
    prefill_chunks=((384, 0), (1500, 0), (3000, 2000)),
    num_units=4,
    budget_ms=60.0,
)
CPU_HELD_OUT = HeldOut(
    encoder_batches=((36,), (100,), (36, 36)),
    decode_steps=((3, 60), (6, 40)),
    prefill_chunks=((40, 0), (24, 32)),
    num_units=2,
    budget_ms=5.0,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    phase: str
    size: str
    units: int
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


def _encoder_prediction(curves: DeviceCurves, images: Sequence[int]) -> Callable[[int], float]:
    return lambda units: curves.at(units).encoder_batch_ms(images)


def _decode_prediction(curves: DeviceCurves, batch: int, context: int) -> Callable[[int], float]:
    return lambda units: curves.at(units).decode_step_ms(batch, context)


def _prefill_prediction(curves: DeviceCurves, tokens: int, prefix: int) -> Callable[[int], float]:
    return lambda units: curves.at(units).prefill_chunk_ms(tokens, prefix)


def validate(
    curves: DeviceCurves,
    shape: ModelShape,
    groups: Groups,
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype,
    held_out: HeldOut,
    tick: Callable[[], object],
) -> list[Comparison]:
    """Measures every held-out size on groups spread over the ladder. Allocates the whole model once per side."""
    kernels = choose_kernels(device, dtype)
    found: list[Comparison] = []

    def spread(units: Sequence[int]) -> list[int]:
        if len(units) <= held_out.num_units:
            return list(units)
        step = (len(units) - 1) / (held_out.num_units - 1)
        return sorted({units[round(i * step)] for i in range(held_out.num_units)})

    def compare(phase: str, size: str, run: Run, predict: Callable[[int], float]) -> None:
        side = groups.encoder if phase == "encoder" else groups.decoder
        for units in spread([u for u in side if phase == "encoder" or u >= curves.min_decoder_units]):
            tick()
            measured = timer.measure(run, side[units], held_out.budget_ms, long_graph=True)
            found.append(
                Comparison(phase=phase, size=size, units=units, predicted_ms=predict(units), measured_ms=measured)
            )

    encoder = EncoderModel(shape, device, dtype, kernels)
    window = shape.encoder.window_patches
    for images in held_out.encoder_batches:
        if window and kernels.attention == "sdpa":
            images = tuple(-(-p // window) * window for p in images)
        compare("encoder", "+".join(map(str, images)), encoder.forward_fn(images), _encoder_prediction(curves, images))
    del encoder
    decoder = DecoderModel(shape, device, dtype, kernels)
    for batch, context in held_out.decode_steps:
        run = decoder.decode_fn(batch, context)
        compare("decode", f"{batch}x{context}", run, _decode_prediction(curves, batch, context))
    for tokens, prefix in held_out.prefill_chunks:
        run = decoder.prefill_fn(tokens, prefix)
        compare("prefill", f"{tokens}@{prefix}", run, _prefill_prediction(curves, tokens, prefix))
    return found


def count_comparisons(groups: Groups, held_out: HeldOut) -> int:
    encoder = min(len(groups.encoder), held_out.num_units) * len(held_out.encoder_batches)
    decoder = min(len(groups.decoder), held_out.num_units)
    return encoder + decoder * (len(held_out.decode_steps) + len(held_out.prefill_chunks))


def summary(found: Sequence[Comparison]) -> dict[str, Any]:
    """Median and worst error of each phase and of all, and every comparison, for the curve file."""
    phases = {"all": list(found)} | {p: [c for c in found if c.phase == p] for p in ("encoder", "decode", "prefill")}
    errors = {
        phase: {
            "median_error": round(statistics.median(c.error for c in some), 4),
            "worst_error": round(max(c.error for c in some), 4),
            "num_points": len(some),
        }
        for phase, some in phases.items()
        if some
    }
    rows = [asdict(c) | {"error": round(c.error, 4)} for c in found]
    return {"errors": errors, "comparisons": rows}


def table(found: Sequence[Comparison]) -> str:
    """Short text table, the summary last."""
    lines = [f"{'phase':8} {'size':>18} {'units':>5} {'predicted ms':>13} {'measured ms':>12} {'error':>7}"]
    lines += [
        f"{c.phase:8} {c.size:>18} {c.units:5d} {c.predicted_ms:13.3f} {c.measured_ms:12.3f} {c.error:7.1%}"
        for c in found
    ]
    for phase, e in summary(found)["errors"].items():
        lines.append(
            f"{phase}: median error {e['median_error']:.1%}, worst {e['worst_error']:.1%} over {e['num_points']} points"
        )
    return "\n".join(lines)
