"""Makes training batches in worker processes: scenes, token ids, rotary positions and targets, as numpy arrays.

Every sequence of a batch shows pictures of the same sizes, so that batches are dense and need no attention mask: a
sequence is padded on the right, where causal attention cannot see it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from spaceserve.demo import questions
from spaceserve.demo.architecture import CELL_SIZE, processed_size
from spaceserve.demo.lessons import NO_LESSONS, NUM_QUESTIONS, Lessons, Plan, lesson_dialogue
from spaceserve.demo.questions import Dialogue
from spaceserve.demo.scenes import LABEL_FIELDS, ROW_FIELDS, Scene
from spaceserve.demo.tokenizer import encode, special_id

MAX_ANSWER_TOKENS = 24
LENGTH_STEP = 16  # padded lengths are multiples of this, to keep the number of tensor shapes low


@dataclass
class Pictures:
    """The pictures at one place of the dialogues of a batch; all have one size."""

    width: int
    height: int
    rows: np.ndarray  # [B, K, len(ROW_FIELDS)] float32
    shades: np.ndarray  # [B, 7] float32
    labels: np.ndarray  # [B, K, len(LABEL_FIELDS)] float32; kind 0 where there is nothing
    globals: np.ndarray  # [B, 2] int64: colour of the background, number of shapes


@dataclass
class Batch:
    """B dialogues over pictures of equal sizes."""

    pictures: list[Pictures]
    tokens: np.ndarray  # [B, L] int32
    positions: np.ndarray  # [3, B, L] int32
    segments: np.ndarray | None  # [B, L] int8, see DemoModel.hidden; None where no dialogue needs it
    lengths: np.ndarray  # [B] int32
    target_index: np.ndarray  # [T] int64: places in the flattened [B * L] whose next token is to be learnt
    targets: np.ndarray  # [T] int64
    questions: list[str]  # these three: of the first turns
    answers: list[str]
    kinds: list[str]


class Sequence(NamedTuple):
    """A dialogue as the model reads it."""

    ids: list[int]
    positions: np.ndarray  # rotary positions [3, L] int32
    answer_places: list[int]  # places of the tokens that the model has to produce
    segments: list[int]  # per token: 0 for what every turn sees, else the number of an independent turn, from 1


@cache
def _grid_positions(rows: int, cols: int) -> np.ndarray:
    """Return the [3, rows * cols] rotary positions of a picture that starts at position 0."""
    row, col = np.divmod(np.arange(rows * cols, dtype=np.int32), cols)
    return np.stack((np.zeros_like(row), row, col))


@lru_cache(maxsize=100_000)
def _ids(text: str) -> tuple[int, ...]:
    return tuple(encode(text))


def build_sequence(dialogue: Dialogue, grids: list[tuple[int, int]], with_answers: bool = True) -> Sequence:
    """Write a dialogue as the chat template does.

    Args:
        grids: (rows, columns) of merged cells of each picture, which are shown in the first turn.
        with_answers: False stops where the first answer would begin.

    Each independent turn has the positions that it would have as the only one, and a segment of its own; text may not
    come first then.
    """
    assert not (dialogue.independent and dialogue.text_first)
    ids: list[int] = []
    turn_starts: list[int] = []
    answer_places: list[int] = []
    picture_starts: list[int] = []
    if dialogue.system:
        ids += _ids(f"<|im_start|>system\n{dialogue.system}<|im_end|>\n")
    for number, turn in enumerate(dialogue.turns):
        if number == 0 or not dialogue.independent:
            ids += _ids("<|im_start|>user\n")
        question = _ids(turn.question)
        if number == 0 and dialogue.text_first:
            ids += question
        if number == 0:
            for rows, cols in grids:
                ids.append(special_id("<|vision_start|>"))
                picture_starts.append(len(ids))
                ids += [special_id("<|image_pad|>")] * (rows * cols)
                ids.append(special_id("<|vision_end|>"))
        turn_starts.append(len(ids))
        if number > 0 or not dialogue.text_first:
            ids += question
        ids += _ids("<|im_end|>\n<|im_start|>assistant\n")
        if not with_answers:
            break
        answer = _ids(turn.answer + "<|im_end|>")
        answer_places += range(len(ids), len(ids) + len(answer))
        ids += answer
        ids += _ids("\n")
    positions = np.empty((3, len(ids)), dtype=np.int32)
    place = position = 0
    for start, (rows, cols) in zip(picture_starts, grids, strict=True):
        positions[:, place:start] = np.arange(position, position + start - place, dtype=np.int32)
        position += start - place
        place = start + rows * cols
        positions[:, start:place] = _grid_positions(rows, cols) + position
        position += max(rows, cols)
    positions[:, place:] = np.arange(position, position + len(ids) - place, dtype=np.int32)
    segments = [0] * len(ids)
    if dialogue.independent:
        for number, (start, end) in enumerate(zip(turn_starts, [*turn_starts[1:], len(ids)], strict=True), 1):
            segments[start:end] = [number] * (end - start)
            positions[:, start:end] -= start - turn_starts[0]
    return Sequence(ids, positions, answer_places, segments)


def _pack_pictures(scenes: list[Scene]) -> Pictures:
    most = max(1, max(len(scene.rows) for scene in scenes))
    rows = np.zeros((len(scenes), most, len(ROW_FIELDS)), dtype=np.float32)
    rows[:, :, 0] = -1
    labels = np.zeros((len(scenes), most, len(LABEL_FIELDS)), dtype=np.float32)
    for i, scene in enumerate(scenes):
        if scene.rows:
            rows[i, : len(scene.rows)] = scene.rows
            labels[i, : len(scene.labels)] = scene.labels
    return Pictures(
        width=scenes[0].width,
        height=scenes[0].height,
        rows=rows,
        shades=np.asarray([scene.shades for scene in scenes], dtype=np.float32),
        labels=labels,
        globals=np.asarray([(questions.COLOURS.index(s.background), len(s.shapes)) for s in scenes], dtype=np.int64),
    )


def pack_batch(dialogues: list[Dialogue], with_answers: bool = True, spare_tokens: int = 0) -> Batch:
    """Make arrays of dialogues whose pictures have equal sizes; `spare_tokens` leaves room at the end for answers."""
    scenes = dialogues[0].scenes
    grids = []
    for scene in scenes:
        width, height = processed_size(scene.width, scene.height)
        grids.append((height // CELL_SIZE, width // CELL_SIZE))
    sequences = [build_sequence(dialogue, grids, with_answers) for dialogue in dialogues]
    longest = max(len(sequence.ids) for sequence in sequences) + spare_tokens
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    tokens = np.full((len(dialogues), length), special_id("<|endoftext|>"), dtype=np.int32)
    positions = np.zeros((3, len(dialogues), length), dtype=np.int32)
    segments = np.zeros((len(dialogues), length), dtype=np.int8)
    index: list[int] = []
    targets: list[int] = []
    for i, (ids, position, places, segment) in enumerate(sequences):
        segments[i, : len(ids)] = segment
        tokens[i, : len(ids)] = ids
        positions[:, i, : len(ids)] = position
        positions[:, i, len(ids) :] = position[0, -1] + 1 + np.arange(length - len(ids), dtype=np.int32)
        index += [i * length + place - 1 for place in places]
        targets += [ids[place] for place in places]
    return Batch(
        pictures=[_pack_pictures([dialogue.scenes[n] for dialogue in dialogues]) for n in range(len(scenes))],
        tokens=tokens,
        positions=positions,
        segments=segments if any(dialogue.independent for dialogue in dialogues) else None,
        lengths=np.asarray([len(sequence.ids) for sequence in sequences], dtype=np.int32),
        target_index=np.asarray(index, dtype=np.int64),
        targets=np.asarray(targets, dtype=np.int64),
        questions=[dialogue.turns[0].question for dialogue in dialogues],
        answers=[dialogue.turns[0].answer for dialogue in dialogues],
        kinds=[dialogue.kind for dialogue in dialogues],
    )


def batch_size(sizes: list[tuple[int, int]], budget: int, text_tokens: int = 48) -> int:
    """Return how many dialogues cost about `budget` patches, counting the decoder's tokens as 1.5 patches each."""
    cells = 0
    for width, height in (processed_size(*size) for size in sizes):
        cells += (width // CELL_SIZE) * (height // CELL_SIZE)
    return max(4, min(1024, budget // int(4 * cells + 1.5 * (cells + text_tokens))))


def training_batch(rng: random.Random, budget: int, lessons: Lessons = NO_LESSONS) -> Batch:
    """Make a batch of random sizes, of 1 to 3 pictures or (rarely) none, and 1 to 4 turns.

    Where lessons take place, some of the dialogues about one picture are lessons, and half of the others have as many
    turns, which are independent.
    """
    lot = rng.random()
    if lot < 0.015:
        return pack_batch([_greeting(rng) for _ in range(128)])
    num_pictures = 1 if lot < 0.8 else 2 if lot < 0.93 else 3
    sizes = [questions.random_size(rng) for _ in range(num_pictures)]
    if rng.random() < 0.5:
        sizes = [sizes[0]] * num_pictures
    num_turns = rng.choice((1, 2, 3, 4))
    teaching = lessons.share > 0 and num_pictures == 1
    dialogues = []
    for _ in range(batch_size(sizes, budget, 16 * NUM_QUESTIONS if teaching else 48)):
        if teaching and rng.random() < lessons.share:
            dialogue = lesson_dialogue(rng, sizes[0], lessons.level(rng))
        else:
            independent = teaching and rng.random() < 0.5
            dialogue = questions.make_dialogue(rng, sizes, None, NUM_QUESTIONS if independent else num_turns)
            dialogue.independent = independent
        questions.decorate(rng, dialogue)
        dialogues.append(dialogue)
    return pack_batch(dialogues)


def _greeting(rng: random.Random) -> Dialogue:
    dialogue = Dialogue([], [questions.greeting(rng)], kind="greeting")
    questions.decorate(rng, dialogue)
    dialogue.text_first = False
    return dialogue


def held_out_batch(rng: random.Random, kind: str, size: int) -> Batch:
    """Make single-turn dialogues of one kind and random sizes with held-out fonts, without answers, to be answered."""
    num_pictures = rng.choice((2, 3)) if kind == "nth" else 1
    sizes = [questions.random_size(rng) for _ in range(num_pictures)]
    first_kind = None if kind == "nth" else kind
    dialogues = [questions.make_dialogue(rng, sizes, first_kind, 1, held_out=True) for _ in range(size)]
    return pack_batch(dialogues, with_answers=False, spare_tokens=MAX_ANSWER_TOKENS)


def worker(queue: Any, seed: str, budget: int, plan: Plan) -> None:
    """Fill a multiprocessing queue with training batches until the process is ended."""
    rng = random.Random(seed)
    while True:
        queue.put(training_batch(rng, budget, plan.now()))
