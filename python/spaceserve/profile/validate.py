"""Predicted against measured on sizes that the profile did not measure: whole forwards of real shape."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spaceserve.partition import Partitioner
from spaceserve.sis.curves import DeviceCurves
from spaceserve.sis.shapes import ModelShape

from .kernels import Kernels
from .models import DecoderModel, EncoderModel
from .sweep import Groups, has_prefill
from .timing import Run, Timer, first_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Sizes of validation; none may be in a grid. Encoder batches are tuples of patches."""

    encoder_batches: Sequence[tuple[int, ...]]
    decode_steps: Sequence[tuple[int, int]]  # (batch, context)
    prefill_chunks: Sequence[tuple[int, int]]  # (tokens, prefix)
    num_units: int  # how many groups of each side, half of them of sizes that were not profiled where there are such
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
    is_profiled_size: bool = True  # the group's; the sizes of the work are never those of the grid

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
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    held_out: HeldOut,
    tick: Callable[[], object],
) -> list[Comparison]:
    """Measures every held-out size on `groups` (see `pick_groups`). Allocates the whole model once per side."""
    found: list[Comparison] = []

    def compare(phase: str, size: str, run: Run, predict: Callable[[int], float]) -> None:
        side = {"encoder": groups.encoder, "decode": groups.decoder, "prefill": groups.prefill}[phase]
        for units in side:
            tick()
            try:
                measured = timer.measure(run, side[units], held_out.budget_ms, long_graph=True)
            except RuntimeError as error:
                logger.warning("%s of %s fails on %d units: %s", phase, size, units, first_line(error))
                continue
            found.append(
                Comparison(
                    phase=phase,
                    size=size,
                    units=units,
                    predicted_ms=predict(units),
                    measured_ms=measured,
                    is_profiled_size=units in curves.curves[f"{phase}_linear"].units,
                )
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


def pick_groups(partitioner: Partitioner, profiled: Sequence[int], num_units: int, min_decoder_units: int) -> Groups:
    """Groups of both sides to validate on: half of sizes that were profiled, half of others, spread over the ladder.

    Args:
        profiled: the encoder's rungs that were profiled.
        num_units: groups of each side.
        min_decoder_units: the smallest complement that is taken.
    """

    def spread(units: Sequence[int], count: int) -> list[int]:
        if len(units) <= count:
            return list(units)
        step = (len(units) - 1) / max(1, count - 1)
        return sorted({units[round(i * step)] for i in range(count)})

    def half(units: Sequence[int], seen: set[int]) -> list[int]:
        new = spread([u for u in units if u not in seen], num_units // 2)
        return sorted([*new, *spread([u for u in units if u in seen], num_units - len(new))])

    groups, whole = Groups(), partitioner.group(partitioner.total_units)
    rests = {rung: partitioner.complement(partitioner.group(rung)) for rung in partitioner.rungs}
    decoder = {rest.granted: rest for rest in rests.values() if rest is not None and rest.granted >= min_decoder_units}
    decoder[whole.granted] = whole
    seen = {rest.granted for rung in profiled if (rest := rests[rung]) is not None} | {whole.granted}
    groups.encoder = {n: partitioner.group(n) for n in half(partitioner.rungs, set(profiled))}
    groups.decoder = {n: decoder[n] for n in half(sorted(decoder), seen)}
    groups.decode = dict(groups.decoder)
    large = [n for n in partitioner.rungs if has_prefill(n, partitioner.total_units)]
    groups.prefill = {n: partitioner.group(n) for n in half(large, set(profiled))}
    return groups


def count_comparisons(groups: Groups, held_out: HeldOut) -> int:
    decoder = len(groups.decoder) * len(held_out.decode_steps) + len(groups.prefill) * len(held_out.prefill_chunks)
    return len(groups.encoder) * len(held_out.encoder_batches) + decoder


def summary(found: Sequence[Comparison]) -> dict[str, Any]:
    """Median and worst error of all, of each phase and of groups of unprofiled sizes, and every comparison."""
    phases = {"all": list(found)} | {p: [c for c in found if c.phase == p] for p in ("encoder", "decode", "prefill")}
    phases["other SM counts"] = [c for c in found if not c.is_profiled_size]
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
