"""The feature store's rules, one by one."""

from __future__ import annotations

import pytest

from spaceserve.feature_store import FeatureStore, ItemTooLarge, Lookup, RebuildCost, Ticket

pytestmark = pytest.mark.cpu

A, B, C, D, E = (bytes([letter]) * 16 for letter in b"ABCDE")


def item(key: bytes, num_blocks: int, num_patches: int = 100) -> tuple[bytes, int, int]:
    """An image of `num_blocks` blocks in a store with 4 tokens per block."""
    return key, num_blocks * 4, num_patches


def make_store(num_blocks: int) -> FeatureStore:
    return FeatureStore(num_blocks, block_tokens=4, rebuild_cost_ms=float)


def encode(store: FeatureStore, rid: str) -> list[Ticket]:
    for key in store.keys_to_encode(rid):
        store.begin_encode(key)
        store.commit(key)
    return store.tickets(rid)


def serve(store: FeatureStore, rid: str, *items: tuple[bytes, int, int]) -> list[Ticket]:
    """One request from arrival to release; its features stay cached."""
    store.register(rid, items)
    assert store.try_reserve(rid)
    tickets = encode(store, rid)
    store.release(rid)
    store.check_integrity()
    return tickets


def cached(store: FeatureStore, *keys: bytes) -> list[bool]:
    return [store.ticket(key) is not None for key in keys]


def test_one_request_from_arrival_to_release() -> None:
    store = make_store(8)
    result = store.register("r", [item(A, 2), (B, 5, 100)])
    assert result.lookups == {A: Lookup.MISS, B: Lookup.MISS}
    assert result.keys(Lookup.MISS) == [A, B]
    assert store.keys_to_encode("r") == []
    assert store.try_reserve("r")
    assert store.keys_to_encode("r") == [A, B]
    assert store.remaining_patches("r") == 200
    writing = store.begin_encode(A)
    assert not store.is_ready("r")
    assert store.commit(A) == writing
    assert store.remaining_patches("r") == 100
    with pytest.raises(ValueError, match="not ready"):
        store.tickets("r")
    store.begin_encode(B)
    store.commit(B)
    assert store.is_ready("r")
    first, second = store.tickets("r")
    assert (first.key, first.num_tokens, second.key, second.num_tokens) == (A, 8, B, 5)
    assert store.stats().pinned_blocks == 4  # 5 tokens take 2 blocks
    assert not store.is_idle
    assert store.release("r") == [A, B]
    stats = store.stats()
    assert (stats.pinned_blocks, stats.cached_blocks, stats.free_blocks) == (0, 4, 4)
    assert store.is_idle
    store.check_integrity()


def test_same_image_in_flight_is_encoded_once() -> None:
    store = make_store(4)
    assert store.register("first", [item(A, 2)]).lookups == {A: Lookup.MISS}
    assert store.register("second", [item(A, 2)]).lookups == {A: Lookup.PENDING}
    assert store.try_reserve("first")
    assert store.register("third", [item(A, 2)]).lookups == {A: Lookup.IN_FLIGHT}
    assert store.try_reserve("second")
    assert store.try_reserve("third")
    store.begin_encode(A)
    assert store.keys_to_encode("second") == []
    store.commit(A)
    assert store.tickets("first") == store.tickets("second") == store.tickets("third")
    stats = store.stats()
    assert (stats.misses, stats.coalesced, stats.hits) == (1, 2, 0)


def test_register_again_changes_nothing() -> None:
    store = make_store(4)
    store.register("r", [item(A, 2)])
    assert store.try_reserve("r")
    tickets = encode(store, "r")
    before = store.stats()
    assert store.register("r", [item(A, 2)]).lookups == {A: Lookup.READY}
    assert store.stats() == before
    assert store.tickets("r") == tickets


def test_image_twice_in_a_request_counts_once() -> None:
    store = make_store(2)
    assert len(serve(store, "r", item(A, 2), item(A, 2))) == 1


