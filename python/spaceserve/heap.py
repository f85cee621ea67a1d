"""What the C library keeps of freed memory: how much, and when it gives it back to the system."""

from __future__ import annotations

import ctypes

# mallopt's names for them, in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest that glibc takes, and where its own adjustment ends once a piece of this size was freed.
MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 2 * MMAP_THRESHOLD_BYTES


def fix_heap_thresholds() -> bool:
    """Take pieces below 32 MiB from the heaps from the beginning; call it before threads allocate.

    glibc starts at 128 KiB and raises the limit whenever a larger piece is freed. What was allocated for good in
    between lies scattered over the heaps, and buffers of images and activations find ever fewer gaps that they fit
    in: the worker's memory rose for thousands of images. Lower limits cost page faults (docs/feature-store.md).

    Returns:
        Whether the C library has `mallopt` and took both (glibc does; musl has none).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    taken = [
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) == 1,
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES) == 1,
    ]
    return all(taken)


def trim_heap() -> bool:
    """Return free pages of glibc's heaps to the system; a few milliseconds.

    Decoding and resizing images of many sizes in several threads leaves freed pieces in each thread's heap, which glibc
    gives back only from the top: a worker's memory would creep up for hours.

    Returns:
        Whether the C library has `malloc_trim` (glibc has, musl has not).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim.argtypes = (ctypes.c_size_t,)
    trim(0)
    return True
