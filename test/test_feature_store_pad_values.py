"""Pad values: no two images of one namespace ever share one."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceserve.feature_store.pad_values import PAD_VALUE_SPACE, KeyedPermutation, PadValueRegistry

pytestmark = pytest.mark.cpu


def digest(i: int) -> bytes:
    return i.to_bytes(16, "big")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4096])
def test_permutation_is_one_to_one(size: int) -> None:
    permutation = KeyedPermutation(size, b"key")
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


def test_permutation_depends_on_its_key_and_scatters() -> None:
    one = [KeyedPermutation(PAD_VALUE_SPACE, b"one")(i) for i in range(2000)]
    two = [KeyedPermutation(PAD_VALUE_SPACE, b"two")(i) for i in range(2000)]
    assert len(set(one)) == 2000
    assert one != two
    assert all(0 <= value < PAD_VALUE_SPACE for value in one)
    # A quarter of the range holds about a quarter of the first numbers: 500 +- 5 standard deviations of 19.
    for quarter in range(4):
        assert abs(sum(value // (PAD_VALUE_SPACE // 4) == quarter for value in one) - 500) < 97


def hash_from(registry: PadValueRegistry, of: bytes) -> int:
    (item_hash,) = registry.assign([of]).item_hashes
    return item_hash


def test_hash_carries_value_and_digest() -> None:
    registry = PadValueRegistry()
    hashes = [hash_from(registry, digest(i)) for i in range(500)]
    assert len({item_hash % 2**30 for item_hash in hashes}) == 500
    assert [item_hash >> 30 for item_hash in hashes] == list(range(500))
    assert hashes == [hash_from(registry, digest(i)) for i in range(500)]


def test_keys_are_random_by_default() -> None:
    assert hash_from(PadValueRegistry(), digest(1)) != hash_from(PadValueRegistry(), digest(1))
    assert hash_from(PadValueRegistry(key=b"k"), digest(1)) == hash_from(PadValueRegistry(key=b"k"), digest(1))


def test_images_of_one_request() -> None:
    registry = PadValueRegistry()
    assignment = registry.assign([digest(7), digest(8), digest(7)])
    assert assignment.item_hashes[0] == assignment.item_hashes[2] != assignment.item_hashes[1]
    assert assignment.namespace == 0
    assert assignment.radix_extra_key is None
    assert registry.assign([]).item_hashes == ()


def test_forced_collision_gets_another_namespace() -> None:
    """With a single pad value, every image has the same one: only the namespace keeps them apart, and it does."""
    registry = PadValueRegistry(space=1)
    first = registry.assign([digest(1)])
    second = registry.assign([digest(2)])
    assert first.item_hashes[0] % 2**30 == second.item_hashes[0] % 2**30 == 0
    assert first.item_hashes != second.item_hashes
    assert first.radix_extra_key != second.radix_extra_key == "spaceserve-pad-1"
    assert registry.assign([digest(2)]) == second
    with pytest.raises(ValueError, match="2 distinct images"):
        registry.assign([digest(1), digest(2)])
    assert registry.assign([digest(3), digest(3)]).namespace == 2


def test_a_forgotten_image_gets_a_new_value() -> None:
    registry = PadValueRegistry(capacity=2)
    old = hash_from(registry, digest(0))
    for i in (1, 2):
        hash_from(registry, digest(i))
    assert len(registry) == 2
    assert [registry.knows(digest(i)) for i in range(4)] == [False, True, True, False]
    assert hash_from(registry, digest(0)) % 2**30 != old % 2**30


def test_the_least_recently_used_is_forgotten_first() -> None:
    registry = PadValueRegistry(capacity=2)
    kept = hash_from(registry, digest(0))
    hash_from(registry, digest(1))
    assert hash_from(registry, digest(0)) == kept
    hash_from(registry, digest(2))  # forgets 1
    assert hash_from(registry, digest(0)) == kept


def test_a_request_larger_than_the_capacity_is_still_consistent() -> None:
    registry = PadValueRegistry(capacity=2)
    hashes = registry.assign([digest(i) for i in (0, 1, 2, 3, 0)]).item_hashes
    assert len({item_hash % 2**30 for item_hash in hashes}) == 4
    assert hashes[0] == hashes[4]


@settings(max_examples=150, deadline=None)
@given(
    space=st.integers(1, 12),
    capacity=st.integers(1, 12),
    requests=st.lists(st.lists(st.integers(0, 15), max_size=5), max_size=60),
)
def test_value_and_namespace_never_name_two_images(space: int, capacity: int, requests: list[list[int]]) -> None:
    """What the RadixCache sees is (namespace, value), and it may remember all of it for ever."""
    registry = PadValueRegistry(capacity=capacity, space=space)
    image_of: dict[tuple[int, int], int] = {}
    for request in requests:
        if len(set(request)) > space:
            with pytest.raises(ValueError, match="distinct images"):
                registry.assign([digest(i) for i in request])
            continue
        assignment = registry.assign([digest(i) for i in request])
        for i, item_hash in zip(request, assignment.item_hashes, strict=True):
            assert item_hash >> 30 == i
            assert item_hash % 2**30 < space
            assert image_of.setdefault((assignment.namespace, item_hash % 2**30), i) == i
        assert len(registry) <= capacity


def test_threads_get_distinct_values_and_agree() -> None:
    registry = PadValueRegistry()
    results: list[dict[int, int]] = [{} for _ in range(6)]

    def work(k: int) -> None:
        order = list(range(400))
        random.Random(k).shuffle(order)
        for i in order:
            results[k][i] = hash_from(registry, digest(i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result == results[0] for result in results)
    assert len({item_hash % 2**30 for item_hash in results[0].values()}) == 400


def test_bad_sizes_are_refused() -> None:
    for capacity, space in ((0, 1), (1, 0), (1, 2**30 + 1)):
        with pytest.raises(ValueError, match="must be"):
            PadValueRegistry(capacity=capacity, space=space)