def test_too_large_is_refused_and_changes_nothing() -> None:
    store = make_store(4)
    with pytest.raises(ItemTooLarge, match="needs 5 blocks"):
        store.register("r", [item(A, 5)])
    with pytest.raises(ItemTooLarge):
        store.register("r", [item(A, 2), item(B, 3)])
    assert store.stats().num_requests == store.stats().num_entries == 0
    store.register("r", [item(A, 2)])
    with pytest.raises(ItemTooLarge):
        store.register("r", [item(B, 3)])
    assert store.wanted_by(B) == []
    assert issubclass(ItemTooLarge, ValueError)


def test_bad_items_are_refused() -> None:
    store = make_store(4)
    store.register("r", [(A, 8, 10)])
    for items in ([(A, 7, 10)], [(A, 8, 11)], [(B, 4, 1), (B, 8, 1)], [(B, 0, 1)], [(B, 4, -1)]):
        with pytest.raises(ValueError, match="request other"):
            store.register("other", items)
    assert store.stats().num_requests == 1
    for num_blocks, block_tokens in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            FeatureStore(num_blocks, block_tokens)


def test_calls_out_of_order_are_refused() -> None:
    store = make_store(4)
    with pytest.raises(ValueError, match="not registered"):
        store.try_reserve("r")
    store.register("r", [item(A, 1)])
    with pytest.raises(ValueError, match="wanted"):
        store.begin_encode(A)
    store.try_reserve("r")
    with pytest.raises(ValueError, match="reserved"):
        store.commit(A)
    store.begin_encode(A)
    with pytest.raises(ValueError, match="encoding"):
        store.begin_encode(A)
    store.commit(A)
    with pytest.raises(ValueError, match="ready"):
        store.fail(A)
    assert store.release("unknown") == []
    assert store.fail(B) == []


def test_held_features_are_never_evicted() -> None:
    store = make_store(4)
    store.register("holder", [item(A, 3)])
    assert store.try_reserve("holder")
    store.register("other", [item(B, 2)])
    before = store.stats()
    assert not store.try_reserve("other")  # while reserved
    store.begin_encode(A)
    assert not store.try_reserve("other")  # while encoding
    store.commit(A)
    assert not store.try_reserve("other")  # while read
    assert store.stats().evictions == before.evictions
    store.release("holder")
    assert store.try_reserve("other")
    assert store.ticket(A) is None


def test_failed_reservation_evicts_nothing() -> None:
    store = make_store(6)
    serve(store, "old", item(A, 2))
    store.register("holder", [item(B, 2)])
    assert store.try_reserve("holder")
    store.register("r", [item(C, 1), item(D, 4)])
    assert not store.try_reserve("r")
    assert cached(store, A) == [True]
    assert store.stats().reserved_blocks == 2


def test_generation_changes_when_blocks_are_taken_again() -> None:
    store = make_store(2)
    generations = [serve(store, f"r{i}", item(key, 2))[0].generation for i, key in enumerate((A, B, A, B))]
    assert len(set(generations)) == 4
    hit = serve(store, "hit", item(B, 2))[0]
    assert hit.generation == generations[-1]


def test_requests_that_only_want_give_way() -> None:
    """Each finds one image cached and needs room for another: neither may keep what it found from the other."""
    store = make_store(4)
    serve(store, "old", item(A, 2), item(B, 2))
    store.register("r1", [item(A, 2), item(C, 2)])
    store.register("r2", [item(B, 2), item(D, 2)])
    assert store.try_reserve("r1")
    assert store.stats().evictions["wanted"] == 1
    assert not store.try_reserve("r2")
    encode(store, "r1")
    store.release("r1")
    assert store.try_reserve("r2")
    assert set(store.keys_to_encode("r2")) == {B, D}


def test_wanted_features_go_last() -> None:
    store = make_store(4)
    serve(store, "old", item(A, 2, num_patches=1), item(B, 2, num_patches=1_000_000))
    store.register("waits", [item(A, 2, num_patches=1)])
    serve(store, "new", item(C, 2))
    assert cached(store, A, B) == [True, False]


