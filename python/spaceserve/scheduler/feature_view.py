"""Features as the prefill sees them: SGLang's multimodal embedding cache, backed by the encoder worker's slab."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from spaceserve.feature_store.store import Ticket
from spaceserve.slab import Slab

logger = logging.getLogger(__name__)


class MissingFeatures(RuntimeError):
    """A prefill asked for features that its request does not hold: a fault of SpaceServe, not of the client."""


class FeatureView:
    """What requests hold at this moment, by the hash that SGLang gives their images.

    It stands in for `mm_utils.embedding_cache`, whose interface it keeps. Nothing is stored or evicted here: the gate
    adds the tickets of a request before it is admitted and takes them away after its prefill. A look-up returns a
    view of the slab, so the prefill copies features once, into its input embeddings.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[str, torch.Tensor]] = {}  # by hash, then by request

    def hold(self, rid: str, slab: Slab, tickets: Iterable[tuple[int, Ticket]]) -> None:
        """Let prefills read `tickets` (hash, ticket) from now on."""
        for mm_hash, ticket in tickets:
            rows = slab.view(ticket.offset_tokens, ticket.num_tokens)
            self._held.setdefault(mm_hash, {})[rid] = rows

    def drop(self, rid: str, hashes: Iterable[int]) -> None:
        """The request no longer reads these; unknown ones are ignored."""
        for mm_hash in hashes:
            holders = self._held.get(mm_hash)
            if holders is not None:
                holders.pop(rid, None)
                if not holders:
                    del self._held[mm_hash]

    def __len__(self) -> int:
        """Images that some request holds."""
        return len(self._held)

    # ---- SGLang's interface (mem_cache/multimodal_cache.py)

    def get_single(self, mm_hash: int) -> Any:
        """Features of one image: an `EmbeddingResult` of `[num_tokens, feature_dim]`.

        Raises:
            MissingFeatures: no request holds them. The gate admits no request without, so this ends the scheduler
                with a message instead of an obscure error inside the forward.
        """
        from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

        holders = self._held.get(mm_hash)
        if not holders:
            raise MissingFeatures(f"no request holds the features of image {mm_hash:x}")
        return EmbeddingResult(embedding=next(iter(holders.values())))

    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> Any:
        """Features of several images, one after another."""
        from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

        return EmbeddingResult(embedding=torch.cat([self.get_single(mm_hash).embedding for mm_hash in mm_hashes]))

    def has(self, mm_hash: int) -> bool:
        """Whether some request holds the image."""
        return mm_hash in self._held

    def set(self, mm_hash: int, embedding: Any, loc: Any = None) -> bool:
        """SGLang encoded something itself, which cannot happen without encoder weights in this process."""
        raise MissingFeatures(f"SGLang tried to store features of image {mm_hash:x} that it encoded itself")

    def clear(self) -> None:
        """SGLang flushes its caches; held features stay, their requests still need them."""
