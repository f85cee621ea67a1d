"""Gives memory that the C library keeps for later back to the system."""

from __future__ import annotations

import ctypes


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
