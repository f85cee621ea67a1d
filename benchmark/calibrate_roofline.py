"""Fit the roofline's efficiency factors to the stand-in measurements, and leave each point out in turn.

    python benchmark/calibrate_roofline.py

Needs scipy. Prints the factors (to be copied into spaceserve/sis/roofline.py), the errors on the points fitted and
the errors on points left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.optimize import least_squares

from spaceserve.sis.roofline import KNOWN_DEVICES, Efficiency, Roofline
from spaceserve.sis.shapes import QWEN2_VL_7B
from spaceserve.sis.standin import DECODE_BATCH, DECODE_CONTEXT, DECODE_MS, DEVICE, ENCODER_MS

FACTORS = ("gemm", "attention", "ceiling", "bandwidth", "sm_bandwidth")
LOWER, UPPER = (0.1, 0.1, 0.5, 0.2, 0.3), (0.95, 0.95, 4.0, 0.95, 20.0)
STARTS = ((0.5, 0.45, 1.0, 0.7, 1.5), (0.7, 0.45, 1.4, 0.7, 1.3))

Point = tuple[int, int, float]  # patches (0: the decode step), SMs, ms
POINTS: list[Point] = [(p, n, ms) for p, row in ENCODER_MS.items() for n, ms in row.items()]
POINTS += [(0, n, ms) for n, ms in DECODE_MS.items()]


def predict(efficiency: Efficiency, point: Point) -> float:
    patches, num_sms, _ = point
    roofline = Roofline(device=KNOWN_DEVICES[DEVICE], efficiency=efficiency)
    sizes = ("encoder", patches, 1) if patches else ("decode", DECODE_BATCH, DECODE_CONTEXT)
    phase, x, y = sizes
    return sum(roofline.curve_ms(f"{phase}_{part}", x, y, QWEN2_VL_7B, num_sms) for part in ("linear", "attention"))


def fit(points: Sequence[Point]) -> Efficiency:
    def efficiency(logs: Sequence[float]) -> Efficiency:
        return Efficiency(**{name: math.exp(v) for name, v in zip(FACTORS, logs, strict=True)})

    def residuals(logs: Sequence[float]) -> list[float]:
        return [math.log(predict(efficiency(logs), point) / point[2]) for point in points]

    bounds = ([math.log(v) for v in LOWER], [math.log(v) for v in UPPER])
    found = [least_squares(residuals, [math.log(v) for v in start], bounds=bounds) for start in STARTS]
    return efficiency(min(found, key=lambda f: f.cost).x)


def report(title: str, errors: Sequence[float]) -> None:
    print(f"{title}: " + " ".join(f"{e:+.1%}" for e in errors))
    print(f"  median {statistics.median(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}")


def main() -> None:
    best = fit(POINTS)
    print(best)
    report("fitted", [predict(best, p) / p[2] - 1 for p in POINTS])
    left_out = [predict(fit([q for q in POINTS if q != p]), p) / p[2] - 1 for p in POINTS]
    report("left out", left_out)


if __name__ == "__main__":
    main()
