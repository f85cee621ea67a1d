"""The encoder worker's decisions: what to encode, where its features go, and whom to tell.

No sockets, no threads, no torch: messages come in through `handle`, finished batches through `finish`; batches go out
through `next_batches`, answers through `send`. `process.py` connects these to the world.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spaceserve.encoder.pieces import Pieces
from spaceserve.encoder.runner import Batch, ItemFailure
from spaceserve.encoder_schedule.queue import EncodeItem, EncodeQueue
from spaceserve.feature_store.store import FeatureStore, ItemTooLarge, Ticket
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
)

logger = logging.getLogger(__name__)

# A request's end may overtake its images, which come over another socket: remember this many ended requests.
NUM_ENDED_REMEMBERED = 16384
# One batch computes while the next is prepared and launched behind it.
MAX_BATCHES_IN_FLIGHT = 2


@dataclass
class _Try:
    """One EncodeRequest. `id` names it in the store and in the queue: tickets of an earlier one must not match."""

    request: EncodeRequest
    arrival_s: float
    id: str
    answered: bool = False
    items: dict[bytes, EncodeItem] = field(default_factory=dict)


class EncoderService:
    """State of the encoder worker. One thread calls it.

    Args:
        store: bookkeeping of the slab.
        queue: order of the work.
        epoch: of this worker; goes into every answer.
        send: delivers an answer to the scheduler at the given address.
        prepare: an image, or a piece of a video, will be encoded and may be decoded ahead (key, segments that hold it).
        forget: nobody wants it any more.
        restore: copies features from the given row of the host tier to the rows of the ticket, and has `restored`
            called when the device has finished. Needed where the store has a host tier.
    """

    def __init__(
        self,
        store: FeatureStore,
        queue: EncodeQueue,
        epoch: int,
        send: Callable[[str, ToScheduler], None],
        prepare: Callable[[bytes, Sequence[ImageSource]], None] = lambda key, sources: None,
        forget: Callable[[bytes], None] = lambda key: None,
        restore: Callable[[Ticket, int], None] | None = None,
    ) -> None:
        self.store = store
        self.queue = queue
        self._epoch = epoch
        self._send = send
        self._prepare = prepare
        self._forget = forget
        self._restore = restore
        self._restoring: set[bytes] = set()  # being copied back from the host tier
        self._tries: dict[str, _Try] = {}  # by id
        self._current: dict[str, _Try] = {}  # by rid
        self._sources: dict[bytes, list[ImageSource]] = {}
        self._pieces = Pieces(queue.batch_capacity_patches)
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._num_in_flight = 0
        self._in_flight_since: OrderedDict[int, float] = OrderedDict()
        # A request waits for room: newcomers must not take it by the shortcut for complete hits.
        self._short_of_room = False
        self.num_encoded = 0
        self.num_failed = 0

    # ---- messages

    def handle(self, message: ToWorker, now_s: float) -> None:
        """Take in one message."""
        if isinstance(message, EncodeRequest):
            self._want(message, now_s)
        elif isinstance(message, ReleaseFeatures):
            self._drop(message.rid)
        elif isinstance(message, FinishRequest):
            self._drop(message.rid)
            self._ended[message.rid] = None
            while len(self._ended) > NUM_ENDED_REMEMBERED:
                self._ended.popitem(last=False)
        elif isinstance(message, RadixHint):
            for key in message.cached:
                self.store.set_radix_cached(key, True)
            for key in message.evicted:
                self.store.set_radix_cached(key, False)
        elif isinstance(message, DropCached):
            self.store.clear()

    def _want(self, request: EncodeRequest, now_s: float) -> None:
        if request.rid in self._ended:
            return
        earlier = self._current.get(request.rid)
        if earlier is not None:
            if earlier.request.seq >= request.seq:
                return
            now_s = earlier.arrival_s  # it keeps its place in the order
            self._drop(request.rid)
        attempt = _Try(request, now_s, id=f"{request.rid}#{request.seq}")
        attempt.items = {source.key: EncodeItem(source.key, source.num_patches) for source in request.sources}
        try:
            self.store.register(
                attempt.id, [(source.key, source.num_tokens, source.num_patches) for source in request.sources]
            )
        except ItemTooLarge as error:
            self._answer_failure(attempt, ItemFailure(400, str(error)))
            return
        self._tries[attempt.id] = attempt
        self._current[request.rid] = attempt
        for source in request.sources:
            self._sources.setdefault(source.key, []).append(source)
        needs_no_encode = all(self._is_encoded(key) for key in attempt.items)
        if needs_no_encode and not self._short_of_room and self.store.try_reserve(attempt.id):
            self._add_evicted(attempt)
            self._advance(attempt)
        else:
            self._enqueue(attempt)

    def _is_encoded(self, key: bytes) -> bool:
        """The features lie in the slab or in the host tier, or are on their way from there."""
        return self.store.ticket(key) is not None or key in self._restoring or self.store.is_on_host(key)

    def _enqueue(self, attempt: _Try) -> None:
        holds = self.store.holds(attempt.id)
        missing = [key for key in attempt.items if self.store.ticket(key) is None]
        if holds:
            # Left to encode is what another request had begun and gave up; copies from the host come by themselves.
            missing = [key for key in missing if key not in self._restoring]
            if not missing:
                return
        work = [piece for key in missing for piece in self._pieces.left(self._sources[key][0])]
        # With every feature present it still has to hold them, for which it waits its turn like the others.
        self.queue.add(attempt.id, work or list(attempt.items.values()), attempt.arrival_s)
        if holds:
            self.queue.mark_reserved(attempt.id)
        for key in missing:
            if not self._is_encoded(key):
                self._prepare_ahead(key)

    def _prepare_ahead(self, key: bytes) -> None:
        """Decode the next piece; later ones wait, as the frames of a long video would fill the memory."""
        piece = self._pieces.next_piece(self._sources[key][0])
        if piece is not None:
            self._prepare(piece, self._pieces.sources(piece, self._sources[key]))

    def _drop(self, rid: str) -> None:
        attempt = self._current.pop(rid, None)
        if attempt is None:
            return
        del self._tries[attempt.id]
        self.queue.cancel(attempt.id)
        for source in attempt.request.sources:
            sources = self._sources.get(source.key, [])
            if source in sources:
                sources.remove(source)
        for key in self.store.release(attempt.id):
            self._sources.pop(key, None)
            if not self._pieces.is_in_flight(key):
                self._give_up(key)

    def _give_up(self, key: bytes) -> None:
        """The image or video will not be encoded, or not to its end: what is decoded, and its extent, can go."""
        pieces, begun = self._pieces.close(key)
        for piece in pieces:
            self._forget(piece)
        if begun:
            self.store.fail(key)

    def _give_up_unheld(self) -> None:
        """Whoever held a half-encoded video, or an image whose file went with its request, is gone: free its room.

        Others may want it, but they hold nothing yet, and wait for their turn behind requests that may wait for just
        that room: nobody would go on.
        """
        for key in self._pieces.interrupted():
            if self.store.is_held(key):
                continue
            pieces, _ = self._pieces.close(key)
            for piece in pieces:
                self._forget(piece)
            self.queue.items_done([key, *pieces])
            for try_id in self.store.fail(key):
                self._enqueue(self._tries[try_id])  # from its beginning

    # ---- batches

    def next_batches(self, now_s: float) -> list[Batch]:
        """Batches to run now, in order; empty while enough are under way or nothing may go."""
        self._give_up_unheld()
        batches = []
        while self._num_in_flight < MAX_BATCHES_IN_FLIGHT:
            refused: list[str] = []

            def try_reserve(try_id: str, refused: list[str] = refused) -> bool:
                granted = self.store.try_reserve(try_id)
                if not granted:
                    refused.append(try_id)
                return granted

            items = self.queue.next_batch(now_s, try_reserve)
            self._short_of_room = bool(refused)
            if not items:
                break
            batch = self._begin(items, now_s)
            if batch is not None:
                batches.append(batch)
        return batches

    def _begin(self, items: list[EncodeItem], now_s: float) -> Batch | None:
        tickets: list[Ticket] = []
        done: list[bytes] = []
        touched: dict[str, None] = {}
        wholes = [self._pieces.whole(item.key) for item in items]
        for item, key in zip(items, wholes, strict=True):
            for try_id in self.queue.wanted(item.key):
                touched[try_id] = None
            if self.store.ticket(key) is not None or key in self._restoring:
                done.append(item.key)  # it only waited to be held
            elif self._begin_restore(key):
                continue
            elif not self._pieces.is_piece(item.key, self._sources[key][0]):
                done.append(item.key)  # a video that waited to be held and was evicted: its pieces come in its place
            else:
                tickets.append(self._pieces.begin(item.key, self.store))
        self.queue.items_done(done)
        for try_id in touched:
            self._add_evicted(self._tries[try_id])
        for key in done:
            self._advance_all(key)
        if not tickets:
            return None
        self._num_in_flight += 1
        sources: dict[bytes, Sequence[ImageSource]] = {}
        for ticket in tickets:
            key = self._pieces.whole(ticket.key)
            sources[ticket.key] = self._pieces.sources(ticket.key, self._sources[key])
            if ticket.key != key:
                self._prepare_ahead(key)
        images = {key: segments[0] for key, segments in sources.items()}
        batch = Batch(tickets, images, sources, started_s=now_s)
        self._in_flight_since[id(batch)] = now_s
        return batch

    def _add_evicted(self, attempt: _Try) -> None:
        """Features that were there when the request came may have been evicted before it could hold them."""
        for key in self.store.keys_to_restore(attempt.id):
            self._begin_restore(key)
        keys = self.store.keys_to_encode(attempt.id)
        if keys:
            work = [piece for key in keys for piece in self._pieces.left(self._sources[key][0])]
            self.queue.add(attempt.id, work, attempt.arrival_s)
            self.queue.mark_reserved(attempt.id)

    # ---- the host tier

    def _begin_restore(self, key: bytes) -> bool:
        """Copy features back instead of encoding them, where the host tier has them and no piece was begun."""
        if self._restore is None or not self.store.is_on_host(key) or not self.store.is_reserved(key):
            return False
        ticket, host_row = self.store.begin_restore(key)
        self._restoring.add(key)
        self._leave_queue(key)
        self._restore(ticket, host_row)
        return True

    def _leave_queue(self, key: bytes) -> None:
        """Whatever was to be encoded of it is not: forget what was decoded ahead."""
        pieces, begun = self._pieces.close(key)
        assert not begun, "features that are copied back are not encoded too"
        for piece in pieces:
            self._forget(piece)
        self.queue.items_done([key, *pieces])

    def restored(self, key: bytes, *, copied: bool) -> None:
        """The device has finished copying features back; without success they are encoded."""
        self._restoring.remove(key)
        if copied:
            self._leave_queue(key)
            self.store.commit(key)
            self._advance_all(key)
            return
        self.store.discard_host_copy(key)
        for try_id in self.store.fail(key):
            self._advance(self._tries[try_id])

    # ---- the device's answers

    def finish(self, batch: Batch, now_s: float) -> None:
        """The device has finished `batch`; its failures are filled in."""
        self._num_in_flight -= 1
        del self._in_flight_since[id(batch)]
        for ticket in batch.tickets:
            failure = batch.failures.get(ticket.key)
            key = self._pieces.whole(ticket.key)
            self._pieces.end(ticket.key, encoded=failure is None)
            if failure is None:
                self.queue.items_done([ticket.key])
            elif failure.source_gone and self._sources.get(key):
                # A request that came meanwhile brought the same file: encode it from there.
                self.queue.requeue([ticket.key])
            else:
                self.queue.items_failed(self._pieces.fail(key, failure))
            self._settle(key)

    def _settle(self, key: bytes) -> None:
        """The device has finished a piece of an image or video: see what becomes of the whole."""
        failure = self._pieces.failure(key)
        if failure is None and self._pieces.is_complete(key):
            self._pieces.close(key)
            self.num_encoded += 1
            self.store.commit(key)
            self._advance_all(key)
        elif self._pieces.is_in_flight(key):
            return  # its extent is still written to
        elif failure is not None:
            self.num_failed += 1
            tries = [self._tries[try_id] for try_id in self.store.wanted_by(key)]
            self._give_up(key)
            for attempt in tries:
                self._answer_failure(attempt, failure)
                self._drop(attempt.request.rid)
        elif not self.store.wanted_by(key):
            self._give_up(key)

    def oldest_in_flight_s(self, now_s: float) -> float:
        """Age of the oldest batch under way, in seconds; 0 with none."""
        return now_s - next(iter(self._in_flight_since.values()), now_s)

    # ---- answers

    def _advance_all(self, key: bytes) -> None:
        for try_id in list(self.store.wanted_by(key)):
            self._advance(self._tries[try_id])

    def _advance(self, attempt: _Try) -> None:
        """Answer the request if it is complete; let it wait its turn for what it lacks otherwise."""
        if attempt.answered:
            return
        if self.store.remaining_patches(attempt.id) == 0 and self.store.try_reserve(attempt.id):
            self._add_evicted(attempt)
        elif self.queue.remaining_patches(attempt.id) == 0:
            self._enqueue(attempt)
        if self.store.is_ready(attempt.id):
            attempt.answered = True
            self.queue.cancel(attempt.id)
            request = attempt.request
            self._send(
                request.reply_to,
                FeaturesReady(request.rid, request.seq, self._epoch, self.store.tickets(attempt.id)),
            )

    def _answer_failure(self, attempt: _Try, failure: ItemFailure) -> None:
        request = attempt.request
        self._send(
            request.reply_to, FeaturesFailed(request.rid, request.seq, self._epoch, failure.status, failure.reason)
        )

    # ---- what one can see

    @property
    def num_requests(self) -> int:
        """Requests that wait or hold features."""
        return len(self._current)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, nothing computes, nothing is held."""
        return not self._current and not self._num_in_flight and not self._restoring

    def check_integrity(self) -> None:
        """Assert that what is kept twice agrees, and that nothing is held at idle."""
        self.store.check_integrity()
        self.queue.check_integrity()
        assert {attempt.id for attempt in self._current.values()} == set(self._tries)
        if self.is_idle:
            stats = self.store.stats()
            assert len(self.queue) == 0, "work waits for nobody"
            assert stats.pinned_blocks == 0, "features are pinned for nobody"
            assert stats.reserved_blocks == 0, "room is reserved for nobody"
            assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
            assert not any(self._sources.values()), "sources are kept for nobody"
            assert len(self._pieces) == 0, "pieces are kept for nobody"
