"""Named shared-memory segments for encoded images.

Plain files of `/dev/shm` rather than `multiprocessing.shared_memory`: its resource tracker unlinks what another
process still uses and warns about what it never owned (Python 3.10 to 3.12).
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHM_DIR = Path("/dev/shm")


class OutOfSharedMemory(RuntimeError):
    """`/dev/shm` has no room for another segment."""


class SegmentWriter:
    """Creates the segments of one server; every name starts with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count()

    def write(self, data: bytes) -> str:
        """Store `data` in a new segment.

        Returns:
            The segment's name. Whoever ends the request unlinks it.

        Raises:
            OutOfSharedMemory: `/dev/shm` is full; nothing is left behind.
        """
        name = f"{self._prefix}img-{os.getpid()}-{next(self._numbers)}"
        descriptor = os.open(path_of(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            unlink(name)
            raise OutOfSharedMemory(f"no room for {len(data)} bytes in {SHM_DIR}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return name


def path_of(name: str) -> str:
    """Where a segment lies, for readers that want a file.

    No `Path`: pathlib interns the parts of paths, and names that differ for every image fill CPython's table of
    interned strings, which is then made twice as large (7 MiB in a process that has imported SGLang).
    """
    return f"{SHM_DIR}/{name}"


@contextmanager
def read(name: str) -> Iterator[memoryview]:
    """Map a segment for reading.

    Raises:
        FileNotFoundError: the segment has been unlinked.
    """
    descriptor = os.open(path_of(name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        view.release()
        mapping.close()


def unlink(name: str) -> None:
    """Remove a segment; one that is already gone is no error."""
    with suppress(FileNotFoundError):
        os.unlink(path_of(name))
