"""Requests that SGLang retracts from decode, whose features are evicted meanwhile, are answered as if nothing was."""

from __future__ import annotations

import concurrent.futures
import re
import time
from collections.abc import Iterator

import pytest

from servers import Server, picture_url, running, user
from spaceserve.shared_memory import SHM_DIR

pytestmark = pytest.mark.cpu

NUM_REQUESTS = 8
MAX_TOKENS = 100


@pytest.fixture(scope="module", params=["RadixCache", "no RadixCache"])
def pressed(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A KV cache with room for the prompts of eight requests, not for their answers; a store for two pictures."""
    flags = ["--max-total-tokens", "500", "--schedule-conservativeness", "0.05"]
    flags += ["--encoder-feature-cache-gb", "0.0001"]
    if request.param == "no RadixCache":
        flags.append("--disable-radix-cache")
    with running("spaceserve.launch_server", *flags, env={"SPACESERVE_DEBUG": "1"}) as server:
        yield server


def ask(server: Server, number: int) -> tuple[list[str], list[float]]:
    """Tokens and log-probabilities of a long answer about a picture of the request's own."""
    message = user(f"Describe picture {number}.", picture_url(300 + number))
    # Not ignore_eos: without a RadixCache SGLang then reserves the whole answer's room and retracts nothing.
    response = server.chat([message], max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS, logprobs=True)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["logprobs"]["content"]
    return [token["token"] for token in tokens], [token["logprob"] for token in tokens]


def num_retracted(server: Server) -> int:
    return sum(map(int, re.findall(r"Retract requests.*?#retracted_reqs: (\d+)", server.log)))


def test_retracted_requests_whose_features_are_gone_answer_the_same(
    pressed: Server, request: pytest.FixtureRequest
) -> None:
    alone = [ask(pressed, number) for number in range(NUM_REQUESTS)]
    assert num_retracted(pressed) == 0
    assert len({tuple(tokens) for tokens, _ in alone}) > NUM_REQUESTS // 2, "equality would prove nothing"
    pressed.flush()

    before = pressed.status()
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        at_once = list(pool.map(lambda number: ask(pressed, number), range(NUM_REQUESTS)))
    after = pressed.status()
    assert num_retracted(pressed) > 0
    num_encoded = after["num_encoded"] - before["num_encoded"]
    if "no RadixCache" in request.node.name:
        # Each picture was encoded for its request, and some again: nothing else could give their retracted requests
        # back what had been evicted.
        assert num_encoded > NUM_REQUESTS
    else:
        assert num_encoded >= NUM_REQUESTS
    assert sum(after["evictions"].values()) > sum(before["evictions"].values())
    assert [tokens for tokens, _ in at_once] == [tokens for tokens, _ in alone]
    for (_, found), (_, expected) in zip(at_once, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)
    assert after["store"]["pinned_blocks"] == after["store"]["reserved_blocks"] == 0
    assert "AssertionError" not in pressed.log


@pytest.mark.parametrize("pressed", ["RadixCache"], indirect=True)
def test_an_idle_server_unlinks_the_files_of_ended_requests(pressed: Server) -> None:
    """Nothing arrives that would wake the scheduler."""
    ask(pressed, 0)
    prefix = pressed.shm_prefix() + "img"
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and list(SHM_DIR.glob(prefix + "*")):
        time.sleep(0.5)
    assert not list(SHM_DIR.glob(prefix + "*"))
