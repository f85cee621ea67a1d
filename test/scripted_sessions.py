"""Benchmark sessions on scripted servers (servebench/fake_server.py), for the tests of the runners."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from servebench.arms import Arm, ServerSpec
from servebench.session import SessionConfig

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
FAKE = "{python} -m servebench.fake_server --host {host} --port {port}"


@pytest.fixture(autouse=True)
def fake_server_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(BENCHMARK), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


def fake_arm(name: str, flags: str = "", ours: bool = False) -> Arm:
    return Arm(name, (ServerSpec("server", f"{FAKE} {flags}"),), ours=ours)


def config(tmp_path: Path, **changes: Any) -> SessionConfig:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "model": str(tmp_path / "model-folder"),
        "model_name": "tiny",
        "results": tmp_path / "results",
        "work_dir": work,
        "repo": BENCHMARK.parent,
        "device": "cpu",
        "output_len": 6,
        "num_words": 8,
        "scale": 0.1,
        "start_estimate_s": 3.0,
        "drain_s": 10.0,
        "budget_s": 300.0,
    }
    return SessionConfig(**{**settings, **changes})
