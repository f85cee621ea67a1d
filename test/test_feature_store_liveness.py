"""Waiting for features cannot deadlock: every interleaving of small cases, and long random runs behind a queue."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator, Sequence

import pytest

from spaceserve.feature_store import FeatureStore

pytestmark = pytest.mark.cpu

Item = tuple[bytes, int, int]
NUM_BLOCKS = 4
# Images of 1, 1, 2, 2 and 3 blocks; requests share them in every way that a slab of 4 blocks admits.
SIZES = {b"a": 1, b"b": 1, b"c": 2, b"d": 2, b"e": 3}


def requests_of_two_or_three_images() -> list[tuple[bytes, ...]]:
    return [
        keys
        for num_items in (2, 3)
        for keys in itertools.combinations(SIZES, num_items)
        if sum(SIZES[key] for key in keys) <= NUM_BLOCKS
    ]


class World:
    """A store, three requests on their way through it, and everything that may happen next."""

    def __init__(self, wishes: Sequence[tuple[bytes, ...]]) -> None:
        self.store = FeatureStore(NUM_BLOCKS, block_tokens=1)
        self.wishes = wishes
        self.phase = ["new"] * len(wishes)  # new, waiting, holding, done
        self.encoding: frozenset[bytes] = frozenset()

    def steps(self) -> Iterator[tuple[str, object]]:
        """Steps that bring a request further."""
        for i, phase in enumerate(self.phase):
            if phase == "new":
                yield "arrive", i
            elif phase == "waiting":
                yield "reserve", i
            elif phase == "holding" and self.store.is_ready(f"r{i}"):
                yield "prefill", i
        holding = [i for i, phase in enumerate(self.phase) if phase == "holding"]
        for key in sorted({key for i in holding for key in self.store.keys_to_encode(f"r{i}")}):
            yield "begin", key
        for key in sorted(self.encoding):
            yield "commit", key

    def mishaps(self) -> Iterator[tuple[str, object]]:
        """Aborts and failed encodes."""
        yield from (("abort", i) for i, phase in enumerate(self.phase) if phase in ("waiting", "holding"))
        yield from (("fail", key) for key in sorted(self.encoding))

    def take(self, step: tuple[str, object]) -> bool:
        """Take the step; False where it left everything as it was."""
        name, what = step
        if isinstance(what, int):
            rid = f"r{what}"
            if name == "arrive":
                self.store.register(rid, [(key, SIZES[key], SIZES[key]) for key in self.wishes[what]])
                self.phase[what] = "waiting"
            elif name == "reserve":
                if not self.store.try_reserve(rid):
                    return False
                self.phase[what] = "holding"
            else:  # prefill, abort
                self.store.release(rid)
                self.phase[what] = "done"
        else:
            assert isinstance(what, bytes)
            if name == "begin":
                self.store.begin_encode(what)
                self.encoding |= {what}
            elif name == "commit":
                self.store.commit(what)
                self.encoding -= {what}
            else:  # the encode fails and is tried again
                for concerned in self.store.fail(what):
                    self.phase[int(concerned[1:])] = "waiting"
                self.encoding -= {what}
        return True

    def signature(self) -> object:
        """Equal for states from which the same can happen: extents, states, order of use, phases."""
        entries = sorted(self.store._entries.all(), key=lambda entry: entry.last_use)
        return (
            tuple(self.phase),
            tuple((entry.key, entry.state, entry.start, tuple(sorted(entry.wanted_by))) for entry in entries),
        )


def explore(wishes: Sequence[tuple[bytes, ...]], with_mishaps: bool) -> int:
    """Visit every reachable state; returns their number. Asserts that none is a dead end.

    Without mishaps no run is endless: a request arrives, reserves and is released once, and only a reservation undoes
    an encode. So where no state is a dead end, every request is served.
    """
    first = World(wishes)
    seen = {first.signature()}
    stack = [first]
    while stack:
        world = stack.pop()
        world.store.check_integrity()
        saved = pickle.dumps(world)
        steps = list(world.steps())
        progress = False
        nothing_held = not world.encoding and "holding" not in world.phase
        for step in [*steps, *(world.mishaps() if with_mishaps else ())]:
            after: World = pickle.loads(saved)
            if not after.take(step):
                assert not nothing_held, f"{step} found no room though nothing is held: {wishes}"
                continue
            progress |= step in steps
            signature = after.signature()
            if signature not in seen:
                seen.add(signature)
                stack.append(after)
        if not steps:
            assert world.phase == ["done"] * len(wishes)
            assert world.store.is_idle
            stats = world.store.stats()
            assert stats.free_blocks + stats.cached_blocks == NUM_BLOCKS
        else:
            assert progress, f"deadlock: {wishes} {world.phase}"
    return len(seen)


# The classic circle (each finds one image and lacks another), shared images, and whole-slab requests.
TRIPLES = [
    ((b"a", b"b", b"c"), (b"c", b"d"), (b"a", b"e")),
    ((b"c", b"d"), (b"a", b"e"), (b"b", b"e")),
    ((b"a", b"c"), (b"b", b"d"), (b"b", b"e")),
]


@pytest.mark.parametrize("wishes", TRIPLES, ids=["shared", "whole-slab", "overlap"])
def test_no_interleaving_of_three_requests_deadlocks(wishes: Sequence[tuple[bytes, ...]]) -> None:
    assert explore(wishes, with_mishaps=False) > 100


def test_no_interleaving_with_mishaps_deadlocks() -> None:
    pairs = itertools.combinations_with_replacement(requests_of_two_or_three_images()[::4], 2)
    assert sum(explore(pair, with_mishaps=True) for pair in pairs) > 1000


class Queue:
    """The encode queue in little: windows in order, ascending patches within one, a younger window never overtakes."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store
        self.window_of: dict[str, int] = {}

    def reserve_all(self) -> list[str]:
        reserved = []
        blocked_window: int | None = None
        order = sorted(self.window_of, key=lambda rid: (self.window_of[rid], self.store.remaining_patches(rid), rid))
        for rid in order:
            if blocked_window is not None and self.window_of[rid] > blocked_window:
                break
            if self.store.try_reserve(rid):
                reserved.append(rid)
                del self.window_of[rid]
            else:
                blocked_window = self.window_of[rid]
        return reserved


