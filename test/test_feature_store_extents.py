"""The placement of extents in the slab, against brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spaceserve.feature_store.extents import EvictionTier, ExtentTable, Layout

pytestmark = pytest.mark.cpu


def random_layout(rng: random.Random, num_blocks: int, pinned_share: float) -> Layout:
    table = ExtentTable(num_blocks)
    block = 0
    while block < num_blocks:
        length = min(rng.randint(1, 4), num_blocks - block)
        if rng.random() < 0.75:
            table.add(block, length)
            if rng.random() >= pinned_share:
                tier = EvictionTier(rng.randrange(3))
                table.set_price(block, tier, rng.randint(1, 50), rng.randint(0, 20))
        block += length
    return table.layout(now=20)


def brute_force_cost(layout: Layout, size: int) -> tuple[int, int, int] | None:
    """Least cost over every first block, extent by extent."""
    costs: list[tuple[int, int, int]] = []
    rows = list(
        zip(
            layout.starts_N.tolist(),
            layout.lengths_N.tolist(),
            layout.tiers_N.tolist(),
            layout.costs_N.tolist(),
            strict=True,
        )
    )
    for first in range(layout.num_blocks - size + 1):
        overlapped = [
            (tier, cost) for start, length, tier, cost in rows if start < first + size and start + length > first
        ]
        if all(tier != EvictionTier.PINNED for tier, _ in overlapped):
            by_tier = [sum(c for t, c in overlapped if t == tier) for tier in (2, 1, 0)]
            costs.append((by_tier[0], by_tier[1], by_tier[2]))
    return min(costs, default=None)


def test_cheapest_window_against_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(400):
        layout = random_layout(rng, rng.randint(1, 24), pinned_share=0.2)
        size = rng.randint(1, layout.num_blocks)
        window = layout.cheapest_window(size)
        expected = brute_force_cost(layout, size)
        assert (window is None) == (expected is None)
        if window is not None:
            first, i, j, cost = window
            assert cost == expected
            ends_N = layout.starts_N + layout.lengths_N
            overlapped = np.flatnonzero((layout.starts_N < first + size) & (ends_N > first)).tolist()
            assert overlapped == list(range(i, j))


def test_plans_never_overlap_pinned_extents_or_each_other() -> None:
    rng = random.Random(2)
    num_planned = 0
    for _ in range(400):
        layout = random_layout(rng, rng.randint(4, 40), pinned_share=0.3)
        before = layout.starts_N.copy(), layout.tiers_N.copy()
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
        placement = layout.plan(sizes)
        assert np.array_equal(before[0], layout.starts_N)
        assert np.array_equal(before[1], layout.tiers_N)
        if placement is None:
            continue
        num_planned += 1
        taken = [b for start, size in zip(placement.starts, sizes, strict=True) for b in range(start, start + size)]
        assert len(taken) == len(set(taken)) == sum(sizes)
        assert min(taken) >= 0
        assert max(taken) < layout.num_blocks
        for start, length, tier in zip(
            layout.starts_N.tolist(), layout.lengths_N.tolist(), layout.tiers_N.tolist(), strict=True
        ):
            if set(range(start, start + length)) & set(taken):
                assert tier != EvictionTier.PINNED
                assert start in placement.evicted
        assert len(placement.evicted) == len(set(placement.evicted))
    assert num_planned > 100


def test_whatever_fits_the_slab_is_placed_when_nothing_is_pinned() -> None:
    rng = random.Random(3)
    for _ in range(400):
        layout = random_layout(rng, rng.randint(1, 40), pinned_share=0.0)
        sizes: list[int] = []
        while sum(sizes) < layout.num_blocks and (not sizes or rng.random() < 0.8):
            sizes.append(rng.randint(1, layout.num_blocks - sum(sizes)))
        assert layout.plan(sizes) is not None


def test_gaps_are_used_when_neither_one_window_nor_the_cheapest_ones_fit() -> None:
    """Pinned at block 3: runs of 3 and 4, the first one in use."""
    table = ExtentTable(8)
    table.add(3, 1)
    table.add(0, 3)
    table.set_price(0, EvictionTier.CACHED, 10, 0)
    # The free run of 4 is cheapest for the 3, which then leaves one block there and one in the other run.
    placement = table.layout(0).plan([2, 2, 3])
    assert placement is not None
    assert placement.evicted == (0,)


def test_images_of_a_request_lie_side_by_side_where_that_costs_nothing() -> None:
    """Free runs of 1, 1 and 2 blocks: the tightest fits would scatter two images over the first two runs."""
    table = ExtentTable(7)
    for block in (1, 3, 4):
        table.add(block, 1)
    placement = table.layout(0).plan([1, 1])
    assert placement is not None
    assert placement.starts == (5, 6)
