"""Random histories of the feature store against a simple model, with a slab whose rows are really written and read."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spaceserve.feature_store import FeatureStore, HostStore, ItemTooLarge, Lookup, Ticket

pytestmark = pytest.mark.cpu

BLOCK_TOKENS = 3
# (key, tokens, patches): 1, 1, 2, 2, 3, 4 blocks
ITEMS = [(bytes([i]), tokens, 10 * tokens) for i, tokens in enumerate((1, 3, 4, 6, 8, 11))]
BLOCKS = {key: -(-tokens // BLOCK_TOKENS) for key, tokens, _ in ITEMS}
TOKENS = {key: tokens for key, tokens, _ in ITEMS}


class StoreMachine(RuleBasedStateMachine):
    """Model: who wants what, who holds, which keys are being encoded. Slab: one (key, generation) per row.

    The encoder writes a row at `begin` and the rest at `commit`, so that an extent given away too early shows; readers
    check all their rows after every step. With a host tier, what is copied there and back is copied when the store says
    so, as on one stream: a copy that is not the image's own shows at once.
    """

    @initialize(num_blocks=st.integers(2, 7), num_host_blocks=st.sampled_from([0, 1, 3, 6, 40]))
    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.host = HostStore(num_host_blocks, BLOCK_TOKENS) if num_host_blocks else None
        self.host_slab: list[bytes | None] = [None] * (num_host_blocks * BLOCK_TOKENS)
        self.num_restored = 0
        self.store = FeatureStore(num_blocks, BLOCK_TOKENS, host=self.host, save=self.save)
        self.slab: list[tuple[bytes, int] | None] = [None] * (num_blocks * BLOCK_TOKENS)
        self.wants: dict[str, list[bytes]] = {}
        self.holds: set[str] = set()
        self.encoding: dict[bytes, Ticket] = {}
        self.given: dict[str, list[Ticket]] = {}  # tickets that readers have
        self.seen_generations: dict[int, tuple[bytes, int]] = {}
        self.stale: set[bytes] = set()  # features from before a clear: they go with their last holder
        self.num_rids = 0

    # ---- helpers on the model

    def wanting(self, key: bytes) -> list[str]:
        return [rid for rid, keys in self.wants.items() if key in keys]

    def held(self, key: bytes) -> bool:
        return any(key in self.wants[rid] for rid in self.holds)

    def write(self, ticket: Ticket, rows: range) -> None:
        for row in rows:
            self.slab[ticket.offset_tokens + row] = (ticket.key, ticket.generation)

    def save(self, ticket: Ticket, host_row: int) -> None:
        """The store evicts: the features must still lie in the slab, and a flushed image's must not come here."""
        rows = self.slab[ticket.offset_tokens : ticket.offset_tokens + ticket.num_tokens]
        assert rows == [(ticket.key, ticket.generation)] * ticket.num_tokens
        assert ticket.key not in self.stale
        self.host_slab[host_row : host_row + ticket.num_tokens] = [ticket.key] * ticket.num_tokens

    def expect_lookup(self, key: bytes, rid: str) -> Lookup:
        if self.store.ticket(key) is not None and not (key in self.stale and not self.held(key)):
            return Lookup.READY
        if key in self.encoding or self.held(key):
            return Lookup.IN_FLIGHT
        if self.store.is_on_host(key):
            return Lookup.HOST
        return Lookup.PENDING if set(self.wanting(key)) - {rid} else Lookup.MISS

    # ---- rules

    def _register(self, rid: str, items: list[tuple[bytes, int, int]]) -> None:
        keys = list(dict.fromkeys([*self.wants.get(rid, []), *(key for key, _, _ in items)]))
        before = self.store.stats()
        if sum(BLOCKS[key] for key in keys) > self.num_blocks:
            with pytest.raises(ItemTooLarge):
                self.store.register(rid, items)
            assert self.store.stats() == before
            return
        if keys != self.wants.get(rid):
            # The reservation goes first: what only it kept reserved counts as pending afterwards.
            self.holds.discard(rid)
            self.given.pop(rid, None)
        expected = {key: self.expect_lookup(key, rid) for key, _, _ in items}
        result = self.store.register(rid, items)
        assert result.lookups == expected
        self.wants[rid] = keys

    @rule(items=st.lists(st.sampled_from(ITEMS), min_size=1, max_size=3))
    def arrive(self, items: list[tuple[bytes, int, int]]) -> None:
        self.num_rids += 1
        self._register(f"r{self.num_rids}", items)

    @precondition(lambda self: self.wants)
    @rule(data=st.data(), items=st.lists(st.sampled_from(ITEMS), max_size=2))
    def add_items(self, data: st.DataObject, items: list[tuple[bytes, int, int]]) -> None:
        self._register(data.draw(st.sampled_from(sorted(self.wants))), items)

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        self._reserve(data.draw(st.sampled_from(sorted(self.wants))))

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def reserve_and_encode(self, data: st.DataObject) -> None:
        """The usual way, in one step, so that random histories get to full slabs."""
        self._reserve_and_encode(data.draw(st.sampled_from(sorted(self.wants))))

    @rule(
        wishes=st.lists(
            st.tuples(st.lists(st.sampled_from(ITEMS), min_size=1, max_size=2), st.booleans()), min_size=1, max_size=6
        )
    )
    def serve(self, wishes: list[tuple[list[tuple[bytes, int, int]], bool]]) -> None:
        """Several requests as far as they get at once; some end, the others stay half-prefilled."""
        for items, ends in wishes:
            self.num_rids += 1
            rid = f"r{self.num_rids}"
            self._register(rid, items)
            if rid in self.wants:
                self._reserve_and_encode(rid)
                if ends:
                    self._release(rid)
            self.store_is_consistent()
            self.extents_are_disjoint_and_generations_unique()
            self.readers_see_their_own_image()

    def _reserve_and_encode(self, rid: str) -> None:
        self._reserve(rid)
        for key in self.store.keys_to_restore(rid):
            self._begin_restore(key)
        for key in self.store.keys_to_encode(rid):
            self._begin(key)
        for key in self.wants[rid]:
            if key in self.encoding:
                self._commit(key)
        if self.store.is_ready(rid):
            self.given[rid] = self.store.tickets(rid)
            assert [ticket.key for ticket in self.given[rid]] == self.wants[rid]

    def _reserve(self, rid: str) -> None:
        before = self.store.stats(), [self.store.ticket(key) for key in BLOCKS]
        on_host = {key for key in self.wants[rid] if self.store.is_on_host(key)}
        reserved = self.store.try_reserve(rid)
        if not reserved:
            assert rid not in self.holds
            assert (self.store.stats(), [self.store.ticket(key) for key in BLOCKS]) == before
            # Only what is held or being written may be in the way.
            assert self.encoding or self.holds, f"{rid} fits the slab, nothing is pinned, and it gets no room"
            return
        self.holds.add(rid)
        # Whoever came for features on the host has not lost them to those that went there for its sake.
        assert on_host <= {key for key in self.wants[rid] if self.store.is_on_host(key)}
        to_encode, to_restore = self.store.keys_to_encode(rid), self.store.keys_to_restore(rid)
        for key in self.wants[rid]:
            ways = (key in to_encode, key in to_restore, key in self.encoding, self.store.ticket(key) is not None)
            assert sum(ways) == 1

    def reserved_keys(self) -> list[bytes]:
        keys = [self.store.keys_to_encode(rid) + self.store.keys_to_restore(rid) for rid in self.holds]
        return sorted({key for of_rid in keys for key in of_rid})

    def keys_to_restore(self) -> list[bytes]:
        return sorted({key for rid in self.holds for key in self.store.keys_to_restore(rid)})

    @precondition(lambda self: self.reserved_keys())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self._begin(data.draw(st.sampled_from(self.reserved_keys())))

    def _begin(self, key: bytes) -> None:
        ticket = self.store.begin_encode(key)
        assert ticket.num_tokens == TOKENS[key]
        self.encoding[key] = ticket
        self.stale.discard(key)
        self.write(ticket, range(1))

    @precondition(lambda self: self.keys_to_restore())
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self._begin_restore(data.draw(st.sampled_from(self.keys_to_restore())))

    def _begin_restore(self, key: bytes) -> None:
        ticket, host_row = self.store.begin_restore(key)
        self.num_restored += 1
        assert ticket.num_tokens == TOKENS[key]
        assert self.host_slab[host_row : host_row + TOKENS[key]] == [key] * TOKENS[key]
        self.encoding[key] = ticket
        self.stale.discard(key)
        self.write(ticket, range(1))

    @precondition(lambda self: self.host is not None)
    @rule(key=st.sampled_from(sorted(BLOCKS)))
    def lose_host_copy(self, key: bytes) -> None:
        self.store.discard_host_copy(key)
        assert not self.store.is_on_host(key)

    @precondition(lambda self: self.encoding)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(sorted(self.encoding))))

    def _commit(self, key: bytes) -> None:
        ticket = self.encoding.pop(key)
        self.write(ticket, range(1, ticket.num_tokens))
        assert self.store.commit(key) == ticket

    @rule(key=st.sampled_from(sorted(BLOCKS)))
    def fail(self, key: bytes) -> None:
        if self.store.ticket(key) is not None:
            with pytest.raises(ValueError, match="ready"):
                self.store.fail(key)
            return
        rids = self.wanting(key)
        assert sorted(self.store.fail(key)) == sorted(rids)
        self.encoding.pop(key, None)
        self.holds -= set(rids)

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.wants))))

    def _release(self, rid: str) -> None:
        keys = self.wants.pop(rid)
        self.holds.discard(rid)
        self.given.pop(rid, None)
        assert self.store.release(rid) == [key for key in keys if not self.wanting(key)]
        assert self.store.release(rid) == []

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.wants)))
        keys = list(self.wants[rid])
        self._release(rid)
        self.num_rids += 1
        self._register(f"r{self.num_rids}", [item for item in ITEMS if item[0] in keys])

    @precondition(lambda self: self.holds)
    @rule()
    def send_tickets(self) -> None:
        for rid in self.holds:
            if self.store.is_ready(rid):
                self.given[rid] = self.store.tickets(rid)
                assert [ticket.key for ticket in self.given[rid]] == self.wants[rid]

    @rule(cached=st.sets(st.sampled_from(sorted(BLOCKS))))
    def set_radix_cached(self, cached: set[bytes]) -> None:
        for key in BLOCKS:
            self.store.set_radix_cached(key, key in cached)

    @precondition(lambda self: self.num_rids % 3 == 2)  # else nothing ever fills up
    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert not any(self.store.is_on_host(key) for key in BLOCKS)
        self.stale = {key for key in BLOCKS if key in self.encoding or self.store.ticket(key) is not None}
        for key in BLOCKS:
            assert (self.store.ticket(key) is None) or self.held(key)

    # ---- invariants

    @invariant()
    def store_is_consistent(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        stats = self.store.stats()
        if self.host is not None:
            assert stats.host is not None
            assert stats.host.hits == self.num_restored
            on_host = [key for key in BLOCKS if self.store.is_on_host(key)]
            assert stats.host.num_entries == len(on_host)
            assert stats.host.used_blocks == sum(BLOCKS[key] for key in on_host) <= stats.host.num_blocks
            for key in on_host:
                row = self.host.find(key)
                assert row is not None
                assert self.host_slab[row : row + TOKENS[key]] == [key] * TOKENS[key]
        ready = {key: ticket for key in BLOCKS if (ticket := self.store.ticket(key)) is not None}
        pinned = {key for key in ready if self.held(key)}
        in_work = set(self.encoding) | {key for key in BLOCKS if self.held(key) and key not in ready}
        assert stats.pinned_blocks == sum(BLOCKS[key] for key in pinned)
        assert stats.cached_blocks == sum(BLOCKS[key] for key in ready.keys() - pinned)
        assert stats.reserved_blocks == sum(BLOCKS[key] for key in in_work)
        assert stats.free_blocks == self.num_blocks - sum(BLOCKS[key] for key in ready.keys() | in_work)
        assert stats.num_requests == len(self.wants)
        assert stats.num_entries == len(ready.keys() | in_work | {key for key in BLOCKS if self.wanting(key)})
        for rid, keys in self.wants.items():
            assert self.store.is_ready(rid) == (rid in self.holds and all(key in ready for key in keys))
            patches = {key: patches for key, _, patches in ITEMS}
            assert self.store.remaining_patches(rid) == sum(patches[key] for key in keys if key not in ready)
        for key in BLOCKS:
            assert sorted(self.store.wanted_by(key)) == sorted(self.wanting(key))

    @invariant()
    def extents_are_disjoint_and_generations_unique(self) -> None:
        if not hasattr(self, "store"):
            return
        assert all(self.held(key) for key in self.stale if self.store.ticket(key) is not None)
        tickets = [ticket for key in BLOCKS if (ticket := self.store.ticket(key)) is not None]
        tickets += self.encoding.values()
        blocks = [ticket.offset_tokens // BLOCK_TOKENS + i for ticket in tickets for i in range(BLOCKS[ticket.key])]
        assert len(blocks) == len(set(blocks))
        assert all(0 <= block < self.num_blocks for block in blocks)
        for ticket in tickets:
            place = (ticket.key, ticket.offset_tokens)
            assert self.seen_generations.setdefault(ticket.generation, place) == place

    @invariant()
    def readers_see_their_own_image(self) -> None:
        if not hasattr(self, "store"):
            return
        for tickets in self.given.values():
            for ticket in tickets:
                rows = self.slab[ticket.offset_tokens : ticket.offset_tokens + ticket.num_tokens]
                assert rows == [(ticket.key, ticket.generation)] * ticket.num_tokens

    def teardown(self) -> None:
        """Whatever happened, at idle nothing is pinned and one request may have the whole slab."""
        if not hasattr(self, "store"):
            return
        for rid in list(self.wants):
            self._release(rid)
        for key in list(self.encoding):
            self._commit(key)
        assert self.store.is_idle
        stats = self.store.stats()
        assert stats.pinned_blocks == stats.reserved_blocks == stats.num_requests == 0
        assert stats.free_blocks + stats.cached_blocks == self.num_blocks
        self.store.check_integrity()
        self.store.register("last", [(b"whole slab", self.num_blocks * BLOCK_TOKENS, 1)])
        assert self.store.try_reserve("last")


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
