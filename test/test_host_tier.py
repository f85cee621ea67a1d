"""The host tier: what is kept when room is short, copies that are made in order, and a server that uses it."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
import requests
import torch

from servers import picture_url, running, user
from spaceserve.encoder.host_tier import HostTier
from spaceserve.feature_store import FeatureStore, HostStore
from spaceserve.feature_store.store import Ticket
from spaceserve.slab import Slab, SlabHandle

pytestmark = pytest.mark.cpu


def test_the_cheapest_to_compute_again_goes_first() -> None:
    host = HostStore(4, block_tokens=2)
    assert host.put(b"dear", 4, rebuild_us=1000) == 0
    assert host.put(b"cheap", 4, rebuild_us=10) == 4
    assert host.put(b"cheap", 4, rebuild_us=10) is None, "it is here already"
    assert host.put(b"new", 3, rebuild_us=100) == 4
    assert (b"dear" in host, b"cheap" in host, b"new" in host) == (True, False, True)
    stats = host.stats()
    assert (stats.used_blocks, stats.num_entries, stats.saved, stats.evictions) == (4, 2, 3, 1)
    host.check_integrity()


def test_use_keeps_features_here_longer() -> None:
    host = HostStore(2, block_tokens=1)
    host.put(b"a", 1, rebuild_us=100)
    host.put(b"b", 1, rebuild_us=100)
    for _ in range(5):
        assert host.use(b"a") == host.find(b"a") == 0
    host.put(b"c", 1, rebuild_us=100)
    assert b"a" in host
    assert b"b" not in host
    assert host.stats().hits == 5


def test_what_is_about_to_come_back_does_not_give_way() -> None:
    host = HostStore(2, block_tokens=1)
    host.put(b"a", 1, rebuild_us=1)
    host.put(b"b", 1, rebuild_us=1)
    assert host.put(b"c", 1, rebuild_us=9, keep=[b"a", b"unknown"]) == 1
    assert host.put(b"d", 1, rebuild_us=9, keep=[b"a", b"c"]) is None
    assert b"a" in host
    host.check_integrity()


def test_what_is_larger_than_the_tier_is_not_kept() -> None:
    host = HostStore(2, block_tokens=2)
    host.put(b"a", 4, rebuild_us=1)
    assert host.put(b"huge", 5, rebuild_us=9) is None
    assert b"a" in host, "nothing gave way for what does not fit"
    host.discard(b"a")
    host.discard(b"a")
    assert host.stats().used_blocks == 0
    with pytest.raises(ValueError, match="not in the host tier"):
        host.use(b"a")


def test_a_store_without_a_host_tier_restores_nothing() -> None:
    store = FeatureStore(2, 1)
    store.register("r", [(b"a", 1, 1)])
    assert store.try_reserve("r")
    assert store.keys_to_encode("r") == [b"a"]
    assert store.keys_to_restore("r") == []
    with pytest.raises(ValueError, match="no host tier"):
        store.begin_restore(b"a")


def test_features_survive_the_way_there_and_back() -> None:
    rows = torch.arange(24, dtype=torch.float32).view(8, 3)
    original = rows.clone()
    host = HostTier(Slab(rows, SlabHandle(8, 3, "torch.float32", "none", None)), num_tokens=4)
    assert host.num_bytes == 48
    host.save(Ticket(b"a", 2, 3, 1), host_row=1)
    rows[2:5] = -1  # somebody else's features
    assert host.take_restored() == []
    host.restore(Ticket(b"a", 5, 3, 2), host_row=1)
    assert host.take_restored() == [(b"a", True)]
    assert host.take_restored() == []
    assert torch.equal(rows[5:8], original[2:5])
    assert torch.equal(rows[2:5], torch.full((3, 3), -1.0))
    # A copy that fails is told, and ends nothing.
    host.restore(Ticket(b"a", 7, 3, 3), host_row=1)
    assert host.take_restored() == [(b"a", False)]
    host.close()


def test_a_tier_larger_than_the_memory_is_refused() -> None:
    slab = Slab(torch.zeros(2, 1024), SlabHandle(2, 1024, "torch.float32", "none", None))
    with pytest.raises(ValueError, match="--encoder-feature-host-gb: the host has"):
        HostTier(slab, num_tokens=2**40)


@pytest.mark.gpu
def test_features_survive_the_way_there_and_back_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    slab = Slab.create(4096, 1024, torch.bfloat16, device, None)
    slab.rows.copy_(torch.randn(4096, 1024, device=device))
    original = slab.rows.clone()
    host = HostTier(slab, num_tokens=4096)
    for block in range(8):  # there, overwritten behind the copy, and back in another order
        host.save(Ticket(bytes([block]), 512 * block, 512, block), host_row=512 * block)
    assert host.last_copy is not None
    torch.cuda.current_stream(device).wait_event(host.last_copy)
    slab.rows.zero_()
    torch.cuda.synchronize(device)
    for block in range(8):
        host.restore(Ticket(bytes([block]), 512 * (7 - block), 512, 8 + block), host_row=512 * block)
    ended: list[tuple[bytes, bool]] = []
    while len(ended) < 8:
        ended += host.take_restored()
    assert all(copied for _, copied in ended)
    expected = original.view(8, 512, 1024).flip(0).reshape(4096, 1024)
    assert torch.equal(slab.rows, expected)
    host.close()


def test_a_server_copies_back_instead_of_encoding(tmp_path: Path) -> None:
    """Ten pictures over a store for two or three: nothing is encoded twice, and the answers stay the same."""
    flags = ["--encoder-feature-cache-gb", "0.0002", "--encoder-feature-host-gb", "0.01", "--enable-metrics"]

    with running("spaceserve.launch_server", *flags, env={"SPACESERVE_DEBUG": "1"}) as server:

        def ask(number: int) -> str:
            # Text of its own comes first: the RadixCache holds no token of the picture behind it.
            parts = [
                {"type": "text", "text": f"Question {number}: what is this?"},
                {"type": "image_url", "image_url": {"url": picture_url(500 + number % 10)}},
            ]
            return server.answer([{"role": "user", "content": parts}])

        warm_up = server.status()["num_encoded"]
        first = [ask(number) for number in range(10)]
        again = [ask(number) for number in range(10)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            other_questions = list(pool.map(ask, range(10, 40)))
        status = server.status()
        assert again == first
        assert len(other_questions) == 30
        assert status["num_encoded"] - warm_up == 10
        assert status["host"]["hits"] > 20
        assert status["store"]["pinned_blocks"] == status["store"]["reserved_blocks"] == 0
        metrics = requests.get(f"{server.url}/metrics", timeout=30).text
        for name in ("host_hits_total", "host_saved_total", "host_evictions_total", "host_used_bytes"):
            assert f"spaceserve:feature_store_{name}" in metrics
        server.flush()
        assert server.answer([user("Describe the picture.", picture_url(500))])
        assert server.status()["num_encoded"] - warm_up == 11, "a flush empties the host tier too"
        assert "AssertionError" not in server.log
