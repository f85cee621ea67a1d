"""The encoder worker's decisions, driven without sockets, threads or torch forwards."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceserve.encoder.runner import Batch, ItemFailure
from spaceserve.encoder.service import MAX_BATCHES_IN_FLIGHT, EncoderService
from spaceserve.encoder_schedule.queue import EncodeQueue
from spaceserve.feature_store.host_store import HostStore
from spaceserve.feature_store.store import FeatureStore, Ticket
from spaceserve.messages import (
    DropCached,
    EncodeRequest,
    FeaturesFailed,
    FeaturesReady,
    FinishRequest,
    ImageSource,
    RadixHint,
    ReleaseFeatures,
)

pytestmark = pytest.mark.cpu

BLOCK = 4


def source(name: str, rid: str = "", num_tokens: int = 4) -> ImageSource:
    return ImageSource(name.encode(), f"{name}-{rid}", 100, 28, 28 * num_tokens, (1, 2, 2 * num_tokens), num_tokens)


class World:
    """A service with a recorded outbox; batches and copies from the host finish when the test says so.

    Slab and host memory hold the key of the image in each row: whoever is answered finds its own there.
    """

    def __init__(
        self, num_blocks: int = 8, capacity: int = 64, policy: str = "twsrft", num_host_blocks: int = 0
    ) -> None:
        self.slab: list[bytes | None] = [None] * (num_blocks * BLOCK)
        self.host: list[bytes | None] = [None] * (num_host_blocks * BLOCK)
        self.restoring: list[Ticket] = []
        self.restored: list[bytes] = []
        self.sent: list[FeaturesReady | FeaturesFailed] = []
        self.now_s = 0.0
        self.running: list[Batch] = []
        self.encoded: list[bytes] = []
        self.service = EncoderService(
            FeatureStore(
                num_blocks, BLOCK, host=HostStore(num_host_blocks, BLOCK) if num_host_blocks else None, save=self.save
            ),
            EncodeQueue(policy, 0.05, capacity),  # type: ignore[arg-type]
            epoch=3,
            send=lambda address, message: self.send(message),  # type: ignore[arg-type]
            restore=self.restore,
        )

    def send(self, message: FeaturesReady | FeaturesFailed) -> None:
        if isinstance(message, FeaturesReady):
            for ticket in message.tickets:
                rows = self.slab[ticket.offset_tokens : ticket.offset_tokens + ticket.num_tokens]
                assert rows == [ticket.key] * ticket.num_tokens
        self.sent.append(message)

    def save(self, ticket: Ticket, host_row: int) -> None:
        rows = self.slab[ticket.offset_tokens : ticket.offset_tokens + ticket.num_tokens]
        assert rows == [ticket.key] * ticket.num_tokens
        self.host[host_row : host_row + ticket.num_tokens] = rows

    def restore(self, ticket: Ticket, host_row: int) -> None:
        """On the one stream of copies: the bytes are those of now, and the host learns of it later."""
        rows = self.host[host_row : host_row + ticket.num_tokens]
        assert rows == [ticket.key] * ticket.num_tokens
        self.slab[ticket.offset_tokens : ticket.offset_tokens + ticket.num_tokens] = rows
        self.restoring.append(ticket)

    def finish_restore(self, *, copied: bool = True) -> None:
        ticket = self.restoring.pop(0)
        if copied:
            self.restored.append(ticket.key)
        self.service.restored(ticket.key, copied=copied)
        self.launch()

    def want(self, rid: str, *sources: ImageSource, seq: int = 0) -> None:
        self.tell(EncodeRequest(rid, seq, list(sources), "scheduler"))

    def tell(self, message: object) -> None:
        self.service.handle(message, self.now_s)  # type: ignore[arg-type]
        self.launch()

    def launch(self) -> None:
        self.running += self.service.next_batches(self.now_s)
        assert len(self.running) <= MAX_BATCHES_IN_FLIGHT
        self.service.check_integrity()

    def finish(self, failures: dict[bytes, ItemFailure] | None = None) -> None:
        batch = self.running.pop(0)
        batch.failures = {key: f for key, f in (failures or {}).items() if key in batch.images}
        for ticket in batch.tickets:
            if ticket.key not in batch.failures:
                self.encoded.append(ticket.key)
                image = self.service._pieces.whole(ticket.key)  # a piece of a video fills its part of the rows
                self.slab[ticket.offset_tokens : ticket.offset_tokens + ticket.num_tokens] = [image] * ticket.num_tokens
        self.service.finish(batch, self.now_s)
        self.launch()

    def finish_all(self) -> None:
        while self.running or self.restoring:
            if self.restoring:
                self.finish_restore()
            else:
                self.finish()

    def drain(self, live: set[str]) -> None:
        """Whoever is ready prefills and ends, until every request of `live` has been answered; then nothing is held."""
        for _ in range(1000):
            for message in list(self.sent):
                if message.rid in live:
                    live.remove(message.rid)
                    if isinstance(message, FeaturesReady):
                        self.tell(FinishRequest(message.rid))
            if self.restoring:
                self.finish_restore()
            elif self.running:
                self.finish()
            elif not live:
                break
        assert not live, "a request was never answered"
        assert self.service.is_idle
        self.service.check_integrity()

    def answers(self, rid: str) -> list[FeaturesReady | FeaturesFailed]:
        return [message for message in self.sent if message.rid == rid]


def test_encodes_and_answers_with_a_ticket() -> None:
    world = World()
    world.want("r", source("a"), source("b"))
    world.finish_all()
    (answer,) = world.sent
    assert isinstance(answer, FeaturesReady)
    assert (answer.rid, answer.seq, answer.epoch) == ("r", 0, 3)
    assert [ticket.key for ticket in answer.tickets] == [b"a", b"b"]
    assert sorted(world.encoded) == [b"a", b"b"]


def test_same_image_in_flight_is_encoded_once() -> None:
    world = World()
    for rid in ("r1", "r2", "r3"):
        world.want(rid, source("a", rid))
    world.finish_all()
    assert world.encoded == [b"a"]
    assert {message.rid for message in world.sent} == {"r1", "r2", "r3"}


def test_cached_features_answer_at_once_after_release() -> None:
    world = World()
    world.want("r1", source("a"))
    world.finish_all()
    world.tell(FinishRequest("r1"))
    world.want("r2", source("a", "r2"))
    assert isinstance(world.answers("r2")[0], FeaturesReady)
    assert world.encoded == [b"a"]


def test_broken_item_fails_its_requests_only() -> None:
    world = World()
    world.want("bad", source("broken"), source("fine"))
    world.want("good", source("other"))
    while world.running:
        world.finish({b"broken": ItemFailure(400, "truncated")})
    (failed,) = world.answers("bad")
    assert isinstance(failed, FeaturesFailed)
    assert (failed.status, failed.reason) == (400, "truncated")
    assert isinstance(world.answers("good")[0], FeaturesReady)
    world.tell(FinishRequest("bad"))
    world.tell(FinishRequest("good"))
    assert world.service.is_idle


def test_item_larger_than_the_slab_is_refused_at_once() -> None:
    world = World(num_blocks=2)
    world.want("big", source("huge", num_tokens=3 * BLOCK))
    (answer,) = world.sent
    assert isinstance(answer, FeaturesFailed)
    assert answer.status == 400
    world.want("small", source("a"))
    world.finish_all()
    assert isinstance(world.answers("small")[0], FeaturesReady)


def test_a_request_that_ended_first_is_not_encoded() -> None:
    world = World()
    world.tell(FinishRequest("r"))
    world.want("r", source("a"))
    assert not world.running
    assert not world.sent


def test_abort_in_the_queue_takes_the_work_away() -> None:
    world = World(capacity=4)  # one image a batch
    for rid in ("r0", "r1", "r2", "r3"):
        world.want(rid, source(rid))
    world.tell(FinishRequest("r3"))
    world.finish_all()
    assert b"r3" not in world.encoded
    assert not world.answers("r3")


def test_image_of_an_ended_request_is_encoded_from_the_one_that_still_wants_it() -> None:
    world = World()
    world.want("r1", source("a", "r1"))
    world.tell(FinishRequest("r1"))
    world.want("r2", source("a", "r2"))
    world.finish({b"a": ItemFailure(503, "gone", source_gone=True)})
    assert not world.answers("r2")
    world.finish_all()
    assert isinstance(world.answers("r2")[0], FeaturesReady)


def test_full_slab_waits_until_features_are_released() -> None:
    world = World(num_blocks=2)
    world.want("r1", source("a", num_tokens=2 * BLOCK))
    world.finish_all()
    world.want("r2", source("b", num_tokens=2 * BLOCK))
    assert not world.running
    world.tell(ReleaseFeatures("r1"))
    world.finish_all()
    assert isinstance(world.answers("r2")[0], FeaturesReady)


def test_later_request_of_the_same_rid_replaces_the_earlier() -> None:
    world = World()
    world.want("r", source("a"), seq=0)
    world.want("r", source("a"), source("b"), seq=1)
    world.want("r", source("c"), seq=0)  # overtaken: ignored
    world.finish_all()
    ready = [message for message in world.answers("r") if isinstance(message, FeaturesReady)]
    assert ready[-1].seq == 1
    assert {ticket.key for ticket in ready[-1].tickets} == {b"a", b"b"}
    assert b"c" not in world.encoded


def world_with_an_evicted_image() -> World:
    """`a` lies in the host tier, `b` fills the slab."""
    world = World(num_blocks=2, num_host_blocks=8)
    for rid, name in (("r1", "a"), ("r2", "b")):
        world.want(rid, source(name, rid, 2 * BLOCK))
        world.finish_all()
        world.tell(FinishRequest(rid))
    assert world.encoded == [b"a", b"b"]
    assert world.service.store.is_on_host(b"a")
    return world


def test_evicted_features_come_back_from_the_host_without_an_encode() -> None:
    world = world_with_an_evicted_image()
    world.want("r3", source("a", "r3", 2 * BLOCK))
    assert not world.running
    assert not world.answers("r3"), "the copy is still under way"
    world.want("r4", source("a", "r4", 2 * BLOCK))  # the same image, wanted while it is on its way
    world.finish_restore()
    assert isinstance(world.answers("r3")[0], FeaturesReady)
    assert isinstance(world.answers("r4")[0], FeaturesReady)
    assert world.encoded == [b"a", b"b"]
    stats = world.service.store.stats()
    assert stats.host is not None
    assert (stats.host.hits, stats.misses, stats.host.saved) == (1, 2, 2)  # b went to the host in its turn
    world.tell(FinishRequest("r3"))
    world.tell(FinishRequest("r4"))
    assert world.service.is_idle


def test_what_cannot_be_copied_back_is_encoded() -> None:
    world = world_with_an_evicted_image()
    world.want("r3", source("a", "r3", 2 * BLOCK))
    world.finish_restore(copied=False)
    assert not world.service.store.is_on_host(b"a")
    assert not world.answers("r3")
    world.finish_all()
    assert isinstance(world.answers("r3")[0], FeaturesReady)
    assert world.encoded == [b"a", b"b", b"a"]


def test_a_request_that_ends_while_its_features_come_back_leaves_them_cached() -> None:
    world = world_with_an_evicted_image()
    world.want("r3", source("a", "r3", 2 * BLOCK))
    world.tell(FinishRequest("r3"))
    assert not world.service.is_idle, "the copy still writes to the slab"
    world.finish_restore()
    assert world.service.is_idle
    world.want("r4", source("a", "r4", 2 * BLOCK))
    assert isinstance(world.answers("r4")[0], FeaturesReady)
    assert not world.answers("r3")


def test_one_image_from_the_host_and_one_from_the_encoder() -> None:
    world = World(num_blocks=3, num_host_blocks=8)
    for rid, name in (("r1", "a"), ("r2", "b"), ("r3", "c"), ("r4", "d")):
        world.want(rid, source(name, rid))
        world.finish_all()
        world.tell(FinishRequest(rid))
    assert world.service.store.is_on_host(b"a")
    world.want("r5", source("a", "r5"), source("new", "r5"))
    assert [ticket.key for ticket in world.restoring] == [b"a"]
    assert len(world.running) == 1
    world.finish()
    assert not world.answers("r5")
    world.finish_restore()
    assert isinstance(world.answers("r5")[0], FeaturesReady)
    assert world.encoded == [b"a", b"b", b"c", b"d", b"new"]


def test_a_flush_empties_the_host_tier() -> None:
    world = world_with_an_evicted_image()
    world.tell(DropCached())
    world.want("r3", source("a", "r3", 2 * BLOCK))
    assert not world.restoring
    world.finish_all()
    assert world.encoded == [b"a", b"b", b"a"]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(3, 12),
    policy=st.sampled_from(["twsrft", "fcfs", "srf"]),
    num_host_blocks=st.sampled_from([0, 2, 5, 40]),
)
def test_random_mix_ends_with_everything_answered_and_nothing_held(
    seed: int, num_blocks: int, policy: str, num_host_blocks: int
) -> None:
    rng = random.Random(seed)
    world = World(num_blocks, rng.choice([8, 16, 64]), policy, num_host_blocks)
    sizes = {f"i{n}": rng.randint(1, num_blocks * BLOCK // 3) for n in range(8)}
    live: set[str] = set()
    for step in range(60):
        world.now_s += rng.random() * 0.05
        action = rng.random()
        if action < 0.45:
            rid = f"r{step}"
            names = rng.sample(sorted(sizes), rng.randint(1, 3))
            world.want(rid, *(source(name, rid, sizes[name]) for name in names))
            live.add(rid)
        elif action < 0.6 and world.restoring:
            world.finish_restore(copied=rng.random() < 0.9)
        elif action < 0.7 and world.running:
            broken = {b"i0": ItemFailure(400, "broken")} if rng.random() < 0.3 else {}
            world.finish(broken)
        elif action < 0.8 and live:
            rid = rng.choice(sorted(live))
            live.remove(rid)
            world.tell(FinishRequest(rid))
        elif action < 0.9:
            key = rng.choice(sorted(sizes)).encode()
            world.tell(RadixHint([key], []) if rng.random() < 0.5 else RadixHint([], [key]))
        elif action < 0.93:
            world.tell(DropCached())
        else:  # a prefill ends: its features are released
            ready = [m.rid for m in world.sent if isinstance(m, FeaturesReady) and m.rid in live]
            if ready:
                world.tell(ReleaseFeatures(rng.choice(ready)))
    world.drain(live)
