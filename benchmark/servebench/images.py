"""Seeded images and texts: the same spec gives the same pixels, and the same bytes for one version of Pillow."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image, ImageDraw

from servebench.workload import ImageSpec

JPEG_QUALITY = 85
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)


def text(seed: int, num_words: int) -> str:
    """``num_words`` common English words, about one token each."""
    rng = random.Random(f"text {seed}")
    return " ".join(rng.choices(COMMON_WORDS.split(), k=num_words))


def render(spec: ImageSpec) -> bytes:
    """Encoded image file. Raises ValueError for an unknown kind or format."""
    if spec.kind == "photo":
        image = _photo(spec)
    elif spec.kind == "chart":
        image = _chart(spec)
    elif spec.kind == "noise":
        rng = np.random.default_rng(spec.seed)
        image = Image.fromarray(rng.integers(0, 256, (spec.height, spec.width, 3), dtype=np.uint8))
    else:
        raise ValueError(f"unknown image kind {spec.kind!r}")
    out = io.BytesIO()
    if spec.format == "jpeg":
        image.save(out, "JPEG", quality=JPEG_QUALITY)
    elif spec.format == "png":
        image.save(out, "PNG", compress_level=1)
    else:
        raise ValueError(f"unknown image format {spec.format!r}")
    return out.getvalue()


def _photo(spec: ImageSpec) -> Image.Image:
    """Random fields of ever finer cells, each fainter than the coarser ones, and grain: energy falls with frequency as
    in photographs, and JPEG files come out near a camera's size (about 2 bits per pixel)."""
    rng = np.random.default_rng(spec.seed)
    size = (spec.width, spec.height)

    def field(width: int, height: int) -> Image.Image:
        return Image.frombytes("RGB", (width, height), rng.bytes(width * height * 3))

    image, cells = field(4, 4).resize(size, Image.Resampling.BILINEAR), 12
    while cells < max(size):
        image = Image.blend(image, field(cells, cells).resize(size, Image.Resampling.BILINEAR), 0.25)
        cells *= 3
    return Image.blend(image, field(*size), 0.04)


def _chart(spec: ImageSpec) -> Image.Image:
    """Bars, a line and some words on white: flat areas and sharp edges."""
    rng = random.Random(f"chart {spec.seed}")
    image = Image.new("RGB", (spec.width, spec.height), "white")
    draw = ImageDraw.Draw(image)
    bars = rng.randint(4, 16)
    step = spec.width / bars
    points = []
    for bar in range(bars):
        top = rng.uniform(0.1, 0.9) * spec.height
        colour = tuple(rng.randint(0, 220) for _ in range(3))
        draw.rectangle((bar * step + 0.1 * step, top, (bar + 0.8) * step, spec.height * 0.95), fill=colour)
        points.append(((bar + 0.5) * step, rng.uniform(0.05, 0.9) * spec.height))
    draw.line(points, fill="black", width=max(1, spec.width // 300))
    for row in range(4):
        draw.text((8, 8 + row * 14), text(spec.seed + row, 8), fill="black")
    return image