def test_radix_cached_features_go_first_whatever_they_cost() -> None:
    store = make_store(4)
    serve(store, "cheap", item(A, 2, num_patches=1))
    serve(store, "dear", item(B, 2, num_patches=1_000_000))
    store.set_radix_cached(B, True)
    serve(store, "new", item(C, 2))
    assert cached(store, A, B) == [True, False]
    assert store.stats().evictions == {"radix_cached": 1, "pressure": 0, "wanted": 0, "repack": 0, "flush": 0}


def test_features_count_again_once_the_radix_cache_evicts_their_tokens() -> None:
    store = make_store(4)
    serve(store, "cheap", item(A, 2, num_patches=1))
    serve(store, "dear", item(B, 2, num_patches=1_000_000))
    store.set_radix_cached(B, True)
    store.set_radix_cached(B, False)
    store.set_radix_cached(D, True)  # unknown: ignored
    serve(store, "new", item(C, 2))
    assert cached(store, A, B) == [False, True]
    assert store.stats().evictions["pressure"] == 1


def test_cheap_features_go_before_dear_ones_and_old_before_new() -> None:
    store = make_store(6)
    for key, num_patches in ((A, 100), (B, 5), (C, 100)):
        serve(store, key.hex(), item(key, 2, num_patches))
    serve(store, "r1", item(D, 2))
    assert cached(store, A, B, C) == [True, False, True]
    serve(store, "r2", item(A, 2))  # A is used again: C is the oldest of the dear ones now
    serve(store, "r3", item(E, 2))
    assert cached(store, A, C, D) == [True, False, True]


def test_age_outweighs_cost_in_the_end() -> None:
    store = make_store(4)
    serve(store, "dear", item(A, 2, num_patches=300))
    serve(store, "cheap", item(B, 2, num_patches=100))
    for i in range(20):
        serve(store, f"again{i}", item(B, 2, num_patches=100))
    serve(store, "new", item(C, 2))
    assert cached(store, A, B) == [False, True]


def test_victims_are_neighbours() -> None:
    """Two old small images far apart would free enough blocks, but only neighbours free a run of them."""
    store = make_store(4)
    for key, num_patches in ((A, 1), (B, 50), (C, 60), (D, 1)):
        serve(store, key.hex(), item(key, 1, num_patches))
    tickets = serve(store, "r", item(E, 2))
    assert cached(store, A, B, C, D) == [False, False, True, True]
    assert tickets[0].offset_tokens == 0


def test_own_features_move_where_they_split_the_space() -> None:
    # B in the middle leaves no run of two.
    store = make_store(4)
    store.register("p", [item(A, 1)])
    store.try_reserve("p")
    store.register("q", [item(B, 2)])
    store.try_reserve("q")
    encode(store, "p")
    encode(store, "q")
    store.release("p")
    store.release("q")
    store.register("r", [item(B, 2), item(D, 2)])
    assert store.try_reserve("r")
    assert store.stats().evictions["repack"] == 1
    assert set(store.keys_to_encode("r")) == {B, D}
    encode(store, "r")
    store.check_integrity()


def test_release_cancels_what_nobody_else_wants() -> None:
    store = make_store(8)
    store.register("r", [item(A, 2), item(B, 2), item(C, 2)])
    store.register("s", [item(C, 2)])
    assert store.try_reserve("r")
    store.begin_encode(A)
    assert store.release("r") == [A, B]
    assert store.wanted_by(C) == ["s"]
    stats = store.stats()
    assert (stats.reserved_blocks, stats.num_entries) == (2, 2)  # A is being written; C waits without blocks
    store.check_integrity()
    store.commit(A)
    assert cached(store, A, B, C) == [True, False, False]
    assert not store.is_ready("s")
    assert store.release("s") == [C]
    assert store.is_idle
    store.check_integrity()


def test_blocks_under_an_abandoned_encode_are_not_taken() -> None:
    store = make_store(2)
    store.register("r", [item(A, 2)])
    store.try_reserve("r")
    store.begin_encode(A)
    store.release("r")
    store.register("s", [item(B, 2)])
    assert not store.try_reserve("s")
    assert store.fail(A) == []
    assert store.try_reserve("s")
    store.check_integrity()


