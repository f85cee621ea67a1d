"""The encoder feature store: content addresses, the slab's bookkeeping, pad values and metrics.

See docs/feature-store.md. Nothing here touches device memory, sockets or clocks, and nothing imports torch or SGLang.
"""

from spaceserve.feature_store.answers import Lookup, RegisterResult, StoreStats, Ticket
from spaceserve.feature_store.content import content_digest
from spaceserve.feature_store.host_store import HostStats, HostStore
from spaceserve.feature_store.pad_values import PadAssignment, PadValueRegistry
from spaceserve.feature_store.rebuild_cost import RebuildCost
from spaceserve.feature_store.store import FeatureStore, ItemTooLarge

__all__ = [
    "FeatureStore",
    "HostStats",
    "HostStore",
    "ItemTooLarge",
    "Lookup",
    "PadAssignment",
    "PadValueRegistry",
    "RebuildCost",
    "RegisterResult",
    "StoreStats",
    "Ticket",
    "content_digest",
]
