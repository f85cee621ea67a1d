"""The gate: which requests of SGLang's waiting queue may be prefilled, and what the encoder worker is told of them.

A request with images may go when every image that its prefill will touch is either in the RadixCache (its tokens lie
before the matched prefix) or in the slab, held for this request. The RadixCache is asked in the same scheduling pass
that admits the request, so a prefix that vanished is noticed: the request then waits for its features instead.

Every rank of a scheduler runs the same gate over the same messages in the same order, so all decide alike; only the
entry rank has a link to the worker and a clock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from spaceserve import shared_memory
from spaceserve.messages import (
    DropCached,
    EncodeRequest,
    FeaturesFailed,
    FeaturesReady,
    FinishRequest,
    ImageSource,
    RadixHint,
    ReleaseFeatures,
    ToScheduler,
    ToWorker,
    WorkerDown,
    WorkerUp,
)
from spaceserve.scheduler.feature_view import FeatureView
from spaceserve.scheduler.tracking import (
    ASKED_KEY,
    OWNER_KEY,
    SOURCE_KEY,
    AnswersExpired,
    Phase,
    TrackedImage,
    TrackedRequest,
    rid_of,
    worker_id,
)
from spaceserve.slab import Slab, SlabHandle

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from spaceserve.feature_store.metrics import FeatureStoreMetrics
    from spaceserve.scheduler.link import EncoderLink

logger = logging.getLogger(__name__)

MAX_TRIES = 2
# Requests made of one (parallel sampling) share the file of an image and end one by one: keep it a little longer.
SEGMENT_GRACE_S = 10.0
# Answers for requests that have not reached the scheduler yet are kept this long.
EARLY_ANSWER_S = 60.0


class EncoderGate:
    """See the module's docstring. `attach` gives it the scheduler once that exists."""

    def __init__(
        self,
        view: FeatureView,
        link: EncoderLink | None,
        timeout_s: float,
        metrics: FeatureStoreMetrics | None = None,
    ) -> None:
        self._view = view
        self._link = link
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._scheduler: Any = None
        self._slab: Slab | None = None
        self._epoch = -1
        self._down_reason: str | None = None
        self._tracked: dict[str, TrackedRequest] = {}  # by rid
        self._by_worker_id: dict[str, TrackedRequest] = {}
        self._num_tracked_ever = 0
        self._early: dict[str, tuple[ToScheduler, float]] = {}
        self._segment_users: dict[str, int] = {}
        self._ended_segments: deque[tuple[float, str]] = deque()
        self._radix_keys: dict[int, bytes] = {}  # pad value -> key of images whose tokens the RadixCache was given
        self.num_ready = 0  # requests that the last pass could have admitted and did not
        self.in_pass = False  # SGLang's scheduling pass is running: nothing may enter its queue now
        self.num_elided = 0

    def attach(self, scheduler: Any) -> None:
        """Called by the hook on the scheduler's construction."""
        self._scheduler = scheduler

    @property
    def num_tracked(self) -> int:
        """Requests with images that have not ended."""
        return len(self._tracked)

    def summary(self) -> str:
        """State in the style of SGLang's log lines."""
        num_waiting = sum(tracked.is_waiting_for_features for tracked in self._tracked.values())
        return (
            f"#image-req: {self.num_tracked}, #feature-wait-req: {num_waiting}, #held-feature: {len(self._view)}, "
            f"#elided-encode: {self.num_elided}"
        )

    # ---- the entry rank's input

    def incoming(self) -> list[ToScheduler | AnswersExpired]:
        """Messages for all ranks, from the worker and from this rank's clock; empty on other ranks."""
        if self._link is None:
            return []
        messages: list[ToScheduler | AnswersExpired] = list(self._link.drain())
        now_s = time.monotonic()
        for tracked in self._tracked.values():
            overdue = tracked.phase is Phase.WAITING and tracked.failure is None
            if overdue and tracked.is_waiting_for_features and now_s - tracked.since_s > self._timeout_s:
                reason = f"the image was not encoded within {self._timeout_s:g} s"
                messages.append(
                    FeaturesFailed(tracked.worker_id, -1, self._epoch, HTTPStatus.SERVICE_UNAVAILABLE, reason)
                )
        expired = [identity for identity, (_, came_s) in self._early.items() if now_s - came_s > EARLY_ANSWER_S]
        if expired:
            messages.append(AnswersExpired(expired))
        self._unlink_segments(now_s)
        return messages

    def _unlink_segments(self, now_s: float) -> None:
        while self._ended_segments and now_s - self._ended_segments[0][0] > SEGMENT_GRACE_S:
            _, segment = self._ended_segments.popleft()
            if segment not in self._segment_users:
                shared_memory.unlink(segment)

    def _send(self, message: ToWorker) -> None:
        if self._link is not None:
            self._link.send(message)

    # ---- messages, the same on all ranks

    def on_message(self, message: ToScheduler | AnswersExpired) -> None:
        """Take in one message of the encoder worker, or of the entry rank's clock."""
        if isinstance(message, AnswersExpired):
            for identity in message.worker_ids:
                if self._early.pop(identity, None) is not None:
                    self._send(FinishRequest(identity))
        elif isinstance(message, WorkerUp):
            self._on_worker_up(message)
        elif isinstance(message, WorkerDown):
            self._down_reason = message.reason
            for tracked in self._tracked.values():
                if tracked.phase is Phase.WAITING and tracked.is_waiting_for_features:
                    self._fail(tracked, HTTPStatus.SERVICE_UNAVAILABLE, message.reason)
        else:
            tracked_request = self._by_worker_id.get(message.rid)
            if tracked_request is None:
                self._early[message.rid] = (message, time.monotonic())
            elif isinstance(message, FeaturesReady):
                self._on_ready(tracked_request, message)
            elif message.seq in (-1, tracked_request.seq) and tracked_request.phase is Phase.WAITING:
                tracked_request.failure = message

    def _on_worker_up(self, message: WorkerUp) -> None:
        self._slab = Slab.attach(SlabHandle.load(message.slab))
        is_restart = self._epoch >= 0
        self._epoch = message.epoch
        self._down_reason = None
        if not is_restart:
            return
        self._early.clear()
        for tracked in self._tracked.values():
            if tracked.phase is not Phase.WAITING or not tracked.asked:
                continue
            self._forget_features(tracked)
            tracked.tries += 1
            if tracked.tries > MAX_TRIES:
                self._fail(tracked, HTTPStatus.SERVICE_UNAVAILABLE, "the encoder worker failed twice on this request")

    def _on_ready(self, tracked: TrackedRequest, message: FeaturesReady) -> None:
        if message.epoch != self._epoch or message.seq != tracked.seq or tracked.phase is not Phase.WAITING:
            return
        assert self._slab is not None
        tracked.tickets = {ticket.key: ticket for ticket in message.tickets}
        held = [
            (image.mm_hash, tracked.tickets[image.source.key])
            for image in tracked.images
            if image.source.key in tracked.tickets
        ]
        self._view.hold(tracked.rid, self._slab, held)
        if self._metrics is not None:
            self._metrics.observe_feature_wait(time.monotonic() - tracked.since_s)

    def _fail(self, tracked: TrackedRequest, status: HTTPStatus, reason: str) -> None:
        tracked.failure = FeaturesFailed(tracked.worker_id, tracked.seq, self._epoch, status, reason)

    # ---- requests

    def track(self, rid: str, items: Sequence[Any]) -> None:
        """A request with images has arrived; `items` are SGLang's multimodal items."""
        if rid in self._tracked:  # the client uses the id again before this rank has seen the first one's end
            self._end(self._tracked[rid])
        images = []
        eager, owner = True, ""
        for item in items:
            source = item.model_specific_data.get(SOURCE_KEY)
            if source is None:
                continue
            owner = item.model_specific_data[OWNER_KEY]
            # Parallel sampling makes several requests of the one that was admitted.
            eager &= item.model_specific_data[ASKED_KEY] and rid_of(owner) == rid
            ((first, last),) = item.offsets
            images.append(TrackedImage(source, item.hash, first, last))
        if not images:
            return
        self._num_tracked_ever += 1
        identity = owner if eager else worker_id(rid, f"s{self._num_tracked_ever}")
        tracked = TrackedRequest(rid, identity, images, since_s=time.monotonic())
        for image in images:
            segment = image.source.segment
            self._segment_users[segment] = self._segment_users.get(segment, 0) + 1
        if eager:  # the main process has asked for all of them, with seq 0
            tracked.asked = frozenset(image.source.key for image in images)
        self._tracked[rid] = tracked
        self._by_worker_id[identity] = tracked
        early = self._early.pop(identity, None)
        if early is not None:
            self.on_message(early[0])

    def _forget_features(self, tracked: TrackedRequest) -> None:
        self._view.drop(tracked.rid, [image.mm_hash for image in tracked.images])
        tracked.tickets = {}
        tracked.asked = frozenset()

    def _end(self, tracked: TrackedRequest) -> None:
        """The request has ended, however it did."""
        self._forget_features(tracked)
        del self._tracked[tracked.rid]
        del self._by_worker_id[tracked.worker_id]
        self._send(FinishRequest(tracked.worker_id))
        now_s = time.monotonic()
        for image in tracked.images:
            segment = image.source.segment
            self._segment_users[segment] -= 1
            if not self._segment_users[segment]:
                del self._segment_users[segment]
                if self._link is not None:
                    self._ended_segments.append((now_s, segment))

    def on_abort(self, rid: str) -> None:
        """SGLang has torn the request down between two chunks of its prefill: no batch will report its end."""
        tracked = self._tracked.get(rid)
        if tracked is not None:
            self._end(tracked)

    # ---- the scheduling pass

    def partition(self, waiting: list[Req]) -> tuple[list[Req], list[Req]]:
        """Split the waiting queue into requests that may be prefilled now and requests that wait for features.

        Requests whose features cannot be had are answered and appear in neither list.
        """
        if not self._tracked:
            return waiting, []
        eligible: list[Req] = []
        held: list[Req] = []
        for req in waiting:
            tracked = self._tracked.get(req.rid)
            if tracked is None:
                eligible.append(req)
            elif req.multimodal_inputs is None:  # SGLang has turned it into an abort
                self._end(tracked)
                eligible.append(req)
            elif tracked.failure is not None:
                self._answer_failure(req, tracked)
            elif self._may_go(req, tracked):
                eligible.append(req)
            else:
                held.append(req)
        return eligible, held

    def _may_go(self, req: Req, tracked: TrackedRequest) -> bool:
        if tracked.phase is not Phase.WAITING:  # it was retracted
            self._forget_features(tracked)
            tracked.phase, tracked.since_s = Phase.WAITING, time.monotonic()
            tracked.num_outputs_before = len(req.output_ids)
        if tracked.is_waiting_for_features:
            return False
        if tracked.holds_all():
            return True
        req.init_next_round_input(self._scheduler.tree_cache)
        prefix_len = len(req.prefix_indices)
        needed = [image.source for image in tracked.images if image.last >= prefix_len]
        if all(source.key in tracked.tickets for source in needed):
            return True
        if self._down_reason is not None:
            self._fail(tracked, HTTPStatus.SERVICE_UNAVAILABLE, self._down_reason)
            return False
        self._ask(tracked, needed)
        return False

    def _ask(self, tracked: TrackedRequest, sources: list[ImageSource]) -> None:
        self._forget_features(tracked)
        tracked.seq += 1
        tracked.asked = frozenset(source.key for source in sources)
        tracked.since_s = time.monotonic()
        if self._link is not None:
            distinct = {source.key: source for source in sources}
            self._link.send(EncodeRequest(tracked.worker_id, tracked.seq, list(distinct.values()), self._link.address))

    def _answer_failure(self, req: Req, tracked: TrackedRequest) -> None:
        from sglang.srt.disaggregation.utils import prepare_abort

        assert tracked.failure is not None
        logger.info("Request %s failed: %s", req.rid, tracked.failure.reason)
        prepare_abort(req, tracked.failure.reason, HTTPStatus(tracked.failure.status))
        self._scheduler.output_streamer.stream_output([req], req.return_logprob)
        self._end(tracked)

    def after_pass(self, eligible: list[Req], waiting: list[Req]) -> None:
        """The pass is over: of `eligible`, those no longer in `waiting` were admitted."""
        if not self._tracked:
            return
        still_waiting = {req.rid for req in waiting}
        for req in eligible:
            tracked = self._tracked.get(req.rid)
            if tracked is None or req.rid in still_waiting or tracked.phase is not Phase.WAITING:
                continue
            tracked.phase = Phase.ADMITTED
            num_elided = sum(image.source.key not in tracked.tickets for image in tracked.images)
            self.num_elided += num_elided
            if self._metrics is not None:
                self._metrics.add_elided(num_elided)
        in_queues = still_waiting | {req.rid for req in self._scheduler.grammar_manager.grammar_queue}
        gone = [t for t in self._tracked.values() if t.phase is Phase.WAITING and t.rid not in in_queues]
        for tracked in gone:  # aborted, timed out, refused: SGLang has answered it
            self._end(tracked)

    def after_batch(self, reqs: Sequence[Req]) -> None:
        """Results of a batch have been processed: prefills that are complete have read their features."""
        if not self._tracked:
            return
        for req in reqs:
            tracked = self._tracked.get(req.rid)
            if tracked is None:
                continue
            if tracked.phase is Phase.ADMITTED and (len(req.output_ids) > tracked.num_outputs_before or req.finished()):
                self._release(tracked)
            if req.finished():
                self._end(tracked)

    def _release(self, tracked: TrackedRequest) -> None:
        self._forget_features(tracked)
        tracked.phase = Phase.PREFILLED
        self._send(ReleaseFeatures(tracked.worker_id))
        if not self._scheduler.server_args.disable_radix_cache:
            cached = []
            for image in tracked.images:
                pad_value = _pad_value(image.mm_hash)
                if pad_value not in self._radix_keys:
                    self._radix_keys[pad_value] = image.source.key
                    cached.append(image.source.key)
            if cached:
                self._send(RadixHint(cached, []))

    # ---- the RadixCache's events

    def on_radix_removed(self, token_ids: Sequence[int]) -> None:
        """A node left the RadixCache; images with tokens in it are wanted again."""
        if not self._radix_keys:
            return
        evicted = [self._radix_keys.pop(token) for token in set(token_ids) & self._radix_keys.keys()]
        if evicted:
            self._send(RadixHint([], evicted))

    def on_radix_cleared(self) -> None:
        """The RadixCache is empty."""
        if self._radix_keys:
            self._send(RadixHint([], list(self._radix_keys.values())))
            self._radix_keys.clear()

    def on_flush(self) -> None:
        """The user flushed the caches."""
        self._send(DropCached())

    def wait_a_little(self, timeout_ms: int) -> None:
        """Nothing can run before the worker answers: sleep until something arrives, to leave the core to it."""
        if self._link is None:
            return
        import zmq

        poller = zmq.Poller()
        poller.register(self._link.inbox, zmq.POLLIN)
        tokenizer = self._scheduler.recv_from_tokenizer
        if isinstance(tokenizer, zmq.Socket):
            poller.register(tokenizer, zmq.POLLIN)
        poller.poll(timeout_ms)


def _pad_value(mm_hash: int) -> int:
    from sglang.srt.managers.schedule_batch import _compute_pad_value

    return int(_compute_pad_value(mm_hash))
