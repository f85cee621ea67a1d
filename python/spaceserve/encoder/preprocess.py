"""From the bytes of an image or video file to the patches that the encoder takes."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image

from spaceserve import shared_memory
from spaceserve.families import video_processor_settings
from spaceserve.messages import ImageSource
from spaceserve.video_file import BadVideo, read_frames


class BadImage(ValueError):
    """The file cannot be decoded, or is not what its header said; the client gets HTTP 400 with this reason."""


def decode(source: ImageSource) -> Image.Image:
    """Decode the file of `source` to RGB.

    Raises:
        BadImage: the file is truncated, damaged, or has another size than the header that was admitted.
        FileNotFoundError: the request has ended and its segment is gone.
    """
    with shared_memory.read(source.segment) as view:
        data = bytes(view)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data))
        if image.mode != "RGB":
            image = image.convert("RGB")
        image.load()
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error, ... on damaged files
        raise BadImage(f"the image cannot be decoded: {error}") from error
    if (image.height, image.width) != (source.height, source.width):
        raise BadImage(
            f"the image decodes to {image.width}x{image.height}, its header said {source.width}x{source.height}"
        )
    return image


def decode_video(source: ImageSource) -> torch.Tensor:
    """Decode the frames that `source` names and give them the size that it states.

    Returns:
        uint8 `[frames, 3, height, width]` on the CPU.

    Raises:
        BadImage: the file is truncated, damaged, or its frames have another size than when it was admitted.
        FileNotFoundError: the request has ended and its segment is gone.
    """
    import torchvision.transforms.functional as functional

    assert source.video is not None
    path = shared_memory.path_of(source.segment)
    os.stat(path)  # a decoder has no error of its own for a file that is not there
    try:
        frames = read_frames(path, source.video.indices)
    except BadVideo as error:
        os.stat(path)
        raise BadImage(str(error)) from error
    if tuple(frames.shape[2:]) != (source.height, source.width):
        raise BadImage(
            f"the video decodes to {frames.shape[3]}x{frames.shape[2]}, its first frame had "
            f"{source.width}x{source.height}"
        )
    resized: torch.Tensor = functional.resize(
        frames, [source.video.height, source.video.width], interpolation=functional.InterpolationMode.BILINEAR
    )
    return resized


class Preprocessor:
    """The checkpoint's image and video processor, with the settings that the user gave, on one device.

    Args:
        processor: Hugging Face's processor of the checkpoint.
        config: what the user gave as `--mm-process-config`.
        device: where images are resized and cut.
    """

    def __init__(self, processor: Any, config: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        self._image_processor = processor.image_processor
        self._video_processor = getattr(processor, "video_processor", None)
        self._image_kwargs = dict(config.get("image", {}))
        # SGLang has chosen the frames, and neither it nor we have the processor choose again.
        self._video_kwargs = {**video_processor_settings(config.get("video", {})), "do_sample_frames": False}
        if device.type == "cuda":
            self._image_kwargs["device"] = self._video_kwargs["device"] = str(device)

    def patches(self, image: Image.Image | torch.Tensor, source: ImageSource) -> torch.Tensor:
        """Resize, normalise and cut to patches.

        Args:
            image: RGB; as a tensor uint8 `[3, height, width]`, for a video `[frames, 3, height, width]`.
            source: what the header said.

        Returns:
            `[num_patches, patch_dim]`, float32, on the device.

        Raises:
            BadImage: the processor made another grid than the header promised; its placeholders would not fit.
        """
        if source.video is None:
            output = self._image_processor(images=[image], return_tensors="pt", **self._image_kwargs)
            grid_name, pixels_name = "image_grid_thw", "pixel_values"
        else:
            assert self._video_processor is not None
            output = self._video_processor(videos=[image], return_tensors="pt", **self._video_kwargs)
            grid_name, pixels_name = "video_grid_thw", "pixel_values_videos"
        grid = tuple(int(n) for n in output[grid_name][0])
        if grid != tuple(source.grid_thw):
            raise BadImage(f"the processor made a grid of {grid}, the header promised {source.grid_thw}")
        pixels: torch.Tensor = output[pixels_name]
        return pixels