def run_random_service(seed: int, num_requests: int) -> tuple[int, int]:
    """Serve random requests through a small slab; returns the encodes done and the longest wait in steps."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 12)
    store = FeatureStore(num_blocks, block_tokens=2)
    keys = [bytes([i]) for i in range(rng.randint(1, 15))]
    sizes = {key: rng.randint(1, max(1, 2 * num_blocks // rng.randint(1, 4))) for key in keys}
    queue = Queue(store)
    wishes: dict[str, list[Item]] = {}
    arrived_at: dict[str, int] = {}
    holding: set[str] = set()
    encoding: list[bytes] = []
    longest_wait = num_encodes = num_arrived = step = 0
    while num_arrived < num_requests or wishes:
        step += 1
        for _ in range(rng.randint(0, 2)):
            if num_arrived == num_requests:
                break
            items: list[Item] = []
            for key in rng.sample(keys, min(len(keys), rng.randint(1, 4))):
                if sum(-(-tokens // 2) for _, tokens, _ in items) + -(-sizes[key] // 2) <= num_blocks:
                    items.append((key, sizes[key], sizes[key]))
            rid = f"r{num_arrived}"
            num_arrived += 1
            store.register(rid, items)
            wishes[rid], arrived_at[rid], queue.window_of[rid] = items, step, step // 5
        holding.update(queue.reserve_all())
        ready_to_begin = sorted({key for rid in holding for key in store.keys_to_encode(rid)})
        for key in rng.sample(ready_to_begin, min(len(ready_to_begin), 2)):
            store.begin_encode(key)
            encoding.append(key)
        if encoding and rng.random() < 0.7:
            key = encoding.pop(rng.randrange(len(encoding)))
            if rng.random() < 0.05:
                for rid in store.fail(key):  # an encode that is tried again
                    if rid in holding:
                        holding.discard(rid)
                        queue.window_of[rid] = arrived_at[rid] // 5
            else:
                num_encodes += 1
                store.commit(key)
        for rid in sorted(rid for rid in holding if store.is_ready(rid)):
            if rng.random() < 0.5:  # else it stays half-prefilled
                longest_wait = max(longest_wait, step - arrived_at[rid])
                holding.discard(rid)
                store.release(rid)
                if rng.random() < 0.1:  # retracted: the same wish under a new name
                    store.register(rid + "'", wishes[rid])
                    wishes[rid + "'"], arrived_at[rid + "'"] = wishes[rid], step
                    queue.window_of[rid + "'"] = step // 5
                del wishes[rid]
        if wishes and rng.random() < 0.05:  # a client goes away
            rid = rng.choice(sorted(wishes))
            store.release(rid)
            del wishes[rid]
            queue.window_of.pop(rid, None)
            holding.discard(rid)
        store.set_radix_cached(rng.choice(keys), rng.random() < 0.5)
        if step % 10 == 0:
            store.check_integrity()
        assert step < 100 * num_requests, f"seed {seed}: no end in sight, waiting: {sorted(wishes)}"
    for key in encoding:
        store.commit(key)
    store.check_integrity()
    assert store.is_idle
    assert store.stats().pinned_blocks == 0
    return num_encodes, longest_wait


def test_every_request_is_served_behind_a_queue_in_window_order() -> None:
    for seed in range(80):
        num_encodes, _ = run_random_service(seed, num_requests=60)
        assert num_encodes > 0
