"""The comparison of encoder orders on a server: its trace, its model, and its figures by size class."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import twsrft_serving
from servebench.client import RequestRecord
from servebench.metrics import compact, summarise
from servebench.results import DONE, Results, SliceKey
from servebench.workload import SIDE_SHARES, Workload, make_trace

pytestmark = pytest.mark.cpu

SCALE = 0.25


def test_the_trace_has_the_shares_of_sizes_and_bursts() -> None:
    trace = make_trace(Workload.parse("sizes@4x200"), 1, scale=SCALE)
    sides = Counter(image.width for request in trace.requests for image in request.images)
    assert {side / SCALE: count / 200 for side, count in sides.items()} == pytest.approx(SIDE_SHARES)
    together = Counter(request.arrival_s for request in trace.requests)
    assert sum(count for count in together.values() if count >= 10) == 100
    assert trace.duration_s <= 50


def test_the_model_has_the_tokens_of_the_demo_and_a_larger_encoder(tmp_path: Path) -> None:
    twsrft_serving.write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vision_config"]["embed_dim"] == twsrft_serving.VISION["embed_dim"]
    assert config["architectures"] == ["Qwen2VLForConditionalGeneration"]
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["max_pixels"] >= 512 * 512
    assert not list(tmp_path.glob("*.safetensors"))


def test_figures_by_class_are_those_of_the_records(tmp_path: Path) -> None:
    workload = Workload.parse("sizes@4x40")
    results = Results(tmp_path / "runs")
    for repeat in range(2):
        trace = results.trace("m", workload, repeat, seed=1, output_len=4, num_words=4, scale=SCALE)
        arms = []
        for factor, name in ((1.0, "quick"), (3.0, "slow")):
            records = []
            for request in trace.requests:
                side = request.images[0].width / SCALE
                first = factor * side
                events = [first, first + factor, first + 2 * factor]
                records.append(RequestRecord(request.id, request.arrival_s * 1e3, 0.0, events, [1, 1, 1]))
            arm: dict[str, Any] = {"arm": name, "commands": ["serve"], "summary": summarise(records)}
            arms.append({**arm, "requests": [compact(record) for record in records]})
        results.save_slice(
            SliceKey("m", workload.name, ("quick", "slow"), repeat),
            {
                "status": DONE,
                "model": "m",
                "workload": workload.name,
                "repeat": repeat,
                "session": "s",
                "command": "c",
                "environment": {},
                "trace": {"sha256": trace.digest, "scale": SCALE, "num_requests": 40},
                "arms": arms,
            },
        )
    out = tmp_path / "twsrft-cpu.json"
    twsrft_serving.report(results.root, out)
    data = json.loads(out.read_text())
    small, medium, large = twsrft_serving.CLASSES
    quick, slow = (data["arms"][name]["classes"] for name in ("quick", "slow"))
    assert quick[large]["num_requests"] == 2 * 3  # of 40: 2 of 1536 and 1 of 2048 pixels
    assert quick[large]["ttft"]["mean_ms"] == pytest.approx((2 * 1536 + 2048) / 3, abs=0.1)
    assert quick[large]["ttft"]["max_ms"] == 2048
    assert quick[medium]["ttft"]["max_ms"] == 1024
    assert quick[small]["tpot"]["mean_ms"] == 1.0
    assert slow[small]["tpot"]["mean_ms"] == 3.0
    assert slow["all"]["ttft"]["mean_ms"] == pytest.approx(3 * quick["all"]["ttft"]["mean_ms"], abs=0.5)
    assert len(data["rows"]) == 2 * 2 * 40
    assert out.with_suffix(".md").read_text().count("| quick |") == 2
    assert out.with_suffix(".png").stat().st_size > 0
