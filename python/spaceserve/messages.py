"""The messages that travel between the main process, the scheduler and the encoder worker.

They carry names, sizes and tickets, never pixels or features: encoded image bytes lie in shared memory
(`shared_memory.py`), features in the slab (`slab.py`). Each class is one msgpack object, tagged with its name.

Direction of each:

    EncodeRequest, ReleaseFeatures, FinishRequest, RadixHint, DropCached    scheduler (or main process) -> worker
    WorkerUp, FeaturesReady, FeaturesFailed, WorkerDown                     worker (or supervisor) -> scheduler
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from spaceserve.feature_store.store import Ticket


class VideoFrames(msgspec.Struct, frozen=True):
    """Which frames of a video are encoded, and at which size the processor gets them."""

    indices: tuple[int, ...]  # of the frames in the file, ascending
    height: int  # pixels of each frame after the first resize; the processor's own rule comes after it
    width: int


class ImageSource(msgspec.Struct, frozen=True, tag=True):
    """One image or video of a request, as the main process admitted it from its header."""

    key: bytes  # content digest: bytes of the file, modality and processor settings (16 bytes)
    segment: str  # shared-memory segment that holds the encoded file
    num_bytes: int  # of the encoded file
    height: int  # pixels: of an image from the header, before any rotation; of a video's decoded frames
    width: int
    grid_thw: tuple[int, int, int]  # patches in time, height and width after the processor's resize rule
    num_tokens: int  # rows of features, equal to the placeholders in the prompt
    video: VideoFrames | None = None  # None for an image

    @property
    def num_patches(self) -> int:
        """Patches that the encoder computes."""
        t, h, w = self.grid_thw
        return t * h * w


class EncodeRequest(msgspec.Struct, frozen=True, tag=True):
    """All images and videos that `rid` still needs; replaces an earlier one of the same rid with a lower `seq`."""

    rid: str
    seq: int
    sources: list[ImageSource]
    reply_to: str  # address of the scheduler that waits


class ReleaseFeatures(msgspec.Struct, frozen=True, tag=True):
    """The prefill of `rid` has read its features; its pins go, the features may stay cached."""

    rid: str


class FinishRequest(msgspec.Struct, frozen=True, tag=True):
    """`rid` has ended, however it did; anything still queued for it is dropped."""

    rid: str


class RadixHint(msgspec.Struct, frozen=True, tag=True):
    """Images whose tokens the RadixCache now holds (`cached`) or no longer holds (`evicted`)."""

    cached: list[bytes]
    evicted: list[bytes]


class DropCached(msgspec.Struct, frozen=True, tag=True):
    """The user flushed the caches: forget features that no request holds."""


class WorkerUp(msgspec.Struct, frozen=True, tag=True):
    """The encoder worker of this epoch is ready. `slab` is a pickled `SlabHandle`."""

    epoch: int
    slab: bytes


class WorkerDown(msgspec.Struct, frozen=True, tag=True):
    """The encoder worker is gone and will not be started again."""

    epoch: int
    reason: str


class FeaturesReady(msgspec.Struct, frozen=True, tag=True):
    """Every image of the EncodeRequest (rid, seq) lies in the slab."""

    rid: str
    seq: int
    epoch: int
    tickets: list[Ticket]


class FeaturesFailed(msgspec.Struct, frozen=True, tag=True):
    """The EncodeRequest (rid, seq) cannot be served; `status` is the HTTP status for the client.

    seq -1 fails the request whatever its current EncodeRequest is.
    """

    rid: str
    seq: int
    epoch: int
    status: int
    reason: str


ToWorker = EncodeRequest | ReleaseFeatures | FinishRequest | RadixHint | DropCached
ToScheduler = WorkerUp | WorkerDown | FeaturesReady | FeaturesFailed
Message = TypeVar("Message", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)


def encode(message: msgspec.Struct) -> bytes:
    """Serialize any message of this module."""
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Read a message that was sent to the encoder worker.

    Raises:
        msgspec.ValidationError: the frame is no such message.
    """
    return _to_worker.decode(frame)


def decode_to_scheduler(frame: bytes) -> ToScheduler:
    """Read a message that was sent to a scheduler.

    Raises:
        msgspec.ValidationError: the frame is no such message.
    """
    return _to_scheduler.decode(frame)
