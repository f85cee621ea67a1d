"""Servers with unusual settings: narrow pad values, a tiny store, small chunks, no RadixCache."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
import requests
from PIL import Image

from servers import Server, data_url, encoded, picture_url, running, user

pytestmark = pytest.mark.cpu

# The launcher with one pad value for all images, so that every two of them collide.
ONE_PAD_VALUE = """
import sys
from functools import partial

if __name__ == "__main__":
    import spaceserve.frontend.admission as admission
    from spaceserve.feature_store.pad_values import PadValueRegistry
    from spaceserve.launch_server import main

    admission.PadValueRegistry = partial(PadValueRegistry, space=1)
    sys.exit(main(sys.argv[1:]))
"""

# 256 float32 a token: room for about 60 blocks of 16 tokens, some five of the pictures asked about here.
TINY_STORE_GB = 0.001


def plain(colour: str, side: int = 224) -> str:
    return data_url(encoded(Image.new("RGB", (side, side), colour)))


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "one_pad_value.py").write_text(ONE_PAD_VALUE)
    flags = ["--encoder-feature-cache-gb", str(TINY_STORE_GB), "--chunked-prefill-size", "48"]
    env = {"PYTHONPATH": str(folder), "SPACESERVE_DEBUG": "1"}
    with running("one_pad_value", *flags, env=env) as server:
        yield server


def test_colliding_pad_values_give_right_answers(cramped: Server) -> None:
    question = "What colour is the background?"
    for _ in range(2):
        for colour in ("red", "blue", "green", "yellow"):
            assert colour in cramped.answer([user(question, plain(colour))]).lower()
    both = "What colour is the background of the second picture?"
    for first, second in (("red", "blue"), ("blue", "red")):
        response = cramped.chat([user(both, plain(first), plain(second))])
        # Two images of one request cannot share the only value there is.
        assert response.status_code == 400
        assert "pad values" in response.json()["message"]


def test_a_store_of_five_pictures_serves_forty_at_once(cramped: Server) -> None:
    def ask(seed: int) -> str:
        return cramped.answer([user("Describe the picture.", picture_url(seed % 20))])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(40)))
    assert answers[:20] == answers[20:]
    store = cramped.status()["store"]
    assert store["pinned_blocks"] == store["reserved_blocks"] == 0
    assert sum(cramped.status()["evictions"].values()) > 0


def test_ten_turns_without_the_radix_cache_encode_three_times() -> None:
    flags = ["--disable-radix-cache", "--encoder-feature-cache-gb", "0.0005"]
    with running("spaceserve.launch_server", *flags) as server:
        before = server.status()["num_encoded"]
        history = [user("Describe the pictures.", *(picture_url(seed) for seed in (22, 23, 24)))]
        for turn in range(10):
            history.append({"role": "assistant", "content": server.answer(history)})
            history.append(user(f"Question {turn}: is there a circle?"))
        assert server.status()["num_encoded"] == before + 3
        # Two pictures of 448x448 have 16 blocks each, more than this store has.
        large = [picture_url(100 + n, 448, 448) for n in range(2)]
        assert server.status()["store"]["num_blocks"] < 32
        response = server.chat([user("What are these?", *large)])
        assert response.status_code == 400
        assert "feature store" in response.json()["message"]
        assert server.chat([user("What is this?", large[0])]).status_code == 200


def test_fcfs_and_static_cores() -> None:
    """Cores for SMs: every batch runs on the one core that it was given."""
    flags = ["--encoder-schedule-policy", "fcfs", "--sm-partition", "static:1"]
    with running("spaceserve.launch_server", *flags) as server:
        assert server.answer([user("Describe the picture.", picture_url(1))]) is not None
        status = server.status()
        assert status["queue"]["policy"] == "fcfs"
        assert status["split"]["static_units"] == 1
        assert "cpu_affinity" in status["split"]["partition"]


def test_sis_on_cores() -> None:
    with running("spaceserve.launch_server", "--sm-partition", "sis") as server:
        for seed in range(3):
            assert server.answer([user("Describe the picture.", picture_url(seed))]) is not None
        decisions = server.status()["split"]["decisions"]
        assert decisions
        assert decisions[-1]["measured_encoder_ms"] > 0
        # The same answers under every mode, changed while it serves; the last one moves between layers.
        question = [user("Describe the picture.", picture_url(40))]
        answer = server.answer(question)
        for mode in ("static:1", "off", "sis:8", "sis:1:1"):
            changed = requests.post(f"{server.url}/spaceserve/sm-partition", json={"mode": mode}, timeout=30)
            assert changed.status_code == 200, changed.text
            assert changed.json()["mode"] == mode
            server.flush()
            assert server.answer(question) == answer
        refused = requests.post(f"{server.url}/spaceserve/sm-partition", json={"mode": "static:9999"}, timeout=30)
        assert refused.status_code == 400
        assert "the device has" in refused.text
