"""The grid of a profile, its measurement, and the sum of operators to curves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spaceserve.partition import Partitioner, UnitGroup
from spaceserve.sis.curves import CURVE_AXES, Curve
from spaceserve.sis.shapes import GemmSpec, ModelShape

from .timing import Timer, first_line
from .workloads import Run, Workloads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes that are measured. `max_patches` bounds length x count of the encoder's attention."""

    patches: Sequence[int]
    lengths: Sequence[int]
    counts: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    tokens: Sequence[int]
    prefixes: Sequence[int]
    max_patches: int
    max_kv_tokens: int
    budget_ms: float
    num_encoder_rungs: int | None  # None: every rung


FULL = Grid(
    patches=(64, 256, 1024, 2048, 4096, 8192, 16384, 32768),
    lengths=(64, 256, 1024, 2048, 4096, 8192, 16384, 32768),
    counts=(1, 2, 4, 16),
    batches=(1, 4, 8, 16, 32, 64, 128),
    contexts=(128, 512, 2048, 8192, 32768),
    tokens=(64, 256, 512, 1024, 2048, 4096, 8192),
    prefixes=(0, 1024, 4096, 16384),
    max_patches=32768,
    max_kv_tokens=1 << 20,
    budget_ms=4.0,
    num_encoder_rungs=9,
)
QUICK = Grid(
    patches=(256, 1024, 4096, 16384),
    lengths=(256, 1024, 4096, 16384),
    counts=(1, 4),
    batches=(1, 8, 32, 128),
    contexts=(256, 2048, 16384),
    tokens=(128, 512, 2048, 8192),
    prefixes=(0, 4096),
    max_patches=16384,
    max_kv_tokens=1 << 19,
    budget_ms=3.0,
    num_encoder_rungs=7,
)
# Cores instead of SMs: the same loop, sizes that a core handles in milliseconds.
CPU_QUICK = Grid(
    patches=(16, 128),
    lengths=(16, 128),
    counts=(1, 4),
    batches=(1, 8),
    contexts=(16, 128),
    tokens=(16, 64),
    prefixes=(0, 64),
    max_patches=512,
    max_kv_tokens=1024,
    budget_ms=1.0,
    num_encoder_rungs=2,
)
CPU_FULL = Grid(
    patches=(16, 64, 256, 1024),
    lengths=(16, 64, 256, 1024),
    counts=(1, 4, 16),
    batches=(1, 2, 4, 8, 16),
    contexts=(16, 128, 512),
    tokens=(16, 64, 256),
    prefixes=(0, 64, 256),
    max_patches=2048,
    max_kv_tokens=8192,
    budget_ms=20.0,
    num_encoder_rungs=None,
)


# Complements of these sizes are always profiled for decode: what it costs on few SMs, while others have the rest.
SMALL_DECODE_UNITS = (16, 24, 32, 48, 64)


def small_decode_units(partitioner: Partitioner) -> list[int]:
    """Those of SMALL_DECODE_UNITS that are a complement of this partitioner."""
    total = partitioner.total_units
    rests = {units: partitioner.complement_of(total - units) for units in SMALL_DECODE_UNITS if units < total}
    return [units for units, rest in rests.items() if rest is not None and rest.granted == units]


def pick_rungs(partitioner: Partitioner, at_most: int | None) -> tuple[int, ...]:
    """Rungs that are profiled: all, or `at_most` spread evenly, the first and the last (whole device) among them."""
    rungs = partitioner.rungs
    if at_most is None or len(rungs) <= at_most:
        return rungs
    step = (len(rungs) - 1) / (at_most - 1)
    return tuple(sorted({rungs[round(i * step)] for i in range(at_most)}))


def has_prefill(num_units: int, total_units: int) -> bool:
    """Whether a server would put a prefill on so many units: at least a third (scheduler/side_lanes.py takes half)."""
    return 3 * num_units >= total_units


