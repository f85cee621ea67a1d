"""Rasterises shapes and glyphs to signed distance fields: `python -m spaceserve.demo.build_atlas --fonts DIR...`.

Run once by whoever changes the fonts; the result travels with the package as atlas.npz, so that drawing pictures needs
neither fonts nor a font library. Needs pillow, scipy and matplotlib (for the fonts that it brings).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from spaceserve.demo.vocabulary import DIGITS, LETTERS, SHAPES

CELL = 48  # atlas pixels along a cell's side
CAP_HEIGHT = 26.0  # atlas pixels
SHAPE_RADIUS = 20.0  # atlas pixels
SPREAD = 6.0  # distances are kept up to this many atlas pixels, positive inside
SUPERSAMPLING = 8

TRAIN_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
    "SourceSansPro-Regular",
    "SourceSansPro-Semibold",
    "HankenGrotesk-Medium",
    "HankenGrotesk-Bold",
)
HELD_OUT_FONTS = ("Roboto-Regular", "SourceSerifPro-Regular", "Aileron")


def distance_field(ink: np.ndarray) -> np.ndarray:
    """Return the uint8 distance field, [CELL, CELL], of a boolean image of SUPERSAMPLING times that size."""
    from scipy.ndimage import distance_transform_edt

    distance = distance_transform_edt(ink) - distance_transform_edt(~ink)
    blocks = distance.reshape(CELL, SUPERSAMPLING, CELL, SUPERSAMPLING).mean(axis=(1, 3)) / SUPERSAMPLING
    return np.clip(np.round((blocks + SPREAD) * 255 / (2 * SPREAD)), 0, 255).astype(np.uint8)


def _polygon(points: list[tuple[float, float]]) -> np.ndarray:
    """Draw a polygon given in units of SHAPE_RADIUS around the cell's centre."""
    side = CELL * SUPERSAMPLING
    scale = SHAPE_RADIUS * SUPERSAMPLING
    image = Image.new("L", (side, side), 0)
    ImageDraw.Draw(image).polygon([(side / 2 + x * scale, side / 2 + y * scale) for x, y in points], fill=255)
    return np.asarray(image) > 0


def _regular(num_points: int, radius: Callable[[int], float], centre_y: float = 0.0) -> np.ndarray:
    angles = [2 * math.pi * i / num_points for i in range(num_points)]
    return _polygon([(radius(i) * math.sin(a), centre_y - radius(i) * math.cos(a)) for i, a in enumerate(angles)])


def draw_shape(name: str) -> np.ndarray:
    """Return the boolean image of a shape; every shape reaches about as far from its centre."""
    if name == "circle":
        return _regular(180, lambda i: 0.92)
    if name == "ring":
        return _regular(180, lambda i: 0.98) & ~_regular(180, lambda i: 0.56)
    if name == "square":
        return _polygon([(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)])
    if name == "triangle":
        return _regular(3, lambda i: 1.08, centre_y=0.2)
    if name == "diamond":
        return _polygon([(0, -1.05), (0.7, 0), (0, 1.05), (-0.7, 0)])
    if name == "star":
        return _regular(10, lambda i: 1.1 if i % 2 == 0 else 0.46)
    if name == "cross":
        arm, end = 0.31, 0.98
        bar = _polygon([(-end, -arm), (end, -arm), (end, arm), (-end, arm)])
        return bar | bar.T
    if name == "heart":
        angles = [2 * math.pi * i / 180 for i in range(180)]
        heart = [
            (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16)
            for a in angles
        ]
        return _polygon([(x, y - 0.12) for x, y in heart])
    raise ValueError(f"unknown shape {name}")


def draw_glyph(font: Any, char: str) -> np.ndarray:
    """Return the boolean image of a glyph, its ink centred along x and half the capital height centred along y."""
    side = CELL * SUPERSAMPLING
    image = Image.new("L", (side, side), 0)
    left, _, right, _ = font.getbbox(char, anchor="ls")
    baseline = side / 2 + CAP_HEIGHT * SUPERSAMPLING / 2
    ImageDraw.Draw(image).text((side / 2 - (left + right) / 2, baseline), char, font=font, fill=255, anchor="ls")
    return np.asarray(image) > 127


def load_font(name: str, folders: list[Path]) -> Any:
    """Load a font at the size that gives capitals of CAP_HEIGHT atlas pixels."""
    if name == "Aileron":  # comes with pillow

        def load(size: float) -> Any:
            return ImageFont.load_default(size)
    else:
        files = [file for folder in folders for file in folder.rglob(f"{name}.[to]tf")]
        if not files:
            raise ValueError(f"no font {name} under {', '.join(map(str, folders))}")

        def load(size: float) -> Any:
            return ImageFont.truetype(str(files[0]), size)

    _, top, _, _ = load(1000).getbbox("H", anchor="ls")
    return load(1000 * CAP_HEIGHT * SUPERSAMPLING / -top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fonts", type=Path, nargs="+", required=True, help="folders with the fonts' files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "atlas.npz")
    args = parser.parse_args()
    fields = [distance_field(draw_shape(name)) for name in SHAPES]
    advances = []
    for name in (*TRAIN_FONTS, *HELD_OUT_FONTS):
        font = load_font(name, args.fonts)
        chars = DIGITS + LETTERS
        fields += [distance_field(draw_glyph(font, char)) for char in chars]
        advances.append([font.getlength(char) / (CAP_HEIGHT * SUPERSAMPLING) for char in chars])
    np.savez_compressed(
        args.out,
        fields=np.stack(fields),
        advances=np.asarray(advances, dtype=np.float32),  # in capital heights
        fonts=np.asarray([*TRAIN_FONTS, *HELD_OUT_FONTS]),
    )
    print(f"{len(fields)} fields in {args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
