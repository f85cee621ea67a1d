"""Draws lots for scenes: what a picture shows, as numbers that the renderer and the questions read.

Plain Python without torch: training makes scenes in worker processes, at some thousands per second and core.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from spaceserve.demo.build_atlas import CAP_HEIGHT, CELL, HELD_OUT_FONTS, SHAPE_RADIUS, TRAIN_FONTS
from spaceserve.demo.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES

CHARS = DIGITS + LETTERS
MAX_OBJECTS = 6

# Every shade of a colour is a random mixture of its anchors.
ANCHORS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((220, 20, 30), (200, 30, 30), (240, 45, 45), (175, 10, 20)),
    "orange": ((255, 140, 0), (245, 125, 25), (255, 160, 50)),
    "yellow": ((255, 230, 0), (250, 222, 50), (240, 215, 20), (255, 242, 90)),
    "green": ((0, 140, 40), (30, 170, 60), (0, 110, 30), (75, 190, 80)),
    "blue": ((20, 60, 220), (40, 90, 240), (10, 35, 165), (65, 120, 235)),
    "purple": ((120, 30, 160), (100, 20, 130), (150, 60, 190)),
    "pink": ((255, 130, 180), (250, 160, 200), (240, 110, 170)),
    "brown": ((120, 70, 30), (100, 55, 25), (140, 88, 48)),
    "black": ((0, 0, 0), (28, 28, 28), (15, 15, 22)),
    "white": ((255, 255, 255), (240, 240, 240), (250, 248, 240)),
    "gray": ((128, 128, 128), (110, 110, 115), (152, 152, 152)),
}
MIN_CONTRAST = 85.0  # Euclidean distance in RGB between whatever is drawn and the background

# One drawn thing, as a row of numbers: see `render`.
ROW_FIELDS = ("index", "cx", "cy", "half_x", "half_y", "rotation", "shear", "weight", "red", "green", "blue")
# What the dense labels of training know about it: "ordinal" and "rank" are
# its places among the shapes from the left and from the top, "height" is 0 at the top of the picture and 1 at its end.
LABEL_FIELDS = ("kind", "colour", "ordinal", "log_size", "rank", "height")


@lru_cache(maxsize=1)
def advances() -> dict[str, list[float]]:
    """Return font name -> advance of each of CHARS, in capital heights."""
    with np.load(Path(__file__).parent / "atlas.npz") as atlas:
        return {str(name): row.tolist() for name, row in zip(atlas["fonts"], atlas["advances"], strict=True)}


def glyph_index(font: str, char: str) -> int:
    """Return the place of a glyph in the atlas; the shapes come first."""
    fonts = (*TRAIN_FONTS, *HELD_OUT_FONTS)
    return len(SHAPES) + fonts.index(font) * len(CHARS) + CHARS.index(char)


@dataclass
class Shape:
    """A shape in a scene; lengths in pixels."""

    shape: str
    colour: str
    cx: float
    cy: float
    radius: float


@dataclass
class Scene:
    """What one picture shows."""

    width: int
    height: int
    background: str
    shapes: list[Shape] = field(default_factory=list)  # from left to right
    text: str = ""  # a digit, a letter, or a word in capitals
    text_colour: str = ""
    rows: list[tuple[float, ...]] = field(default_factory=list)  # ROW_FIELDS, drawn in this order
    labels: list[tuple[float, ...]] = field(default_factory=list)  # LABEL_FIELDS, one per row
    shades: tuple[float, ...] = ()  # RGB at one end of the background, RGB at the other end, angle of the gradient


def _shade(rng: random.Random, colour: str) -> tuple[float, float, float]:
    anchors = ANCHORS[colour]
    weights = [rng.expovariate(1.0) for _ in anchors]
    total = sum(weights)
    red, green, blue = (sum(w * a[i] for w, a in zip(weights, anchors, strict=True)) / total for i in range(3))
    return red, green, blue


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return math.dist(a[:3], b[:3])


def _contrasting(rng: random.Random, scene: Scene, colours: list[str]) -> tuple[str, tuple[float, float, float]]:
    """Choose one of the colours and a shade of it that stands out from the background."""
    for _ in range(40):
        colour = rng.choice(colours)
        if colour == scene.background:
            continue
        shade = _shade(rng, colour)
        if min(_distance(shade, scene.shades[:3]), _distance(shade, scene.shades[3:6])) >= MIN_CONTRAST:
            return colour, shade
    colour = "white" if sum(scene.shades[:6]) < 6 * 127 else "black"
    return colour, (255.0, 255.0, 255.0) if colour == "white" else (0.0, 0.0, 0.0)


def _empty(rng: random.Random, width: int, height: int) -> Scene:
    background = rng.choice(COLOURS)
    first = _shade(rng, background)
    last = _shade(rng, background) if rng.random() < 0.3 else first
    return Scene(width, height, background, shades=(*first, *last, rng.uniform(0, 2 * math.pi)))


def _add_shape(rng: random.Random, scene: Scene, shape: str, place: Shape, shade: tuple[float, ...]) -> None:
    """Draw a shape at a place that has been found free."""
    limit = 0.2 if shape in ("square", "diamond", "cross") else 0.35
    half = place.radius * CELL / (2 * SHAPE_RADIUS)
    rotation = rng.uniform(-limit, limit)
    index = SHAPES.index(shape)
    scene.shapes.append(place)
    scene.rows.append((index, place.cx, place.cy, half, half, rotation, 0.0, 0.0, *shade))


def _free_place(rng: random.Random, scene: Scene, radius: float) -> tuple[float, float, float] | None:
    for attempt in range(60):
        if attempt % 15 == 14:
            radius *= 0.85
        margin = radius * 1.1 + 1
        if 2 * margin >= min(scene.width, scene.height):
            continue
        cx, cy = rng.uniform(margin, scene.width - margin), rng.uniform(margin, scene.height - margin)
        if all((cx - s.cx) ** 2 + (cy - s.cy) ** 2 > (1.15 * (radius + s.radius) + 2) ** 2 for s in scene.shapes):
            return cx, cy, radius
    return None


def shapes_scene(
    rng: random.Random, width: int, height: int, num_shapes: int | None = None, outlines: tuple[str, ...] = ()
) -> Scene:
    """Return a scene of 0 to MAX_OBJECTS shapes that do not touch, of the given outlines where there are any."""
    scene = _empty(rng, width, height)
    if num_shapes is None:
        num_shapes = rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6))
    # Few colours or few shapes make questions such as "how many circles" worth asking.
    colours = list(COLOURS) if rng.random() < 0.6 else rng.sample(COLOURS, 3)
    shapes = list(SHAPES) if rng.random() < 0.6 else rng.sample(SHAPES, 2)
    area = width * height
    low = max(9.0, 0.06 * min(width, height))
    high = min(0.42 * math.sqrt(area / max(num_shapes, 2)), 0.4 * min(width, height))
    for number in range(num_shapes):
        radius = low * (max(high, low * 1.2) / low) ** rng.random()
        place = _free_place(rng, scene, radius)
        if place is None:
            continue
        colour, shade = _contrasting(rng, scene, colours)
        shape = outlines[number] if outlines else rng.choice(shapes)
        _add_shape(rng, scene, shape, Shape(shape, colour, *place), shade)
    _finish(scene)
    return scene


def text_scene(rng: random.Random, width: int, height: int, kind: str, fonts: tuple[str, ...]) -> Scene:
    """Return a scene with one digit, letter or word, in capitals, and sometimes a shape above or below it.

    `kind` is "digit", "letter" or "word".
    """
    scene = _empty(rng, width, height)
    font = rng.choice(fonts)
    table = advances()[font]
    if kind == "word":
        longest = max(2, min(5, int((width - 16) / 26)))
        text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, longest)))
    else:
        text = rng.choice(DIGITS if kind == "digit" else LETTERS)
    stretch = rng.uniform(0.88, 1.12)
    spacing = rng.uniform(0.02, 0.16)
    steps = [(table[CHARS.index(char)] + spacing) * stretch for char in text]
    widest = (width - 12) / max(sum(steps), 0.8)
    high = max(18.0, min(widest, 0.66 * height, 0.66 * width))
    low = min(high, max(22.0, 0.14 * height))
    cap = low * (high / low) ** rng.random() if high > low else high
    span = sum(steps) * cap
    cx = rng.uniform(span / 2 + 4, width - span / 2 - 4) if width > span + 8 else width / 2
    cy = rng.uniform(0.62 * cap + 3, height - 0.62 * cap - 3)
    tilt = rng.uniform(-0.12, 0.12) if len(text) == 1 else rng.uniform(-0.05, 0.05)
    shear = rng.uniform(-0.08, 0.14)
    weight = rng.uniform(-0.5, 0.8)
    scene.text = text
    scene.text_colour, shade = _contrasting(rng, scene, list(COLOURS))
    x = -span / 2
    half = cap * CELL / (2 * CAP_HEIGHT)
    glyph_labels = []
    for i, (char, step) in enumerate(zip(text, steps, strict=True)):
        along = x + step * cap / 2
        x += step * cap
        place = (cx + along * math.cos(tilt), cy + along * math.sin(tilt))
        scene.rows.append((glyph_index(font, char), *place, half * stretch, half, tilt, shear, weight, *shade))
        glyph_labels.append(
            (
                1 + len(SHAPES) + CHARS.index(char),
                COLOURS.index(scene.text_colour),
                i,
                math.log(cap / 40),
                0,
                place[1] / height,
            )
        )
    if rng.random() < 0.35:
        _add_beside_text(rng, scene, cy, 0.7 * cap)
    shape_rows = scene.rows[len(text) :]
    scene.labels = glyph_labels + [_shape_label(s, 0, 0, height) for s in scene.shapes[: len(shape_rows)]]
    return scene


def _add_beside_text(rng: random.Random, scene: Scene, text_y: float, half_height: float) -> None:
    """Put one shape above or below the text where there is room."""
    above, below = text_y - half_height, scene.height - text_y - half_height
    room = max(above, below)
    radius = min(room / 2.3, 0.25 * min(scene.width, scene.height)) * rng.uniform(0.7, 1.0)
    if radius < 9:
        return
    margin = radius * 1.1 + 1
    cy = rng.uniform(margin, room - margin) if room > 2 * margin else room / 2
    if below >= above:
        cy = scene.height - cy
    colour, shade = _contrasting(rng, scene, list(COLOURS))
    shape = rng.choice(SHAPES)
    place = Shape(shape, colour, rng.uniform(margin, scene.width - margin), cy, radius)
    _add_shape(rng, scene, shape, place, shade)


def _shape_label(shape: Shape, ordinal: int, rank: int, height: int) -> tuple[float, ...]:
    kind, colour = 1 + SHAPES.index(shape.shape), COLOURS.index(shape.colour)
    return kind, colour, ordinal, math.log(shape.radius / 40), rank, shape.cy / height


def _finish(scene: Scene) -> None:
    """Sort the shapes from left to right and label them."""
    order = sorted(range(len(scene.shapes)), key=lambda i: scene.shapes[i].cx)
    scene.rows = [scene.rows[i] for i in order]
    scene.shapes = [scene.shapes[i] for i in order]
    down = sorted(shape.cy for shape in scene.shapes)
    scene.labels = [_shape_label(s, i, down.index(s.cy), scene.height) for i, s in enumerate(scene.shapes)]
