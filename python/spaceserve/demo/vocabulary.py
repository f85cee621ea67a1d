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
_OPENERS = """
system user assistant What Which How Is Are Does Do Can Name Count Describe Tell Read Look In There The A An yes no
the a Give Say Please Hello I You It Write no
""".split()

# Words inside a sentence, with the blank before them.
_INNER = """
a an the of in on is are it there this that these what which how many much colour color shape shapes object objects
thing things figure picture image images background first second third last left right above below larger smaller bigger
or and letter digit number word written says text read see you do does have has contain contains shown drawn visible
larger further farther left-hand kind one two three four five six any me describe please count total only name say
answer with briefly short words can between painted behind everything find to all tell about being not
I questions pictures show ask helpful write spell out side size by for same
""".split()


def word_tokens() -> list[str]:
    """Return the multi-byte tokens in the order of their ids, as plain text (a leading blank is part of a token)."""
    plural = [shape + ("es" if shape == "cross" else "s") for shape in SHAPES]
    words = [*_OPENERS, *COLOURS, *SHAPES]
    words += [" " + word for word in (*COLOURS, *SHAPES, *plural, *_INNER)]
    return [word for word in dict.fromkeys(words) if len(word) > 1 and "-" not in word]
