"""Asks questions about scenes and answers them from what was drawn, never from pixels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from spaceserve.demo.build_atlas import HELD_OUT_FONTS, TRAIN_FONTS
from spaceserve.demo.scenes import Scene, Shape, shapes_scene, text_scene
from spaceserve.demo.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES, plural

KINDS = (
    "colour",
    "shape",
    "background",
    "count",
    "digit",
    "letter",
    "word",
    "yesno",
    "larger",
    "left",
    "nth",
    "describe",
)
ORDINALS = ("first", "second", "third")
RELATIONS = ("left of", "right of", "above", "below", "larger than", "smaller than")
YESNO_TOPICS = ("there", "colour", "background", "relation", "character")

_COLOUR = (
    "What colour is the {}?",
    "What color is the {}?",
    "Which colour is the {}?",
    "What is the colour of the {}?",
    "Tell me the color of the {}.",
    "Name the colour of the {}.",
    "What colour does the {} have?",
    "The {} is of which color?",
)
_SHAPE = (
    "What shape is the {} object?",
    "Which shape is {}?",
    "What is the shape of the {} thing?",
    "Which shape does the {} object have?",
    "Name the shape of the {} figure.",
    "What kind of shape is {}?",
    "What is the {} object?",
)
_BACKGROUND = (
    "What colour is the background?",
    "What color is the background?",
    "What is the background colour?",
    "Name the colour of the background.",
    "Which colour is behind everything?",
    "Tell me the background color.",
    "Which color does the background have?",
)
_COUNT = (
    "How many {} are there?",
    "How many {} do you see?",
    "Count the {}.",
    "How many {} can you find?",
    "Tell me how many {} are shown.",
    "What is the number of {}?",
)
_DIGIT = (
    "Which digit is written?",
    "What digit is shown?",
    "What number do you see?",
    "Read the digit.",
    "Which number is written here?",
    "What is the digit?",
)
_LETTER = (
    "Which letter is written?",
    "What letter is shown?",
    "What letter do you see?",
    "Read the letter.",
    "Name the letter.",
    "What is the letter?",
)
_WORD = (
    "What word is written?",
    "Which word do you see?",
    "Read the word.",
    "What does the text say?",
    "What is written here?",
    "Spell the word.",
)
_DESCRIBE = (
    "Describe the picture.",
    "Describe the image.",
    "What do you see?",
    "What does the picture show?",
    "Tell me what is in the image.",
    "What is in this picture?",
    "Describe what you see briefly.",
)
_THERE = (
    "Is there a {}?",
    "Do you see a {}?",
    "Does the picture contain a {}?",
    "Can you see a {}?",
    "Is a {} shown?",
    "Is there a {} in the image?",
)
_NTH = (
    "In the {} image, {}",
    "In the {} picture, {}",
    "Look at the {} image: {}",
    "About the {} picture: {}",
)
_GREETINGS = (
    ("Hello", "Hello! Show me a picture and ask about it."),
    ("Hello!", "Hello! Show me a picture and ask about it."),
    ("Hi", "Hello! Show me a picture and ask about it."),
    ("Who are you?", "I answer questions about pictures."),
    ("What can you do?", "I answer questions about pictures."),
    ("What are you?", "I answer questions about pictures."),
)
_SYSTEM = ("You are a helpful assistant.", "Answer with one word.", "You answer questions about pictures.")


def article(phrase: str) -> str:
    """Put "a" or "an" before a phrase."""
    return ("an " if phrase[0] in "aeio" else "a ") + phrase


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]


@dataclass
class Turn:
    """One question with its answer and the kind under which it is counted."""

    kind: str
    question: str
    answer: str


def _unique(scene: Scene, attribute: str) -> list[Shape]:
    """Return the shapes whose value of `attribute` no other shape of the scene has."""
    values = [getattr(s, attribute) for s in scene.shapes]
    return [s for s in scene.shapes if values.count(getattr(s, attribute)) == 1]


def _text_kind(scene: Scene) -> str:
    if len(scene.text) > 1:
        return "word"
    return "digit" if scene.text in DIGITS else "letter"


def ask_colour(rng: random.Random, scene: Scene) -> Turn | None:
    candidates = [(s.shape, s.colour) for s in _unique(scene, "shape")]
    if len(scene.shapes) == 1 and not scene.text:
        candidates.append((rng.choice(("object", "shape", "thing")), scene.shapes[0].colour))
    if scene.text:
        candidates.append((_text_kind(scene), scene.text_colour))
    if not candidates:
        return None
    name, colour = rng.choice(candidates)
    return Turn("colour", rng.choice(_COLOUR).format(name), colour)


def ask_shape(rng: random.Random, scene: Scene) -> Turn | None:
    if scene.text:
        return None
    if len(scene.shapes) == 1 and rng.random() < 0.3:
        question = rng.choice(("What shape is it?", "Which shape is shown?", "What shape do you see?"))
        return Turn("shape", question, scene.shapes[0].shape)
    candidates = _unique(scene, "colour")
    if not candidates:
        return None
    shape = rng.choice(candidates)
    return Turn("shape", rng.choice(_SHAPE).format(shape.colour), shape.shape)


def ask_background(rng: random.Random, scene: Scene) -> Turn | None:
    return Turn("background", rng.choice(_BACKGROUND), scene.background)


def ask_count(rng: random.Random, scene: Scene) -> Turn | None:
    if scene.text:
        return None
    lot = rng.random()
    if lot < 0.5:
        name, number = rng.choice(("objects", "shapes", "things")), len(scene.shapes)
    elif lot < 0.75:
        colour = rng.choice([s.colour for s in scene.shapes] or list(COLOURS))
        if rng.random() < 0.15:
            colour = rng.choice(COLOURS)
        name = f"{colour} {rng.choice(('objects', 'shapes', 'things'))}"
        number = sum(s.colour == colour for s in scene.shapes)
    else:
        shape = rng.choice([s.shape for s in scene.shapes] or list(SHAPES))
        if rng.random() < 0.15:
            shape = rng.choice(SHAPES)
        name, number = plural(shape), sum(s.shape == shape for s in scene.shapes)
    return Turn("count", rng.choice(_COUNT).format(name), str(number))


def ask_text(rng: random.Random, scene: Scene) -> Turn | None:
    if not scene.text:
        return None
    kind = _text_kind(scene)
    wording = {"digit": _DIGIT, "letter": _LETTER, "word": _WORD}[kind]
    return Turn(kind, rng.choice(wording), scene.text)


def ask_yesno(rng: random.Random, scene: Scene) -> Turn | None:
    for _ in range(4):
        turn = rng.choice((_is_there, _is_there, _is_coloured, _is_background, ask_character, ask_relation))(rng, scene)
        if turn is not None:
            return turn
    return _is_background(rng, scene)


def yesno_topic(question: str) -> str:
    """Return what a yes/no question is about, of YESNO_TOPICS."""
    if "background" in question:
        return "background"
    if any(f" {word} the " in question for word in RELATIONS):
        return "relation"
    if not question.startswith(("Is the ", "Is this the ")):
        return "there"
    return "character" if question[-2] in DIGITS + LETTERS else "colour"


def _yes(question: str, truth: bool) -> Turn:
    return Turn("yesno", question, "yes" if truth else "no")


def _is_there(rng: random.Random, scene: Scene) -> Turn | None:
    if scene.text and not scene.shapes:
        return None
    right = rng.random() < 0.5 and scene.shapes
    if right:
        seen = rng.choice(scene.shapes)
        colour, shape = seen.colour, seen.shape
    else:
        colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
        if scene.shapes and rng.random() < 0.6:  # the colour of one shape with the outline of another is the hard case
            colour, shape = rng.choice(scene.shapes).colour, rng.choice(scene.shapes).shape
            if rng.random() < 0.5:
                colour = rng.choice(COLOURS)
    lot = rng.random()
    if lot < 0.5:
        truth = any(s.colour == colour and s.shape == shape for s in scene.shapes)
        name = f"{colour} {shape}"
    elif lot < 0.8:
        truth, name = any(s.shape == shape for s in scene.shapes), shape
    else:
        if scene.text:
            return None
        truth, name = any(s.colour == colour for s in scene.shapes), f"{colour} object"
    return _yes(rng.choice(_THERE).format(name).replace(" a o", " an o"), truth)


def _is_coloured(rng: random.Random, scene: Scene) -> Turn | None:
    candidates = [(s.shape, s.colour) for s in _unique(scene, "shape")]
    if scene.text:
        candidates.append((_text_kind(scene), scene.text_colour))
    if not candidates:
        return None
    name, colour = rng.choice(candidates)
    asked = (
        colour if rng.random() < 0.5 else rng.choice([*COLOURS, scene.background, *(s.colour for s in scene.shapes)])
    )
    return _yes(rng.choice(("Is the {} {}?", "Is the colour of the {} {}?")).format(name, asked), asked == colour)


def _is_background(rng: random.Random, scene: Scene) -> Turn:
    asked = scene.background if rng.random() < 0.5 else rng.choice([*COLOURS, *(s.colour for s in scene.shapes)])
    wording = rng.choice(("Is the background {}?", "Does the picture have a {} background?"))
    return _yes(wording.format(asked).replace(" a o", " an o"), asked == scene.background)


def ask_character(rng: random.Random, scene: Scene) -> Turn | None:
    """Ask whether the scene's digit or letter is a certain one."""
    if not scene.text or len(scene.text) > 1:
        return None
    kind = _text_kind(scene)
    asked = scene.text if rng.random() < 0.5 else rng.choice(DIGITS if kind == "digit" else LETTERS)
    return _yes(rng.choice(("Is the {} {}?", "Is this the {} {}?")).format(kind, asked), asked == scene.text)


