"""From the bytes of an image file to the patches that the encoder takes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image

from spaceserve import shared_memory
from spaceserve.messages import ImageSource


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


class Preprocessor:
    """The checkpoint's image processor, with the settings that the user gave, on one device."""

    def __init__(self, image_processor: Any, image_config: Mapping[str, Any], device: torch.device) -> None:
        self._processor = image_processor
        self._kwargs = dict(image_config)
        if device.type == "cuda":
            self._kwargs["device"] = str(device)

    def patches(self, image: Image.Image | torch.Tensor, source: ImageSource) -> torch.Tensor:
        """Resize, normalise and cut to patches.

        Args:
            image: RGB; as a tensor uint8 `[3, height, width]`.
            source: what the header said.

        Returns:
            `[num_patches, patch_dim]`, float32, on the device.

        Raises:
            BadImage: the processor made another grid than the header promised; its placeholders would not fit.
        """
        output = self._processor(images=[image], return_tensors="pt", **self._kwargs)
        grid = tuple(int(n) for n in output["image_grid_thw"][0])
        if grid != tuple(source.grid_thw):
            raise BadImage(f"the image processor made a grid of {grid}, its header promised {source.grid_thw}")
        pixels: torch.Tensor = output["pixel_values"]
        return pixels
