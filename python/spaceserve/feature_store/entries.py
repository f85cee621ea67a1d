"""The slab's features by content address: where each lies, in which state it is, what gives way for others.

An entry is one image's features, wanted, on their way, or ready. This module places entries in the slab, prices and
evicts them. Requests are not its business: an entry only knows who wants it and how many of those hold it, and
`store.py` keeps both. What becomes of evicted features is that of `spill.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spaceserve.feature_store.answers import Ticket
from spaceserve.feature_store.extents import EvictionTier, ExtentTable, Placement
from spaceserve.feature_store.spill import HostSpill

EVICTION_REASONS = ("radix_cached", "pressure", "wanted", "repack", "flush")
_REASON_OF_TIER = {
    EvictionTier.RADIX_CACHED: "radix_cached",
    EvictionTier.CACHED: "pressure",
    EvictionTier.WANTED: "wanted",
}


class State(Enum):
    """Of an entry; see `store.py` for how it changes. All but WANTED have an extent in the slab."""

    WANTED = "wanted"
    RESERVED = "reserved"
    ENCODING = "encoding"
    READY = "ready"


@dataclass(slots=True)
class Entry:
    """Features of one image. `Entries` alone changes state, extent and price."""

    key: bytes
    num_tokens: int
    num_patches: int
    num_blocks: int
    rebuild_us: int
    state: State = State.WANTED
    start: int | None = None
    generation: int = -1
    last_use: int = 0
    radix_cached: bool = False
    # Set by clear() on features that must not outlive the requests that use them now.
    drop_when_unheld: bool = False
    wanted_by: dict[str, None] = field(default_factory=dict)  # an ordered set of rids
    num_holders: int = 0  # how many of them have a reservation


@dataclass(frozen=True)
class Plan:
    """Room for some entries: `moved` are ready ones of their own that must go first, `to_place` go to `placement`."""

    placement: Placement
    moved: Sequence[Entry]
    to_place: Sequence[Entry]


class Entries:
    """Entries of one slab of `num_blocks` blocks of `block_tokens` rows.

    Args:
        rebuild_cost_ms: maps an image's number of patches to the milliseconds an encode takes.
        spill: takes what is evicted.

    Raises:
        ValueError: there is not one block of one row.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, rebuild_cost_ms: Callable[[int], float], spill: HostSpill
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._extents = ExtentTable(num_blocks)
        self._rebuild_cost_ms = rebuild_cost_ms
        self._spill = spill
        self._by_key: dict[bytes, Entry] = {}
        self._at: dict[int, Entry] = {}  # by first block
        self._last_generation = 0
        self._tick = 0
        self.evictions = dict.fromkeys(EVICTION_REASONS, 0)

    # ------------------------------------------------------------------ looking up

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def __getitem__(self, key: bytes) -> Entry:
        return self._by_key[key]

    def get(self, key: bytes) -> Entry | None:
        """The entry of `key`, if it has one."""
        return self._by_key.get(key)

    def all(self) -> list[Entry]:
        """Every entry as of now; the list does not change with them."""
        return list(self._by_key.values())

    def expect(self, key: bytes, *states: State) -> Entry:
        """The entry of `key`. Raises ValueError unless it is in one of `states`."""
        entry = self._by_key.get(key)
        if entry is None or entry.state not in states:
            found = "unknown" if entry is None else entry.state.value
            raise ValueError(f"key {key.hex()} is {found}, expected {' or '.join(state.value for state in states)}")
        return entry

    def ticket(self, entry: Entry) -> Ticket:
        """Where the entry's rows lie."""
        assert entry.start is not None, "an entry without an extent has no ticket"
        return Ticket(entry.key, entry.start * self.block_tokens, entry.num_tokens, entry.generation)

    def blocks_for(self, num_tokens: int) -> int:
        """Whole blocks that hold `num_tokens` rows."""
        return -(-num_tokens // self.block_tokens)

    # ------------------------------------------------------------------ life of an entry

    def add(self, key: bytes, num_tokens: int, num_patches: int) -> Entry:
        """An entry for a key that has none; it is wanted, by nobody yet."""
        assert key not in self._by_key, "the key has an entry"
        rebuild_us = round(self._rebuild_cost_ms(num_patches) * 1000)
        entry = Entry(key, num_tokens, num_patches, self.blocks_for(num_tokens), rebuild_us)
        self._by_key[key] = entry
        return entry

    def plan(self, entries: Sequence[Entry]) -> Plan | None:
        """Room for those of `entries` that have none, without touching the others; None where there is none.

        If their own ready features split the free space, those are given up one by one, the cheapest first. Changes
        nothing.
        """
        to_place = [entry for entry in entries if entry.start is None]
        if not to_place:
            return Plan(Placement((), (), (0, 0, 0)), (), ())
        layout = self._extents.layout(self._tick)
        movable = []
        for entry in entries:
            if entry.start is not None:
                if self._tier(entry) is not EvictionTier.PINNED:
                    movable.append(entry)
                layout.pin(entry.start)
        movable.sort(key=lambda entry: entry.rebuild_us)
        moved: list[Entry] = []
        while True:
            placement = layout.plan([entry.num_blocks for entry in to_place])
            if placement is not None:
                return Plan(placement, moved, to_place)
            if not movable:
                return None
            entry = movable.pop(0)
            assert entry.start is not None
            layout.drop(entry.start)
            moved.append(entry)
            to_place.append(entry)

    def carry_out(self, plan: Plan, keep: Collection[bytes]) -> None:
        """Evict and reserve as planned; nothing may have changed since. `keep`: see `HostSpill.keep`."""
        for entry in plan.moved:
            self._evict(entry, "repack", keep)
        for start in plan.placement.evicted:
            victim = self._at[start]
            self._evict(victim, _REASON_OF_TIER[self._tier(victim)], keep)
        for entry, start in zip(plan.to_place, plan.placement.starts, strict=True):
            self._last_generation += 1
            self._extents.add(start, entry.num_blocks)
            self._at[start] = entry
            entry.start, entry.generation, entry.state = start, self._last_generation, State.RESERVED

    def begin(self, entry: Entry) -> Ticket:
        """Something starts to write the rows of a reserved entry."""
        assert entry.state is State.RESERVED, "its rows are being written, or it has none"
        entry.state = State.ENCODING
        return self.ticket(entry)

    def finish(self, entry: Entry) -> Ticket:
        """They are written. The caller settles the entry afterwards."""
        assert entry.state is State.ENCODING, "nobody writes its rows"
        entry.state = State.READY
        self.touch(entry)
        return self.ticket(entry)

    def touch(self, entry: Entry) -> None:
        """It is used now."""
        self._tick += 1
        entry.last_use = self._tick
        self.reprice(entry)

    def reprice(self, entry: Entry) -> None:
        """State anew what its eviction costs, after its holders, its wishers or the RadixCache's hint have changed."""
        if entry.start is not None:
            self._extents.set_price(entry.start, self._tier(entry), entry.rebuild_us, entry.last_use)

    def settle(self, entry: Entry) -> None:
        """Give up what the entry keeps without reason, after it lost a holder, a wish or its encode."""
        if entry.num_holders == 0:
            if entry.state is State.RESERVED:
                self.lose_extent(entry)
            elif entry.state is State.READY and entry.drop_when_unheld:
                self._evict(entry, "flush")
        if entry.state is State.WANTED and not entry.wanted_by:
            self._by_key.pop(entry.key, None)
        self.reprice(entry)

    def lose_extent(self, entry: Entry) -> None:
        """Its rows are free, whatever lies there; the entry is only wanted again."""
        assert entry.start is not None, "the entry has no extent"
        self._extents.remove(entry.start)
        del self._at[entry.start]
        entry.start, entry.state, entry.drop_when_unheld = None, State.WANTED, False

    @staticmethod
    def _tier(entry: Entry) -> EvictionTier:
        if entry.state is not State.READY or entry.num_holders:
            return EvictionTier.PINNED
        if entry.wanted_by:
            return EvictionTier.WANTED
        return EvictionTier.RADIX_CACHED if entry.radix_cached else EvictionTier.CACHED

    def _evict(self, entry: Entry, reason: str, keep: Collection[bytes] = ()) -> None:
        assert entry.state is State.READY, "only ready features are evicted"
        assert entry.num_holders == 0, "features that a request holds are never evicted"
        self.evictions[reason] += 1
        if reason != "flush":
            self._spill.keep(self.ticket(entry), entry.rebuild_us, keep)
        self.lose_extent(entry)
        if not entry.wanted_by:
            self._by_key.pop(entry.key, None)

    # ------------------------------------------------------------------ counts and checks

    def blocks(self) -> dict[str, int]:
        """Blocks by the part of `StoreStats` that they count for; O(entries)."""
        parts = {"cached": 0, "pinned": 0, "reserved": 0}
        for entry in self._at.values():
            if entry.state is not State.READY:
                parts["reserved"] += entry.num_blocks
            else:
                parts["pinned" if entry.num_holders else "cached"] += entry.num_blocks
        return {**parts, "free": self.num_blocks - self._extents.used_blocks}

    def largest_free_blocks(self) -> int:
        """Length of the longest free run of blocks."""
        return self._extents.largest_free_blocks()

    def check_integrity(self) -> None:
        """Raise AssertionError where entries and extents contradict each other. O(entries)."""
        end = 0
        rows = self._extents.rows()
        for start, length, tier in rows:
            check(start >= end, f"extent at block {start} overlaps the one before it")
            end = start + length
            entry = self._at.get(start)
            check(entry is not None, f"extent at block {start} belongs to no entry")
            assert entry is not None
            check(entry.start == start and entry.num_blocks == length, f"{entry} is not the extent at block {start}")
            check(tier is self._tier(entry), f"{entry} is priced as {tier.name}")
        check(end <= self.num_blocks, "an extent reaches beyond the slab")
        check(len(rows) == len(self._at), "an entry's extent is not in the table")
        check(sum(length for _, length, _ in rows) == self._extents.used_blocks, "used blocks are miscounted")
        for entry in self._by_key.values():
            check((entry.start is None) == (entry.state is State.WANTED), f"{entry} has state and extent apart")
            check(entry.start is None or self._at.get(entry.start) is entry, f"{entry} is not at its extent")
            check(entry.state is not State.RESERVED or entry.num_holders > 0, f"{entry} is reserved for nobody")
            check(
                entry.state is not State.WANTED or (entry.num_holders == 0 and bool(entry.wanted_by)),
                f"{entry} is left over",
            )
        check(sum(self.blocks().values()) == self.num_blocks, f"blocks do not add up: {self.blocks()}")


def check(condition: bool, message: str) -> None:
    """Raise AssertionError unless `condition`: not an assert statement, which vanishes under python -O."""
    if not condition:
        raise AssertionError(f"feature store: {message}")
