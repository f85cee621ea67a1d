"""The tensor-parallel smoke test's parts: the random checkpoint, and what counts as an equal answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import answers
import random_checkpoint
import tp_smoke
from dummy_model import SHAPES, model_config
from spaceserve.demo import model_path

pytestmark = pytest.mark.cpu


def demo_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model_path()) / "config.json").read_text())
    return config


def test_names_and_shapes_are_those_of_a_checkpoint() -> None:
    with safe_open(Path(model_path()) / "model.safetensors", "pt") as checkpoint:
        names = checkpoint.keys()
        expected = {name: tuple(checkpoint.get_slice(name).get_shape()) for name in names}
    assert random_checkpoint.tensor_shapes(demo_config()) == expected


def test_an_untied_model_has_a_head_and_other_families_are_refused() -> None:
    shapes = random_checkpoint.tensor_shapes(model_config(SHAPES["qwen2-vl-7b"]))
    assert shapes["lm_head.weight"] == (152064, 3584)
    with pytest.raises(ValueError, match="qwen2_5_vl"):
        random_checkpoint.tensor_shapes(model_config(SHAPES["qwen2.5-vl-7b"]))


def test_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(demo_config()))
    contents = []
    for seed in (0, 0, 1):
        random_checkpoint.write_weights(tmp_path, seed=seed)
        contents.append((tmp_path / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def answer(*tokens: tuple[str, float], other: tuple[str, float] = ("z", -9.0)) -> answers.Answer:
    return [{"token": text, "logprob": value, "top": [[text, value], list(other)]} for text, value in tokens]


STOCK = answer(("a", -1.0), ("b", -1.0), other=("z", -1.2))


@pytest.mark.parametrize(
    ("ours", "is_ok", "equal_tokens"),
    [
        (answer(("a", -1.0), ("b", -1.1)), True, 2),
        (answer(("a", -1.0), ("b", -1.5)), False, 2),  # the same token, other features
        (answer(("a", -1.0), ("z", -1.0)), True, 1),  # nearly as likely
        (answer(("z", -1.0), ("q", -1.0)), True, 0),  # after a tie all may differ
        (answer(("a", -1.0), ("q", -1.0)), False, 1),  # unlikely in stock
        (answer(("a", -1.0)), False, 0),
    ],
)
def test_an_answer_may_leave_stocks_at_a_tie_alone(ours: answers.Answer, is_ok: bool, equal_tokens: int) -> None:
    found = answers.compare(ours, STOCK, tie=0.3)
    assert found["ok"] is is_ok
    assert found["equal_tokens"] == equal_tokens


def test_requests_have_one_to_three_pictures_and_none_twice() -> None:
    asked = tp_smoke.image_requests(0, 0.25)
    urls = [[part["image_url"]["url"] for part in request[0]["content"][:-1]] for request in asked]
    assert {len(of_request) for of_request in urls} == {1, 2, 3}
    assert len(asked) == tp_smoke.NUM_REQUESTS
    flat = [url for of_request in urls for url in of_request]
    assert len(set(flat)) == len(flat)


def test_agreement_needs_a_control_that_moves() -> None:
    told = {"alone": [STOCK], "control": [STOCK], "at_once": [STOCK] * 5, "again": [STOCK] * 2}
    assert not tp_smoke.judge(told, told, 0.3)["ok"]
    moved = {**told, "control": [answer(("q", -1.0), ("q", -1.0))]}
    assert tp_smoke.judge(moved, moved, 0.3)["ok"]
    assert not tp_smoke.judge({**moved, "again": [moved["control"][0], STOCK]}, moved, 0.3)["ok"]