@dataclass
class Groups:
    """Groups of both sides by granted units: the encoder's rungs; the decoder's complements and the whole device.

    `decode` is the decoder's and, where asked for, small groups on which only decode steps run. `prefill` are those of
    the encoder's side on which a prefill may run beside decode.
    """

    encoder: dict[int, UnitGroup] = field(default_factory=dict)
    decoder: dict[int, UnitGroup] = field(default_factory=dict)
    decode: dict[int, UnitGroup] = field(default_factory=dict)
    prefill: dict[int, UnitGroup] = field(default_factory=dict)

    @staticmethod
    def of(partitioner: Partitioner, rungs: Sequence[int], small_decode_units: Sequence[int] = ()) -> Groups:
        groups = Groups()
        for rung in rungs:
            group = partitioner.group(rung)
            groups.encoder[group.granted] = group
            rest = partitioner.complement(group)
            if rest is not None:
                groups.decoder[rest.granted] = rest
        groups.decoder[partitioner.total_units] = partitioner.group(partitioner.total_units)
        groups.encoder = dict(sorted(groups.encoder.items()))
        groups.decoder = dict(sorted(groups.decoder.items()))
        groups.prefill = {n: group for n, group in groups.encoder.items() if has_prefill(n, partitioner.total_units)}
        small = {n: partitioner.complement_of(partitioner.total_units - n) for n in small_decode_units}
        groups.decode = dict(sorted({**{n: rest for n, rest in small.items() if rest}, **groups.decoder}.items()))
        return groups

    def of_phase(self, phase: str) -> dict[int, UnitGroup]:
        """Groups on which the operators of "encoder", "decode" or "prefill" are measured."""
        return {"encoder": self.encoder, "decode": self.decode, "prefill": self.prefill}[phase]


@dataclass(frozen=True)
class Operator:
    """One operator type of a phase: `count` launches per forward; y is (None,) where one size says it all."""

    name: str
    phase: str
    kind: str
    count: int
    xs: tuple[int, ...]
    ys: tuple[int | None, ...]
    make: Callable[[int, int | None], Run]
    allowed: Callable[[int, int | None], bool] = lambda x, y: True


def operators_of(shape: ModelShape, work: Workloads, grid: Grid) -> list[Operator]:
    """Every operator of the model with the sizes of the grid."""
    none = (None,)

    def gemms(specs: Sequence[GemmSpec], phase: str, xs: Sequence[int], one_sequence: bool) -> list[Operator]:
        gemm = work.decode_gemm if phase == "decode" else work.gemm

        def maker(spec: GemmSpec) -> Callable[[int, int | None], Run]:
            return lambda x, y: gemm(spec, max(1, int(spec.rows(x, 1 if one_sequence else x))))

        return [Operator(s.name, phase, "gemm", s.count, tuple(xs), none, maker(s)) for s in specs]

    encoder, decoder = shape.encoder, shape.decoder
    patches, batches, tokens = tuple(grid.patches), tuple(grid.batches), tuple(grid.tokens)
    found = gemms(encoder.gemms(), "encoder", patches, False)
    pointwise = lambda x, y: work.encoder_pointwise(x)  # noqa: E731
    found.append(Operator("encoder_pointwise", "encoder", "pointwise", encoder.num_layers, patches, none, pointwise))
    windowed = encoder.num_layers - encoder.full_layers
    if windowed:
        make_window = lambda x, y: work.window_attention(x)  # noqa: E731
        found.append(Operator("encoder_window", "encoder", "window_attention", windowed, patches, none, make_window))
    found.append(
        Operator(
            "encoder_attention",
            "encoder",
            "attention",
            encoder.full_layers,
            tuple(grid.lengths),
            tuple(grid.counts),
            lambda x, y: work.encoder_attention(x, y or 1),
            lambda x, y: x * (y or 1) <= grid.max_patches,
        )
    )
    for phase, xs in (("decode", batches), ("prefill", tokens)):
        found += gemms(decoder.gemms(), phase, xs, phase == "prefill")
        make_pointwise = lambda x, y: work.decoder_pointwise(x)  # noqa: E731
        found.append(Operator("decoder_pointwise", phase, "pointwise", decoder.num_layers, xs, none, make_pointwise))
    found.append(
        Operator(
            "decode_attention",
            "decode",
            "attention",
            decoder.num_layers,
            batches,
            tuple(grid.contexts),
            lambda x, y: work.decode_attention(x, y or 1),
            lambda x, y: x * (y or 1) <= grid.max_kv_tokens,
        )
    )
    found.append(
        Operator(
            "prefill_attention",
            "prefill",
            "attention",
            decoder.num_layers,
            tokens,
            tuple(grid.prefixes),
            lambda x, y: work.prefill_attention(x, y or 0),
        )
    )
    return found


