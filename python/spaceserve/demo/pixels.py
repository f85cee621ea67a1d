"""From scenes to the patches that the image processor would make of their pictures, on the device, many at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spaceserve.demo import architecture as arch
from spaceserve.demo.data import Batch, Pictures
from spaceserve.demo.render import render


def to_patches(image_B3HW: Tensor) -> Tensor:
    """Cut normalised pictures into patches [B, rows * cols, 588], the four of a merged cell beside each other."""
    batch, channels, height, width = image_B3HW.shape
    patch, merge = arch.PATCH_SIZE, arch.MERGE_SIZE
    rows, cols = height // arch.CELL_SIZE, width // arch.CELL_SIZE
    x = image_B3HW.view(batch, channels, rows, merge, patch, cols, merge, patch)
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, rows * cols * merge * merge, channels * patch * patch)


def process(image_B3HW: Tensor) -> Tensor:
    """Resize and normalise pictures of values 0 to 255 as Qwen2-VL's image processor does; float32 in and out."""
    height, width = image_B3HW.shape[-2:]
    new_width, new_height = arch.processed_size(width, height)
    image = image_B3HW.round().clamp_(0, 255)
    if (new_width, new_height) != (width, height):
        image = F.interpolate(image, (new_height, new_width), mode="bicubic", antialias=True, align_corners=False)
        image = image.round_().clamp_(0, 255)
    mean = torch.tensor(arch.IMAGE_MEAN, device=image.device).view(3, 1, 1)
    std = torch.tensor(arch.IMAGE_STD, device=image.device).view(3, 1, 1)
    return (image / 255 - mean) / std


def on_device(values: Any, device: torch.device) -> Tensor:
    """Return an array or a (pinned) tensor on the device; a pinned one is copied without waiting for the device."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.to(device, non_blocking=True)


def pin(batch: Batch) -> None:
    """Move, in place, a batch's arrays to pinned tensors: copies from pageable memory would wait for the device."""
    for owner in (batch, *batch.pictures):
        for name, value in vars(owner).items():
            if isinstance(value, np.ndarray):
                setattr(owner, name, torch.from_numpy(value).pin_memory())


def patches_of(pictures: Pictures, device: torch.device, noise: bool) -> tuple[Tensor, tuple[int, int]]:
    """Draw pictures; return patches [B, P, 588] float32 and the grid (rows, columns) in patches.

    `noise` adds, for training only, a little Gaussian noise to some of the pictures, as lossy files have it.
    """
    rows = on_device(pictures.rows, device)
    shades = on_device(pictures.shades, device)
    image = render(rows, shades, pictures.width, pictures.height)
    if noise:
        amplitude = 6 * torch.rand(image.shape[0], 1, 1, 1, device=device)
        amplitude *= torch.rand_like(amplitude) < 0.3
        image = torch.addcmul(image, torch.randn_like(image), amplitude)
    patches = to_patches(process(image))
    width, height = arch.processed_size(pictures.width, pictures.height)
    return patches, (height // arch.PATCH_SIZE, width // arch.PATCH_SIZE)
