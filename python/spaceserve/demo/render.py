"""Draws scenes as pictures, in torch, many at once: on a GPU for training, on the CPU for test sets and examples.

A drawn thing is a cell of the atlas of signed distance fields, placed by an affine map; its edge is antialiased over
one pixel. The same code draws both, so a test picture differs from a training picture in rounding only.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from spaceserve.demo.build_atlas import CELL, SPREAD
from spaceserve.demo.scenes import ROW_FIELDS, Scene


@lru_cache(maxsize=4)
def _atlas(device: torch.device) -> Tensor:
    """Return the distances plus SPREAD, [num_fields, 1, CELL, CELL] in atlas pixels: 0 is far outside."""
    with np.load(Path(__file__).parent / "atlas.npz") as atlas:
        fields = torch.from_numpy(atlas["fields"])
    return (fields.to(device).float() * (2 * SPREAD / 255))[:, None]


def pack_scenes(scenes: list[Scene]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [B, K, len(ROW_FIELDS)] float32, padded with index -1, and backgrounds [B, 7] float32."""
    most = max(1, max(len(scene.rows) for scene in scenes))
    rows = np.zeros((len(scenes), most, len(ROW_FIELDS)), dtype=np.float32)
    rows[:, :, 0] = -1
    for i, scene in enumerate(scenes):
        if scene.rows:
            rows[i, : len(scene.rows)] = scene.rows
    return rows, np.asarray([scene.shades for scene in scenes], dtype=np.float32)


def render(rows_BKF: Tensor, shades_B7: Tensor, width: int, height: int) -> Tensor:
    """Draw scenes of one size.

    Args:
        rows_BKF: float32 rows of `scenes.ROW_FIELDS`; an index of -1 draws nothing. Lengths are in pixels, `half_x` and
            `half_y` are half the sides of the atlas cell, `weight` thickens by that many atlas pixels.
        shades_B7: float32, RGB of one end of the background, RGB of the other, angle of the gradient in radians.

    Returns:
        float32 [B, 3, height, width] on the same device, values 0 to 255, not yet rounded.
    """
    device = rows_BKF.device
    x = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    y = torch.arange(height, device=device, dtype=torch.float32) + 0.5
    angle = shades_B7[:, 6, None, None]
    along = (x / width - 0.5)[None, None] * angle.cos() + (y / height - 0.5)[None, :, None] * angle.sin()
    mix = (along / 1.5 + 0.5).clamp_(0, 1)[:, None]
    first, last = shades_B7[:, :3, None, None], shades_B7[:, 3:6, None, None]
    image = first + (last - first) * mix
    for k in range(rows_BKF.shape[1]):
        index, cx, cy, half_x, half_y, rotation, shear, weight = (rows_BKF[:, k, i, None, None] for i in range(8))
        cos, sin = rotation.cos(), rotation.sin()
        dx, dy = x[None, None] - cx, y[None, :, None] - cy
        v = (dy * cos - dx * sin) / half_y.clamp(min=1)
        u = (dx * cos + dy * sin) / half_x.clamp(min=1) + shear * v
        cells = _atlas(device)[index.flatten().long().clamp(min=0)]
        distance = F.grid_sample(cells, torch.stack((u, v), dim=-1), align_corners=False)[:, 0]
        pixels = (distance - SPREAD + weight) * (half_y * 2 / CELL)
        cover = ((pixels + 0.5).clamp_(0, 1) * (index >= 0))[:, None]
        colour = rows_BKF[:, k, 8:11, None, None]
        image = torch.lerp(image, colour.expand_as(image), cover)
    return image


def draw(scene: Scene) -> Image.Image:
    """Draw one scene as an RGB picture."""
    rows, shades = pack_scenes([scene])
    image = render(torch.from_numpy(rows), torch.from_numpy(shades), scene.width, scene.height)
    return Image.fromarray(image[0].round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy())
