"""Bookkeeping of the encoder feature store: which image's features lie where in the slab, and who needs them.

The encoder worker owns one store and calls it from one thread. The store touches no memory and reads no clock.

Life of an entry (one per content address)::

    register          try_reserve            begin_encode           commit
    --------> WANTED ------------> RESERVED --------------> ENCODING ------> READY --+
                ^                      |                        |              |     | released: stays cached
                +----------------------+------------------------+--------------+     | until evicted
                   last reservation      fail                     evicted, cleared   v

Why waiting cannot deadlock. `register` only says what a request wants. `try_reserve` gives a request extents for all
of its images at once and holds them; until then it holds nothing, and cached features that it wants may be evicted
(last of all). So whoever holds blocks waits only for encodes that have their blocks already, and whoever waits for
blocks holds none. Encodes end, holders prefill and release, and once nothing is held any request that fits the slab
can reserve: see `Layout.plan`. Who may try first is the encode queue's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spaceserve.feature_store.extents import EvictionTier, ExtentTable, Placement
from spaceserve.feature_store.host_store import HostStats, HostStore
from spaceserve.feature_store.rebuild_cost import RebuildCost

EVICTION_REASONS = ("radix_cached", "pressure", "wanted", "repack", "flush")


class ItemTooLarge(ValueError):
    """An image, or a request's distinct images together, need more blocks than the slab has."""


class Lookup(Enum):
    """What `register` found for one key."""

    READY = "ready"  # features are in the slab
    IN_FLIGHT = "in_flight"  # reserved or being encoded for another request
    PENDING = "pending"  # another request wants it too; it has no place in the slab yet
    HOST = "host"  # features are in the host tier, and no place in the slab is theirs yet
    MISS = "miss"  # nobody else wants it


class _State(Enum):
    WANTED = "wanted"
    RESERVED = "reserved"
    ENCODING = "encoding"
    READY = "ready"


@dataclass(frozen=True)
class Ticket:
    """Where one image's features lie: rows [offset_tokens, offset_tokens + num_tokens) of the slab.

    The slab is [num_slab_tokens, feature_dim] of the model's dtype. `generation` is given once in a store's life: an
    extent that is taken again has another.
    """

    key: bytes
    offset_tokens: int
    num_tokens: int
    generation: int


