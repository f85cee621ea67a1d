"""Lessons for the yes/no questions that compare: "Is the star left of the ring?" and "Is the letter F?".

In the ordinary mixture they are rare, and the model stays at guessing them: both things have to be found in the picture
before anything is gained. A lesson asks many such questions about one picture, each as if it were the only one, and
begins with few outlines and words.
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass

from spaceserve.demo.build_atlas import TRAIN_FONTS
from spaceserve.demo.questions import RELATIONS, Dialogue, Turn, ask_character, ask_relation
from spaceserve.demo.scenes import Scene, shapes_scene, text_scene
from spaceserve.demo.vocabulary import SHAPES

NUM_QUESTIONS = 8
CHARACTER_SHARE = 0.25
# The first levels: two shapes, of these outlines. After them two to four and two to six shapes of any outlines.
OUTLINES = (("circle", "star"), ("circle", "star", "square", "heart"), SHAPES)
NUM_LEVELS = len(OUTLINES) + 2
FIRST_WORDS = RELATIONS[::2]  # of level 0: the opposites come later


@dataclass(frozen=True)
class Lessons:
    """What share of the dialogues are lessons, and of which levels."""

    share: float
    lowest: int = NUM_LEVELS - 1
    highest: int = NUM_LEVELS - 1

    def level(self, rng: random.Random) -> int:
        """Choose a level: in half the cases the highest."""
        return self.highest if rng.random() < 0.5 else rng.randint(self.lowest, self.highest)


NO_LESSONS = Lessons(0.0)


class Plan:
    """The lessons of a run, for all of its processes: new levels in the first third, all levels in the second one, and
    only the highest, in `last_share` of the dialogues, in the last."""

    def __init__(self, share: float, last_share: float) -> None:
        self.share, self.last_share = share, last_share
        self.progress = multiprocessing.get_context("fork").Value("d", 0.0)  # from 0 to 1

    def now(self) -> Lessons:
        progress = self.progress.value
        if progress > 2 / 3:
            return Lessons(self.last_share)
        return Lessons(self.share, 0, min(NUM_LEVELS - 1, int(3 * progress * NUM_LEVELS)))


def lesson_dialogue(rng: random.Random, size: tuple[int, int], level: int) -> Dialogue:
    """Make a picture of `size` (width, height) and NUM_QUESTIONS independent questions about it."""
    if rng.random() < CHARACTER_SHARE:
        scene = text_scene(rng, *size, rng.choice(("digit", "letter")), TRAIN_FONTS)
        asked = [ask_character(rng, scene) for _ in range(NUM_QUESTIONS)]
        turns = [turn for turn in asked if turn is not None]
    else:
        turns = []
        while not turns:
            scene = _shapes(rng, size, level)
            turns = _relations(rng, scene, FIRST_WORDS if level == 0 else RELATIONS)
    return Dialogue([scene], turns, independent=True, kind="yesno")


def _shapes(rng: random.Random, size: tuple[int, int], level: int) -> Scene:
    if level < len(OUTLINES):
        return shapes_scene(rng, *size, 2, tuple(rng.sample(OUTLINES[level], 2)))
    return shapes_scene(rng, *size, rng.randint(2, 4 if level == len(OUTLINES) else 6))


def _relations(rng: random.Random, scene: Scene, words: tuple[str, ...]) -> list[Turn]:
    """Return NUM_QUESTIONS questions, or none where the scene does not give rise to that many soon."""
    asked = [ask_relation(rng, scene, words) for _ in range(4 * NUM_QUESTIONS)]
    turns = [turn for turn in asked if turn is not None][:NUM_QUESTIONS]
    return turns if len(turns) == NUM_QUESTIONS else []
