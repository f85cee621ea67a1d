"""Prometheus metrics of the feature store, named the way SGLang names its own, with the prefix `spaceserve:`."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from spaceserve.feature_store.answers import StoreStats
from spaceserve.feature_store.entries import EVICTION_REASONS

_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class FeatureStoreMetrics:
    """Gauges, counters and a histogram of one feature store.

    Make it once per process, after PROMETHEUS_MULTIPROC_DIR is set: prometheus_client looks at the variable when a
    metric is made. The worker exports the store's numbers (`update`), and whoever sees requests pass (the scheduler's
    rank 0) `add_elided` and `observe_feature_wait`; series of several processes add up in `/metrics`.

    labels: label names and values, the same as of SGLang's own metrics (model_name, ...).
    block_bytes: bytes of one block of the slab.
    """

    def __init__(self, labels: Mapping[str, str], block_bytes: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._labels = dict(labels)
        self._block_bytes = block_bytes
        names = list(labels)

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(f"spaceserve:{name}", documentation, names, registry=registry, multiprocess_mode="mostrecent")

        def counter(name: str, documentation: str, more: tuple[str, ...] = ()) -> Counter:
            return Counter(f"spaceserve:{name}", documentation, [*names, *more], registry=registry)

        self._blocks = {
            part: gauge(f"feature_store_{part}_blocks", f"Blocks of the encoder feature slab that are {part}.")
            for part in ("used", "pinned", "cached", "reserved", "free")
        }
        self._bytes = {
            part: gauge(f"feature_store_{part}_bytes", f"Bytes of the encoder feature slab that are {part}.")
            for part in ("used", "pinned", "cached", "reserved", "free")
        }
        self._largest_free = gauge(
            "feature_store_largest_free_blocks", "Longest run of free blocks of the encoder feature slab."
        )
        self._entries = gauge("feature_store_entries", "Images known to the encoder feature store.")
        self._hits = counter("feature_store_hits_total", "Images whose features were in the store.")
        self._misses = counter("feature_store_misses_total", "Images that nobody had asked for before.")
        self._coalesced = counter(
            "coalesced_encodes_total", "Images that another request had already asked for when they came."
        )
        self._elided = counter("elided_encodes_total", "Images not encoded because the RadixCache held their tokens.")
        self._evictions = counter("feature_store_evictions_total", "Features evicted, by reason.", ("reason",))
        self._wait = Histogram(
            "spaceserve:feature_wait_seconds",
            "Time from a request's arrival at the scheduler until its features are ready.",
            names,
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self._host_bytes = gauge("feature_store_host_used_bytes", "Bytes of evicted features in the host tier.")
        self._host_entries = gauge("feature_store_host_entries", "Images whose features are in the host tier.")
        self._host = {
            "hits": counter("feature_store_host_hits_total", "Features copied back from the host tier, not encoded."),
            "saved": counter("feature_store_host_saved_total", "Evicted features copied to the host tier."),
            "evictions": counter("feature_store_host_evictions_total", "Features that the host tier gave up."),
        }
        self._counted_host = dict.fromkeys(self._host, 0)
        self._counted = {"hits": 0, "misses": 0, "coalesced": 0}
        self._counted_evictions = dict.fromkeys(EVICTION_REASONS, 0)

    def update(self, stats: StoreStats) -> None:
        """Export the store's state; its totals must not be lower than at the call before (same store)."""
        parts = {
            "used": stats.used_blocks,
            "pinned": stats.pinned_blocks,
            "cached": stats.cached_blocks,
            "reserved": stats.reserved_blocks,
            "free": stats.free_blocks,
        }
        for part, num_blocks in parts.items():
            self._blocks[part].labels(**self._labels).set(num_blocks)
            self._bytes[part].labels(**self._labels).set(num_blocks * self._block_bytes)
        self._largest_free.labels(**self._labels).set(stats.largest_free_blocks)
        self._entries.labels(**self._labels).set(stats.num_entries)
        totals = {"hits": stats.hits, "misses": stats.misses, "coalesced": stats.coalesced}
        counters = {"hits": self._hits, "misses": self._misses, "coalesced": self._coalesced}
        for name, total in totals.items():
            counters[name].labels(**self._labels).inc(total - self._counted[name])
            self._counted[name] = total
        for reason, total in stats.evictions.items():
            self._evictions.labels(**self._labels, reason=reason).inc(total - self._counted_evictions[reason])
            self._counted_evictions[reason] = total
        if stats.host is not None:
            self._host_bytes.labels(**self._labels).set(stats.host.used_blocks * self._block_bytes)
            self._host_entries.labels(**self._labels).set(stats.host.num_entries)
            for name, series in self._host.items():
                total = getattr(stats.host, name)
                series.labels(**self._labels).inc(total - self._counted_host[name])
                self._counted_host[name] = total

    def add_elided(self, num_images: int) -> None:
        """Images whose encode the RadixCache made needless."""
        self._elided.labels(**self._labels).inc(num_images)

    def observe_feature_wait(self, wait_s: float) -> None:
        """One request's wait for its features, in seconds."""
        self._wait.labels(**self._labels).observe(wait_s)
