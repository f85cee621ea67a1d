"""Bookkeeping of the host tier: evicted features whose rows lie in host memory, under the content address they had.

Copying an image's features back takes far less than computing them again (docs/feature-store.md), so what the slab
gives up is kept here, bounded, until something dearer needs the room. This module touches no memory: `put` says where
a copy has to go, `find` where it lies. The owner carries the copies out in the order of these calls, one after
another, so that rows that are given away again are neither overwritten before they were read nor read before they
were written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spaceserve.feature_store.extents import EvictionTier, ExtentTable


@dataclass(frozen=True, kw_only=True)
class HostStats:
    """Blocks of the host tier now, and totals since the start."""

    num_blocks: int
    used_blocks: int
    num_entries: int
    hits: int  # features copied back instead of encoded
    saved: int  # features copied out
    evictions: int  # features given up here, and with that lost


@dataclass(slots=True)
class _Copy:
    key: bytes
    start: int
    num_blocks: int
    rebuild_us: int


class HostStore:
    """Extents of `num_blocks` blocks of `block_tokens` rows each in host memory, by content address.

    Who goes when room is needed: the window of rows whose features cost least to compute again, weighed by how long
    they have not been used, as in the slab (`extents.py`).
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        """Raises ValueError unless there is at least one block of at least one row."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self._extents = ExtentTable(num_blocks)
        self._block_tokens = block_tokens
        self._copies: dict[bytes, _Copy] = {}
        self._copy_at: dict[int, _Copy] = {}  # by first block
        self._tick = 0
        self._hits = self._saved = self._evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._copies

    def find(self, key: bytes) -> int | None:
        """First row of the features of `key`, None where they are not here."""
        copy = self._copies.get(key)
        return None if copy is None else copy.start * self._block_tokens

    def put(self, key: bytes, num_tokens: int, rebuild_us: int, keep: Collection[bytes] = ()) -> int | None:
        """Keep the features of `key`, which the slab gives up; evicts what is in the way, but none of `keep`.

        Returns:
            First row of the place that they have to be copied to; None where there is nothing to copy: they are here
            already, or there is no room for them.
        """
        copy = self._copies.get(key)
        if copy is not None:
            self._touch(copy)
            return None
        num_blocks = -(-num_tokens // self._block_tokens)
        layout = self._extents.layout(self._tick)
        for kept in keep:
            if kept in self._copies:
                layout.pin(self._copies[kept].start)
        placement = layout.plan([num_blocks])
        if placement is None:
            return None
        for start in placement.evicted:
            self._evictions += 1
            self._remove(self._copy_at[start])
        (start,) = placement.starts
        copy = _Copy(key, start, num_blocks, rebuild_us)
        self._extents.add(start, num_blocks)
        self._copies[key] = self._copy_at[start] = copy
        self._touch(copy)
        self._saved += 1
        return start * self._block_tokens

    def use(self, key: bytes) -> int:
        """The features of `key` are copied back now; they stay here too. Returns their first row.

        Raises ValueError where they are not here.
        """
        copy = self._copies.get(key)
        if copy is None:
            raise ValueError(f"the features of {key.hex()} are not in the host tier")
        self._hits += 1
        self._touch(copy)
        return copy.start * self._block_tokens

    def discard(self, key: bytes) -> None:
        """The copy of `key` is not to be used; unknown keys are ignored."""
        copy = self._copies.get(key)
        if copy is not None:
            self._remove(copy)

    def clear(self) -> None:
        """Forget everything: for `flush_cache` and weight updates."""
        for copy in list(self._copies.values()):
            self._remove(copy)

    def stats(self) -> HostStats:
        """Counts as of now."""
        return HostStats(
            num_blocks=self._extents.num_blocks,
            used_blocks=self._extents.used_blocks,
            num_entries=len(self._copies),
            hits=self._hits,
            saved=self._saved,
            evictions=self._evictions,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where copies and extents contradict each other."""
        rows = self._extents.rows()
        end = 0
        for start, length, tier in rows:
            copy = self._copy_at.get(start)
            if start < end or copy is None or copy.num_blocks != length or tier is not EvictionTier.CACHED:
                raise AssertionError(f"host tier: extent at block {start} of {length} blocks is not that of {copy}")
            if self._copies.get(copy.key) is not copy:
                raise AssertionError(f"host tier: {copy} cannot be found by its key")
            end = start + length
        if not len(rows) == len(self._copies) == len(self._copy_at) or end > self._extents.num_blocks:
            raise AssertionError("host tier: copies and extents differ in number, or reach beyond the end")
        if sum(length for _, length, _ in rows) != self._extents.used_blocks:
            raise AssertionError("host tier: used blocks are miscounted")

    def _touch(self, copy: _Copy) -> None:
        self._tick += 1
        self._extents.set_price(copy.start, EvictionTier.CACHED, copy.rebuild_us, self._tick)

    def _remove(self, copy: _Copy) -> None:
        self._extents.remove(copy.start)
        del self._copies[copy.key]
        del self._copy_at[copy.start]
