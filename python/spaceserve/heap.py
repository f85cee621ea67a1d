"""What the C library keeps of freed memory: how much, and when it gives it back to the system."""

from __future__ import annotations

import ctypes

# mallopt's names for them, in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 1 << 20
TRIM_THRESHOLD_BYTES = 64 << 20


def fix_heap_thresholds() -> bool:
    """Give buffers from 1 MiB on pages of their own, which go back when they are freed; call it before threads start.

    For processes that run a model on the CPU, whose activations are buffers of the C library. glibc moves the limit up
    to 32 MiB as it sees such pieces freed. From then on they lie in the threads' heaps, between what was allocated for
    good, and a process grows for ten thousand requests towards the most that its batches ever needed at once. With a
    limit of one's own, glibc also gives back the top of its heaps beyond 128 KiB, at a cost in page faults: 64 MiB
    are left to `trim_heap`. Figures: docs/feature-store.md.

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
