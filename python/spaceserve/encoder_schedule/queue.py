"""What is still to encode, and in which order: the encoder worker's queue.

A request wants items (images, pieces of a video); an item, known by the digest of its content, is encoded once
whoever wants it. An item is pending until `next_batch` picks it, in flight until `items_done`, `items_failed` or
`requeue` names it. `order` decides which request comes first.

Three structures keep every call cheap: dicts for look-up, one sorted list of request keys (bisect, so a change of
position is a search and a short memmove), and a sorted list of pending sizes whose first tells when to stop looking.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spaceserve.encoder_schedule.order import OrderKey, RequestOrder, SchedulePolicy


@dataclass(frozen=True)
class EncodeItem:
    """One image or one piece of a video."""

    key: bytes  # digest of the content: equal keys are the same features
    num_patches: int


@dataclass
class _Request:
    rid: str
    arrival_s: float
    window: float
    items: dict[bytes, EncodeItem] = field(default_factory=dict)  # not done yet, in the request's own order
    pending_patches: int = 0  # of the items that are not in flight
    smallest_patches: int = 0  # no item is smaller; may lie below the true minimum once items are done
    reserved: bool = False  # the feature store last said yes for all the items it has now
    key: OrderKey | None = None  # position in the order; None while nothing is pending


@dataclass
class _ItemState:
    item: EncodeItem
    requests: dict[str, _Request] = field(default_factory=dict)  # who wants it, in order of arrival in the queue
    started_s: float | None = None  # when it was picked; None while pending


class EncodeQueue:
    """Items to encode, ordered by policy. Not thread-safe: one thread owns it, and callbacks must not call back."""

    def __init__(self, policy: SchedulePolicy, window_s: float, batch_capacity_patches: int) -> None:
        """window_s matters for TWSRFT and slack order. Raises ValueError for a bad policy, window or capacity."""
        if batch_capacity_patches < 1:
            raise ValueError(f"batch capacity must be at least one patch, not {batch_capacity_patches}")
        self._request_order = RequestOrder(policy, window_s)
        self._capacity_patches = batch_capacity_patches
        self._requests: dict[str, _Request] = {}
        self._items: dict[bytes, _ItemState] = {}
        self._order: list[OrderKey] = []  # sorted; exactly the requests with something pending
        self._pending_sizes: list[int] = []  # sorted patches of the pending items
        self._pending_patches = 0

    # ---- what enters and leaves

    def add(self, rid: str, items: Sequence[EncodeItem], now_s: float) -> None:
        """Request rid wants these items encoded; now_s is its time of arrival.

        Items it already wants are ignored, and a request that is still here keeps its first arrival and window: give
        all its items in one call, as growing may also make two requests wait for room that the other holds. One that
        comes back (retracted, features gone) takes the arrival given now: pass the first one to keep its place.

        Raises ValueError, with nothing changed, for an item without patches or for a key known with another size.
        """
        known: dict[bytes, EncodeItem] = {}
        for item in items:
            if item.num_patches < 1:
                raise ValueError(f"item {item.key.hex()} of request {rid} has {item.num_patches} patches")
            state = self._items.get(item.key)
            other = state.item if state else known.get(item.key, item)
            if other != item:
                raise ValueError(
                    f"item {item.key.hex()} has {item.num_patches} patches here and {other.num_patches} elsewhere"
                )
            known[item.key] = item
        request = self._requests.get(rid)
        if request is None:
            if not known:
                return
            window = self._request_order.window(now_s, sum(item.num_patches for item in known.values()))
            request = _Request(rid, arrival_s=now_s, window=window)
            self._requests[rid] = request
        for item in known.values():
            if item.key not in request.items:
                self._want(request, item)
        self._reposition(request)

    def mark_reserved(self, rid: str) -> None:
        """The feature store holds room for all that remains of request rid, items added since it was asked included.

        Such a request goes on while older windows are refused: it would otherwise hold what they wait for.
        """
        request = self._requests.get(rid)
        if request is not None:
            request.reserved = True

    def cancel(self, rid: str) -> None:
        """Request rid wants nothing any more (aborted, finished). Unknown requests are ignored.

        Its items leave unless another request wants them; one in flight stays known until the worker reports it.
        """
        request = self._requests.get(rid)
        if request is not None:
            self.release(rid, list(request.items))

    def release(self, rid: str, keys: Iterable[bytes]) -> None:
        """Request rid alone needs these items no longer, for instance because its RadixCache prefix holds them."""
        request = self._requests.get(rid)
        if request is None:
            return
        for key in keys:
            if key not in request.items:
                continue
            state = self._items[key]
            self._unwant(request, state)
            if not state.requests and state.started_s is None:
                self._forget(state)
        self._settle(request)

    def items_done(self, keys: Iterable[bytes]) -> None:
        """These items have features: encoded now, or found ready elsewhere while pending. Unknown keys are ignored."""
        self._drop(keys)

    def items_failed(self, keys: Iterable[bytes]) -> list[str]:
        """These items cannot be encoded. Returns the requests that wanted them, once each.

        Their other items stay: whoever serves the request decides, and calls `cancel`. Unknown keys are ignored.
        """
        return self._drop(keys)

    def requeue(self, keys: Iterable[bytes]) -> None:
        """Items in flight become pending again in their old places (worker restart). Other keys are ignored.

        Those that nobody wants any more leave.
        """
        for key in keys:
            state = self._items.get(key)
            if state is None or state.started_s is None:
                continue
            if state.requests:
                self._set_pending(state)
            else:
                del self._items[key]

    def next_batch(self, now_s: float, try_reserve: Callable[[str], bool]) -> list[EncodeItem]:
        """Picks the items of the next forward and marks them in flight; empty where nothing may go.

        Requests are looked at in order. Each gives the items that still fit; what does not fit is skipped, so later
        requests fill what is left, but never take the place of an item ahead of them. The batch holds at most the
        capacity; a larger item runs alone, when it is the first that may go.

        try_reserve(rid) asks the feature store for room for all that remains of the request, all or nothing and
        idempotent; it must not call into this queue. Room is handed out in order of windows: once a request is
        refused, only its own window and requests which already hold room go on. A request that is passed over
        because nothing of it fits is therefore asked for before a younger window is admitted. A request whose items
        are all picked, or in flight, on behalf of others is not asked for.

        now_s only dates the items (see `snapshot`): whoever is pending may go, in an open window too.
        """
        batch: dict[bytes, EncodeItem] = {}
        left_patches = self._capacity_patches
        refused_window: float | None = None
        passed_over: list[_Request] = []  # hold no room, none of their items fits

        for order_key in self._order:
            if batch and left_patches < self._pending_sizes[0]:
                break
            request = self._requests[order_key.rid]
            if refused_window is not None and request.window > refused_window and not request.reserved:
                continue
            if batch and request.smallest_patches > left_patches:
                if not request.reserved:
                    passed_over.append(request)
                continue
            picked = self._pick(request, batch, left_patches)
            if not picked:
                if not request.reserved:
                    passed_over.append(request)
                continue
            if not request.reserved and refused_window is None:
                while passed_over and passed_over[0].window < request.window:
                    elder = passed_over.pop(0)
                    if not self._unpicked(elder, batch):
                        continue
                    elder.reserved = try_reserve(elder.rid)
                    if not elder.reserved:
                        refused_window = elder.window
                        break
                if refused_window is not None:
                    continue
            request.reserved = try_reserve(request.rid)
            if not request.reserved:
                if refused_window is None:
                    refused_window = request.window
                continue
            for item in picked:
                batch[item.key] = item
                left_patches -= item.num_patches
            if left_patches <= 0:
                break

        for key in batch:
            self._set_in_flight(self._items[key], now_s)
        return list(batch.values())

    # ---- what one can see

    @property
    def batch_capacity_patches(self) -> int:
        """Most patches in one forward, but for a single larger item."""
        return self._capacity_patches

    def __len__(self) -> int:
        """Items pending: what `next_batch` may still pick."""
        return len(self._pending_sizes)

    @property
    def num_requests(self) -> int:
        """Requests with something pending or in flight."""
        return len(self._requests)

    @property
    def num_items(self) -> int:
        """Items pending or in flight, each once."""
        return len(self._items)

    @property
    def pending_patches(self) -> int:
        """Patches of the pending items, each once however many requests want it."""
        return self._pending_patches

    def wanted(self, key: bytes) -> tuple[str, ...]:
        """Requests that want this item, in the order in which they asked; empty for an unknown key."""
        state = self._items.get(key)
        return tuple(state.requests) if state else ()

    def remaining_patches(self, rid: str) -> int:
        """Patches of the request that are not done, in flight included; 0 for an unknown request."""
        request = self._requests.get(rid)
        return sum(item.num_patches for item in request.items.values()) if request else 0

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """State as plain JSON types for a debug endpoint; requests in the order of service, then those in flight."""
        in_order = [self._requests[key.rid] for key in self._order]
        waiting = [request for request in self._requests.values() if request.key is None]
        return {
            "policy": self._request_order.policy,
            "window_s": self._request_order.window_s,
            "batch_capacity_patches": self._capacity_patches,
            "num_requests": self.num_requests,
            "num_items_pending": len(self),
            "num_items_in_flight": self.num_items - len(self),
            "pending_patches": self._pending_patches,
            "requests": [
                {
                    "rid": request.rid,
                    "window": request.window,
                    "age_s": now_s - request.arrival_s,
                    "remaining_patches": self.remaining_patches(request.rid),
                    "pending_patches": request.pending_patches,
                    "reserved": request.reserved,
                }
                for request in in_order + waiting
            ],
            "in_flight": [
                {
                    "key": state.item.key.hex(),
                    "num_patches": state.item.num_patches,
                    "requests": list(state.requests),
                    "age_s": now_s - state.started_s,
                }
                for state in self._items.values()
                if state.started_s is not None
            ],
        }

    def check_integrity(self) -> None:
        """Asserts that all that is kept twice agrees. Costs a pass over everything: for tests and idle moments."""
        pending = [state for state in self._items.values() if state.started_s is None]
        assert self._pending_sizes == sorted(state.item.num_patches for state in pending)
        assert self._pending_patches == sum(self._pending_sizes)
        assert self._order == sorted(r.key for r in self._requests.values() if r.key is not None)
        for rid, request in self._requests.items():
            assert request.rid == rid
            assert request.items, "a request with nothing remaining must leave"
            own = [item.num_patches for key, item in request.items.items() if self._items[key].started_s is None]
            assert request.pending_patches == sum(own)
            assert request.smallest_patches <= min(item.num_patches for item in request.items.values())
            expected = (
                self._request_order.key(rid, request.window, request.arrival_s, request.pending_patches)
                if own
                else None
            )
            assert request.key == expected
            assert all(self._items[key].requests.get(rid) is request for key in request.items)
        for key, state in self._items.items():
            assert state.item.key == key
            assert state.requests or state.started_s is not None, "a pending item that nobody wants must leave"
            assert all(key in request.items for request in state.requests.values())

    # ---- inside

    def _unpicked(self, request: _Request, batch: dict[bytes, EncodeItem]) -> list[EncodeItem]:
        """Pending items of the request that are not in the batch yet, in the request's own order."""
        return [item for key, item in request.items.items() if key not in batch and self._items[key].started_s is None]

    def _pick(self, request: _Request, batch: dict[bytes, EncodeItem], left_patches: int) -> list[EncodeItem]:
        """Items of the request that may join the batch."""
        picked: list[EncodeItem] = []
        for item in self._unpicked(request, batch):
            if item.num_patches <= left_patches:
                picked.append(item)
                left_patches -= item.num_patches
            elif not batch and not picked:
                return [item]  # the batch is empty, so the item is larger than the capacity: it runs alone
        return picked

    def _want(self, request: _Request, item: EncodeItem) -> None:
        state = self._items.get(item.key)
        if state is None:
            state = self._items[item.key] = _ItemState(item)
            self._count(item, +1)
        state.requests[request.rid] = request
        request.smallest_patches = (
            min(request.smallest_patches, item.num_patches) if request.items else item.num_patches
        )
        request.items[item.key] = item
        request.reserved = False  # room for the new item has not been asked for
        if state.started_s is None:
            request.pending_patches += item.num_patches

    def _unwant(self, request: _Request, state: _ItemState) -> None:
        """Parts request and item; the caller settles the request and forgets the item."""
        del request.items[state.item.key]
        del state.requests[request.rid]
        if state.started_s is None:
            request.pending_patches -= state.item.num_patches

    def _drop(self, keys: Iterable[bytes]) -> list[str]:
        """Takes the items out of every request and of the queue; returns the requests that wanted them."""
        concerned: dict[str, None] = {}
        for key in keys:
            state = self._items.get(key)
            if state is None:
                continue
            for request in list(state.requests.values()):
                concerned[request.rid] = None
                self._unwant(request, state)
                self._settle(request)
            self._forget(state)
        return list(concerned)

    def _forget(self, state: _ItemState) -> None:
        del self._items[state.item.key]
        if state.started_s is None:
            self._count(state.item, -1)

    def _set_in_flight(self, state: _ItemState, now_s: float) -> None:
        state.started_s = now_s
        self._count(state.item, -1)
        for request in state.requests.values():
            request.pending_patches -= state.item.num_patches
            self._reposition(request)

    def _set_pending(self, state: _ItemState) -> None:
        state.started_s = None
        self._count(state.item, +1)
        for request in state.requests.values():
            request.pending_patches += state.item.num_patches
            self._reposition(request)

    def _count(self, item: EncodeItem, sign: int) -> None:
        """Enters an item among the pending ones (+1) or takes it out (-1)."""
        self._pending_patches += sign * item.num_patches
        if sign > 0:
            insort(self._pending_sizes, item.num_patches)
        else:
            del self._pending_sizes[bisect_left(self._pending_sizes, item.num_patches)]

    def _settle(self, request: _Request) -> None:
        """Puts the request where it belongs after it lost items, or lets it leave."""
        if not request.items:
            del self._requests[request.rid]
        self._reposition(request)

    def _reposition(self, request: _Request) -> None:
        key = None
        if request.pending_patches > 0:
            key = self._request_order.key(request.rid, request.window, request.arrival_s, request.pending_patches)
        if key == request.key:
            return
        if request.key is not None:
            del self._order[bisect_left(self._order, request.key)]
        if key is not None:
            insort(self._order, key)
        request.key = key