@dataclass(frozen=True)
class RegisterResult:
    """What `register` found for each distinct key of the call."""

    lookups: Mapping[bytes, Lookup]

    def keys(self, lookup: Lookup) -> list[bytes]:
        """Keys with this outcome, in the order of the call."""
        return [key for key, found in self.lookups.items() if found is lookup]


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Counts of blocks now (free + cached + pinned + reserved = num_blocks), and totals since the start."""

    num_blocks: int
    block_tokens: int
    free_blocks: int
    cached_blocks: int  # ready, held by no request: evictable
    pinned_blocks: int  # ready and held
    reserved_blocks: int  # reserved or being encoded
    largest_free_blocks: int
    num_entries: int
    num_requests: int
    hits: int
    coalesced: int
    misses: int
    evictions: Mapping[str, int]  # by reason, see EVICTION_REASONS
    host: HostStats | None = None  # None without a host tier

    @property
    def used_blocks(self) -> int:
        """Blocks that are not free."""
        return self.num_blocks - self.free_blocks


@dataclass(slots=True)
class _Entry:
    key: bytes
    num_tokens: int
    num_patches: int
    num_blocks: int
    rebuild_us: int
    state: _State = _State.WANTED
    start: int | None = None
    generation: int = -1
    last_use: int = 0
    radix_cached: bool = False
    # Set by clear() on features that must not outlive the requests that use them now.
    drop_when_unheld: bool = False
    wanted_by: dict[str, None] = field(default_factory=dict)  # an ordered set of rids
    num_holders: int = 0  # how many of them have a reservation


@dataclass(slots=True)
class _Request:
    rid: str
    keys: dict[bytes, None] = field(default_factory=dict)  # an ordered set
    holds: bool = False
    # Version of the store at which try_reserve last failed: it fails again until something changes.
    failed_at_version: int = -1


class FeatureStore:
    """Entries, requests and extents of one slab of `num_blocks` blocks of `block_tokens` tokens (slab rows).

    Args:
        rebuild_cost_ms: maps an image's number of patches to the milliseconds an encode takes.
        host: keeps what the slab gives up; None for no host tier.
        save: called at an eviction with the ticket of the features and the first row in host memory that they have to
            be copied to. The copy must be made, or put in order, before anything else is written to the ticket's rows.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        rebuild_cost_ms: Callable[[int], float] | None = None,
        host: HostStore | None = None,
        save: Callable[[Ticket, int], None] | None = None,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self._extents = ExtentTable(num_blocks)
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._host = host
        self._save = save
        self._rebuild_cost_ms = rebuild_cost_ms if rebuild_cost_ms is not None else RebuildCost()
        self._entries: dict[bytes, _Entry] = {}
        self._entry_at: dict[int, _Entry] = {}  # by first block
        self._requests: dict[str, _Request] = {}
        self._last_generation = 0
        self._tick = 0
        self._version = 0
        self._hits = self._coalesced = self._misses = 0
        self._evictions = dict.fromkeys(EVICTION_REASONS, 0)

    # ------------------------------------------------------------------ requests

    def register(self, rid: str, items: Sequence[tuple[bytes, int, int]]) -> RegisterResult:
        """State that request `rid` wants `items`, each (key, num_tokens, num_patches).

        Repeating a call changes nothing. New items for a known rid are added, and take back its reservation if it had
        one: it must reserve again, its earlier tickets are void, and the caller may do this only while no forward
        reads them. After `release` use another rid for the same request's next try, so that tickets still on
        their way are not taken for the new ones.

        Raises ItemTooLarge (nothing changed) where the request's distinct items exceed the slab, ValueError where a
        key is known with another number of tokens or patches.
        """
        sizes: dict[bytes, tuple[int, int]] = {}
        for key, num_tokens, num_patches in items:
            if num_tokens < 1 or num_patches < 0:
                raise ValueError(f"item of {num_tokens} tokens and {num_patches} patches in request {rid}")
            known = self._entries.get(key)
            size = sizes.setdefault(key, (num_tokens, num_patches))
            if size != (num_tokens, num_patches) or (
                known is not None and (known.num_tokens, known.num_patches) != size
            ):
                raise ValueError(f"key {key.hex()} in request {rid} is known with another number of tokens or patches")
        request = self._requests.get(rid)
        known_keys: Iterable[bytes] = request.keys if request is not None else ()
        total_blocks = sum(self._entries[key].num_blocks for key in known_keys if key not in sizes)
        total_blocks += sum(self._blocks_for(num_tokens) for num_tokens, _ in sizes.values())
        if total_blocks > self._num_blocks:
            raise ItemTooLarge(
                f"request {rid} needs {total_blocks} blocks of {self._block_tokens} tokens for its images, "
                f"the feature store has {self._num_blocks}"
            )

        if request is None:
            request = self._requests[rid] = _Request(rid)
        new_keys = [key for key in sizes if key not in request.keys]
        if new_keys:
            self._changed()
            self._stop_holding(request)
        lookups = {}
        for key, (num_tokens, num_patches) in sizes.items():
            entry = self._entries.get(key)
            if entry is None:
                rebuild_us = round(self._rebuild_cost_ms(num_patches) * 1000)
                entry = _Entry(key, num_tokens, num_patches, self._blocks_for(num_tokens), rebuild_us)
                self._entries[key] = entry
            lookups[key] = self._lookup(entry, rid)
            if key not in request.keys:
                request.keys[key] = None
                entry.wanted_by[rid] = None
                self._count(lookups[key])
                self._touch(entry)
        return RegisterResult(lookups)

    def try_reserve(self, rid: str) -> bool:
        """Hold every image of `rid`, with extents for those that have none; False leaves the store unchanged.

        True also where `rid` holds them already. What now has to be encoded for it says `keys_to_encode`: features
        that were found by `register` may have been evicted since, or be moved (that is, encoded again) where they
        split the free space. Raises ValueError for an unknown rid.
        """
        request = self._request(rid)
        if request.holds:
            return True
        if request.failed_at_version == self._version:
            return False
        entries = [self._entries[key] for key in request.keys]
        planned = self._plan(entries)
        if planned is None:
            request.failed_at_version = self._version
            return False
        placement, moved, to_place = planned
        self._changed()
        for entry in moved:
            self._evict(entry, "repack", request.keys)
        for start in placement.evicted:
            victim = self._entry_at[start]
            self._evict(victim, _reason(self._tier(victim)), request.keys)
        for entry, start in zip(to_place, placement.starts, strict=True):
            self._last_generation += 1
            self._extents.add(start, entry.num_blocks)
            self._entry_at[start] = entry
            entry.start, entry.generation, entry.state = start, self._last_generation, _State.RESERVED
        request.holds = True
        for entry in entries:
            entry.num_holders += 1
            self._reprice(entry)
        return True

    def release(self, rid: str) -> list[bytes]:
        """Request `rid` needs its images no more: finished, aborted, timed out, failed or retracted. Idempotent.

        Ready features stay cached, an encode under way is cached when it commits. Returns the keys that no request
        wants any more: their encoded bytes and their places in queues can go. The caller releases a request whose
        features a forward reads only after that forward has ended on every rank.
        """
        request = self._requests.get(rid)
        if request is None:
            return []
        self._changed()
        self._stop_holding(request)
        del self._requests[rid]
        unwanted = []
        for key in request.keys:
            entry = self._entries[key]
            del entry.wanted_by[rid]
            if not entry.wanted_by:
                unwanted.append(key)
            self._settle(entry)
        return unwanted

    def keys_to_encode(self, rid: str) -> list[bytes]:
        """Keys of `rid` that have their extent and wait for `begin_encode`; empty before `try_reserve` succeeded."""
        return [key for key in self._reserved_keys(rid) if not self.is_on_host(key)]

    def keys_to_restore(self, rid: str) -> list[bytes]:
        """Those that wait for `begin_restore` instead: their features lie in the host tier."""
        return [key for key in self._reserved_keys(rid) if self.is_on_host(key)]

    def _reserved_keys(self, rid: str) -> list[bytes]:
        request = self._request(rid)
        if not request.holds:
            return []
        return [key for key in request.keys if self._entries[key].state is _State.RESERVED]

    def holds(self, rid: str) -> bool:
        """Whether `try_reserve` has succeeded for all that `rid` wants now. An unknown rid holds nothing."""
        request = self._requests.get(rid)
        return request is not None and request.holds

    def remaining_patches(self, rid: str) -> int:
        """Patches of `rid`'s images whose features are not in the slab now: what TWSRFT orders requests by."""
        entries = (self._entries[key] for key in self._request(rid).keys)
        return sum(entry.num_patches for entry in entries if entry.state is not _State.READY)

    def is_ready(self, rid: str) -> bool:
        """Whether `rid` holds all of its images and all are encoded. An unknown rid is not ready."""
        request = self._requests.get(rid)
        return (
            request is not None
            and request.holds
            and all(self._entries[key].state is _State.READY for key in request.keys)
        )

    def tickets(self, rid: str) -> list[Ticket]:
        """Tickets of all images of `rid` in the order of registration; valid until `rid` is released.

        Raises ValueError if `rid` is not ready: a ticket for features that it does not hold could be overwritten.
        """
        if not self.is_ready(rid):
            raise ValueError(f"request {rid} is not ready")
        return [self._ticket(self._entries[key]) for key in self._requests[rid].keys]

    # ------------------------------------------------------------------ encodes

    def begin_encode(self, key: bytes) -> Ticket:
        """The encoder starts to write `key`'s features into the extent that the returned ticket names.

        Raises ValueError unless `key` is reserved and not begun: ask `keys_to_encode` first.
        """
        entry = self._entry_in(key, (_State.RESERVED,))
        entry.state = _State.ENCODING
        return self._ticket(entry)

    def begin_restore(self, key: bytes) -> tuple[Ticket, int]:
        """The features of `key` are copied back from the host tier; `commit` or `fail` follows as for an encode.

        Returns the rows to write and the first row of the copy in host memory. Raises ValueError unless `key` is
        reserved and its features lie in the host tier.
        """
        entry = self._entry_in(key, (_State.RESERVED,))
        if self._host is None:
            raise ValueError("there is no host tier")
        host_row = self._host.use(key)
        entry.state = _State.ENCODING
        return self._ticket(entry), host_row

    def commit(self, key: bytes) -> Ticket:
        """The features of `key` are in place: the device has finished writing them.

        If every request that wanted them is gone they stay cached, or, after a `clear`, go at once. Raises ValueError
        unless `begin_encode` or `begin_restore` came before.
        """
        entry = self._entry_in(key, (_State.ENCODING,))
        self._changed()
        entry.state = _State.READY
        self._touch(entry)
        ticket = self._ticket(entry)
        self._settle(entry)
        return ticket

    def fail(self, key: bytes) -> list[str]:
        """The image of `key` could not be decoded or encoded. Returns the requests concerned.

        The extent is freed; the device must have stopped writing to it. The requests concerned lose their reservation
        (none of them was ready) but go on wanting the image: the caller releases them, or lets them reserve again for
        another try. An unknown key concerns nobody. Raises ValueError if the features are ready.
        """
        if key not in self._entries:
            return []
        entry = self._entry_in(key, (_State.WANTED, _State.RESERVED, _State.ENCODING))
        self._changed()
        rids = list(entry.wanted_by)
        if entry.start is not None:
            self._lose_extent(entry)
        for rid in rids:
            self._stop_holding(self._requests[rid])
        self._settle(entry)
        return rids

    # ------------------------------------------------------------------ entries

    def ticket(self, key: bytes) -> Ticket | None:
        """Ticket of `key` if its features are ready. It pins nothing: only `tickets(rid)` may be given to a reader."""
        entry = self._entries.get(key)
        return self._ticket(entry) if entry is not None and entry.state is _State.READY else None

    def is_held(self, key: bytes) -> bool:
        """Whether a request that has its reservation wants `key`."""
        entry = self._entries.get(key)
        return entry is not None and entry.num_holders > 0

    def is_reserved(self, key: bytes) -> bool:
        """Whether `key` has its extent and neither an encode nor a copy into it has begun."""
        entry = self._entries.get(key)
        return entry is not None and entry.state is _State.RESERVED

    def is_on_host(self, key: bytes) -> bool:
        """Whether the host tier holds a copy of the features of `key`."""
        return self._host is not None and key in self._host

    def discard_host_copy(self, key: bytes) -> None:
        """The host tier's copy of `key` could not be read: encode the next time."""
        if self._host is not None:
            self._host.discard(key)

    def wanted_by(self, key: bytes) -> list[str]:
        """Requests that want `key`, oldest registration first."""
        entry = self._entries.get(key)
        return list(entry.wanted_by) if entry is not None else []

    def set_radix_cached(self, key: bytes, cached: bool) -> None:
        """Hint: the RadixCache holds all tokens of this image (or no longer does). Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.radix_cached = cached
            self._reprice(entry)

    def clear(self) -> None:
        """Drop all features that no request holds; those held, and encodes under way, go when their last holder does.
        The host tier is emptied.

        For `flush_cache` and weight updates. Requests that only want a dropped image go on wanting it.
        """
        self._changed()
        if self._host is not None:
            self._host.clear()
        for entry in list(self._entries.values()):
            if entry.state in (_State.READY, _State.ENCODING):
                entry.drop_when_unheld = True
                self._settle(entry)

    @property
    def is_idle(self) -> bool:
        """No request is registered and no encode is under way: nothing may be pinned then."""
        return not self._requests and all(entry.state is _State.READY for entry in self._entries.values())

    def stats(self) -> StoreStats:
        """Counts as of now; O(entries)."""
        pinned = cached = reserved = 0
        for entry in self._entry_at.values():
            if entry.state is not _State.READY:
                reserved += entry.num_blocks
            elif entry.num_holders:
                pinned += entry.num_blocks
            else:
                cached += entry.num_blocks
        return StoreStats(
            num_blocks=self._num_blocks,
            block_tokens=self._block_tokens,
            free_blocks=self._num_blocks - self._extents.used_blocks,
            cached_blocks=cached,
            pinned_blocks=pinned,
            reserved_blocks=reserved,
            largest_free_blocks=self._extents.largest_free_blocks(),
            num_entries=len(self._entries),
            num_requests=len(self._requests),
            hits=self._hits,
            coalesced=self._coalesced,
            misses=self._misses,
            evictions=dict(self._evictions),
            host=None if self._host is None else self._host.stats(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where entries, requests and extents contradict each other. O(entries + requests)."""
        end = 0
        rows = self._extents.rows()
        for start, length, tier in rows:
            _check(start >= end, f"extent at block {start} overlaps the one before it")
            end = start + length
            entry = self._entry_at.get(start)
            _check(entry is not None, f"extent at block {start} belongs to no entry")
            assert entry is not None
            _check(entry.start == start and entry.num_blocks == length, f"{entry} is not the extent at block {start}")
            _check(tier is self._tier(entry), f"{entry} is priced as {tier.name}")
        _check(end <= self._num_blocks, "an extent reaches beyond the slab")
        _check(len(rows) == len(self._entry_at), "an entry's extent is not in the table")
        _check(sum(length for _, length, _ in rows) == self._extents.used_blocks, "used blocks are miscounted")
        for key, entry in self._entries.items():
            _check((entry.start is None) == (entry.state is _State.WANTED), f"{entry} has state and extent apart")
            _check(entry.start is None or self._entry_at.get(entry.start) is entry, f"{entry} is not at its extent")
            _check(
                all(rid in self._requests and key in self._requests[rid].keys for rid in entry.wanted_by),
                f"{entry} is wanted by a request that does not know it",
            )
            holders = sum(self._requests[rid].holds for rid in entry.wanted_by)
            _check(holders == entry.num_holders, f"{entry} has {holders} holders")
            _check(entry.state is not _State.RESERVED or holders > 0, f"{entry} is reserved for nobody")
            _check(
                entry.state is not _State.WANTED or (holders == 0 and bool(entry.wanted_by)), f"{entry} is left over"
            )
        for request in self._requests.values():
            _check(
                all(request.rid in self._entries[key].wanted_by for key in request.keys if key in self._entries)
                and all(key in self._entries for key in request.keys),
                f"{request} wants an entry that does not know it",
            )
        if self._host is not None:
            self._host.check_integrity()
        stats = self.stats()
        parts = stats.free_blocks + stats.cached_blocks + stats.pinned_blocks + stats.reserved_blocks
        _check(parts == self._num_blocks, f"blocks do not add up: {stats}")
        if self.is_idle:
            _check(stats.pinned_blocks == 0 and stats.reserved_blocks == 0, f"pinned blocks at idle: {stats}")

    # ------------------------------------------------------------------ internals

    def _plan(self, entries: Sequence[_Entry]) -> tuple[Placement, list[_Entry], list[_Entry]] | None:
        """(where, own entries that must move, entries in the order of the placement), or None where there is no room.

        First without touching the request's own ready features. If those split the free space, they are given up one
        by one, the cheapest first.
        """
        to_place = [entry for entry in entries if entry.start is None]
        if not to_place:
            return Placement((), (), (0, 0, 0)), [], []
        layout = self._extents.layout(self._tick)
        movable = []
        for entry in entries:
            if entry.start is not None:
                if self._tier(entry) is not EvictionTier.PINNED:
                    movable.append(entry)
                layout.pin(entry.start)
        movable.sort(key=lambda entry: entry.rebuild_us)
        moved: list[_Entry] = []
        while True:
            placement = layout.plan([entry.num_blocks for entry in to_place])
            if placement is not None:
                return placement, moved, to_place
            if not movable:
                return None
            entry = movable.pop(0)
            assert entry.start is not None
            layout.drop(entry.start)
            moved.append(entry)
            to_place.append(entry)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _request(self, rid: str) -> _Request:
        request = self._requests.get(rid)
        if request is None:
            raise ValueError(f"request {rid} is not registered")
        return request

    def _entry_in(self, key: bytes, states: Sequence[_State]) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.state not in states:
            found = "unknown" if entry is None else entry.state.value
            raise ValueError(f"key {key.hex()} is {found}, expected {' or '.join(state.value for state in states)}")
        return entry

    def _ticket(self, entry: _Entry) -> Ticket:
        assert entry.start is not None, "an entry without an extent has no ticket"
        return Ticket(entry.key, entry.start * self._block_tokens, entry.num_tokens, entry.generation)

    def _lookup(self, entry: _Entry, rid: str) -> Lookup:
        if entry.state is _State.READY:
            return Lookup.READY
        if entry.state is not _State.WANTED:
            return Lookup.IN_FLIGHT
        if self.is_on_host(entry.key):
            return Lookup.HOST
        return Lookup.PENDING if entry.wanted_by.keys() - {rid} else Lookup.MISS

    def _count(self, lookup: Lookup) -> None:
        if lookup is Lookup.READY:
            self._hits += 1
        elif lookup is Lookup.MISS:
            self._misses += 1
        elif lookup is not Lookup.HOST:  # counted when it is copied back
            self._coalesced += 1

    def _touch(self, entry: _Entry) -> None:
        self._tick += 1
        entry.last_use = self._tick
        self._reprice(entry)

    def _changed(self) -> None:
        self._version += 1

    @staticmethod
    def _tier(entry: _Entry) -> EvictionTier:
        if entry.state is not _State.READY or entry.num_holders:
            return EvictionTier.PINNED
        if entry.wanted_by:
            return EvictionTier.WANTED
        return EvictionTier.RADIX_CACHED if entry.radix_cached else EvictionTier.CACHED

    def _reprice(self, entry: _Entry) -> None:
        if entry.start is not None:
            self._extents.set_price(entry.start, self._tier(entry), entry.rebuild_us, entry.last_use)

    def _stop_holding(self, request: _Request) -> None:
        if not request.holds:
            return
        request.holds = False
        for key in request.keys:
            entry = self._entries[key]
            entry.num_holders -= 1
            self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        """Give up what the entry keeps without reason, after it lost a holder, a wish or its encode."""
        if entry.num_holders == 0:
            if entry.state is _State.RESERVED:
                self._lose_extent(entry)
            elif entry.state is _State.READY and entry.drop_when_unheld:
                self._evict(entry, "flush")
        if entry.state is _State.WANTED and not entry.wanted_by:
            self._entries.pop(entry.key, None)
        self._reprice(entry)

    def _evict(self, entry: _Entry, reason: str, keep: Collection[bytes] = ()) -> None:
        """`keep`: what must not give way in the host tier, since the room in the slab is for it."""
        assert entry.state is _State.READY, "only ready features are evicted"
        assert entry.num_holders == 0, "features that a request holds are never evicted"
        self._evictions[reason] += 1
        if self._host is not None and reason != "flush":
            host_row = self._host.put(entry.key, entry.num_tokens, entry.rebuild_us, keep)
            if host_row is not None and self._save is not None:
                self._save(self._ticket(entry), host_row)
        self._lose_extent(entry)
        if not entry.wanted_by:
            self._entries.pop(entry.key, None)

    def _lose_extent(self, entry: _Entry) -> None:
        assert entry.start is not None, "the entry has no extent"
        self._extents.remove(entry.start)
        del self._entry_at[entry.start]
        entry.start, entry.state, entry.drop_when_unheld = None, _State.WANTED, False


def _reason(tier: EvictionTier) -> str:
    return {
        EvictionTier.RADIX_CACHED: "radix_cached",
        EvictionTier.CACHED: "pressure",
        EvictionTier.WANTED: "wanted",
    }[tier]


def _check(condition: bool, message: str) -> None:
    # Not an assert statement: the check is asked for by name and must not vanish under python -O.
    if not condition:
        raise AssertionError(f"feature store: {message}")
