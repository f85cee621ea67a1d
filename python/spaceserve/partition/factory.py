"""Which back end partitions a device."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from .base import Partitioner, PartitionUnavailable
from .cpu_affinity import CpuAffinityPartitioner, usable_cores
from .green_ctx import GreenCtxPartitioner
from .hip import HipCuMaskPartitioner
from .libsmctrl import LibsmctrlPartitioner
from .mps_percentage import MpsPercentagePartitioner
from .simulated import SimulatedPartitioner
from .unmasked import UnmaskedPartitioner, UnmaskedStreamPartitioner

logger = logging.getLogger(__name__)

BACKENDS = (
    "green_ctx",
    "libsmctrl",
    "mps_percentage",
    "hip_cu_mask",
    "cpu_affinity",
    "none",
    "simulated",
)

# cuBLAS failed in a remainder of 12 SMs of an H200 and worked in one of 20.
MIN_SERVING_SMS = 16

Side = Literal["groups", "complements", "both", "nothing"]


def make_partitioner(
    backend: str = "auto",
    *,
    device: str,
    total_units: int | None = None,
    min_units: int | None = None,
    step: int | None = None,
    prepare: Side = "groups",
) -> Partitioner:
    """The partitioner of a device, with its ladder made; says in one log line which back end it is and why.

    Args:
        backend: ``auto`` or a name of :data:`BACKENDS`. ``auto`` takes green contexts on NVIDIA, CU masks on AMD,
            thread affinity on the CPU, and ``none`` where that cannot work. ``simulated`` confines nothing and takes
            any ``total_units`` (tests of schedulers).
        device: ``cuda``, ``cuda:N`` or ``cpu``.
        total_units: for the CPU, how many of the usable cores to split; for ``simulated``, the units. A GPU has as
            many units as it has: another number is an error.
        min_units: the smallest group and the smallest complement; None takes the back end's own (Hopper: 8 SMs).
            cuBLAS failed on 12 SMs of an H200 and worked on 20, so 16 is a sensible least value there.
        step: distance of the rungs; None takes the back end's own (Hopper: 8 SMs).
        prepare: which side to make at once: the encoder's ("groups"), the decoder's ("complements"), "both", or
            "nothing" (each at its first use; 2 to 5 ms for a green context).

    Raises:
        ValueError: unknown back end; a back end that was asked for cannot work here (PartitionUnavailable, with the
            reason); sizes that the device cannot grant.
    """
    if backend == "auto":
        partitioner, reason = _choose(device, total_units, min_units, step)
    else:
        partitioner, reason = _make(backend, device, total_units, min_units, step), "as requested"
    if total_units is not None and partitioner.total_units != total_units:
        actual = partitioner.total_units
        partitioner.close()
        raise ValueError(f"{device} has {actual} {partitioner.unit_name}, total_units {total_units} cannot be had")
    try:
        partitioner.prepare(groups=prepare in ("groups", "both"), complements=prepare in ("complements", "both"))
    except Exception:
        partitioner.close()
        raise
    logger.info("Partition of %s: %s (%s)", device, partitioner.describe(), reason)
    return partitioner


def serving_partitioner(device: str, *, prepare: Side = "groups") -> Partitioner:
    """The ladder of a server's device. Its processes all take this one: only equal splits have the same SMs."""
    min_units = MIN_SERVING_SMS if torch.device(device).type == "cuda" else None
    return make_partitioner(device=device, min_units=min_units, prepare=prepare)


def _choose(device: str, total_units: int | None, min_units: int | None, step: int | None) -> tuple[Partitioner, str]:
    """Back end for ``auto``, and why."""
    if torch.device(device).type == "cpu":
        wanted, why = "cpu_affinity", "the device is the CPU"
    elif torch.version.hip is not None:
        wanted, why = "hip_cu_mask", "torch is a ROCm build"
    else:
        wanted, why = "green_ctx", "the device is an NVIDIA GPU"
    try:
        return _make(wanted, device, total_units, min_units, step), why
    except PartitionUnavailable as error:
        return _make("none", device, total_units, min_units, step), f"{wanted} cannot work: {error}"


def _make(backend: str, device: str, total_units: int | None, min_units: int | None, step: int | None) -> Partitioner:
    is_cpu = torch.device(device).type == "cpu"
    if backend == "simulated":
        if total_units is None:
            raise ValueError("the back end 'simulated' needs total_units")
        return SimulatedPartitioner(total_units=total_units, min_units=min_units or 1, step=step or 1)
    if backend == "cpu_affinity":
        if not is_cpu:
            raise PartitionUnavailable(f"cpu_affinity splits cores, the device is {device}")
        return CpuAffinityPartitioner(total_units=total_units, min_units=min_units, step=step)
    if backend == "none":
        if is_cpu:
            return UnmaskedPartitioner(total_units=total_units or _num_cores())
        return UnmaskedStreamPartitioner(device=device)
    if backend == "green_ctx":
        return GreenCtxPartitioner(device=device, min_units=min_units, step=step)
    if backend == "libsmctrl":
        return LibsmctrlPartitioner(device=device, min_units=min_units, step=step)
    if backend == "hip_cu_mask":
        return HipCuMaskPartitioner(device=device, min_units=min_units, step=step)
    if backend == "mps_percentage":
        return MpsPercentagePartitioner(device=device)
    raise ValueError(f"unknown partition back end {backend!r}: auto, {', '.join(BACKENDS)}")


def _num_cores() -> int:
    try:
        return len(usable_cores())
    except PartitionUnavailable:
        return torch.get_num_threads()
