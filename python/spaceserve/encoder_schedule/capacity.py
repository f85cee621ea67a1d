"""How many patches share one forward, and the defaults of window and capacity."""

from __future__ import annotations

from collections.abc import Sequence

# Both were chosen on simulated traces; docs/twsrft.md shows the figures and what a smaller or larger value does.
DEFAULT_WINDOW_S = 2.0
DEFAULT_BATCH_CAPACITY_PATCHES = 8_192


def batch_capacity_from_curve(curve: Sequence[tuple[int, float]], tolerance: float = 0.1) -> int:
    """Fewest patches at which the encoder does, within tolerance, the most patches per second that it ever does.

    curve holds measured (patches, milliseconds) of one forward, in any order; the result is one of its patch counts.
    Beyond that point a fuller batch hardly raises throughput, but makes the first image wait for the last. Where
    attention makes large images slower per patch the curve has a maximum, and the point before it is found.

    Raises ValueError for an empty curve, a value that is not positive or a tolerance outside [0, 1).
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must lie in [0, 1), not {tolerance}")
    if not curve or any(num_patches < 1 or latency_ms <= 0 for num_patches, latency_ms in curve):
        raise ValueError("the encoder's latency curve needs points, all of them positive")
    rates = sorted((num_patches, num_patches / latency_ms) for num_patches, latency_ms in curve)
    enough = (1 - tolerance) * max(rate for _, rate in rates)
    return next(num_patches for num_patches, rate in rates if rate >= enough)
