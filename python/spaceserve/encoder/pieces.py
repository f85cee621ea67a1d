"""What is on its way through the encoder, piece by piece.

An image is one piece. A video of more patches than one forward takes is several, cut between temporal slices
(`encoder_schedule/video.py`); each is an item of the queue, so that shorter requests overtake between them, and fills
its own rows of the whole's extent. No torch, no clock: `service.py` decides, this remembers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import msgspec

from spaceserve.encoder_schedule.queue import EncodeItem
from spaceserve.encoder_schedule.video import split_video
from spaceserve.feature_store.store import FeatureStore, Ticket
from spaceserve.messages import ImageSource

if TYPE_CHECKING:
    from spaceserve.encoder.runner import ItemFailure


# Pixels of a piece's frames as they come from the file; some twelve bytes each while they are resized.
MAX_PIECE_PIXELS = 1 << 26


def piece_of(source: ImageSource, first: int, end: int) -> ImageSource:
    """Temporal slices [first, end) of a video, as a video of its own with a key of its own."""
    slices, rows, columns = source.grid_thw
    assert source.video is not None
    assert 0 <= first < end <= slices
    frames_per_slice = -(-len(source.video.indices) // slices)
    frames = source.video.indices[first * frames_per_slice : end * frames_per_slice]
    return msgspec.structs.replace(
        source,
        key=source.key + struct.pack(">II", first, end),
        grid_thw=(end - first, rows, columns),
        num_tokens=source.num_tokens // slices * (end - first),
        video=msgspec.structs.replace(source.video, indices=frames),
    )


class _PieceSources(Sequence[ImageSource]):
    """One piece, in whichever files hold its video now: a live view of the whole's sources."""

    def __init__(self, sources: Sequence[ImageSource], first: int, end: int) -> None:
        self._sources = sources
        self._slices = first, end

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> ImageSource: ...
    @overload
    def __getitem__(self, index: slice) -> list[ImageSource]: ...
    def __getitem__(self, index: int | slice) -> ImageSource | list[ImageSource]:
        if isinstance(index, slice):
            return [piece_of(source, *self._slices) for source in self._sources[index]]
        return piece_of(self._sources[index], *self._slices)


@dataclass
class _Encode:
    """One image or video that somebody wants, or that the device computes."""

    slices: dict[bytes, tuple[int, int]]  # of each piece, by its key; the one piece of an uncut file has the file's key
    left: dict[bytes, EncodeItem]  # pieces that are not encoded yet, in order
    ticket: Ticket | None = None  # of the whole, from its first piece on
    in_flight: set[bytes] = field(default_factory=set)
    failure: ItemFailure | None = None