def ask_relation(rng: random.Random, scene: Scene, words: tuple[str, ...] = RELATIONS) -> Turn | None:
    """Ask whether one of some relations holds between two shapes that differ enough in it."""
    pair = _pair(rng, scene)
    if pair is None:
        return None
    first, second, name_a, name_b = pair
    relations: list[tuple[str, float]] = []
    if max(first.radius, second.radius) > 1.3 * min(first.radius, second.radius):
        relations += [("larger than", first.radius - second.radius), ("smaller than", second.radius - first.radius)]
    gap = 0.12
    if abs(first.cx - second.cx) > gap * scene.width:
        relations += [("left of", second.cx - first.cx), ("right of", first.cx - second.cx)]
    if abs(first.cy - second.cy) > gap * scene.height:
        relations += [("above", second.cy - first.cy), ("below", first.cy - second.cy)]
    relations = [(word, sign) for word, sign in relations if word in words]
    if not relations:
        return None
    relation, sign = rng.choice(relations)
    return _yes(f"Is the {name_a} {relation} the {name_b}?", sign > 0)


def _pair(rng: random.Random, scene: Scene) -> tuple[Shape, Shape, str, str] | None:
    """Choose two shapes that words can tell apart, and how to call them."""
    if len(scene.shapes) < 2:
        return None
    unique = _unique(scene, "shape")
    if len(unique) >= 2 and rng.random() < 0.6:
        first, second = rng.sample(unique, 2)
        return first, second, first.shape, second.shape
    first, second = rng.sample(scene.shapes, 2)
    both = [(s.colour, s.shape) for s in scene.shapes]
    if both.count((first.colour, first.shape)) > 1 or both.count((second.colour, second.shape)) > 1:
        return None
    return first, second, f"{first.colour} {first.shape}", f"{second.colour} {second.shape}"


