"""The encoder's batch capacity on this device: as asked for, from a measured profile, or the documented default."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spaceserve.encoder_schedule import DEFAULT_BATCH_CAPACITY_PATCHES
from spaceserve.encoder_schedule.capacity import batch_capacity_from_curve

if TYPE_CHECKING:
    from spaceserve.sis.curves import DeviceCurves

logger = logging.getLogger(__name__)

CPU_BATCH_CAPACITY_PATCHES = 1024
# Images of 224 x 224 pixels: small ones are what a batch is filled with; a large one fills the device alone.
IMAGE_PATCHES = 256
# Bounds of what a profile may choose: docs/twsrft.md shows what smaller and larger batches cost.
LEAST_PATCHES, MOST_PATCHES = 2_048, 16_384


def capacity_from_profile(curves: DeviceCurves) -> int:
    """Fewest patches of small images at which the encoder, alone on the whole device, is nearly as fast as ever."""
    at = curves.at(curves.total_units)
    sizes = [int(n) for n in curves.curves["encoder_linear"].x if IMAGE_PATCHES <= n <= MOST_PATCHES]
    sizes += [n for n in (LEAST_PATCHES, MOST_PATCHES) if n not in sizes]
    points = [(n, at.encoder_batch_ms([IMAGE_PATCHES] * (n // IMAGE_PATCHES))) for n in sizes]
    return max(LEAST_PATCHES, batch_capacity_from_curve(points))


def batch_capacity(asked_for: int | None, device_name: str | None, total_units: int, model_path: str) -> int:
    """Most patches in one forward, and one log line that says where the number comes from.

    Args:
        asked_for: of `--encoder-batch-capacity-patches`; None for auto.
        device_name: torch's name of the GPU; None on the CPU.
        total_units: its SMs.
        model_path: folder of the model.
    """
    if asked_for is not None:
        return asked_for
    if device_name is None:
        return CPU_BATCH_CAPACITY_PATCHES
    from spaceserve.sis import find_curves
    from spaceserve.sis.shapes import shape_from_model_path

    curves = find_curves(device_name, total_units, shape_from_model_path(model_path).fingerprint())
    if curves is None or curves.source != "profiled":
        logger.info("Encoder batches of %d patches: no profile of %s", DEFAULT_BATCH_CAPACITY_PATCHES, device_name)
        return DEFAULT_BATCH_CAPACITY_PATCHES
    capacity = capacity_from_profile(curves)
    logger.info("Encoder batches of %d patches: from the profile of %s", capacity, device_name)
    return capacity