Table = dict[tuple[int, int, "int | None"], float]  # (units, x, y) -> ms of one launch


def count_points(operators: Sequence[Operator], groups: Groups) -> int:
    total = 0
    for op in operators:
        units = groups.of_phase(op.phase)
        total += len(units) * sum(op.allowed(x, y) for x in op.xs for y in op.ys)
    return total


def measure_operator(
    op: Operator, groups: Groups, timer: Timer, budget_ms: float, tick: Callable[[], object]
) -> tuple[Table, set[int]]:
    """Times of one operator over its grid, and the units on which it failed (for example cuBLAS on 12 SMs)."""
    table: Table = {}
    failed: set[int] = set()
    for x in op.xs:
        for y in op.ys:
            if not op.allowed(x, y):
                continue
            bounded = y is not None and y != op.ys[0]  # then a cell may be missing: `_filled` scales a smaller one
            try:
                run = op.make(x, y)
            except torch.cuda.OutOfMemoryError:
                if not bounded:
                    raise
                logger.warning("%s of %s x %s does not fit into memory: left out", op.name, x, y)
                continue
            for units, group in groups.of_phase(op.phase).items():
                tick()
                if units in failed:
                    continue
                try:
                    table[(units, x, y)] = timer.measure(run, group, budget_ms)
                except RuntimeError as error:
                    if isinstance(error, torch.cuda.OutOfMemoryError):
                        if not bounded:
                            raise
                        logger.warning("%s of %s x %s does not fit into memory: left out", op.name, x, y)
                        continue
                    logger.warning("%s fails on %d units (%s): left out", op.name, units, first_line(error))
                    failed.add(units)
    # A group on which one size fails has no curve: the sizes before the failure go too.
    return {key: ms for key, ms in table.items() if key[0] not in failed}, failed


def _filled(op: Operator, table: Table, units: int, x: int, y: int | None) -> float:
    """A measured time, or for a cell beyond the bounds one scaled from the largest y measured: work goes with y."""
    if (units, x, y) in table:
        return table[(units, x, y)]
    assert y is not None
    known = [v for v in op.ys if v is not None and (units, x, v) in table]
    if known:
        return table[(units, x, known[-1])] * y / known[-1]
    # The whole row is out of bounds: scale the row below, linearly in x as well.
    smaller = op.xs[op.xs.index(x) - 1]
    assert smaller < x, "the smallest size of a grid must be within its bounds"
    return _filled(op, table, units, smaller, y) * x / smaller


def sum_curves(operators: Sequence[Operator], tables: Mapping[tuple[str, str], Table]) -> dict[str, Curve]:
    """Curves as sums of operators: `count` times one launch, products and pointwise work in the linear curve."""
    curves: dict[str, Curve] = {}
    for name in CURVE_AXES:
        phase, part = name.split("_")
        parts = [op for op in operators if op.phase == phase and (op.kind == "attention") == (part == "attention")]
        assert parts, name
        units = sorted(set.intersection(*({u for u, _, _ in tables[(op.phase, op.name)]} for op in parts)))
        if not units:
            raise ValueError(f"no group of units ran every operator of {name}: see the warnings above")
        xs, ys = parts[0].xs, parts[0].ys
        table = [
            [
                [sum(op.count * _filled(op, tables[(op.phase, op.name)], u, x, y) for op in parts) for y in ys]
                for x in xs
            ]
            for u in units
        ]
        curves[name] = Curve.fit(name, units, xs, [1.0 if y is None else float(y) for y in ys], table)
    return curves


def operators_json(operators: Sequence[Operator], tables: Mapping[tuple[str, str], Table]) -> list[dict[str, Any]]:
    """Raw measurements for the curve file: [units, x, y, ms of one launch]."""
    return [
        {"operator": op.name, "phase": op.phase, "kind": op.kind, "launches_per_forward": op.count}
        | {
            "points": [
                [u, x, y, float(f"{ms:.5g}")] for (u, x, y), ms in sorted(tables[(op.phase, op.name)].items(), key=str)
            ]
        }
        for op in operators
    ]
