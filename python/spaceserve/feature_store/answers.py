"""What the feature store answers: where features lie, what was found, and how much of the slab is in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from spaceserve.feature_store.host_store import HostStats


@dataclass(frozen=True)
class Ticket:
    """Where one image's features lie: rows [offset_tokens, offset_tokens + num_tokens) of the slab.

    The slab is [num_slab_tokens, feature_dim] of the model's dtype. `generation` is given once in a store's life: an
    extent that is taken again has another.
    """

    key: bytes
    offset_tokens: int
    num_tokens: int
    generation: int


class Lookup(Enum):
    """What `register` found for one key."""

    READY = "ready"  # features are in the slab
    IN_FLIGHT = "in_flight"  # reserved or being encoded for another request
    PENDING = "pending"  # another request wants it too; it has no place in the slab yet
    HOST = "host"  # features are in the host tier, and no place in the slab is theirs yet
    MISS = "miss"  # nobody else wants it


@dataclass(frozen=True)
class RegisterResult:
    """What `register` found for each distinct key of the call."""

    lookups: Mapping[bytes, Lookup]

    def keys(self, lookup: Lookup) -> list[bytes]:
        """Keys with this outcome, in the order of the call."""
        return [key for key, found in self.lookups.items() if found is lookup]


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Counts of blocks now (free + cached + pinned + reserved = num_blocks), and totals since the start."""

    num_blocks: int
    block_tokens: int
    free_blocks: int
    cached_blocks: int  # ready, held by no request: evictable
    pinned_blocks: int  # ready and held
    reserved_blocks: int  # reserved or being encoded
    largest_free_blocks: int
    num_entries: int
    num_requests: int
    hits: int
    coalesced: int
    misses: int
    evictions: Mapping[str, int]  # by reason, see EVICTION_REASONS in entries.py
    host: HostStats | None = None  # None without a host tier

    @property
    def used_blocks(self) -> int:
        """Blocks that are not free."""
        return self.num_blocks - self.free_blocks
