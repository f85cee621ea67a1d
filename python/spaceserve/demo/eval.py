"""Asks held-out questions and counts exact answers: `python -m spaceserve.demo.eval --base-url URL --num 2000`.

With `--base-url` a running server with an OpenAI-compatible interface is asked; with `--transformers DIR` the stock
classes of transformers load a checkpoint and answer in this process. Answers can be kept and compared with
`--answers FILE`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from spaceserve.demo.questions import KINDS, make_dialogue, random_size, yesno_topic
from spaceserve.demo.render import draw

MAX_NEW_TOKENS = 32


@dataclass
class Example:
    """A held-out question about one to three pictures."""

    kind: str
    images: list[Image.Image]
    question: str
    answer: str


def held_out_example(number: int, seed: int = 0, kinds: tuple[str, ...] = KINDS) -> Example:
    """Make held-out example `number`: the same one on every machine, up to the rounding of pixels.

    The kinds of question take turns. Seeds, mixtures of colours and placements differ from all training pictures, and
    so do the fonts.
    """
    rng = random.Random(f"held-out-{seed}-{number}")
    kind = kinds[number % len(kinds)]
    num_pictures = rng.choice((2, 3)) if kind == "nth" else 1
    sizes = [random_size(rng) for _ in range(num_pictures)]
    dialogue = make_dialogue(rng, sizes, None if kind == "nth" else kind, 1, held_out=True)
    turn = dialogue.turns[0]
    return Example(kind, [draw(scene) for scene in dialogue.scenes], turn.question, turn.answer)


def is_right(example: Example, answer: str) -> bool:
    """Exact match, but for blanks around it."""
    return answer.strip() == example.answer


def count(kinds: list[str], right: list[bool]) -> dict[str, tuple[int, int]]:
    """Return kind -> (right answers, questions)."""
    result: dict[str, tuple[int, int]] = {}
    for kind, hit in zip(kinds, right, strict=True):
        before = result.get(kind, (0, 0))
        result[kind] = (before[0] + hit, before[1] + 1)
    return result


def count_topics(kinds: list[str], questions: list[str], right: list[bool]) -> dict[str, tuple[int, int]]:
    """Return topic -> (right answers, questions) of the yes/no questions."""
    asked = [(yesno_topic(q), hit) for k, q, hit in zip(kinds, questions, right, strict=True) if k == "yesno"]
    found = count([f"yesno: {topic}" for topic, _ in asked], [hit for _, hit in asked])
    return dict(sorted(found.items()))


def table(result: dict[str, tuple[int, int]]) -> str:
    """Return exact match per kind and topic as lines of text, and the total of the kinds."""
    lines = [f"{kind:17s} {100 * right / asked:6.1f} %  of {asked}" for kind, (right, asked) in result.items()]
    right, asked = (sum(result[kind][i] for kind in result if kind in KINDS) for i in range(2))  # topics are in "yesno"
    return "\n".join([*lines, f"{'all':17s} {100 * right / max(asked, 1):6.1f} %  of {asked}"])


def messages(images: list[Image.Image], question: str) -> list[dict[str, Any]]:
    """Return the chat messages of a question, its pictures as PNG data URLs."""
    parts: list[dict[str, Any]] = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def ask_server(base_url: str, images: list[Image.Image], question: str, model: str = "default") -> str:
    """Ask an OpenAI-compatible server and return its answer.

    Raises:
        OSError: the server is not there, or answers with an error.
    """
    body = {
        "model": model,
        "messages": messages(images, question),
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
    }
    request = urllib.request.Request(
        base_url.rstrip("/") + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        reply = json.load(response)
    return str(reply["choices"][0]["message"]["content"])


def evaluate_server(
    base_url: str, num: int, seed: int, kinds: tuple[str, ...], concurrency: int, model: str
) -> tuple[list[Example], list[str]]:
    """Ask `num` held-out questions, `concurrency` at a time; return them with the answers, in order."""

    def one(number: int) -> tuple[Example, str]:
        example = held_out_example(number, seed, kinds)
        return example, ask_server(base_url, example.images, example.question, model)

    with ThreadPoolExecutor(concurrency) as pool:
        pairs = list(pool.map(one, range(num)))
    return [example for example, _ in pairs], [answer for _, answer in pairs]


class TransformersModel:
    """A checkpoint in the stock classes of transformers."""

    def __init__(self, folder: Path, device: str, dtype: str = "bfloat16") -> None:
        import torch
        from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

        self._torch = torch
        self.processor = AutoProcessor.from_pretrained(str(folder))
        model: Any = Qwen2VLForConditionalGeneration.from_pretrained(str(folder), dtype=getattr(torch, dtype))
        self.model = model.to(device).eval()

    def ask(self, images: list[Image.Image], question: str) -> str:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(text=[text], images=images, return_tensors="pt").to(self.model.device)
        with self._torch.no_grad():
            output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.tokenizer.decode(new, skip_special_tokens=True))


def evaluate_transformers(
    folder: Path, num: int, device: str, seed: int = 0, stop: Callable[[], bool] = lambda: False
) -> dict[str, tuple[int, int]]:
    """Ask a checkpoint in transformers up to `num` held-out questions; `stop` may end it early."""
    model = TransformersModel(folder, device)
    kinds, right = [], []
    for number in range(num):
        if stop():
            break
        example = held_out_example(number, seed)
        kinds.append(example.kind)
        right.append(is_right(example, model.ask(example.images, example.question)))
    return count(kinds, right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="such as http://127.0.0.1:30000")
    parser.add_argument("--transformers", type=Path, help="folder of a checkpoint to load here instead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of --transformers")
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help="default: all")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--model", default="default", help="the model's name in requests")
    parser.add_argument("--answers", type=Path, help="write every question and answer to this JSON file")
    parser.add_argument("--json", type=Path, help="write the table to this JSON file")
    parser.add_argument("--show-wrong", type=int, default=0, help="print this many wrong answers")
    args = parser.parse_args()
    if bool(args.base_url) == bool(args.transformers):
        parser.error("give either --base-url or --transformers")
    kinds = tuple(args.kinds)
    began = time.monotonic()
    if args.base_url:
        examples, answers = evaluate_server(args.base_url, args.num, args.seed, kinds, args.concurrency, args.model)
    else:
        model = TransformersModel(args.transformers, args.device, args.dtype)
        examples = [held_out_example(number, args.seed, kinds) for number in range(args.num)]
        answers = [model.ask(example.images, example.question) for example in examples]
    right = [is_right(example, answer) for example, answer in zip(examples, answers, strict=True)]
    kinds_asked = [example.kind for example in examples]
    result = count(kinds_asked, right) | count_topics(kinds_asked, [example.question for example in examples], right)
    wrong = [(e, a) for e, a, hit in zip(examples, answers, right, strict=True) if not hit]
    for example, answer in wrong[: args.show_wrong]:
        print(f"{example.kind}: {example.question!r} right {example.answer!r} given {answer!r}")
    if args.answers:
        rows = [
            {"kind": e.kind, "question": e.question, "right": e.answer, "given": a}
            for e, a in zip(examples, answers, strict=True)
        ]
        args.answers.write_text(json.dumps(rows, indent=1) + "\n")
    if args.json:
        args.json.write_text(json.dumps({"num": args.num, "seed": args.seed, "exact_match": result}, indent=1) + "\n")
    print(f"{args.num} questions in {time.monotonic() - began:.0f} s")
    print(table(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
