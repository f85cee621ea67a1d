"""Resource-utility curves: latency of the encoder batch, the decode step and the prefill chunk over SM count.

A curve file is versioned JSON written by `python -m spaceserve.profile` (measured operator tables and the curves
summed from them) or by the roofline estimate. Pure Python: no torch, no clock.

Two tables make each phase, because their sizes differ: `*_linear` (products and pointwise work, by rows) and
`*_attention`. An encoder batch of images with p_i patches has sum(p_i) rows, and the attention work
sum(p_i**2); it is looked up as `count` equal images of `length` patches with the same rows and the same work:
length = sum(p_i**2) / sum(p_i), count = sum(p_i) / length.

Interpolation is multilinear in log(ms) over log(size): exact for power laws, which every operator is by pieces.
Tables are made monotone when built (isotonic regression of log ms: never down with size, never up with units),
so that noise of a measurement cannot make a scheduler oscillate.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

# (x axis, y axis, offset added to y before the logarithm) of each curve. A prefix may be 0 tokens long.
CURVE_AXES: Mapping[str, tuple[str, str | None, float]] = {
    "encoder_linear": ("patches", None, 0.0),
    "encoder_attention": ("length", "count", 0.0),
    "decode_linear": ("batch", None, 0.0),
    "decode_attention": ("batch", "context", 0.0),
    "prefill_linear": ("tokens", None, 0.0),
    "prefill_attention": ("tokens", "prefix", 512.0),
}

CONTENTION_CASES = (
    "encoder_beside_decode_masked",
    "encoder_beside_decode_unmasked",
    "encoder_beside_prefill_masked",
    "encoder_beside_prefill_unmasked",
    "decode_beside_encoder_masked",
    "decode_beside_encoder_unmasked",
    "prefill_beside_encoder_masked",
    "prefill_beside_encoder_unmasked",
)


def isotonic(values: Sequence[float], increasing: bool = True) -> list[float]:
    """Least-squares monotone fit (pool adjacent violators; Barlow et al. 1972) of a sequence."""
    signed = list(values) if increasing else [-v for v in values]
    blocks: list[tuple[float, int]] = []
    for value in signed:
        mean, size = value, 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_size = blocks.pop()
            mean, size = (mean * size + last_mean * last_size) / (size + last_size), size + last_size
        blocks.append((mean, size))
    fitted = [mean for mean, size in blocks for _ in range(size)]
    return fitted if increasing else [-v for v in fitted]


def _bracket(axis: Sequence[float], value: float) -> tuple[int, float]:
    """Index i and weight w such that value = axis[i] * (1 - w) + axis[i + 1] * w; w leaves [0, 1] outside the axis."""
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True)
class Slice:
    """One curve at a fixed number of units: ms over x, or over x and y. Fast enough to call between layers."""

    log_x: tuple[float, ...]
    log_y: tuple[float, ...]
    log_ms: tuple[tuple[float, ...], ...]  # [x][y]
    y_offset: float = 0.0

    def ms(self, x: float, y: float | None = None) -> float:
        """Latency in ms; outside the grid the last segment goes on in log space, never falling with size."""
        if x <= 0:
            return 0.0
        vx = math.log(x)
        j, wy = 0, 0.0
        if len(self.log_y) > 1:
            assert y is not None
            j, wy = _bracket(self.log_y, math.log(max(y + self.y_offset, 1e-9)))
        if len(self.log_x) == 1:
            row = self.log_ms[0]
            return math.exp(row[j] + wy * (row[j + 1] - row[j]) if wy else row[j])
        i, wx = _bracket(self.log_x, vx)
        low, high = self.log_ms[i], self.log_ms[i + 1]
        at_low = low[j] + wy * (low[j + 1] - low[j]) if wy else low[j]
        at_high = high[j] + wy * (high[j + 1] - high[j]) if wy else high[j]
        return math.exp(at_low + wx * (at_high - at_low))


@dataclass(frozen=True)
class Curve:
    """Latency table [units][x][y] in ms. A curve without y has one column. Raises ValueError if malformed."""

    name: str
    units: tuple[int, ...]
    x: tuple[float, ...]
    y: tuple[float, ...]
    ms: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        if self.name not in CURVE_AXES:
            raise ValueError(f"unknown curve {self.name!r}; known: {', '.join(CURVE_AXES)}")
        for label, axis in (("units", self.units), ("x", self.x), ("y", self.y)):
            if not axis or any(b <= a for a, b in pairwise(axis)):
                raise ValueError(f"curve {self.name}: axis {label} must be strictly ascending and not empty: {axis}")
        if len(self.ms) != len(self.units) or any(
            len(plane) != len(self.x) or any(len(row) != len(self.y) for row in plane) for plane in self.ms
        ):
            raise ValueError(f"curve {self.name}: the table does not have the shape of its axes")
        if any(not math.isfinite(v) or v <= 0 for plane in self.ms for row in plane for v in row):
            raise ValueError(f"curve {self.name}: every latency must be finite and above 0 ms")

    @staticmethod
    def fit(
        name: str, units: Sequence[int], x: Sequence[float], y: Sequence[float], ms: Sequence[Sequence[Sequence[float]]]
    ) -> Curve:
        """Curve from a measured table, made monotone: never up with units, never down with x or y."""
        log_ms = [[[math.log(v) for v in row] for row in plane] for plane in ms]
        # Each pass can undo a little of the one before; few passes converge, and the last decides on units.
        for _ in range(4):
            for plane in log_ms:
                for i in range(len(x)):
                    plane[i] = isotonic(plane[i])
                for j in range(len(y)):
                    for i, value in enumerate(isotonic([plane[i][j] for i in range(len(x))])):
                        plane[i][j] = value
            for i in range(len(x)):
                for j in range(len(y)):
                    for u, value in enumerate(isotonic([plane[i][j] for plane in log_ms], increasing=False)):
                        log_ms[u][i][j] = value
        table = tuple(tuple(tuple(math.exp(v) for v in row) for row in plane) for plane in log_ms)
        return Curve(name, tuple(units), tuple(float(v) for v in x), tuple(float(v) for v in y), table)

    def at(self, num_units: float) -> Slice:
        """The curve at `num_units`, interpolated (or carried on with the last segment's slope) in log space."""
        offset = CURVE_AXES[self.name][2]
        if len(self.units) == 1:
            log_ms = tuple(tuple(math.log(v) for v in row) for row in self.ms[0])
        else:
            i, w = _bracket([math.log(u) for u in self.units], math.log(num_units))
            log_ms = tuple(
                tuple(math.log(a) + w * (math.log(b) - math.log(a)) for a, b in zip(low, high, strict=True))
                for low, high in zip(self.ms[i], self.ms[i + 1], strict=True)
            )
        log_y = tuple(math.log(v + offset) for v in self.y) if len(self.y) > 1 else (0.0,)
        return Slice(tuple(math.log(v) for v in self.x), log_y, log_ms, offset)


@dataclass(frozen=True, kw_only=True)
class PhaseSlices:
    """All curves at one number of units."""

    slices: Mapping[str, Slice]

    def encoder_batch_ms(self, patches: Sequence[int]) -> float:
        rows = sum(patches)
        if rows == 0:
            return 0.0
        length = sum(p * p for p in patches) / rows
        return self.slices["encoder_linear"].ms(rows) + self.slices["encoder_attention"].ms(length, rows / length)

    def decode_step_ms(self, batch: int, context: float) -> float:
        if batch == 0:
            return 0.0
        return self.slices["decode_linear"].ms(batch) + self.slices["decode_attention"].ms(batch, max(1.0, context))

    def prefill_chunk_ms(self, tokens: int, prefix: float) -> float:
        if tokens == 0:
            return 0.0
        return self.slices["prefill_linear"].ms(tokens) + self.slices["prefill_attention"].ms(tokens, max(0.0, prefix))


@dataclass(frozen=True, kw_only=True)
class DeviceCurves:
    """Curves of one model on one device.

    `contention` maps a case to {encoder units: factor}. Factors of the encoder are relative to the encoder alone on
    as many units; those of decode and prefill to the same work alone on the complement, in both mask modes, so
    that a factor below 1 in an unmasked case is the units of the encoder that the decoder reaches as well.
    `min_decoder_units` is the least complement on which the decode side is known to run.
    `sharing` are measured rows of decode beside prefill inside the decoder's process (profile/contention.py).
    `source` is "profiled", "stand-in" or "roofline"; `provenance` says in words where the numbers come from.
    """

    device_name: str
    total_units: int
    model_fingerprint: str
    curves: Mapping[str, Curve]
    source: str
    provenance: str
    unit_kind: str = "sm"
    min_decoder_units: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    operators: Sequence[Mapping[str, Any]] = ()
    contention: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    validation: Mapping[str, Any] = field(default_factory=dict)
    sharing: Sequence[Mapping[str, Any]] = ()
    _slices: dict[float, PhaseSlices] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = [name for name in CURVE_AXES if name not in self.curves]
        if missing:
            raise ValueError(f"curves of {self.device_name} lack {', '.join(missing)}")
        if self.total_units < 1 or self.source not in ("profiled", "stand-in", "roofline"):
            raise ValueError(
                f"curves of {self.device_name}: bad total_units {self.total_units} or source {self.source!r}"
            )
        for case, table in self.contention.items():
            if case not in CONTENTION_CASES or any(not math.isfinite(f) or f <= 0 for f in table.values()):
                raise ValueError(f"contention {case!r} is unknown or has a factor that is not above 0")

    def at(self, num_units: int) -> PhaseSlices:
        """All curves at `num_units` (kept: a ladder has a dozen rungs)."""
        found = self._slices.get(num_units)
        if found is None:
            found = PhaseSlices(slices={name: curve.at(num_units) for name, curve in self.curves.items()})
            self._slices[num_units] = found
        return found

    def has_contention(self, case: str, encoder_units: int) -> bool:
        return encoder_units in self.contention.get(case, {})

    def contention_factor(self, case: str, encoder_units: int) -> float:
        """Factor of `case` at a split, interpolated over units and held flat outside them; 1.0 where not measured.

        The whole device (no complement) is a case of its own: it is taken only if it was measured itself.
        """
        table = self.contention.get(case, {})
        if encoder_units in table:
            return table[encoder_units]
        units = sorted(u for u in table if u < self.total_units)
        if not units:
            return 1.0
        if encoder_units <= units[0]:
            return table[units[0]]
        if encoder_units >= units[-1]:
            return table[units[-1]]
        i, w = _bracket([float(u) for u in units], encoder_units)
        return table[units[i]] * (1 - w) + table[units[i + 1]] * w

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "provenance": self.provenance,
            "device": {"name": self.device_name, "total_units": self.total_units, "unit_kind": self.unit_kind},
            "min_decoder_units": self.min_decoder_units,
            "versions": dict(self.versions),
            "model": {"fingerprint": self.model_fingerprint, "shape": dict(self.model)},
            "contention": {c: {str(u): f for u, f in sorted(t.items())} for c, t in self.contention.items()},
            "curves": {
                name: {
                    "axes": ["units", *CURVE_AXES[name][:2]],
                    "units": list(curve.units),
                    "x": list(curve.x),
                    "y": list(curve.y),
                }
                | {"ms": [[[float(f"{v:.6g}") for v in row] for row in plane] for plane in curve.ms]}
                for name, curve in self.curves.items()
            },
            "operators": [dict(op) for op in self.operators],
            "validation": dict(self.validation),
            "sharing": [dict(row) for row in self.sharing],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DeviceCurves:
        """Raises ValueError for another schema version, a missing field or a malformed table."""
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"curve file has schema version {version!r}, this release reads {SCHEMA_VERSION}: profile again"
            )
        try:
            curves = {
                name: Curve(
                    name,
                    tuple(c["units"]),
                    tuple(c["x"]),
                    tuple(c["y"]),
                    tuple(tuple(tuple(row) for row in plane) for plane in c["ms"]),
                )
                for name, c in data["curves"].items()
            }
            return DeviceCurves(
                device_name=data["device"]["name"],
                total_units=int(data["device"]["total_units"]),
                unit_kind=data["device"]["unit_kind"],
                min_decoder_units=int(data["min_decoder_units"]),
                source=data["source"],
                provenance=data["provenance"],
                versions=data["versions"],
                model_fingerprint=data["model"]["fingerprint"],
                model=data["model"]["shape"],
                contention={c: {int(u): float(f) for u, f in t.items()} for c, t in data["contention"].items()},
                curves=curves,
                operators=tuple(data["operators"]),
                validation=data["validation"],
                sharing=tuple(data.get("sharing", ())),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed curve file: {error!r}") from error

    def save(self, file: str | Path) -> None:
        # One line for each top-level entry: readable heads, and tables that do not run over thousands of lines.
        entries = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.to_json().items())
        Path(file).write_text("{\n" + ",\n".join(entries) + "\n}\n")

    @staticmethod
    def load(file: str | Path) -> DeviceCurves:
        """Raises ValueError where the file is no curve file; OSError where it cannot be read."""
        try:
            data = json.loads(Path(file).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{file} is not a curve file")
        return DeviceCurves.from_json(data)


@lru_cache(maxsize=1)
def shipped_files() -> tuple[Path, ...]:
    """Curve files that come with the package."""
    return tuple(sorted((Path(__file__).parent / "curves").glob("*.json")))


def find_curves(device_name: str, total_units: int, model_fingerprint: str) -> DeviceCurves | None:
    """The shipped curves of this device and model shape, profiled ones before stand-ins; None where there are none."""
    found = [
        curves
        for curves in map(DeviceCurves.load, shipped_files())
        if curves.device_name == device_name
        and curves.total_units == total_units
        and curves.model_fingerprint == model_fingerprint
    ]
    return min(found, key=lambda curves: curves.source != "profiled", default=None)
