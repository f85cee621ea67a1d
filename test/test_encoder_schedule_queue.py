"""EncodeQueue: what each call does, and what holds for every queue (under hypothesis)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceserve.encoder_schedule import POLICIES, EncodeItem, EncodeQueue, SchedulePolicy
from spaceserve.encoder_schedule.order import SLACK_REFERENCE_PATCHES

pytestmark = pytest.mark.cpu
WINDOW_S = 1.0
REF = SLACK_REFERENCE_PATCHES


def item(name: str, num_patches: int) -> EncodeItem:
    return EncodeItem(name.encode(), num_patches)


def always(rid: str) -> bool:
    return True


def keys(batch: Sequence[EncodeItem]) -> list[str]:
    return [entry.key.decode() for entry in batch]


def drain(queue: EncodeQueue) -> list[list[EncodeItem]]:
    """Encodes until nothing is pending, one batch at a time."""
    batches = []
    while len(queue):
        batch = queue.next_batch(0.0, always)
        assert batch, "something is pending and may go, but the batch is empty"
        queue.items_done(entry.key for entry in batch)
        queue.check_integrity()
        batches.append(batch)
    return batches


def queue_of(policy: SchedulePolicy, capacity: int, *requests: tuple[str, float, list[EncodeItem]]) -> EncodeQueue:
    queue = EncodeQueue(policy, WINDOW_S, capacity)
    for rid, arrival_s, items in requests:
        queue.add(rid, items, arrival_s)
    return queue


# ---- examples


def test_shortest_first_inside_a_window_and_older_windows_first() -> None:
    requests = (
        ("big", 0.1, [item("big", 90)]),
        ("small", 0.9, [item("small", 20)]),
        ("tiny", 1.0, [item("tiny", 11)]),
    )
    alone = {policy: [keys(b)[0] for b in drain(queue_of(policy, 10, *requests))] for policy in POLICIES}
    assert alone == {
        "twsrft": ["small", "big", "tiny"],
        "fcfs": ["big", "small", "tiny"],
        "srf": ["tiny", "small", "big"],
        "slack": ["big", "small", "tiny"],  # sizes of no account against the reference: as they came
    }


def test_batch_is_packed_in_order_and_skips_what_does_not_fit() -> None:
    queue = queue_of(
        "twsrft",
        10,
        ("a", 0.0, [item("a", 6)]),
        ("b", 0.0, [item("b", 7)]),
        ("c", 1.5, [item("c", 3)]),
        ("d", 1.5, [item("d", 1)]),
    )
    assert keys(queue.next_batch(2.0, always)) == ["a", "d", "c"]
    assert keys(queue.next_batch(2.0, always)) == ["b"]


def test_larger_item_runs_alone_when_its_turn_comes() -> None:
    queue = queue_of(
        "twsrft",
        10,
        ("a", 0.0, [item("a1", 5), item("a2", 25)]),
        ("b", 1.0, [item("b", 2)]),
    )
    assert [keys(b) for b in drain(queue)] == [["a1", "b"], ["a2"]]


def test_remaining_is_what_is_left_of_a_request() -> None:
    queue = queue_of(
        "srf",
        10,
        ("many", 0.0, [item("m1", 10), item("m2", 10), item("m3", 10)]),
        ("one", 0.0, [item("one", 25)]),
    )
    assert queue.remaining_patches("many") == 30
    assert keys(queue.next_batch(0.0, always)) == ["one"]
    queue.requeue([b"one"])
    queue.items_done([b"m1"])  # found ready elsewhere: 20 are left, so the request now goes first
    assert queue.remaining_patches("many") == 20
    assert [keys(b) for b in drain(queue)] == [["m2"], ["m3"], ["one"]]


def test_shared_item_is_encoded_and_charged_once() -> None:
    shared = item("shared", 8)
    queue = queue_of("fcfs", 10, ("a", 0.0, [shared]), ("b", 0.1, [shared, item("b", 2)]), ("c", 0.2, [shared]))
    assert (queue.num_requests, queue.num_items, queue.pending_patches, len(queue)) == (3, 2, 10, 2)
    assert queue.wanted(b"shared") == ("a", "b", "c")
    assert keys(queue.next_batch(0.3, always)) == ["shared", "b"]
    queue.add("d", [shared], 0.4)  # joins the one in flight
    assert len(queue) == 0
    queue.items_done([b"shared"])
    assert queue.num_requests == 1
    assert queue.wanted(b"b") == ("b",)
    queue.items_done([b"b"])
    assert (queue.num_requests, queue.num_items) == (0, 0)


def test_same_request_and_key_again_changes_nothing() -> None:
    queue = queue_of("twsrft", 10, ("a", 0.5, [item("x", 3)]))
    before = queue.snapshot(9.0)
    queue.add("a", [item("x", 3), item("x", 3)], 7.0)
    queue.add("nobody", [], 7.0)
    assert queue.snapshot(9.0) == before


def test_cancel_frees_only_what_nobody_else_wants_and_what_is_not_in_flight() -> None:
    queue = queue_of(
        "fcfs",
        10,
        ("a", 0.0, [item("running", 10), item("own", 4), item("shared", 5)]),
        ("b", 0.1, [item("shared", 5)]),
    )
    assert keys(queue.next_batch(0.2, always)) == ["running"]
    queue.cancel("a")
    queue.cancel("a")
    assert (queue.num_requests, queue.num_items, queue.pending_patches) == (1, 2, 5)
    assert queue.wanted(b"running") == ()
    queue.requeue([b"running"])  # nobody wants it: it leaves instead
    assert keys(queue.next_batch(0.2, always)) == ["shared"]
    queue.items_done([b"shared"])
    assert queue.num_items == 0


def test_item_in_flight_for_a_cancelled_request_serves_a_new_one() -> None:
    queue = queue_of("fcfs", 10, ("a", 0.0, [item("x", 10)]))
    queue.next_batch(0.0, always)
    queue.cancel("a")
    queue.add("b", [item("x", 10)], 0.1)
    assert len(queue) == 0
    queue.items_done([b"x"])
    assert queue.num_requests == 0


def test_release_is_for_one_request_alone() -> None:
    queue = queue_of("fcfs", 10, ("a", 0.0, [item("x", 3), item("y", 2)]), ("b", 0.1, [item("x", 3)]))
    queue.release("a", [b"x", b"unknown"])
    queue.release("unknown", [b"x"])
    assert queue.wanted(b"x") == ("b",)
    assert queue.remaining_patches("a") == 2
    queue.release("b", [b"x"])
    assert (queue.num_requests, queue.num_items) == (1, 1)


def test_broken_item_concerns_its_requests_and_serves_the_others() -> None:
    queue = queue_of(
        "fcfs",
        20,
        ("a", 0.0, [item("bad", 5), item("good", 5)]),
        ("b", 0.1, [item("bad", 5)]),
        ("c", 0.2, [item("fine", 5)]),
    )
    assert keys(queue.next_batch(0.3, always)) == ["bad", "good", "fine"]
    assert queue.items_failed([b"bad", b"bad", b"unknown"]) == ["a", "b"]
    assert (queue.num_requests, queue.num_items) == (2, 2)
    queue.cancel("a")
    queue.items_done([b"good", b"fine"])
    assert (queue.num_requests, queue.num_items) == (0, 0)


def test_requeued_items_come_back_to_their_old_place() -> None:
    requests = (("a", 0.0, [item("a1", 5), item("a2", 5)]), ("b", 0.1, [item("b", 10)]))
    queue = queue_of("fcfs", 10, *requests)
    first = queue.next_batch(0.2, always)
    second = queue.next_batch(0.2, always)
    queue.requeue([b"a2", b"b", b"a1", b"unknown"])
    assert (len(queue), queue.pending_patches) == (3, 20)
    assert queue.next_batch(0.3, always) == first
    assert queue.next_batch(0.3, always) == second


def test_refused_request_holds_back_younger_windows_only() -> None:
    queue = queue_of(
        "twsrft",
        10,
        ("refused", 0.0, [item("r", 2)]),
        ("peer", 0.0, [item("p", 3)]),
        ("younger", 1.0, [item("y", 1)]),
    )
    asked: list[str] = []

    def store(rid: str) -> bool:
        asked.append(rid)
        return rid != "refused"

    assert keys(queue.next_batch(1.0, store)) == ["p"]
    assert asked == ["refused", "peer"]
    assert queue.next_batch(1.0, store) == []
    assert keys(queue.next_batch(1.0, always)) == ["r", "y"]


def test_request_that_holds_room_goes_on_behind_a_refusal() -> None:
    """Its features are what the refused one waits for: holding it back would stop both for ever."""
    queue = queue_of("twsrft", 10, ("young", 5.0, [item("y1", 10), item("y2", 10)]))
    assert keys(queue.next_batch(5.0, always)) == ["y1"]
    queue.items_done([b"y1"])
    queue.add("old", [item("o", 1)], 0.0)  # a retracted request that comes back with its first arrival
    assert keys(queue.next_batch(6.0, lambda rid: rid == "young")) == ["y2"]


def test_request_that_grew_is_admitted_anew() -> None:
    queue = queue_of("twsrft", 10, ("young", 5.0, [item("y1", 10)]))
    queue.next_batch(5.0, always)
    queue.add("young", [item("y2", 10)], 5.5)
    queue.add("old", [item("o", 1)], 0.0)
    assert queue.next_batch(6.0, lambda rid: rid == "young") == [], "room for y2 must not go before the older request"


def test_passed_over_request_is_asked_for_before_a_younger_window() -> None:
    queue = queue_of(
        "twsrft",
        10,
        ("head", 0.0, [item("h", 6)]),
        ("wide", 0.0, [item("w", 7)]),  # does not fit beside the head
        ("young", 1.0, [item("y", 2)]),
    )
    asked: list[str] = []

    def store(rid: str) -> bool:
        asked.append(rid)
        return rid != "wide"

    assert keys(queue.next_batch(1.0, store)) == ["h"]
    assert asked == ["head", "wide"], "room goes to the older window first"


def test_request_served_by_others_is_not_asked_for() -> None:
    """Its only item is in the batch already: a refusal of room that it does not need must hold nobody back."""
    queue = queue_of(
        "twsrft",
        10,
        ("head", 0.0, [item("shared", 6)]),
        ("same", 0.5, [item("shared", 6)]),
        ("young", 1.0, [item("y", 2)]),
    )
    assert keys(queue.next_batch(1.0, lambda rid: rid != "same")) == ["shared", "y"]


def test_snapshot_is_json_and_complete() -> None:
    import json

    queue = queue_of("twsrft", 10, ("b", 0.0, [item("x", 9)]), ("a", 1.0, [item("y", 4), item("z", 4)]))
    queue.next_batch(2.0, always)
    snapshot = json.loads(json.dumps(queue.snapshot(3.0)))
    assert [r["rid"] for r in snapshot["requests"]] == ["a", "b"]
    assert snapshot["in_flight"] == [{"key": b"x".hex(), "num_patches": 9, "requests": ["b"], "age_s": 1.0}]
    assert (snapshot["num_items_pending"], snapshot["pending_patches"]) == (2, 8)


@pytest.mark.parametrize("arguments", [("lifo", 1.0, 1), ("twsrft", 0.0, 1), ("twsrft", math.inf, 1), ("srf", 1.0, 0)])
def test_bad_settings_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        EncodeQueue(*arguments)


def test_bad_items_are_refused_and_change_nothing() -> None:
    queue = queue_of("fcfs", 10, ("a", 0.0, [item("x", 3)]))
    before = queue.snapshot(1.0)
    with pytest.raises(ValueError, match="4 patches here and 3 elsewhere"):
        queue.add("b", [item("y", 1), item("x", 4)], 0.5)
    with pytest.raises(ValueError, match="2 patches here and 1 elsewhere"):
        queue.add("b", [item("z", 1), item("z", 2)], 0.5)
    with pytest.raises(ValueError, match="has 0 patches"):
        queue.add("b", [item("y", 1), item("z", 0)], 0.5)
    assert queue.snapshot(1.0) == before


# ---- properties

sizes = st.integers(1, 30)
capacities = st.integers(1, 40)
policies = st.sampled_from(POLICIES)
# Requests as (arrival, item numbers); item number n is the same item for all who have it, of size SIZES[n].
arrivals = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def workloads(draw: st.DrawFn, max_requests: int = 12) -> list[tuple[str, float, list[EncodeItem]]]:
    item_sizes = draw(st.lists(sizes, min_size=1, max_size=15))
    indices = st.lists(st.integers(0, len(item_sizes) - 1), min_size=1, max_size=4)
    drawn = draw(st.lists(st.tuples(arrivals, indices), min_size=1, max_size=max_requests))
    return [
        (f"r{i}", arrival_s, [item(f"i{j}", item_sizes[j]) for j in own]) for i, (arrival_s, own) in enumerate(drawn)
    ]


@given(policies, capacities, workloads())
def test_everything_is_encoded_once_within_capacity(policy: SchedulePolicy, capacity: int, work: Any) -> None:
    queue = queue_of(policy, capacity, *work)
    batches = drain(queue)
    encoded = [entry for batch in batches for entry in batch]
    assert sorted(keys(encoded)) == sorted({entry.key.decode() for _, _, items in work for entry in items})
    for batch in batches:
        assert len(batch) == 1 or sum(entry.num_patches for entry in batch) <= capacity
    assert (queue.num_requests, queue.num_items, queue.pending_patches) == (0, 0, 0)


@given(policies, capacities, workloads())
def test_work_conservation(policy: SchedulePolicy, capacity: int, work: Any) -> None:
    """No item is left out that would have fitted, and none that could go is left while the encoder idles."""
    queue = queue_of(policy, capacity, *work)
    pending = {entry.key: entry for _, _, items in work for entry in items}
    while pending:
        batch = queue.next_batch(9.0, always)
        assert batch
        for entry in batch:
            del pending[entry.key]
        left = capacity - sum(entry.num_patches for entry in batch)
        assert all(entry.num_patches > left for entry in pending.values())
    assert queue.next_batch(9.0, always) == []


@given(policies, capacities, workloads(), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_the_order_of_insertion(
    policy: SchedulePolicy, capacity: int, work: Any, random: Any
) -> None:
    shuffled = random.sample(work, len(work))
    assert drain(queue_of(policy, capacity, *work)) == drain(queue_of(policy, capacity, *shuffled))


@given(st.lists(st.tuples(arrivals, sizes), min_size=1, max_size=20))
def test_order_of_service(work: list[tuple[float, int]]) -> None:
    """One image each, batches of one: the order is the policy's, ties by arrival, then request id."""
    requests = [
        (f"r{i:02d}", arrival_s, [item(f"r{i:02d}", size * REF // 20)]) for i, (arrival_s, size) in enumerate(work)
    ]
    expected: dict[str, list[tuple[Any, ...]]] = {
        "twsrft": sorted((math.floor(t / WINDOW_S), i[0].num_patches, t, rid) for rid, t, i in requests),
        "srf": sorted((i[0].num_patches, t, rid) for rid, t, i in requests),
        "fcfs": sorted((t, rid) for rid, t, _ in requests),
        "slack": sorted((t + WINDOW_S * i[0].num_patches / REF, i[0].num_patches, t, rid) for rid, t, i in requests),
    }
    for policy in POLICIES:
        served = [keys(batch) for batch in drain(queue_of(policy, 1, *requests))]
        assert served == [[str(key[-1])] for key in expected[policy]]


@given(capacities, workloads(), workloads())
def test_younger_windows_do_not_change_what_older_ones_get(capacity: int, old: Any, young: Any) -> None:
    """Theorem 1 of docs/twsrft.md: filling a batch up with younger windows never delays an older one."""
    later = [
        (f"y{rid}", arrival_s + 5.0, [item(f"y{e.key.decode()}", e.num_patches) for e in i])
        for rid, arrival_s, i in young
    ]
    alone = queue_of("twsrft", capacity, *old)
    both = queue_of("twsrft", capacity, *old, *later)
    while len(alone):
        expected, batch = alone.next_batch(9.0, always), both.next_batch(9.0, always)
        assert [entry for entry in batch if not entry.key.startswith(b"y")] == expected
        alone.items_done(entry.key for entry in expected)
        both.items_done(entry.key for entry in batch)


def most_batches(items: dict[bytes, int], capacity: int) -> int:
    """Theorem 2: ceil(2 V / C) forwards empty the windows up to one; larger items weigh C."""
    return -(-2 * sum(min(size, capacity) for size in items.values()) // capacity)


@given(capacities, workloads(), st.lists(st.lists(sizes, max_size=5), max_size=60))
def test_starvation_bound_in_forwards(capacity: int, work: Any, adversary: list[list[int]]) -> None:
    """Once its window is over a request waits ceil(2 V / C) forwards at most, whatever arrives after it."""
    queue = queue_of("twsrft", capacity, *work)
    for window in range(5):
        items = {e.key: e.num_patches for _, t, i in work if t < window + 1 for e in i if queue.wanted(e.key)}
        bound = most_batches(items, capacity)
        forwards = 0
        while any(queue.wanted(key) for key in items):
            smalls = adversary.pop() if adversary else []
            queue.add(f"late{len(adversary)}", [item(f"l{len(adversary)}/{i}", s) for i, s in enumerate(smalls)], 50.0)
            batch = queue.next_batch(50.0, always)
            queue.items_done(entry.key for entry in batch)
            forwards += 1
            assert forwards <= bound


@given(capacities, workloads(max_requests=20), st.sampled_from([0.05, 0.3, 1.0]))
@settings(max_examples=200)
def test_starvation_bound_in_windows(capacity: int, work: Any, forward_s: float) -> None:
    """Theorem 3: f_j <= max(f_(j-1), (j + 1) W + tau) + ceil(2 V_j / C) tau, on a clock, with one encoder."""
    bound_s, f_s = {}, 0.0
    for window in range(5):
        own = {e.key: e.num_patches for _, t, i in work if math.floor(t / WINDOW_S) == window for e in i}
        f_s = max(f_s, (window + 1) * WINDOW_S + forward_s) + most_batches(own, capacity) * forward_s
        bound_s[window] = f_s

    queue = EncodeQueue("twsrft", WINDOW_S, capacity)
    coming = sorted(work, key=lambda request: request[1])
    arrived: dict[str, float] = {}
    now_s = 0.0
    while coming or arrived:
        while coming and coming[0][1] <= now_s:
            rid, arrival_s, items = coming.pop(0)
            queue.add(rid, items, arrival_s)
            arrived[rid] = arrival_s
        batch = queue.next_batch(now_s, always)
        if not batch:
            now_s = coming[0][1]
            continue
        now_s += forward_s
        queue.items_done(entry.key for entry in batch)
        for rid in [rid for rid in arrived if not queue.remaining_patches(rid)]:
            assert now_s <= bound_s[math.floor(arrived.pop(rid) / WINDOW_S)] + 1e-9


@given(capacities, st.lists(st.tuples(arrivals, sizes), min_size=1, max_size=20), st.tuples(arrivals, sizes))
def test_slack_bounds_who_overtakes(capacity: int, others: list[tuple[float, int]], own: tuple[float, int]) -> None:
    """Slack order: in batches of one, whoever goes before r came before r's arrival + slack(r) - slack(its own)."""
    unit = REF // 10
    requests = [(f"o{i}", t, [item(f"o{i}", n * unit)]) for i, (t, n) in enumerate(others)]
    requests.append(("r", own[0], [item("r", own[1] * unit)]))
    served = [keys(batch)[0] for batch in drain(queue_of("slack", 1, *requests))]
    before = served[: served.index("r")]
    for rid, arrival_s, items in requests[:-1]:
        slack_s = (own[1] * unit - items[0].num_patches) / REF * WINDOW_S
        assert (rid not in before) or arrival_s <= own[0] + slack_s + 1e-9
        assert (rid in before) or arrival_s >= own[0] + slack_s - 1e-9


@given(
    st.sampled_from(["twsrft", "slack", "fcfs"]),
    capacities,
    workloads(),
    st.lists(st.lists(sizes, max_size=5), max_size=60),
)
def test_every_bounded_policy_withstands_an_adversary(
    policy: SchedulePolicy, capacity: int, work: Any, adversary: list[list[int]]
) -> None:
    """Theorem 2 for them all: what comes after every window of the work is over cannot delay it."""
    queue = queue_of(policy, capacity, *work)
    items = {e.key: e.num_patches for _, _, i in work for e in i}
    forwards = 0
    while any(queue.wanted(key) for key in items):
        smalls = adversary.pop() if adversary else []
        queue.add(f"late{len(adversary)}", [item(f"l{len(adversary)}/{i}", s) for i, s in enumerate(smalls)], 50.0)
        queue.items_done(entry.key for entry in queue.next_batch(50.0, always))
        forwards += 1
        assert forwards <= most_batches(items, capacity)


def served_against_a_stream_of_small(policy: SchedulePolicy, num_forwards: int) -> bool:
    """Whether a large image is encoded while a small one arrives with each forward, half a window long."""
    queue = queue_of(policy, REF, ("large", 0.0, [item("large", REF)]))
    for forward in range(num_forwards):
        now_s = forward / 2
        queue.add(f"s{forward}", [item(f"s{forward}", REF // 10)], now_s)
        batch = queue.next_batch(now_s, always)
        if keys(batch) == ["large"]:
            return True
        queue.items_done(entry.key for entry in batch)
    return False


def test_srf_starves_where_twsrft_keeps_its_bound() -> None:
    assert served_against_a_stream_of_small("fcfs", 1)
    assert served_against_a_stream_of_small("twsrft", 3)  # behind its own window's two small ones, no others
    assert served_against_a_stream_of_small("slack", 3)  # 1 s of slack against 0.1 s: behind those of 0 and 0.5 s
    assert not served_against_a_stream_of_small("srf", 1_000)
