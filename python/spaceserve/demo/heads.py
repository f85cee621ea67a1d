"""Dense labels for the vision encoder: what the renderer knows about every merged cell, learnt by linear heads.

They teach the encoder before any language is learnt, and are thrown away afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spaceserve.demo.architecture import HIDDEN_SIZE
from spaceserve.demo.scenes import CHARS, MAX_OBJECTS
from spaceserve.demo.vocabulary import COLOURS, SHAPES

NUM_KINDS = 1 + len(SHAPES) + len(CHARS)  # 0: no centre of a drawn thing lies in the cell
NUM_ORDINALS = MAX_OBJECTS


class DenseHeads(nn.Module):
    """Linear heads over merged cells."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (NUM_KINDS, len(COLOURS), NUM_ORDINALS, len(COLOURS), MAX_OBJECTS + 1, 1)
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.out = nn.Linear(HIDDEN_SIZE, sum(self.sizes))
        # Last, and apart, so that the weights of runs without it are a prefix of those with it.
        self.vertical = nn.Linear(HIDDEN_SIZE, NUM_ORDINALS + 1)

    def forward(self, features_BMD: Tensor) -> tuple[Tensor, ...]:
        """Return logits of kind, colour and ordinal of the thing centred in a cell, of the background's colour and the
        number of shapes, the log of the thing's size, logits of its rank from the top, and its height, [B, M, n]
        each."""
        normed = self.norm(features_BMD)
        return (*self.out(normed).split(self.sizes, dim=-1), *self.vertical(normed).split((NUM_ORDINALS, 1), dim=-1))


def cell_of(rows_BKF: Tensor, width: int, height: int, grid: tuple[int, int]) -> Tensor:
    """Return the merged cell, [B, K], in which each drawn thing is centred; `grid` is (rows, columns) of cells."""
    row = (rows_BKF[..., 2] / height * grid[0]).long().clamp(0, grid[0] - 1)
    col = (rows_BKF[..., 1] / width * grid[1]).long().clamp(0, grid[1] - 1)
    return row * grid[1] + col


def dense_loss(
    heads: DenseHeads, features_BMD: Tensor, cells_BK: Tensor, labels_BKF: Tensor, globals_B2: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss, and per head the share of right cells [kind where drawn, colour, ordinal, rank, background,
    number].

    `labels_BKF` holds `scenes.LABEL_FIELDS`, with kind 0 in unused rows.
    """
    kind, colour, ordinal, ground, number, size, rank, height = (x.float() for x in heads(features_BMD))
    batch, cells = kind.shape[:2]
    drawn = labels_BKF[..., 0] > 0
    truth_kind = torch.zeros(batch, cells + 1, dtype=torch.long, device=kind.device)
    # Unused rows write to a spare last cell.
    place = torch.where(drawn, cells_BK, cells)
    truth_kind.scatter_(1, place, labels_BKF[..., 0].long())
    truth_kind = truth_kind[:, :cells]
    every = F.cross_entropy(kind.flatten(0, 1), truth_kind.flatten(), reduction="none").view(batch, cells)
    is_drawn = (truth_kind > 0).float()
    total = is_drawn.sum().clamp(min=1)
    loss = (every * is_drawn).sum() / total + 2 * (every * (1 - is_drawn)).sum() / (batch * cells)

    at = cells_BK[..., None]
    weight = drawn.float()
    scores = [((kind.argmax(-1) == truth_kind) * is_drawn).sum() / total]
    for logits, column, factor in ((colour, 1, 1.0), (ordinal, 2, 0.5), (rank, 4, 1.0)):
        here = logits.gather(1, at.expand(-1, -1, logits.shape[-1]))
        truth = labels_BKF[..., column].long()
        each = F.cross_entropy(here.flatten(0, 1), truth.flatten(), reduction="none").view_as(weight)
        loss = loss + factor * (each * weight).sum() / weight.sum().clamp(min=1)
        scores.append(((here.argmax(-1) == truth) * weight).sum() / weight.sum().clamp(min=1))
    here_size, here_height = size.gather(1, at).squeeze(-1), height.gather(1, at).squeeze(-1)
    loss = loss + 2 * ((here_height - labels_BKF[..., 5]).abs() * weight).sum() / total
    loss = loss + 0.5 * (F.smooth_l1_loss(here_size, labels_BKF[..., 3], reduction="none") * weight).sum() / total
    for logits, column, factor in ((ground, 0, 0.5), (number, 1, 0.5)):
        truth = globals_B2[:, column, None].expand(-1, cells)
        loss = loss + factor * F.cross_entropy(logits.flatten(0, 1), truth.flatten())
        scores.append((logits.argmax(-1) == truth).float().mean())
    return loss, torch.stack(scores).detach()