def test_failed_encode_names_its_requests_and_frees_everything() -> None:
    store = make_store(6)
    store.register("r", [item(A, 2), item(B, 2)])
    store.register("s", [item(A, 2)])
    store.register("t", [item(C, 2)])
    for rid in ("r", "s", "t"):
        assert store.try_reserve(rid)
    store.begin_encode(A)
    assert store.fail(A) == ["r", "s"]
    assert store.keys_to_encode("r") == []
    assert store.stats().reserved_blocks == 2  # of t
    assert store.release("r") == [B]
    assert store.try_reserve("s")  # another try
    assert store.keys_to_encode("s") == [A]
    store.check_integrity()


def test_image_that_cannot_be_decoded_fails_before_it_has_blocks() -> None:
    store = make_store(4)
    store.register("r", [item(A, 2)])
    assert store.fail(A) == ["r"]
    assert store.release("r") == [A]
    assert store.stats().num_entries == 0


def test_added_images_take_back_the_reservation() -> None:
    """A prefix vanished between admission and prefill: the request wants one image more, and may not hold and wait."""
    store = make_store(4)
    store.register("r", [item(A, 2)])
    assert store.try_reserve("r")
    encode(store, "r")
    store.register("r", [item(B, 2)])
    assert not store.is_ready("r")
    assert store.stats().pinned_blocks == 0
    assert store.try_reserve("r")
    assert store.keys_to_encode("r") == [B]
    assert [ticket.key for ticket in encode(store, "r")] == [A, B]


def test_retracted_request_finds_its_features_or_encodes_again() -> None:
    store = make_store(2)
    serve(store, "r#0", item(A, 2))
    assert store.register("r#1", [item(A, 2)]).lookups == {A: Lookup.READY}
    store.release("r#1")
    serve(store, "other", item(B, 2))
    assert store.register("r#2", [item(A, 2)]).lookups == {A: Lookup.MISS}
    assert store.try_reserve("r#2")
    assert store.keys_to_encode("r#2") == [A]


def test_clear_drops_what_is_not_held_and_the_rest_in_time() -> None:
    store = make_store(8)
    serve(store, "old", item(A, 2))
    store.register("holder", [item(B, 2)])
    store.register("writer", [item(C, 2)])
    store.register("waits", [item(A, 2)])
    assert store.try_reserve("holder")
    encode(store, "holder")
    assert store.try_reserve("writer")
    store.begin_encode(C)
    store.clear()
    assert store.is_ready("holder")
    assert cached(store, A, B) == [False, True]
    assert store.wanted_by(A) == ["waits"]
    store.release("writer")
    store.commit(C)
    store.release("holder")
    assert cached(store, B, C) == [False, False]
    assert store.stats().evictions["flush"] == 3
    store.release("waits")
    assert store.stats().free_blocks == 8
    store.check_integrity()


def test_integrity_check_sees_damage() -> None:
    store = make_store(4)
    serve(store, "r", item(A, 2))
    store._entries[A].num_holders = 1
    with pytest.raises(AssertionError, match="holders"):
        store.check_integrity()
    store._entries[A].num_holders = 0
    store._entries._extents.remove(0)
    with pytest.raises(AssertionError, match="not in the table"):
        store.check_integrity()


def test_rebuild_cost_passes_through_its_measured_points() -> None:
    cost = RebuildCost()
    assert cost(5_329) == pytest.approx(26.5, rel=0.01)
    assert cost(21_316) == pytest.approx(251, rel=0.01)
    assert cost(4_000) > 2 * cost(2_000)
    with pytest.raises(ValueError, match="negative"):
        RebuildCost(fixed_ms=-1)


def test_a_failed_reservation_succeeds_once_the_abandoned_encode_commits() -> None:
    store = make_store(2)
    store.register("r", [item(A, 2)])
    assert store.try_reserve("r")
    store.begin_encode(A)
    store.release("r")
    store.register("s", [item(B, 2)])
    assert not store.try_reserve("s")
    store.commit(A)
    assert store.try_reserve("s")
