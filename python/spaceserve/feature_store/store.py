"""The encoder feature store: requests, what they want and hold of the slab's features, and what is encoded for them.

The encoder worker owns one store and calls it from one thread. The store touches no memory and reads no clock. Where
features lie and what is evicted for others is the business of `entries.py`, the host tier that of `spill.py`.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from spaceserve.feature_store.answers import Lookup, RegisterResult, StoreStats, Ticket
from spaceserve.feature_store.entries import Entries, Entry, State, check
from spaceserve.feature_store.host_store import HostStore
from spaceserve.feature_store.rebuild_cost import RebuildCost
from spaceserve.feature_store.spill import HostSpill

__all__ = ["FeatureStore", "ItemTooLarge", "Lookup", "RegisterResult", "StoreStats", "Ticket"]


class ItemTooLarge(ValueError):
    """An image, or a request's distinct images together, need more blocks than the slab has."""


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
        self._spill = HostSpill(host, save)
        self._entries = Entries(num_blocks, block_tokens, rebuild_cost_ms or RebuildCost(), self._spill)
        self._requests: dict[str, _Request] = {}
        self._version = 0
        self._hits = self._coalesced = self._misses = 0

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
        total_blocks += sum(self._entries.blocks_for(num_tokens) for num_tokens, _ in sizes.values())
        if total_blocks > self._entries.num_blocks:
            raise ItemTooLarge(
                f"request {rid} needs {total_blocks} blocks of {self._entries.block_tokens} tokens for its images, "
                f"the feature store has {self._entries.num_blocks}"
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
                entry = self._entries.add(key, num_tokens, num_patches)
            lookups[key] = self._lookup(entry, rid)
            if key not in request.keys:
                request.keys[key] = None
                entry.wanted_by[rid] = None
                self._count(lookups[key])
                self._entries.touch(entry)
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
        plan = self._entries.plan(entries)
        if plan is None:
            request.failed_at_version = self._version
            return False
        self._changed()
        self._entries.carry_out(plan, keep=request.keys)
        request.holds = True
        for entry in entries:
            entry.num_holders += 1
            self._entries.reprice(entry)
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
            self._entries.settle(entry)
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
        return [key for key in request.keys if self._entries[key].state is State.RESERVED]

    def holds(self, rid: str) -> bool:
        """Whether `try_reserve` has succeeded for all that `rid` wants now. An unknown rid holds nothing."""
        request = self._requests.get(rid)
        return request is not None and request.holds

    def remaining_patches(self, rid: str) -> int:
        """Patches of `rid`'s images whose features are not in the slab now: what TWSRFT orders requests by."""
        entries = (self._entries[key] for key in self._request(rid).keys)
        return sum(entry.num_patches for entry in entries if entry.state is not State.READY)

    def is_ready(self, rid: str) -> bool:
        """Whether `rid` holds all of its images and all are encoded. An unknown rid is not ready."""
        request = self._requests.get(rid)
        return (
            request is not None
            and request.holds
            and all(self._entries[key].state is State.READY for key in request.keys)
        )

    def tickets(self, rid: str) -> list[Ticket]:
        """Tickets of all images of `rid` in the order of registration; valid until `rid` is released.

        Raises ValueError if `rid` is not ready: a ticket for features that it does not hold could be overwritten.
        """
        if not self.is_ready(rid):
            raise ValueError(f"request {rid} is not ready")
        return [self._entries.ticket(self._entries[key]) for key in self._requests[rid].keys]

    # ------------------------------------------------------------------ encodes

    def begin_encode(self, key: bytes) -> Ticket:
        """The encoder starts to write `key`'s features into the extent that the returned ticket names.

        Raises ValueError unless `key` is reserved and not begun: ask `keys_to_encode` first.
        """
        return self._entries.begin(self._entries.expect(key, State.RESERVED))

    def begin_restore(self, key: bytes) -> tuple[Ticket, int]:
        """The features of `key` are copied back from the host tier; `commit` or `fail` follows as for an encode.

        Returns the rows to write and the first row of the copy in host memory. Raises ValueError unless `key` is
        reserved and its features lie in the host tier.
        """
        entry = self._entries.expect(key, State.RESERVED)
        host_row = self._spill.take_back(key)
        return self._entries.begin(entry), host_row

    def commit(self, key: bytes) -> Ticket:
        """The features of `key` are in place: the device has finished writing them.

        If every request that wanted them is gone they stay cached, or, after a `clear`, go at once. Raises ValueError
        unless `begin_encode` or `begin_restore` came before.
        """
        entry = self._entries.expect(key, State.ENCODING)
        self._changed()
        ticket = self._entries.finish(entry)
        self._entries.settle(entry)
        return ticket

    def fail(self, key: bytes) -> list[str]:
        """The image of `key` could not be decoded or encoded. Returns the requests concerned.

        The extent is freed; the device must have stopped writing to it. The requests concerned lose their reservation
        (none of them was ready) but go on wanting the image: the caller releases them, or lets them reserve again for
        another try. An unknown key concerns nobody. Raises ValueError if the features are ready.
        """
        if key not in self._entries:
            return []
        entry = self._entries.expect(key, State.WANTED, State.RESERVED, State.ENCODING)
        self._changed()
        rids = list(entry.wanted_by)
        if entry.start is not None:
            self._entries.lose_extent(entry)
        for rid in rids:
            self._stop_holding(self._requests[rid])
        self._entries.settle(entry)
        return rids

    # ------------------------------------------------------------------ entries

    def ticket(self, key: bytes) -> Ticket | None:
        """Ticket of `key` if its features are ready. It pins nothing: only `tickets(rid)` may be given to a reader."""
        entry = self._entries.get(key)
        return self._entries.ticket(entry) if entry is not None and entry.state is State.READY else None

    def is_held(self, key: bytes) -> bool:
        """Whether a request that has its reservation wants `key`."""
        entry = self._entries.get(key)
        return entry is not None and entry.num_holders > 0

    def is_reserved(self, key: bytes) -> bool:
        """Whether `key` has its extent and neither an encode nor a copy into it has begun."""
        entry = self._entries.get(key)
        return entry is not None and entry.state is State.RESERVED

    def is_on_host(self, key: bytes) -> bool:
        """Whether the host tier holds a copy of the features of `key`."""
        return key in self._spill

    def discard_host_copy(self, key: bytes) -> None:
        """The host tier's copy of `key` could not be read: encode the next time."""
        self._spill.discard(key)

    def wanted_by(self, key: bytes) -> list[str]:
        """Requests that want `key`, oldest registration first."""
        entry = self._entries.get(key)
        return list(entry.wanted_by) if entry is not None else []

    def set_radix_cached(self, key: bytes, cached: bool) -> None:
        """Hint: the RadixCache holds all tokens of this image (or no longer does). Unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.radix_cached = cached
            self._entries.reprice(entry)

    def clear(self) -> None:
        """Drop all features that no request holds; those held, and encodes under way, go when their last holder does.
        The host tier is emptied.

        For `flush_cache` and weight updates. Requests that only want a dropped image go on wanting it.
        """
        self._changed()
        self._spill.clear()
        for entry in self._entries.all():
            if entry.state in (State.READY, State.ENCODING):
                entry.drop_when_unheld = True
                self._entries.settle(entry)

    @property
    def is_idle(self) -> bool:
        """No request is registered and no encode is under way: nothing may be pinned then."""
        return not self._requests and all(entry.state is State.READY for entry in self._entries.all())

    def stats(self) -> StoreStats:
        """Counts as of now; O(entries)."""
        blocks = self._entries.blocks()
        return StoreStats(
            num_blocks=self._entries.num_blocks,
            block_tokens=self._entries.block_tokens,
            free_blocks=blocks["free"],
            cached_blocks=blocks["cached"],
            pinned_blocks=blocks["pinned"],
            reserved_blocks=blocks["reserved"],
            largest_free_blocks=self._entries.largest_free_blocks(),
            num_entries=len(self._entries),
            num_requests=len(self._requests),
            hits=self._hits,
            coalesced=self._coalesced,
            misses=self._misses,
            evictions=dict(self._entries.evictions),
            host=self._spill.stats(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where entries, requests and extents contradict each other. O(entries + requests)."""
        self._entries.check_integrity()
        for entry in self._entries.all():
            check(
                all(rid in self._requests and entry.key in self._requests[rid].keys for rid in entry.wanted_by),
                f"{entry} is wanted by a request that does not know it",
            )
            holders = sum(self._requests[rid].holds for rid in entry.wanted_by)
            check(holders == entry.num_holders, f"{entry} has {holders} holders")
        for request in self._requests.values():
            check(
                all(key in self._entries and request.rid in self._entries[key].wanted_by for key in request.keys),
                f"{request} wants an entry that does not know it",
            )
        self._spill.check_integrity()
        stats = self.stats()
        if self.is_idle:
            check(stats.pinned_blocks == 0 and stats.reserved_blocks == 0, f"pinned blocks at idle: {stats}")

    # ------------------------------------------------------------------ internals

    def _request(self, rid: str) -> _Request:
        request = self._requests.get(rid)
        if request is None:
            raise ValueError(f"request {rid} is not registered")
        return request

    def _lookup(self, entry: Entry, rid: str) -> Lookup:
        if entry.state is State.READY:
            return Lookup.READY
        if entry.state is not State.WANTED:
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

    def _changed(self) -> None:
        self._version += 1

    def _stop_holding(self, request: _Request) -> None:
        if not request.holds:
            return
        request.holds = False
        for key in request.keys:
            entry = self._entries[key]
            entry.num_holders -= 1
            self._entries.settle(entry)
