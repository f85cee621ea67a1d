"""Two ranks on two cores, beside stock SGLang on two: both see the same tickets in one order and read one slab."""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

import pytest

from servers import Server, picture_url, running, user

pytestmark = pytest.mark.upstream

NUM_PROMPTS = 24
MAX_TOKENS = 12


def prompts() -> list[list[dict[str, Any]]]:
    """One to three pictures each, and some without; some pictures come again."""
    asked = []
    for number in range(NUM_PROMPTS):
        seeds = range(number % 5, number % 5 + number % 4)
        urls = [picture_url(400 + seed, 112 + 56 * (seed % 3), 168) for seed in seeds]
        asked.append([user(f"Describe what you see, in {number} words.", *urls)])
    return asked


def ask(server: Server, messages: list[dict[str, Any]]) -> list[str]:
    response = server.chat(messages, max_tokens=MAX_TOKENS, logprobs=True, ignore_eos=True)
    assert response.status_code == 200, response.text
    return [token["token"] for token in response.json()["choices"][0]["logprobs"]["content"]]


def two_ranks() -> dict[str, str]:
    """What SGLang needs for ranks on a CPU: a core for each, and no NCCL, which it would find and try."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "SGLANG_NCCL_SO_PATH": "/nonexistent"}


def test_equal_to_stock_on_two_ranks() -> None:
    from spaceserve.demo import model_path

    asked = prompts()
    with running("sglang.launch_server", "--model-path", str(model_path()), "--tp", "2", env=two_ranks()) as stock:
        expected = [ask(stock, messages) for messages in asked]
    assert len({tuple(tokens) for tokens in expected}) > NUM_PROMPTS // 3, "equality would prove nothing"
    # A store of a few pictures, so that features are evicted and encoded again.
    flags = ["--tp", "2", "--encoder-feature-cache-gb", "0.0003"]
    with running("spaceserve.launch_server", *flags, env=two_ranks()) as server:
        assert [ask(server, messages) for messages in asked] == expected
        server.flush()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda messages: ask(server, messages), asked)) == expected
        status = server.status()
        assert sum(status["evictions"].values()) > 0
        assert status["store"]["pinned_blocks"] == status["store"]["reserved_blocks"] == 0
