"""Small videos for tests, made without a video encoder: JPEG frames in an AVI container."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

# 30 frames of 128x96 pixels at 10 a second: moving gradients, H.264 with two B frames between others and a key frame
# every 12. Most frames are coded as differences, so that seeking to one is worth a test.
MOVING = Path(__file__).resolve().parent / "data" / "moving.mp4"


def damaged() -> bytes:
    """MOVING with its header and first frame whole, and later frames overwritten."""
    data = bytearray(MOVING.read_bytes())
    data[1000:1600] = bytes((place * 7) % 256 for place in range(1000, 1600))
    return bytes(data)


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", name + data)


def motion_jpeg(frames: Sequence[Image.Image], frames_per_s: int = 8) -> bytes:
    """An AVI file of these pictures (all of one size); layout after Microsoft's AVI RIFF file reference."""
    width, height = frames[0].size
    files = []
    for frame in frames:
        buffer = io.BytesIO()
        frame.convert("RGB").save(buffer, "JPEG", quality=95)
        files.append(buffer.getvalue())
    largest = max(map(len, files))
    # avih: microseconds a frame, bytes a second, padding, flags (has index), frames, first frame, streams, buffer, size
    main = struct.pack(
        "<14I", 1_000_000 // frames_per_s, largest * frames_per_s, 0, 0x10, len(files), 0, 1, largest, width, height,
        0, 0, 0, 0,
    )  # fmt: skip
    # strh: kind, codec, flags, priority, language, first frame, scale, rate, start, length, buffer, quality, and so on
    stream = struct.pack(
        "<4s4sIHHIIIIIIIIHHHH", b"vids", b"MJPG", 0, 0, 0, 0, 1, frames_per_s, 0, len(files), largest, 0xFFFFFFFF, 0,
        0, 0, width, height,
    )  # fmt: skip
    bitmap = struct.pack("<IIIHH4sIIIII", 40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0)
    header = _list(b"hdrl", _chunk(b"avih", main) + _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", bitmap)))
    chunks = [_chunk(b"00dc", file) for file in files]
    offsets = np.cumsum([4, *map(len, chunks)])
    index = b"".join(
        b"00dc" + struct.pack("<III", 0x10, offset, len(file))
        for offset, file in zip(offsets.tolist(), files, strict=False)
    )
    body = header + _list(b"movi", b"".join(chunks)) + _chunk(b"idx1", index)
    return _chunk(b"RIFF", b"AVI " + body)


def clip(seed: int, num_frames: int = 10, width: int = 168, height: int = 112, frames_per_s: int = 4) -> bytes:
    """A video file whose frames all differ: a bright block moves over a background of the seed's colours."""
    rng = np.random.default_rng(seed)
    background = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    frames = []
    for number in range(num_frames):
        picture = Image.fromarray(background).resize((width, height), Image.Resampling.BILINEAR)
        side = width // 6
        left = (number * width) // max(1, num_frames) % max(1, width - side)
        picture.paste((255 - 20 * (number % 10), 25 * (number % 10), 60), (left, height // 3, left + side, height // 2))
        frames.append(picture)
    return motion_jpeg(frames, frames_per_s)
