"""Asks a running server one question about the bundled picture: `python -m spaceserve.demo.ask --base-url URL`."""

from __future__ import annotations

import argparse
import random

from PIL import Image

from spaceserve.demo import PICTURE, QUESTION, RIGHT_ANSWER
from spaceserve.demo.eval import ask_server
from spaceserve.demo.questions import ask_describe
from spaceserve.demo.render import draw
from spaceserve.demo.scenes import Scene, shapes_scene

_SEED = "picture-105"


def picture_scene() -> Scene:
    """Return the scene that picture.png shows; its seed belongs to no training picture."""
    return shapes_scene(random.Random(_SEED), 336, 224, 3)


def right_answer() -> str:
    """Return what is drawn in picture.png, in the words of the demo model: RIGHT_ANSWER, from the scene."""
    turn = ask_describe(random.Random(0), picture_scene())
    assert turn is not None
    return turn.answer


def ask(base_url: str) -> str:
    """Return the server's answer to QUESTION about PICTURE; raises OSError where no server answers."""
    with Image.open(PICTURE) as image:
        return ask_server(base_url, [image.convert("RGB")], QUESTION)


def report(answer: str) -> str:
    """Return three lines for people: the picture, the question, the answer and whether it is right."""
    verdict = "right" if answer.strip() == RIGHT_ANSWER else f"wrong: {RIGHT_ANSWER}"
    return f"picture:  {PICTURE}\nquestion: {QUESTION}\nanswer:   {answer} ({verdict})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--draw", action="store_true", help="draw picture.png again instead of asking")
    args = parser.parse_args()
    if args.draw:
        draw(picture_scene()).save(PICTURE)
        print(PICTURE)
    else:
        print(report(ask(args.base_url)))


if __name__ == "__main__":
    main()
