"""The feature store's Prometheus metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from spaceserve.feature_store import FeatureStore, HostStore
from spaceserve.feature_store.metrics import FeatureStoreMetrics

pytestmark = pytest.mark.cpu

LABELS = {"model_name": "m"}


def served_store() -> FeatureStore:
    """A slab of 4 blocks in which b displaced a, and c is reserved twice over."""
    store = FeatureStore(4, block_tokens=2, rebuild_cost_ms=float)
    for rid, key in (("r0", b"a"), ("r1", b"b"), ("r2", b"b")):
        store.register(rid, [(key, 6, 10)])
        assert store.try_reserve(rid)
        for wanted in store.keys_to_encode(rid):
            store.begin_encode(wanted)
            store.commit(wanted)
        if rid != "r2":
            store.release(rid)
    for rid in ("r3", "r4"):
        store.register(rid, [(b"c", 2, 10)])
        assert store.try_reserve(rid)
    return store


def test_values_follow_the_store() -> None:
    registry = CollectorRegistry()
    metrics = FeatureStoreMetrics(LABELS, block_bytes=100, registry=registry)
    store = served_store()
    metrics.update(store.stats())
    metrics.update(store.stats())  # totals are not added twice
    metrics.add_elided(3)
    metrics.observe_feature_wait(0.2)

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"spaceserve:{name}", {**LABELS, **more})

    assert value("feature_store_used_blocks") == 4
    assert value("feature_store_used_bytes") == 400
    assert value("feature_store_pinned_blocks") == 3
    assert value("feature_store_reserved_bytes") == 100
    assert value("feature_store_cached_blocks") == 0
    assert value("feature_store_free_blocks") == value("feature_store_largest_free_blocks") == 0
    assert value("feature_store_entries") == 2
    assert value("feature_store_hits_total") == 1
    assert value("feature_store_misses_total") == 3
    assert value("coalesced_encodes_total") == 1
    assert value("elided_encodes_total") == 3
    assert value("feature_store_evictions_total", reason="pressure") == 1
    assert value("feature_store_evictions_total", reason="flush") == 0
    assert value("feature_wait_seconds_sum") == 0.2
    assert value("feature_wait_seconds_bucket", le="0.1") == 0
    assert value("feature_wait_seconds_bucket", le="0.25") == 1
    store.release("r2")
    metrics.update(store.stats())
    assert value("feature_store_pinned_bytes") == 0
    assert value("feature_store_cached_bytes") == 300
    assert b"spaceserve:feature_store_used_blocks" in generate_latest(registry)


def test_the_host_tier_has_metrics_of_its_own() -> None:
    registry = CollectorRegistry()
    metrics = FeatureStoreMetrics(LABELS, block_bytes=100, registry=registry)
    store = FeatureStore(1, block_tokens=2, host=HostStore(1, 2))
    for rid, key in (("r0", b"a"), ("r1", b"b"), ("r2", b"a")):
        store.register(rid, [(key, 2, 10)])
        assert store.try_reserve(rid)
        for wanted in store.keys_to_restore(rid):
            store.begin_restore(wanted)
            store.commit(wanted)
        for wanted in store.keys_to_encode(rid):
            store.begin_encode(wanted)
            store.commit(wanted)
        store.release(rid)
    for _ in range(2):
        metrics.update(store.stats())

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"spaceserve:feature_store_{name}", LABELS)

    # r1 sent a to the host. r2 wanted a, in the place of b, which found no room beside it on the host.
    assert value("host_saved_total") == 1
    assert value("host_evictions_total") == 0
    assert value("host_hits_total") == 1
    assert value("host_used_bytes") == 100
    assert value("host_entries") == 1


SCRIPT = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from spaceserve.feature_store import FeatureStore
from spaceserve.feature_store.metrics import FeatureStoreMetrics

metrics = FeatureStoreMetrics({"model_name": "m"}, block_bytes=100)
if sys.argv[1] == "worker":
    metrics.update(FeatureStore(4, 2).stats())
else:
    metrics.add_elided(2)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def test_metrics_of_several_processes_meet(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, role], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for role in ("worker", "scheduler")
    ]
    assert 'spaceserve:feature_store_free_bytes{model_name="m"} 400.0' in outputs[1]
    assert 'spaceserve:elided_encodes_total{model_name="m"} 2.0' in outputs[1]
