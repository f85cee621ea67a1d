"""Long videos in the encoder worker: cut, overtaken between pieces, put together again, given up half-way."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceserve.encoder.pieces import Pieces, piece_of
from spaceserve.encoder.runner import ItemFailure
from spaceserve.feature_store.store import FeatureStore
from spaceserve.messages import (
    DropCached,
    FeaturesFailed,
    FeaturesReady,
    FinishRequest,
    ImageSource,
    ReleaseFeatures,
    VideoFrames,
    decode_to_worker,
    encode,
)
from spaceserve.messages import EncodeRequest as Ask
from test_encoder_service import BLOCK, World, source

pytestmark = pytest.mark.cpu

SLICE_TOKENS = 4
SLICE_PATCHES = 4 * SLICE_TOKENS


def video(name: str, num_slices: int, rid: str = "") -> ImageSource:
    frames = VideoFrames(tuple(range(0, 6 * num_slices, 3)), 28, 28 * SLICE_TOKENS)
    tokens = num_slices * SLICE_TOKENS
    return ImageSource(
        name.encode(), f"{name}-{rid}", 999, 90, 120, (num_slices, 2, 2 * SLICE_TOKENS), tokens, video=frames
    )


def key_of(piece: bytes) -> bytes:
    return piece[:-8]


class VideoWorld(World):
    """Two slices a batch, and a slab of 16 slices. Notes which rows are written, and who was answered when."""

    def __init__(
        self,
        num_blocks: int = 16,
        capacity: int = 2 * SLICE_PATCHES,
        policy: str = "twsrft",
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(num_blocks, capacity, policy, num_host_blocks)
        self.order: list[tuple[bytes, tuple[int, ...]]] = []

    def finish(self, failures: dict[bytes, ItemFailure] | None = None) -> None:
        batch = self.running[0]
        for ticket in batch.tickets:
            image = batch.images[ticket.key]
            assert ticket.num_tokens == image.num_tokens == image.num_patches // 4
            if ticket.key not in (failures or {}):
                self.order.append((ticket.key, image.video.indices if image.video else ()))
        super().finish(failures)


def test_messages_carry_videos() -> None:
    ask = Ask("r", 0, [video("v", 3), source("a")], "there")
    assert decode_to_worker(encode(ask)) == ask


def test_frames_that_are_large_before_they_are_resized_make_short_pieces() -> None:
    small = video("v", 8)
    assert [end - first for first, end in slices_of(small, capacity=8 * SLICE_PATCHES)] == [8]
    # Two frames of 16 million pixels are 32 million: two slices are what a piece may decode.
    large = msgspec.structs.replace(small, height=4096, width=4096)
    assert [end - first for first, end in slices_of(large, capacity=8 * SLICE_PATCHES)] == [2, 2, 2, 2]
    huge = msgspec.structs.replace(small, height=8192, width=8192)
    assert [end - first for first, end in slices_of(huge, capacity=8 * SLICE_PATCHES)] == [1] * 8


def slices_of(source: ImageSource, capacity: int) -> list[tuple[int, int]]:
    pieces = Pieces(capacity)
    pieces.left(source)
    return list(pieces._encodes[source.key].slices.values())


def test_a_piece_is_a_video_of_its_own() -> None:
    piece = piece_of(video("v", 5), 1, 3)
    assert piece.grid_thw == (2, 2, 8)
    assert piece.num_tokens == 2 * SLICE_TOKENS
    assert piece.num_patches == 2 * SLICE_PATCHES
    assert piece.video is not None
    assert piece.video.indices == (6, 9, 12, 15)
    assert piece.key != video("v", 5).key


def test_pieces_fill_the_extent_of_the_whole_in_order() -> None:
    whole = video("v", 5)
    store = FeatureStore(16, BLOCK)
    store.register("r", [(whole.key, whole.num_tokens, whole.num_patches)])
    assert store.try_reserve("r")
    pieces = Pieces(2 * SLICE_PATCHES)
    tickets = [pieces.begin(item.key, store) for item in pieces.left(whole)]
    rows = [row for ticket in tickets for row in range(ticket.offset_tokens, ticket.offset_tokens + ticket.num_tokens)]
    for ticket in tickets:
        pieces.end(ticket.key, encoded=True)
    assert pieces.is_complete(whole.key)
    whole_ticket = store.commit(whole.key)
    assert rows == list(range(whole_ticket.offset_tokens, whole_ticket.offset_tokens + whole.num_tokens))


def test_a_thumbnail_overtakes_a_video_between_its_pieces() -> None:
    world = VideoWorld()
    world.want("long", video("v", 8))
    assert len(world.running) == 2  # one computes, one is launched behind it
    world.want("short", source("thumbnail"))
    world.finish()
    world.finish()
    world.finish()
    assert isinstance(world.answers("short")[0], FeaturesReady)
    assert not world.answers("long")
    world.finish_all()
    (answer,) = world.answers("long")
    assert isinstance(answer, FeaturesReady)
    assert [(ticket.key, ticket.num_tokens) for ticket in answer.tickets] == [(b"v", 8 * SLICE_TOKENS)]
    assert [key for key, _ in world.order].index(b"thumbnail") == 2
    assert [index for key, indices in world.order if key != b"thumbnail" for index in indices] == list(range(0, 48, 3))


def test_first_come_first_served_lets_nobody_overtake() -> None:
    world = VideoWorld(policy="fcfs")
    world.want("long", video("v", 8))
    world.now_s = 1.0
    world.want("short", source("thumbnail"))
    world.finish_all()
    assert [key for key, _ in world.order][-1] == b"thumbnail"


def test_remaining_counts_down_by_pieces() -> None:
    world = VideoWorld()
    world.want("long", video("v", 8))
    left = [world.service.queue.remaining_patches("long#0")]
    while world.running:
        world.finish()
        left.append(world.service.queue.remaining_patches("long#0"))
    assert left == [n * SLICE_PATCHES for n in (8, 6, 4, 2, 0)]


def test_a_second_request_joins_a_video_half_way_and_nothing_is_encoded_twice() -> None:
    world = VideoWorld()
    world.want("r1", video("v", 8, "r1"))
    world.finish()
    world.want("r2", video("v", 8, "r2"))
    world.tell(FinishRequest("r1"))
    world.finish_all()
    assert isinstance(world.answers("r2")[0], FeaturesReady)
    assert len(world.order) == 4
    world.tell(FinishRequest("r2"))
    world.want("r3", video("v", 8, "r3"))
    assert isinstance(world.answers("r3")[0], FeaturesReady)
    assert len(world.order) == 4


@pytest.mark.parametrize("num_finished", [0, 1])
def test_abort_half_way_frees_the_extent_once_the_device_has_stopped(num_finished: int) -> None:
    world = VideoWorld()
    world.want("r", video("v", 8))
    for _ in range(num_finished):
        world.finish()
    world.tell(FinishRequest("r"))
    assert len(world.running) == 2
    assert world.service.store.stats().reserved_blocks == 8
    world.finish_all()
    assert len(world.order) == num_finished + 2
    assert world.service.is_idle
    assert world.service.store.stats().free_blocks == 16
    world.service.check_integrity()


def test_a_video_whose_last_pieces_are_in_flight_is_kept_although_nobody_wants_it_any_more() -> None:
    world = VideoWorld()
    world.want("r", video("v", 8))
    world.finish()
    world.finish()
    world.tell(FinishRequest("r"))
    world.finish_all()
    world.want("again", video("v", 8, "again"))
    assert isinstance(world.answers("again")[0], FeaturesReady)


def test_a_damaged_piece_fails_its_requests_only_and_after_the_piece_behind_it() -> None:
    world = VideoWorld()
    world.want("bad", video("v", 8))
    world.want("good", source("other"))
    broken = world.running[0].tickets[0].key
    world.finish({broken: ItemFailure(400, "truncated")})
    assert not world.answers("bad")  # the second piece is still written
    world.finish_all()
    (failed,) = world.answers("bad")
    assert isinstance(failed, FeaturesFailed)
    assert (failed.status, failed.reason) == (400, "truncated")
    assert isinstance(world.answers("good")[0], FeaturesReady)
    assert sum(key_of(key) == b"v" for key, _ in world.order) == 1
    world.tell(FinishRequest("good"))
    assert world.service.is_idle
    world.service.check_integrity()


def test_a_video_that_waits_to_be_held_and_is_evicted_meanwhile_is_encoded_in_pieces() -> None:
    world = VideoWorld(num_blocks=8)
    world.want("r1", video("v", 6, "r1"))
    world.finish_all()
    world.tell(FinishRequest("r1"))
    world.want("big", source("image", num_tokens=8 * BLOCK))  # larger than the capacity, and evicts the video
    world.want("other", source("image 2", num_tokens=2 * BLOCK))
    world.want("r2", video("v", 6, "r2"))
    world.finish_all()
    world.tell(FinishRequest("big"))
    world.finish_all()
    for rid in ("other", "r2"):
        assert isinstance(world.answers(rid)[0], FeaturesReady)
    assert max(len(indices) for _, indices in world.order) == 4


def test_half_of_a_video_that_nobody_holds_is_in_nobodys_way() -> None:
    world = VideoWorld(num_blocks=9)
    world.want("first", video("v", 8, "first"))
    world.now_s = 1.0
    world.want("large", source("image", num_tokens=9 * BLOCK))  # waits for the whole slab
    world.now_s = 2.0
    world.want("young", video("v", 8, "young"))  # wants the video too, and may not overtake
    world.finish()
    world.tell(FinishRequest("first"))
    world.finish()
    world.finish()
    assert not world.answers("young"), "its last piece is not encoded"
    world.finish_all()
    assert isinstance(world.answers("large")[0], FeaturesReady)
    world.tell(FinishRequest("large"))
    world.finish_all()
    assert isinstance(world.answers("young")[0], FeaturesReady)


def test_a_holder_goes_on_with_what_another_request_began_and_gave_up() -> None:
    world = VideoWorld(num_blocks=16, policy="fcfs")
    world.want("r0", video("v", 3, "r0"))
    world.finish_all()
    world.tell(FinishRequest("r0"))
    world.want("busy", source("x", num_tokens=2 * BLOCK), source("y", num_tokens=2 * BLOCK))
    world.want("r1", video("w", 3, "r1"), video("v", 3, "r1"))  # v is a hit, and not held yet
    world.tell(DropCached())
    world.want("r2", video("v", 3, "r2"))
    while world.running:
        keys = {key_of(ticket.key) for batch in world.running for ticket in batch.tickets}
        if b"v" in keys and "r2" not in world.service._ended:
            world.tell(FinishRequest("r2"))  # after its first piece was begun
        world.finish()
    assert isinstance(world.answers("r1")[0], FeaturesReady)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(["twsrft", "fcfs", "srf"]))
def test_random_mix_with_videos_ends_with_everything_answered_and_nothing_held(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    world = VideoWorld(rng.randint(8, 20), policy=policy, num_host_blocks=rng.choice([0, 24]))
    names = [f"v{n}" for n in range(4)] + [f"i{n}" for n in range(4)]

    def made(name: str, rid: str) -> ImageSource:
        return video(name, 1 + 2 * int(name[1:]), rid) if name[0] == "v" else source(name, rid, 2 + int(name[1:]))

    live: set[str] = set()
    for step in range(80):
        world.now_s += rng.random() * 0.05
        action = rng.random()
        if action < 0.35:
            rid = f"r{step}"
            live.add(rid)
            world.want(rid, *(made(name, rid) for name in rng.sample(names, rng.randint(1, 2))))
        elif action < 0.7 and world.running:
            failures = {}
            for ticket in world.running[0].tickets:
                luck = rng.random()
                if luck < 0.05:
                    failures[ticket.key] = ItemFailure(400, "broken")
                elif luck < 0.15:
                    failures[ticket.key] = ItemFailure(503, "gone", source_gone=True)
            world.finish(failures)
        elif action < 0.75 and world.restoring:
            world.finish_restore(copied=rng.random() < 0.8)
        elif action < 0.85 and live:
            rid = rng.choice(sorted(live))
            live.remove(rid)
            world.tell(FinishRequest(rid))
        elif action < 0.88:
            world.tell(DropCached())
        else:
            ready = [m.rid for m in world.sent if isinstance(m, FeaturesReady) and m.rid in live]
            if ready:
                world.tell(ReleaseFeatures(rng.choice(ready)))
    world.drain(live)
