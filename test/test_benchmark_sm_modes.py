"""The comparison of SM modes: phases, scores against hand-made numbers, and passes on a scripted server."""

from __future__ import annotations

import json
import math
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

import sm_modes
from servebench import arms
from servebench.arms import Arm, ServerSpec
from servebench.client import RequestRecord
from servebench.phases import DEFAULT_PHASES, Phase, phased_trace

pytestmark = pytest.mark.cpu

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
FAKE = "{python} -m servebench.fake_server --host {host} --port {port} --ttft-ms 5 --tpot-ms 4"
PHASES = ("text=0.5:text@20", "image=0.5:text@10+fixed:224@10")


def test_phases_follow_one_another_with_all_their_arrivals() -> None:
    phases = [Phase.parse(text) for text in DEFAULT_PHASES]
    drawn = phased_trace(phases, 3, output_len=16, num_words=8, scale=1.0)
    begin = 0.0
    for phase in phases:
        mine = [r for r, name in zip(drawn.trace.requests, drawn.phase_of, strict=True) if name == phase.name]
        assert len(mine) == sum(round(load.rate * phase.duration_s) for load in phase.workloads)
        assert all(begin <= r.arrival_s <= begin + phase.duration_s for r in mine)
        begin += phase.duration_s
    assert [r.id for r in drawn.trace.requests] == list(range(len(drawn.trace.requests)))
    heavy = [r for r, name in zip(drawn.trace.requests, drawn.phase_of, strict=True) if name == "heavy"]
    assert sum(any(image.width == 2048 for image in r.images) for r in heavy) == 20
    seeds = [image.seed for r in drawn.trace.requests for image in r.images]
    assert len(set(seeds)) == len(seeds)  # no image is another's: the store has nothing to share
    assert drawn == phased_trace(phases, 3, output_len=16, num_words=8, scale=1.0)
    assert drawn.trace.digest != phased_trace(phases, 4, output_len=16, num_words=8, scale=1.0).trace.digest


@pytest.mark.parametrize(
    "bad", ["", "a", "a=8", "a=0:text@8", "a=x:text@8", "a=8:sat:448", "a=8:mix@0.5S", "=8:text@8"]
)
def test_what_is_no_phase_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"phase|workload"):
        Phase.parse(bad)


def scores(**latency_ms: float) -> dict[str, Any]:
    rows = {phase: {"latency_ms": ms, "ttft_ms": 1.0, "tpot_ms": 2.0} for phase, ms in latency_ms.items()}
    return {**rows, "all": {"latency_ms": sum(latency_ms.values()), "num_failed": 0.0}}


def one(mode: str, repeat: int = 0, **latency_ms: float) -> dict[str, Any]:
    return {"mode": mode, "repeat": repeat, "scores": scores(**latency_ms)}


def test_modes_are_held_against_the_best_static_split_of_every_phase() -> None:
    passes = [
        one("static:32", light=100.0, heavy=400.0),
        one("static:96", light=150.0, heavy=200.0),
        one("sis", 0, light=100.0, heavy=230.0),
        one("sis", 1, light=110.0, heavy=210.0),
        one("off", light=90.0, heavy=800.0),
    ]
    found = sm_modes.compare(passes)
    assert found["best_static"] == {"light": "static:32", "heavy": "static:96"}
    table = found["modes"]
    assert table["sis"]["repeats"] == 2
    assert table["sis"]["phases"]["light"]["ratio"] == pytest.approx(1.05)
    assert table["sis"]["phases"]["heavy"]["ratio"] == pytest.approx(1.1)
    assert table["sis"]["phases"]["heavy"]["latency_spread_ms"] == pytest.approx(20.0)
    assert table["sis"]["overall"] == pytest.approx(math.sqrt(1.05 * 1.1))
    assert table["static:32"]["overall"] == pytest.approx(math.sqrt(2.0))
    assert table["static:96"]["overall"] == pytest.approx(math.sqrt(1.5))
    assert table["off"]["overall"] == pytest.approx(math.sqrt(0.9 * 4))
    (line,) = sm_modes.verdict(found)
    assert "+10.0% at most" in line
    assert "(heavy)" in line
    assert f"{math.sqrt(1.05 * 1.1 / 1.5) - 1:+.1%} overall against the best single one (static:96)" in line