class Pieces:
    """Cuts what is larger than `capacity_patches` and may be cut, and counts what is left of it."""

    def __init__(self, capacity_patches: int) -> None:
        self._capacity_patches = capacity_patches
        self._encodes: dict[bytes, _Encode] = {}  # by the key of the whole
        self._whole: dict[bytes, bytes] = {}  # by the key of a piece
        self._begun: dict[bytes, None] = {}  # an ordered set of wholes whose extent is taken

    def __len__(self) -> int:
        """Images and videos that are remembered."""
        return len(self._encodes)

    def whole(self, piece: bytes) -> bytes:
        """Key of the image or video that the piece belongs to."""
        return self._whole.get(piece, piece)

    def _open(self, source: ImageSource) -> _Encode:
        encode = self._encodes.get(source.key)
        if encode is None:
            cuts = [(0, source.grid_thw[0])]
            if source.video is not None:
                cuts = split_video(source.grid_thw, self._patches_of_a_piece(source))
            slices: dict[bytes, tuple[int, int]] = {}
            left: dict[bytes, EncodeItem] = {}
            for first, end in cuts:
                piece = source if len(cuts) == 1 else piece_of(source, first, end)
                slices[piece.key] = first, end
                left[piece.key] = EncodeItem(piece.key, piece.num_patches)
                self._whole[piece.key] = source.key
            encode = self._encodes[source.key] = _Encode(slices, left)
        return encode

    def _patches_of_a_piece(self, source: ImageSource) -> int:
        """The capacity, or less where frames are so large before they are resized that decoding them fills memory."""
        assert source.video is not None
        slices, rows, columns = source.grid_thw
        pixels_of_a_slice = -(-len(source.video.indices) // slices) * source.height * source.width
        return min(self._capacity_patches, max(1, MAX_PIECE_PIXELS // pixels_of_a_slice) * rows * columns)

    def left(self, source: ImageSource) -> list[EncodeItem]:
        """Pieces of an image or video that are not encoded yet, those in flight included."""
        return list(self._open(source).left.values())

    def next_piece(self, source: ImageSource) -> bytes | None:
        """First piece that is neither encoded nor in flight."""
        encode = self._open(source)
        return next((piece for piece in encode.left if piece not in encode.in_flight), None)

    def is_piece(self, item: bytes, source: ImageSource) -> bool:
        """Whether this item of the queue can be encoded: a cut video as a whole cannot."""
        return item in self._open(source).slices

    def sources(self, piece: bytes, sources: Sequence[ImageSource]) -> Sequence[ImageSource]:
        """The piece in each of the files of its whole; follows changes of `sources`."""
        encode = self._encodes[self.whole(piece)]
        return sources if len(encode.slices) == 1 else _PieceSources(sources, *encode.slices[piece])

    def begin(self, piece: bytes, store: FeatureStore) -> Ticket:
        """The device starts on the piece. Returns the rows that are its own; the whole's first piece takes its extent.

        Raises ValueError where the store holds no extent for the whole.
        """
        key = self.whole(piece)
        encode = self._encodes[key]
        assert piece in encode.left
        assert piece not in encode.in_flight
        if encode.ticket is None:
            encode.ticket = store.begin_encode(key)
            self._begun[key] = None
        encode.in_flight.add(piece)
        num_slices = max(end for _, end in encode.slices.values())
        slice_tokens = encode.ticket.num_tokens // num_slices
        first, end = encode.slices[piece]
        if len(encode.slices) == 1:
            return encode.ticket
        return Ticket(
            piece,
            encode.ticket.offset_tokens + first * slice_tokens,
            (end - first) * slice_tokens,
            encode.ticket.generation,
        )

    def end(self, piece: bytes, *, encoded: bool) -> None:
        """The device has finished with the piece; without features it is still left."""
        encode = self._encodes[self.whole(piece)]
        encode.in_flight.remove(piece)
        if encoded:
            del encode.left[piece]

    def fail(self, key: bytes, failure: ItemFailure) -> list[bytes]:
        """The whole can no longer be had; the first failure counts. Returns its pieces that are not in flight."""
        encode = self._encodes[key]
        encode.failure = encode.failure or failure
        return [piece for piece in encode.left if piece not in encode.in_flight]

    def failure(self, key: bytes) -> ItemFailure | None:
        """Why the whole cannot be had."""
        return self._encodes[key].failure

    def is_complete(self, key: bytes) -> bool:
        """Every piece has features."""
        return not self._encodes[key].left

    def is_in_flight(self, key: bytes) -> bool:
        """The device writes to the whole's extent."""
        encode = self._encodes.get(key)
        return encode is not None and bool(encode.in_flight)

    def interrupted(self) -> list[bytes]:
        """Wholes whose extent is taken, on which the device does not work now, and which are not complete."""
        return [key for key in self._begun if not self._encodes[key].in_flight and self._encodes[key].left]

    def close(self, key: bytes) -> tuple[list[bytes], bool]:
        """Forget the whole. Returns the pieces that were left, and whether its extent had been begun."""
        encode = self._encodes.pop(key, None)
        if encode is None:
            return [key], False
        assert not encode.in_flight
        self._begun.pop(key, None)
        for piece in encode.slices:
            del self._whole[piece]
        return list(encode.left), encode.ticket is not None
