"""What is written about the demo model is what was measured, of the weights that are bundled."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from spaceserve.demo import model_path
from spaceserve.demo.questions import KINDS

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parent.parent

ROWS = {
    "colour": "colour",
    "shape": "shape",
    "background": "background",
    "yes/no": "yesno",
    "counting": "count",
    "digit": "digit",
    "letter": "letter",
    "word": "word",
    "which is larger": "larger",
    "which is further left": "left",
    "about one of several pictures": "nth",
    "description": "describe",
}
# The aims, per cent of exact answers.
AIMS = {"colour": 95, "shape": 95, "background": 95, "yesno": 95, "count": 90, "digit": 90, "letter": 90}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmark" / "results" / "demo-model.json").read_text())
    return result


def test_the_bundled_weights_were_measured(measured: dict[str, Any]) -> None:
    weights = (model_path() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == measured["checkpoint_sha256"]


@pytest.mark.parametrize("page", [ROOT / "docs" / "demo-model.md", model_path() / "README.md"], ids=lambda p: p.name)
def test_pages_quote_the_measurement(measured: dict[str, Any], page: Path) -> None:
    accuracy = page.read_text().split("## Accuracy\n")[1].split("\n## ")[0]
    row = re.compile(r"^\| ([^|]+) \| ([\d,]+) of ([\d,]+) \(([\d.]+) %\)", re.MULTILINE)
    quoted = {name: (int(a.replace(",", "")), int(b.replace(",", "")), p) for name, a, b, p in row.findall(accuracy)}
    found = measured["exact_match"]["server"]
    expected = {name: tuple(found[kind]) for name, kind in ROWS.items()}
    expected["all"] = (sum(right for right, _ in found.values()), sum(asked for _, asked in found.values()))
    assert set(ROWS.values()) == set(KINDS) == set(found)
    assert {name: row[:2] for name, row in quoted.items()} == expected
    for right, asked, percent in quoted.values():
        assert percent in (f"{100 * right / asked:.1f}", f"{100 * right / asked:g}")


def test_the_measurement_reaches_the_aims(measured: dict[str, Any]) -> None:
    for path, result in measured["exact_match"].items():
        for kind, aim in AIMS.items():
            right, asked = result[kind]
            assert 100 * right >= aim * asked, (path, kind)
    right, asked = measured["count_up_to_5"]
    assert 100 * right >= 90 * asked
    assert set(measured["different_answers"].values()) == {0}
