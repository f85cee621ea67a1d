"""Greedy answers of the plain torch model, many at once, for the evaluations during training."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from spaceserve.demo.data import MAX_ANSWER_TOKENS, Batch, held_out_batch
from spaceserve.demo.eval import count, count_topics
from spaceserve.demo.model import DemoModel
from spaceserve.demo.pixels import on_device, patches_of
from spaceserve.demo.questions import KINDS
from spaceserve.demo.tokenizer import decode, special_id


def encode_pictures(model: DemoModel, batch: Batch, device: torch.device, noise: bool) -> Tensor | None:
    """Return the features of a batch's pictures, [B, M, D], in the order in which the sequences show them."""
    if not batch.pictures:
        return None
    dtype = model.model.embed_tokens.weight.dtype
    features = []
    for pictures in batch.pictures:
        patches, grid = patches_of(pictures, device, noise)
        features.append(model.visual(patches.to(dtype), *grid))
    return torch.cat(features, dim=1)


@torch.no_grad()
def answer_batch(model: DemoModel, batch: Batch, device: torch.device) -> list[str]:
    """Return the greedy answers to a batch that was made without answers and with MAX_ANSWER_TOKENS to spare."""
    features = encode_pictures(model, batch, device, noise=False)
    flat = None if features is None else features.flatten(0, 1)
    tokens = on_device(batch.tokens, device).long()
    positions = on_device(batch.positions, device)
    lengths = on_device(batch.lengths, device).long()
    row = torch.arange(len(tokens), device=device)
    end = special_id("<|im_end|>")
    done = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    for step in range(MAX_ANSWER_TOKENS):
        hidden = model.hidden(tokens, positions, flat, special_id("<|image_pad|>"))
        best = model.logits(hidden[row, lengths - 1 + step]).argmax(-1)
        tokens[row, lengths + step] = torch.where(done, end, best)
        done |= best == end
        if bool(done.all()):
            break
    answers = []
    for line, length in zip(tokens.tolist(), batch.lengths.tolist(), strict=True):
        ids = line[length : length + MAX_ANSWER_TOKENS]
        answers.append(decode(ids[: ids.index(end)] if end in ids else ids))
    return answers


def held_out_set(per_kind: int, seed: int, kinds: tuple[str, ...] = KINDS, num_sizes: int = 5) -> list[Batch]:
    """Return batches of held-out questions, `per_kind` of each kind in `num_sizes` sizes of pictures."""
    rng = random.Random(f"held-out-batches-{seed}")
    return [held_out_batch(rng, kind, max(1, per_kind // num_sizes)) for kind in kinds for _ in range(num_sizes)]


def exact_match(
    model: DemoModel, batches: list[Batch], device: torch.device, stop: Callable[[], bool] = lambda: False
) -> dict[str, tuple[int, int]]:
    """Return kind, and topic of yes/no questions, -> (right answers, questions); `stop` may end it early."""
    kinds, questions, right = [], [], []
    for batch in batches:
        if stop():
            break
        answers = answer_batch(model, batch, device)
        kinds += batch.kinds
        questions += batch.questions
        right += [a == b for a, b in zip(answers, batch.answers, strict=True)]
    return count(kinds, right) | count_topics(kinds, questions, right)
