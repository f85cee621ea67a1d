"""Rungs, rounding and masks: the arithmetic of partitions, without any device.

A *ladder* is the ascending list of group sizes that a device grants. A *unit* is what a mask can switch on or off:
a streaming multiprocessor (NVIDIA), a compute unit (AMD) or a core (CPU). Units are numbered from 0; a group of
``n`` units takes the first ``n`` and its complement the others, so two processes that compute the same split get
disjoint groups without talking to each other.

Everything here is pure: it is tested on topologies from 1 to 1024 units without an accelerator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def make_rungs(total_units: int, *, min_units: int, step: int) -> tuple[int, ...]:
    """The sizes granted to an encoder group: multiples of ``step`` from ``min_units`` on, then the whole device.

    Args:
        total_units: units of the device, at least 1.
        min_units: the smallest group. Rounded up to a multiple of ``step``.
        step: distance of two rungs, at least 1.

    Returns:
        Ascending sizes without repeats. The last is ``total_units`` and means "no mask". ``make_rungs(132,
        min_units=16, step=8)`` is ``(16, 24, ..., 128, 132)``; a ``min_units`` of ``total_units`` or more leaves
        the whole device as the only rung.

    Raises:
        ValueError: an argument is below 1.
    """
    for name, value in (("total_units", total_units), ("min_units", min_units), ("step", step)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    first = round_up(min_units, step)
    return (*range(first, total_units, step), total_units)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is ``value`` or more."""
    return -(-value // multiple) * multiple


def round_to_rung(rungs: Sequence[int], requested: int) -> int:
    """The smallest rung that is at least ``requested``: a group is never smaller than what was asked for.

    With the rungs ``(8, 16, ..., 128, 132)``: 1 and 8 give 8, 60 and 64 give 64, 65 gives 72, 129 and 132 give 132.

    Raises:
        ValueError: ``requested`` is below 1 or above the last rung.
    """
    if not 1 <= requested <= rungs[-1]:
        raise ValueError(f"requested {requested} units, but the device grants 1 to {rungs[-1]}")
    return rungs[bisect_left(rungs, requested)]


def complement_units(total_units: int, granted: int, *, min_complement: int) -> int | None:
    """Size of the complement of a group, or None where it would be smaller than ``min_complement`` (or empty).

    A remainder of few units is not merely slow: cuBLAS failed with CUBLAS_STATUS_EXECUTION_FAILED on 12 SMs of an
    H200, where 20 worked.
    """
    assert 1 <= granted <= total_units, (granted, total_units)
    rest = total_units - granted
    return rest if rest >= max(min_complement, 1) else None


def unit_range(total_units: int, granted: int, *, is_complement: bool) -> range:
    """The units of a group of ``granted`` units, or of a complement that has ``granted`` units: the last ones."""
    assert 0 <= granted <= total_units, (granted, total_units)
    return range(total_units - granted, total_units) if is_complement else range(granted)


def bits_of(units: range) -> int:
    """Integer whose bit ``i`` is set for each unit ``i`` of a contiguous range."""
    return ((1 << len(units)) - 1) << units.start if len(units) else 0


def enabled_mask_words(units: range, total_units: int, *, word_bits: int = 32) -> list[int]:
    """Little-endian words of a mask in which a *set* bit *enables* a unit (hipExtStreamCreateWithCUMask)."""
    assert 0 <= units.start <= units.stop <= total_units, (units, total_units)
    mask = bits_of(units)
    num_words = -(-total_units // word_bits)
    return [(mask >> (word_bits * i)) & ((1 << word_bits) - 1) for i in range(num_words)]


def disabled_tpc_mask(units: range, total_units: int, *, units_per_tpc: int = 2) -> int:
    """Mask in which a *set* bit *disables* a thread processing cluster (libsmctrl's convention).

    Args:
        units: SMs that stay enabled; both ends must lie on TPC boundaries.
        total_units: SMs of the device; must be a multiple of ``units_per_tpc``.
        units_per_tpc: SMs in a TPC: 2 from Pascal to Blackwell.

    Raises:
        ValueError: the SMs do not fill whole TPCs.
    """
    if total_units % units_per_tpc or units.start % units_per_tpc or len(units) % units_per_tpc:
        raise ValueError(f"SMs {units.start}..{units.stop} of {total_units} do not fill whole TPCs of {units_per_tpc}")
    all_tpcs = (1 << (total_units // units_per_tpc)) - 1
    enabled = bits_of(range(units.start // units_per_tpc, units.stop // units_per_tpc))
    return all_tpcs & ~enabled


def mps_percentage_for(requested: int, total_units: int) -> int:
    """The least whole ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` that covers ``requested`` of ``total_units`` SMs.

    Raises:
        ValueError: ``requested`` is below 1 or above ``total_units``.
    """
    if not 1 <= requested <= total_units:
        raise ValueError(f"requested {requested} SMs, but the device has {total_units}")
    return -(-100 * requested // total_units)
