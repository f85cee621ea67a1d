"""The words that the demo tokenizer knows as single tokens; every other text is encoded byte by byte."""

from __future__ import annotations

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
DIGITS = "0123456789"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Words at the start of a line or an answer, without a blank before them.
_OPENERS = (
    "system user assistant What Which How Is Are Does Do Can Name Count Describe Tell Read Look In About There "
    "The A An Hello Hi Who Show Spell Answer You I yes no the a an only"
)

# Words inside a sentence, with the blank before them.
_INNER = (
    "a an the of in on is are it there this that these what which how many colour color shape shapes object "
    "objects thing things figure picture image images pictures background first second third last left right "
    "above below larger smaller bigger and or letter digit number word written says text read see you do does "
    "have has contain shown drawn visible further kind one two three four five six any me describe count total "
    "only name say answer answers with briefly can behind everything find to tell about not questions show ask "
    "helpful assistant spell out side here than look who at by"
)


def plural(shape: str) -> str:
    """Return the plural of a shape's name."""
    return shape + ("es" if shape == "cross" else "s")


def word_tokens() -> list[str]:
    """Return the multi-byte tokens in the order of their ids, as plain text (a leading blank is part of a token)."""
    words = [*_OPENERS.split(), *COLOURS, *SHAPES]
    words += [" " + word for word in (*COLOURS, *SHAPES, *map(plural, SHAPES), *_INNER.split())]
    return [word for word in dict.fromkeys(words) if len(word) > 1]
