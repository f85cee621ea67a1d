"""Executes encoder batches: preprocessing in threads, forwards on one, completion noticed without blocking either."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from spaceserve.encoder.polled_queue import PolledQueue
from spaceserve.encoder.preprocess import BadImage, Preprocessor, decode, decode_video
from spaceserve.feature_store.store import Ticket
from spaceserve.messages import ImageSource
from spaceserve.slab import Slab

if TYPE_CHECKING:
    from spaceserve.encoder.model import VisionEncoder
    from spaceserve.encoder.split import EncoderSplit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ItemFailure:
    """Why one image of a batch has no features; `status` is the HTTP status for its requests."""

    status: int
    reason: str
    source_gone: bool = False  # its file went with the request that brought it: another's may be there


class SourceGone(Exception):
    """Every request that brought the image had ended when its turn came."""


@dataclass
class Batch:
    """Images and pieces of videos that go through the encoder together, each with the rows that its features fill."""

    tickets: list[Ticket]
    images: dict[bytes, ImageSource]  # by key: sizes of the image
    sources: dict[bytes, Sequence[ImageSource]]  # by key: segments that hold its file now; the service changes them
    started_s: float = field(default_factory=time.monotonic)
    failures: dict[bytes, ItemFailure] = field(default_factory=dict)
    encode_ms: float = 0.0  # from the first kernel to the last, on the encoder's stream

    @property
    def num_patches(self) -> int:
        """Patches of the whole batch."""
        return sum(image.num_patches for image in self.images.values())


# Patches on the CPU; on a GPU the RGB bytes [3, height, width] of an image, [frames, 3, height, width] of a video.
Prepared = torch.Tensor


class BatchRunner:
    """Owns the threads. `submit` returns at once; finished batches come out of `take_finished`.

    `wakeup_fd` becomes readable when a batch has finished, for the caller's poll.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        preprocessor: Preprocessor,
        slab: Slab,
        split: EncoderSplit,
        num_threads: int,
    ) -> None:
        self._encoder = encoder
        self._preprocessor = preprocessor
        self._slab = slab
        self._split = split
        self._on_gpu = encoder.device.type == "cuda"
        self._prepare_pool = ThreadPoolExecutor(num_threads, thread_name_prefix="preprocess")
        self._encode_thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._completion_thread = ThreadPoolExecutor(1, thread_name_prefix="completion")
        self._prepared: dict[bytes, Future[Prepared]] = {}
        self._finished: PolledQueue[Batch] = PolledQueue()
        self.wakeup_fd = self._finished.wakeup_fd

    # ---- preprocessing

    @property
    def num_prepared(self) -> int:
        """Images that are decoded, or being decoded, ahead of their batch."""
        return len(self._prepared)

    def prepare(self, key: bytes, sources: Sequence[ImageSource]) -> None:
        """Decode an image ahead of its batch; a second call for the same key does nothing."""
        if key not in self._prepared:
            self._prepared[key] = self._prepare_pool.submit(self._prepare, sources)

    def forget(self, key: bytes) -> None:
        """Nobody wants this image any more."""
        future = self._prepared.pop(key, None)
        if future is not None:
            future.cancel()

    def _prepare(self, sources: Sequence[ImageSource]) -> Prepared:
        for source in list(sources):
            try:
                image = decode(source) if source.video is None else decode_video(source)
            except FileNotFoundError:
                continue
            if not self._on_gpu:
                return self._preprocessor.patches(image, source)
            # Pinned, so that the copy to the device does not wait for the batch before it.
            if isinstance(image, torch.Tensor):
                return image.contiguous().pin_memory()
            rgb = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            return rgb.view(image.height, image.width, 3).permute(2, 0, 1).contiguous().pin_memory()
        raise SourceGone

    # ---- forwards

    def submit(self, batch: Batch, after: torch.cuda.Event | None = None) -> None:
        """Run a batch after those submitted before. On a GPU, its features are written after the event `after`."""
        for ticket in batch.tickets:
            self.prepare(ticket.key, batch.sources[ticket.key])
        futures = {ticket.key: self._prepared.pop(ticket.key) for ticket in batch.tickets}
        self._encode_thread.submit(self._run, batch, futures, after)

    def take_finished(self) -> list[Batch]:
        """Batches that have finished since the last call, their features in the slab."""
        return self._finished.take_all()

    def _finish(self, batch: Batch) -> None:
        self._finished.put(batch)

    def _run(self, batch: Batch, futures: dict[bytes, Future[Prepared]], after: torch.cuda.Event | None) -> None:
        try:
            wait = self._launch(batch, futures, after)
        except Exception as error:
            logger.exception("Encoding %d images failed", len(batch.tickets))
            self._fail_rest(batch, error)
            self._finish(batch)
            return
        if wait is None:
            self._finish(batch)
        else:
            # The next batch can be launched while this one computes.
            self._completion_thread.submit(self._complete, batch, wait)

    def _complete(self, batch: Batch, wait: Callable[[], None]) -> None:
        try:
            wait()
        except Exception as error:
            logger.exception("Encoding %d images failed on the device", len(batch.tickets))
            self._fail_rest(batch, error)
        self._finish(batch)

    @staticmethod
    def _fail_rest(batch: Batch, error: Exception) -> None:
        for ticket in batch.tickets:
            batch.failures.setdefault(ticket.key, ItemFailure(500, f"the encoder failed: {error}"))

    def _launch(
        self, batch: Batch, futures: dict[bytes, Future[Prepared]], after: torch.cuda.Event | None
    ) -> Callable[[], None] | None:
        pixels: list[torch.Tensor] = []
        tickets: list[Ticket] = []
        # Attention ends at the temporal slice, so a slice of a video costs as much as an image of its size.
        sizes = [n for t, h, w in (image.grid_thw for image in batch.images.values()) for n in [h * w] * t]
        with self._split.for_batch(sizes) as timing:
            for ticket in batch.tickets:
                source = batch.images[ticket.key]
                try:
                    prepared = futures[ticket.key].result()
                    pixels.append(self._preprocessor.patches(prepared, source) if self._on_gpu else prepared)
                except BadImage as error:
                    batch.failures[ticket.key] = ItemFailure(400, str(error))
                    continue
                except SourceGone:
                    batch.failures[ticket.key] = ItemFailure(503, "the image is gone", source_gone=True)
                    continue
                tickets.append(ticket)
            if not tickets:
                return None
            timing.start()
            self._encode_into_slab(batch, tickets, pixels, after)
            wait = timing.stop()

        def finish() -> None:
            batch.encode_ms = wait()

        if self._on_gpu:
            return finish
        finish()
        return None

    def _encode_into_slab(
        self,
        batch: Batch,
        tickets: Sequence[Ticket],
        pixels: Sequence[torch.Tensor],
        after: torch.cuda.Event | None,
    ) -> None:
        grids = [batch.images[ticket.key].grid_thw for ticket in tickets]
        features = self._encoder.encode(pixels, grids)
        if after is not None:  # what lay in these rows is still being copied to the host
            torch.cuda.current_stream(self._encoder.device).wait_event(after)
        first = 0
        for ticket in tickets:
            rows = features[first : first + ticket.num_tokens]
            self._slab.view(ticket.offset_tokens, ticket.num_tokens).copy_(rows, non_blocking=True)
            first += ticket.num_tokens
        assert first == features.shape[0], f"{features.shape[0]} rows of features, {first} placeholders"

    def close(self) -> None:
        """Stop the threads; batches that have not started are dropped."""
        for pool in (self._prepare_pool, self._encode_thread, self._completion_thread):
            pool.shutdown(wait=False, cancel_futures=True)