def ask_larger(rng: random.Random, scene: Scene) -> Turn | None:
    pair = _pair(rng, scene)
    if pair is None:
        return None
    first, second, name_a, name_b = pair
    if max(first.radius, second.radius) < 1.3 * min(first.radius, second.radius):
        return None
    word, larger = rng.choice((("larger", True), ("bigger", True), ("smaller", False)))
    wording = rng.choice(("Which is {}, the {} or the {}?", "Which one is {}: the {} or the {}?"))
    answer = name_a if (first.radius > second.radius) == larger else name_b
    return Turn("larger", wording.format(word, name_a, name_b), f"the {answer}")


def ask_left(rng: random.Random, scene: Scene) -> Turn | None:
    pair = _pair(rng, scene)
    if pair is None or abs(pair[0].cx - pair[1].cx) < 0.12 * scene.width:
        return None
    first, second, name_a, name_b = pair
    side = rng.choice(("left", "right"))
    wording = rng.choice(("Which is further {}, the {} or the {}?", "Which one is on the {}: the {} or the {}?"))
    answer = name_a if (first.cx < second.cx) == (side == "left") else name_b
    return Turn("left", wording.format(side, name_a, name_b), f"the {answer}")


def ask_describe(rng: random.Random, scene: Scene) -> Turn | None:
    ground = f"{article(scene.background)} background"
    if scene.text:
        what = f"the {_text_kind(scene)} {scene.text} in {scene.text_colour}"
    elif not scene.shapes:
        return Turn("describe", rng.choice(_DESCRIBE), f"only {ground}")
    elif len(scene.shapes) > 3:
        what = f"{len(scene.shapes)} objects"
    else:
        names = [article(f"{s.colour} {s.shape}") for s in scene.shapes]
        what = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return Turn("describe", rng.choice(_DESCRIBE), f"{what} on {ground}")


_ASKERS: dict[str, Callable[[random.Random, Scene], Turn | None]] = {
    "colour": ask_colour,
    "shape": ask_shape,
    "background": ask_background,
    "count": ask_count,
    "digit": ask_text,
    "letter": ask_text,
    "word": ask_text,
    "yesno": ask_yesno,
    "larger": ask_larger,
    "left": ask_left,
    "describe": ask_describe,
}
_SHAPES_LOT: tuple[str, ...] = (
    "colour",
    "colour",
    "shape",
    "shape",
    "background",
    "count",
    "count",
    "count",
    "yesno",
    "yesno",
    "yesno",
)
_SHAPES_LOT += ("larger", "larger", "left", "left", "describe")
_TEXT_LOT = ("text", "text", "text", "text", "colour", "background", "yesno", "describe")


