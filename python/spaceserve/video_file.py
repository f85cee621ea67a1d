"""Reading video files, with the decoder that stock SGLang takes: torchcodec where FFmpeg's libraries are, or decord.

Both find all frames by the container's index or packets when they open a file; only the frames asked for are decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class BadVideo(ValueError):
    """The file is no video that can be decoded; the client gets HTTP 400 with this reason."""


class NoVideoDecoder(BadVideo):
    """This installation cannot decode videos at all."""


@dataclass(frozen=True)
class VideoHeader:
    """What is known of a video before its frames are decoded."""

    num_frames: int
    frames_per_s: float
    height: int  # pixels of a decoded frame, so after any rotation
    width: int


def _open(path: str) -> Any:
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    try:
        return VideoDecoderWrapper(path)
    except ImportError as error:
        logger.warning("A video was refused, no decoder is installed: %s", error)
        raise NoVideoDecoder(
            "this server has no video decoder: it needs FFmpeg's libraries (for torchcodec) or the package decord2"
        ) from error
    except Exception as error:  # torchcodec raises RuntimeError and ValueError, decord an error of its own
        raise BadVideo(f"the file is not a video that can be read{_reason(error, path)}") from error


def _reason(error: Exception, path: str) -> str:
    """What the client may know of a decoder's error: its first line, unless that names a path or a source file."""
    line = (str(error).splitlines() or [""])[0]
    return "" if not line or "/" in line or len(line) > 200 else f": {line}"


def read_video_header(path: str) -> VideoHeader:
    """Open a video and decode its first frame, whose size counts: a container's may be another.

    Raises:
        BadVideo: no video, no frames, no frame rate, or its first frame is damaged.
        NoVideoDecoder: nothing to decode it with.
    """
    with _open(path) as decoder:
        try:
            num_frames = len(decoder)
            frames_per_s = float(decoder.avg_fps or 0)
            height, width, _ = decoder[0].shape
        except Exception as error:
            raise BadVideo(f"the video cannot be decoded{_reason(error, path)}") from error
    if num_frames < 1 or not 0 < frames_per_s < float("inf"):
        raise BadVideo(f"the video has {num_frames} frames at {frames_per_s} frames per second")
    return VideoHeader(num_frames, frames_per_s, int(height), int(width))


def read_frames(path: str, indices: Sequence[int]) -> torch.Tensor:
    """Decode some frames of a video.

    Args:
        path: of the file.
        indices: of the frames, ascending.

    Returns:
        uint8 `[len(indices), 3, height, width]` on the CPU, RGB.

    Raises:
        BadVideo: the file is truncated or damaged.
    """
    import torch

    with _open(path) as decoder:
        try:
            frames = torch.from_numpy(decoder.get_frames_at(list(indices)))
        except Exception as error:
            raise BadVideo(f"the video cannot be decoded{_reason(error, path)}") from error
    return frames.permute(0, 3, 1, 2)
