"""EncodeQueue against a plain model, through any sequence of calls, with a feature store that runs out of room."""

from __future__ import annotations

import copy
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spaceserve.encoder_schedule import POLICIES, EncodeItem, EncodeQueue, SchedulePolicy
from spaceserve.encoder_schedule.order import SLACK_REFERENCE_PATCHES

pytestmark = pytest.mark.cpu
UNIT = SLACK_REFERENCE_PATCHES // 10  # so that the slack of these sizes is of the order of a window
SIZES = [n * UNIT for n in (1, 2, 3, 4, 6, 9, 14, 40)]
ITEMS = [EncodeItem(bytes([i]), size) for i, size in enumerate(SIZES)]
RIDS = [f"r{i}" for i in range(7)]
WINDOW_S = 1.0
indices = st.integers(0, len(ITEMS) - 1)


class Store:
    """Room in patches; all of a request or nothing. A shared item takes room once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[str, set[EncodeItem]] = {}

    def try_reserve(self, rid: str, remaining: set[EncodeItem]) -> bool:
        others = set().union(*(items for other, items in self.held.items() if other != rid))
        if sum(item.num_patches for item in others | remaining) > self.room:
            self.held.pop(rid, None)
            return False
        self.held[rid] = remaining
        return True


class Model:
    """What the queue should hold, kept in the most obvious way."""

    def __init__(self, policy: SchedulePolicy, capacity: int, room: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.store = Store(room)
        self.arrival_s: dict[str, float] = {}
        self.first_patches: dict[str, int] = {}  # of the request when it came
        self.wants: dict[str, list[EncodeItem]] = {}
        self.in_flight: list[EncodeItem] = []
        self.reserved: set[str] = set()

    def pending_of(self, rid: str) -> list[EncodeItem]:
        return [item for item in self.wants[rid] if item not in self.in_flight]

    def pending(self) -> set[EncodeItem]:
        return {item for rid in self.wants for item in self.pending_of(rid)}

    def window(self, rid: str) -> float:
        arrival_s = self.arrival_s[rid]
        slack_s = WINDOW_S * self.first_patches[rid] / SLACK_REFERENCE_PATCHES
        windows = {
            "twsrft": math.floor(arrival_s / WINDOW_S),
            "slack": arrival_s + slack_s,
            "fcfs": arrival_s,
            "srf": 0,
        }
        return windows[self.policy]

    def drop(self, rid: str, item: EncodeItem) -> None:
        if item in self.wants.get(rid, []):
            self.wants[rid].remove(item)
        self.leave()

    def leave(self) -> None:
        for rid in [rid for rid, items in self.wants.items() if not items]:
            del self.wants[rid], self.arrival_s[rid], self.first_patches[rid]
            self.store.held.pop(rid, None)
            self.reserved.discard(rid)

    def try_reserve(self, rid: str) -> bool:
        granted = self.store.try_reserve(rid, set(self.wants[rid]))
        (self.reserved.add if granted else self.reserved.discard)(rid)
        return granted

    def next_batch(self) -> list[EncodeItem]:
        """The rule of docs/twsrft.md, without any of the queue's shortcuts."""
        batch: list[EncodeItem] = []
        refused: float | None = None
        passed_over: list[str] = []

        def key(rid: str) -> tuple[float, int, float, str]:
            patches = 0 if self.policy == "fcfs" else sum(item.num_patches for item in self.pending_of(rid))
            return self.window(rid), patches, self.arrival_s[rid], rid

        for rid in sorted((rid for rid in self.wants if self.pending_of(rid)), key=key):
            if refused is not None and self.window(rid) > refused and rid not in self.reserved:
                continue
            chosen: list[EncodeItem] = []
            for item in self.pending_of(rid):
                used = sum(other.num_patches for other in batch + chosen)
                if item not in batch and (used + item.num_patches <= self.capacity or not used):
                    chosen.append(item)
            if not chosen:
                passed_over.append(rid)
                continue
            if rid not in self.reserved and refused is None:
                for elder in passed_over:
                    waits = elder not in self.reserved and any(item not in batch for item in self.pending_of(elder))
                    if waits and self.window(elder) < self.window(rid) and not self.try_reserve(elder):
                        refused = self.window(elder)
                        break
                if refused is not None:
                    continue
            if self.try_reserve(rid):
                batch += chosen
            elif refused is None:
                refused = self.window(rid)
        return batch


class QueueMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(POLICIES), capacity=st.integers(1, 16), room=st.integers(26, 120))
    def start(self, policy: SchedulePolicy, capacity: int, room: int) -> None:
        self.queue = EncodeQueue(policy, WINDOW_S, capacity * UNIT)
        self.model = Model(policy, capacity * UNIT, room * UNIT)
        self.now_s = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(rid=st.sampled_from(RIDS), wanted=st.lists(indices, max_size=4))
    def add(self, rid: str, wanted: list[int]) -> None:
        model, items = self.model, [ITEMS[i] for i in wanted]
        self.queue.add(rid, items, self.now_s)
        if items:
            if rid not in model.wants:
                model.arrival_s[rid] = self.now_s
                model.first_patches[rid] = sum(item.num_patches for item in set(items))
            for item in items:
                if item not in model.wants.setdefault(rid, []):
                    model.wants[rid].append(item)
                    model.reserved.discard(rid)

    @rule(rid=st.sampled_from(RIDS))
    def cancel(self, rid: str) -> None:
        self.queue.cancel(rid)
        for item in list(self.model.wants.get(rid, [])):
            self.model.drop(rid, item)

    @rule(rid=st.sampled_from(RIDS), which=st.lists(indices, max_size=2))
    def release(self, rid: str, which: list[int]) -> None:
        self.queue.release(rid, [ITEMS[i].key for i in which])
        for i in which:
            self.model.drop(rid, ITEMS[i])

    @rule()
    def next_batch(self) -> None:
        reference = copy.deepcopy(self.model)
        expected = reference.next_batch()
        pending = self.model.pending()
        batch = self.queue.next_batch(self.now_s, self.model.try_reserve)
        assert batch == expected
        assert self.model.store.held == reference.store.held, "room was asked for differently"
        assert len(batch) == len(set(batch)), "encoded twice"
        assert set(batch) <= pending, "not wanted, or in flight already"
        assert len(batch) == 1 or sum(item.num_patches for item in batch) <= self.model.capacity
        self.model.in_flight += batch

    @rule(which=st.sets(indices, max_size=3))
    def done(self, which: set[int]) -> None:
        """Encoded if in flight; found ready elsewhere if pending; unknown otherwise."""
        self.queue.items_done([ITEMS[i].key for i in which])
        self.gone([ITEMS[i] for i in which])

    @rule(which=st.lists(indices, max_size=2))
    def failed(self, which: list[int]) -> None:
        items = [ITEMS[i] for i in which]
        concerned = {rid for rid, wants in self.model.wants.items() if set(wants) & set(items)}
        reported = self.queue.items_failed([item.key for item in items])
        assert len(reported) == len(set(reported))
        assert set(reported) == concerned
        self.gone(items)

    def gone(self, items: list[EncodeItem]) -> None:
        for item in items:
            for rid in list(self.model.wants):
                self.model.drop(rid, item)
            if item in self.model.in_flight:
                self.model.in_flight.remove(item)

    @precondition(lambda self: self.model.in_flight)
    @rule(which=st.sets(indices, min_size=1))
    def requeue(self, which: set[int]) -> None:
        self.queue.requeue([ITEMS[i].key for i in which])
        for i in which:
            if ITEMS[i] in self.model.in_flight:
                self.model.in_flight.remove(ITEMS[i])

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue, model = self.queue, self.model
        queue.check_integrity()
        pending = model.pending()
        assert len(queue) == len(pending)
        assert queue.pending_patches == sum(item.num_patches for item in pending)
        assert queue.num_requests == len(model.wants)
        assert queue.num_items == len(pending) + len(model.in_flight)
        for item in ITEMS:
            assert set(queue.wanted(item.key)) == {rid for rid, wants in model.wants.items() if item in wants}
        for rid in RIDS:
            assert queue.remaining_patches(rid) == sum(item.num_patches for item in model.wants.get(rid, []))

    def teardown(self) -> None:
        """Whatever happened, all that is wanted gets encoded, as long as the largest request fits the store."""
        if not hasattr(self, "queue"):
            return
        self.model.store.room = max(self.model.store.room, sum(SIZES))
        self.gone(list(self.model.in_flight))
        self.queue.items_done([item.key for item in ITEMS if item not in self.model.pending()])
        while len(self.queue):
            batch = self.queue.next_batch(self.now_s, self.model.try_reserve)
            assert batch, "the queue is stuck"
            self.queue.items_done([item.key for item in batch])
            self.gone(batch)
        assert self.queue.num_requests == 0
        assert self.queue.num_items == 0


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