@dataclass
class Dialogue:
    """Scenes in the order shown, and one or more turns about them."""

    scenes: list[Scene]
    turns: list[Turn]
    system: str = ""
    text_first: bool = False
    independent: bool = False  # in training: every turn sees the pictures, and no turn sees another one
    kind: str = field(default="")  # of the first turn


def _scene_for(rng: random.Random, kind: str, width: int, height: int, fonts: tuple[str, ...]) -> Scene:
    if kind in ("digit", "letter", "word"):
        return text_scene(rng, width, height, kind, fonts)
    if kind in ("larger", "left"):
        return shapes_scene(rng, width, height, rng.randint(2, 4))
    if kind in ("colour", "shape"):
        return shapes_scene(rng, width, height, rng.randint(1, 4))
    if kind in ("background", "describe", "yesno") and rng.random() < 0.2:
        return text_scene(rng, width, height, rng.choice(("digit", "letter", "word")), fonts)
    return shapes_scene(rng, width, height)


def _any_turn(rng: random.Random, scene: Scene) -> Turn:
    for _ in range(10):
        kind = rng.choice(_TEXT_LOT if scene.text else _SHAPES_LOT)
        turn = ask_text(rng, scene) if kind == "text" else _ASKERS[kind](rng, scene)
        if turn is not None:
            return turn
    return Turn("background", rng.choice(_BACKGROUND), scene.background)


def _about_nth(rng: random.Random, scenes: list[Scene]) -> Turn:
    """Ask about one of several pictures."""
    number = rng.randrange(len(scenes))
    turn = _any_turn(rng, scenes[number])
    ordinal = "last" if number == len(scenes) - 1 and rng.random() < 0.15 else ORDINALS[number]
    question = turn.question
    for tail in (" in the image?", " in the picture?"):
        question = question.replace(tail, "?")
    question = rng.choice(_NTH).format(ordinal, _lower_first(question))
    return Turn("nth", question, turn.answer)


def make_dialogue(
    rng: random.Random, sizes: list[tuple[int, int]], kind: str | None, num_turns: int, held_out: bool = False
) -> Dialogue:
    """Make scenes of the given sizes (width, height) and turns about them.

    Args:
        kind: kind of the first turn, of KINDS, or None for any; "nth" exactly where there are several sizes.
        held_out: use the fonts that training never sees.
    """
    fonts = HELD_OUT_FONTS if held_out else TRAIN_FONTS
    if len(sizes) > 1:
        scenes = [
            _scene_for(rng, rng.choice(("digit", "letter", "word", "left", "colour", "", "", "")), *size, fonts)
            for size in sizes
        ]
        return Dialogue(scenes, [_about_nth(rng, scenes) for _ in range(num_turns)], kind="nth")
    scenes_kind = kind or rng.choice(
        ("digit", "letter", "word", "word", "colour", "shape", "larger", "", "", "", "", "")
    )
    while True:
        scene = _scene_for(rng, scenes_kind, *sizes[0], fonts)
        first = _ASKERS[kind](rng, scene) if kind else _any_turn(rng, scene)
        if first is not None and (kind is None or first.kind == kind):
            break
    turns = [first] + [_any_turn(rng, scene) for _ in range(num_turns - 1)]
    return Dialogue([scene], turns, kind=first.kind)


def decorate(rng: random.Random, dialogue: Dialogue) -> None:
    """Vary, in place, what stands around the question: a system message, the order of text and pictures."""
    if rng.random() < 0.15:
        dialogue.system = rng.choice(_SYSTEM)
    dialogue.text_first = rng.random() < 0.2 and not dialogue.independent


def greeting(rng: random.Random) -> Turn:
    """Return a turn without a picture."""
    return Turn("greeting", *rng.choice(_GREETINGS))


def random_size(rng: random.Random) -> tuple[int, int]:
    """Return a width and height of 112 to 448 pixels, not always multiples of anything, of aspect up to 4."""
    lot = rng.random()
    width = int(112 * 4 ** rng.random())
    height = int(112 * 4 ** rng.random()) if lot < 0.6 else width
    if rng.random() < 0.5:
        width, height = round(width / 28) * 28, round(height / 28) * 28
    return max(112, min(448, width)), max(112, min(448, height))


def all_wording() -> list[str]:
    """Return one example of every wording, for the vocabulary's test."""
    plain = [*_BACKGROUND, *_DIGIT, *_LETTER, *_WORD, *_DESCRIBE, *_SYSTEM]
    filled = [w.format("red circle") for w in (*_COLOUR, *_SHAPE, *_THERE)] + [w.format("red stars") for w in _COUNT]
    return (
        plain
        + filled
        + [w.format("second", "what is it?") for w in _NTH]
        + [text for pair in _GREETINGS for text in pair]
    )