def test_splits_that_mask_both_sides_are_static_splits_too() -> None:
    passes = [
        one("static:84", light=100.0),
        one("both+static:84", light=80.0),
        one("both+sis", light=88.0),
        one("sis", light=96.0),
    ]
    found = sm_modes.compare(passes)
    assert found["best_static"] == {"light": "both+static:84"}
    lines = sm_modes.verdict(found)
    assert [line.split(":")[0] for line in lines] == ["both+sis", "sis"]
    assert "+10.0% at most" in lines[0]
    assert sm_modes.pass_path(Path("x"), "both+static:84", 0).name == "both+static-84__r0.json"


def test_scores_are_means_of_a_phases_requests() -> None:
    drawn = phased_trace([Phase.parse(text) for text in PHASES], 1, output_len=3, num_words=4, scale=1.0)
    records = []
    for request in drawn.trace.requests:
        first = 50.0 if request.images else 10.0
        records.append(RequestRecord(request.id, 0.0, events_ms=[first, first + 4, first + 10], event_tokens=[1, 1, 1]))
    records[-1].error = "timeout"
    found = sm_modes.phase_scores(drawn, records)
    assert found["text"]["ttft_ms"] == 10.0
    assert found["text"]["latency_ms"] == 20.0
    assert found["text"]["tpot_ms"] == 5.0
    assert "image_ttft_ms" not in found["text"]
    assert found["image"]["image_ttft_ms"] == 50.0
    assert found["all"]["num_failed"] == found["image"]["num_failed"] == 1


def test_passes_on_one_server_are_kept_and_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(BENCHMARK), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    fake = Arm("spaceserve", (ServerSpec("server", FAKE),), ours=False)
    monkeypatch.setattr(arms, "parse_arm", lambda name: fake)
    monkeypatch.setattr(arms, "prepare", lambda arm, **flags: arm)
    out = tmp_path / "out"
    command = ["measure", "--model", "tiny", "--out", str(out), "--phases", *PHASES, "--output-len", "6"]
    command += ["--scale", "0.25", "--drain-s", "5", "--repeats", "1"]
    assert sm_modes.main([*command, "--modes", "static:32", "static:128"]) == 0
    assert len(list((out / "passes").iterdir())) == 2
    before = (out / "passes" / "static-32__r0.json").stat().st_mtime_ns
    bundle = tmp_path / "all.tgz"
    assert sm_modes.main([*command, "--modes", "sis", "static:32", "--bundle", str(bundle)]) == 0
    assert (out / "passes" / "static-32__r0.json").stat().st_mtime_ns == before
    summary = json.loads((out / "summary.json").read_text())
    assert summary["best_static"] == {"text": "static:32", "image": "static:32"}
    # The scripted server decodes four times as slowly under static:128.
    tpots = {mode: row["phases"]["text"]["tpot_ms"] for mode, row in summary["modes"].items()}
    assert tpots["static:128"] > 2 * tpots["static:32"]
    stored = json.loads((out / "passes" / "sis__r0.json").read_text())
    assert len(stored["requests"]) == 20
    assert stored["flushed"] is True
    with tarfile.open(bundle) as archive:
        assert "out/passes/sis__r0.json" in archive.getnames()
    assert "best static split: text static:32" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sm_modes.main([*command, "--modes", "off", "--seed", "2"])
    assert "another load" in capsys.readouterr().err
    # What does not fit is left for the next call.
    assert sm_modes.main([*command, "--modes", "off", "--budget-s", "4"]) == 0
    assert not (out / "passes" / "off__r0.json").exists()
