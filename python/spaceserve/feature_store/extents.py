"""Extents of the feature slab: which blocks are taken, what each extent costs to evict, and where new ones fit.

An extent is a contiguous run of blocks that holds the features of one image, so that the reader gets a view of
consecutive rows. Contiguity makes the choice of victims geometric: what has to be cheap is not one entry but a whole
*window* of blocks. `Layout.cheapest_window` therefore slides over the ordered extents and takes the window whose
extents together cost least; an LRU list would free the right number of blocks in the wrong places.

Legend of the shapes below: N = number of extents, ordered by their first block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

# Cost of one extent is kept below this, so that the sum over any slab stays exact in int64.
_MAX_COST = 1 << 40
# Above this many items a request is first tried as one window; placing each item by itself costs a scan per item.
_MAX_ITEMS_PLACED_SINGLY = 16


class EvictionTier(IntEnum):
    """Order in which extents give way. A higher tier goes only when no window of lower tiers is large enough."""

    RADIX_CACHED = 0  # the RadixCache holds the tokens: a request that matches them never asks for the features
    CACHED = 1  # nobody wants it now
    WANTED = 2  # a request that has no reservation yet wants it: evicting it costs that request an encode
    PINNED = 3  # reserved, being written, or held by a request with a reservation: never evicted


@dataclass(frozen=True)
class Placement:
    """Outcome of planning: `starts[i]` is the first block of the i-th size, `evicted` the first blocks of victims."""

    starts: tuple[int, ...]
    evicted: tuple[int, ...]
    cost: tuple[int, int, int]  # by tier WANTED, CACHED, RADIX_CACHED, compared in that order


class ExtentTable:
    """Occupied extents of a slab of `num_blocks` blocks, with what is needed to price them. One row per first block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.used_blocks = 0
        self._lengths: IntArray = np.zeros(num_blocks, dtype=np.int64)  # 0: no extent starts at this block
        self._tiers: IntArray = np.zeros(num_blocks, dtype=np.int64)
        self._rebuild_costs: IntArray = np.zeros(num_blocks, dtype=np.int64)
        self._last_uses: IntArray = np.zeros(num_blocks, dtype=np.int64)

    def add(self, start: int, length: int) -> None:
        """Take `length` blocks from `start` on, pinned until `set_price` says otherwise. Mutates the table."""
        assert length > 0, "an extent has at least one block"
        assert 0 <= start <= self.num_blocks - length, "extent lies outside the slab"
        assert not self._lengths[start : start + length].any(), "extent overlaps the start of another"
        self._lengths[start] = length
        self._tiers[start] = EvictionTier.PINNED
        self.used_blocks += length

    def remove(self, start: int) -> None:
        """Free the extent that starts at block `start`."""
        length = int(self._lengths[start])
        assert length > 0, "no extent starts here"
        self._lengths[start] = 0
        self.used_blocks -= length

    def set_price(self, start: int, tier: EvictionTier, rebuild_cost: int, last_use: int) -> None:
        """State what evicting the extent at `start` costs: tier, cost to rebuild (microseconds), tick of last use."""
        assert self._lengths[start] > 0, "no extent starts here"
        self._tiers[start] = tier
        self._rebuild_costs[start] = min(max(rebuild_cost, 1), _MAX_COST // self.num_blocks)
        self._last_uses[start] = last_use

    def layout(self, now: int) -> Layout:
        """Copy of the extents in order, priced as of tick `now`; planning mutates the copy only."""
        starts = np.flatnonzero(self._lengths)
        costs = self._rebuild_costs[starts]
        ages = now - self._last_uses[starts]
        # Expected cost of an eviction = cost to rebuild x likelihood of another use. The likelihood is taken to fall
        # hyperbolically: it halves once as many uses of other entries have passed as there are entries.
        half_life = max(len(starts), 1)
        expected = np.maximum((costs * half_life) // (half_life + ages), 1)
        return Layout(self.num_blocks, starts, self._lengths[starts], self._tiers[starts], expected)

    def largest_free_blocks(self) -> int:
        """Length of the longest free run of blocks."""
        starts = np.flatnonzero(self._lengths)
        ends = np.concatenate(([0], starts + self._lengths[starts]))
        return int((np.concatenate((starts, [self.num_blocks])) - ends).max())

    def rows(self) -> list[tuple[int, int, EvictionTier]]:
        """(first block, length, tier) of every extent in order: for checks, not for the hot path."""
        starts = np.flatnonzero(self._lengths)
        return [(int(s), int(self._lengths[s]), EvictionTier(int(self._tiers[s]))) for s in starts]


class Layout:
    """Scratch copy of a table on which a placement is planned before anything is changed.

    starts_N, lengths_N, tiers_N, costs_N: int64, ordered by start.
    """

    def __init__(
        self, num_blocks: int, starts_N: IntArray, lengths_N: IntArray, tiers_N: IntArray, costs_N: IntArray
    ) -> None:
        self.num_blocks = num_blocks
        self.starts_N = starts_N
        self.lengths_N = lengths_N
        self.tiers_N = tiers_N
        self.costs_N = costs_N

    def pin(self, start: int) -> None:
        """Keep the extent at `start` where it is."""
        self.tiers_N[np.searchsorted(self.starts_N, start)] = EvictionTier.PINNED

    def drop(self, start: int) -> None:
        """Treat the extent at `start` as free."""
        i = int(np.searchsorted(self.starts_N, start))
        self._replace(i, i + 1, None)

    def plan(self, sizes: Sequence[int]) -> Placement | None:
        """Find room for extents of `sizes` blocks, evicting the least that is possible; None where there is no room.

        With nothing pinned, any sizes with sum(sizes) <= num_blocks are placed: `_place_together` then has at least
        the window that starts at block 0. With pinned extents between, the packing is a heuristic and may miss one.
        """
        pinned_blocks = int(self.lengths_N[self.tiers_N == EvictionTier.PINNED].sum())
        if sum(sizes) > self.num_blocks - pinned_blocks:
            return None
        if not sizes:
            return Placement((), (), (0, 0, 0))
        together = self._place_together(sizes)
        if len(sizes) == 1:
            return together
        if together is not None and (not any(together.cost) or len(sizes) > _MAX_ITEMS_PLACED_SINGLY):
            return together
        singly = self._place_singly(sizes)
        found = [placement for placement in (together, singly) if placement is not None]
        if found:
            # Neighbours are evicted together later, which keeps the slab less fragmented: ties go to one window.
            return min(found, key=lambda placement: placement.cost)
        return self._place_in_gaps(sizes)

    def _place_together(self, sizes: Sequence[int]) -> Placement | None:
        window = self.cheapest_window(sum(sizes))
        if window is None:
            return None
        first_block, i, j, cost = window
        starts = []
        for size in sizes:
            starts.append(first_block)
            first_block += size
        return Placement(tuple(starts), tuple(int(s) for s in self.starts_N[i:j]), cost)

    def _place_singly(self, sizes: Sequence[int]) -> Placement | None:
        """Place the largest first, each in its cheapest window given those before it."""
        scratch = self._copy()
        starts = [0] * len(sizes)
        evicted: list[int] = []
        total = [0, 0, 0]
        for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
            window = scratch.cheapest_window(sizes[k])
            if window is None:
                return None
            starts[k], i, j, cost = window
            evicted.extend(int(s) for s in scratch.starts_N[i:j])
            total = [a + b for a, b in zip(total, cost, strict=True)]
            scratch._replace(i, j, (starts[k], sizes[k]))
        return Placement(tuple(starts), tuple(evicted), (total[0], total[1], total[2]))

    def _place_in_gaps(self, sizes: Sequence[int]) -> Placement | None:
        """Best-fit-decreasing into the runs between pinned extents, whatever that evicts."""
        pinned = self.tiers_N == EvictionTier.PINNED
        run_starts = np.concatenate(([0], self.starts_N[pinned] + self.lengths_N[pinned]))
        run_ends = np.concatenate((self.starts_N[pinned], [self.num_blocks]))
        runs = [[int(end - start), int(start)] for start, end in zip(run_starts, run_ends, strict=True)]
        starts = [0] * len(sizes)
        taken = np.zeros(len(self.starts_N), dtype=np.bool_)
        for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
            fitting = [run for run in runs if run[0] >= sizes[k]]
            if not fitting:
                return None
            run = min(fitting)
            starts[k] = run[1]
            run[0] -= sizes[k]
            run[1] += sizes[k]
            taken |= (self.starts_N < run[1]) & (self.starts_N + self.lengths_N > starts[k])
        wanted, cached, radix_cached = (
            int(self.costs_N[taken & (self.tiers_N == tier)].sum())
            for tier in (EvictionTier.WANTED, EvictionTier.CACHED, EvictionTier.RADIX_CACHED)
        )
        evicted = tuple(int(s) for s in self.starts_N[taken])
        return Placement(tuple(starts), evicted, (wanted, cached, radix_cached))

    def cheapest_window(self, size: int) -> tuple[int, int, int, tuple[int, int, int]] | None:
        """Cheapest run of `size` blocks without a pinned extent: (first block, i, j, cost by tier) or None.

        The extents [i, j) overlap the run. Only runs that begin at block 0 or right behind an extent are looked at:
        a run that begins elsewhere can be moved left to the next such place, and on the way it enters no extent, so
        one of these is always among the cheapest. Ties go to the tightest fit, then to the lowest block.
        """
        n = len(self.starts_N)
        firsts = np.concatenate((np.zeros(1, dtype=np.int64), self.starts_N + self.lengths_N))
        i_all = np.arange(n + 1)
        j_all = np.searchsorted(self.starts_N, firsts + size, side="left")
        pinned_before = _prefix_sums((self.tiers_N == EvictionTier.PINNED).astype(np.int64))
        possible = (firsts + size <= self.num_blocks) & (pinned_before[j_all] == pinned_before[i_all])
        candidates = np.flatnonzero(possible)
        if len(candidates) == 0:
            return None
        cost = []
        for tier in (EvictionTier.WANTED, EvictionTier.CACHED, EvictionTier.RADIX_CACHED):
            sums = _prefix_sums(np.where(self.tiers_N == tier, self.costs_N, 0))
            window_costs = sums[j_all[candidates]] - sums[i_all[candidates]]
            least = window_costs.min()
            cost.append(int(least))
            candidates = candidates[window_costs == least]
        next_starts = np.concatenate((self.starts_N, [self.num_blocks]))[j_all[candidates]]
        best = int(candidates[np.argmin(next_starts - firsts[candidates])])
        return int(firsts[best]), best, int(j_all[best]), (cost[0], cost[1], cost[2])

    def _copy(self) -> Layout:
        # _replace makes new arrays, so that sharing them is safe.
        return Layout(self.num_blocks, self.starts_N, self.lengths_N, self.tiers_N, self.costs_N)

    def _replace(self, i: int, j: int, extent: tuple[int, int] | None) -> None:
        """Put one pinned extent (start, length), or nothing, in place of the extents [i, j)."""

        def spliced(array: IntArray, value: int) -> IntArray:
            middle = [value] if extent is not None else []
            return np.concatenate((array[:i], np.asarray(middle, dtype=np.int64), array[j:]))

        start, length = extent if extent is not None else (0, 0)
        self.starts_N = spliced(self.starts_N, start)
        self.lengths_N = spliced(self.lengths_N, length)
        self.tiers_N = spliced(self.tiers_N, EvictionTier.PINNED)
        self.costs_N = spliced(self.costs_N, 0)


def _prefix_sums(values_N: IntArray) -> IntArray:
    """Shape [N + 1]: the sum of the first k values at index k."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values_N)))
