"""The interference part of benchmark/gpu_partition.py: its arms and what it makes of times, with peers that act."""

from __future__ import annotations

import time
from typing import Any

import pytest

from partitionbench import interfere
from partitionbench.gpu import SPLITS
from partitionbench.table import interfere_lines
from spaceserve.partition.ladder import make_rungs

pytestmark = pytest.mark.cpu

# Milliseconds of the decoder's kernels: alone on the device, alone on a complement, beside an encoder.
ALONE_MS, ON_COMPLEMENT_MS, BESIDE_MS = 1.0, 2.0, 3.0


class ActingPeer:
    """Answers as a peer process does: twice as long on a complement, three times while the other side runs."""

    running: str | None = None  # where the encoder's load runs now

    def __init__(self, environ: dict[str, str]) -> None:
        self._answers: list[Any] = []

    def send(self, command: str, *arguments: Any) -> None:
        if command == "go":
            self._answers.append({"versions": {}, "attention": "an attention"})
        elif command == "until_told":
            ActingPeer.running = arguments[1]
            self._answers.append("started")
        elif command == "stop":
            rate = 100.0 if ActingPeer.running == interfere.ALL else 50.0
            ActingPeer.running = None
            self._answers.append({"runs": 10, "per_s": rate})
        elif command == "timed":
            _, where, _ = arguments
            alone_ms = ALONE_MS if where == interfere.ALL else ON_COMPLEMENT_MS
            median_ms = alone_ms if ActingPeer.running is None else BESIDE_MS
            self._answers.append({"runs": 5, "median_ms": median_ms, "mean_ms": median_ms, "p99_ms": median_ms})

    def receive(self, timeout_s: float = 60.0) -> Any:
        return self._answers.pop(0)

    def call(self, *command: Any) -> Any:
        self.send(*command)
        return self.receive()

    def close(self) -> None:
        assert not self._answers, "an answer was not read"


def test_splits_are_rungs_of_the_device_they_were_chosen_for() -> None:
    rungs = make_rungs(132, min_units=8, step=8)
    assert all(group + rest == 132 and rest in rungs for group, rest in SPLITS)


def test_every_arm_is_set_against_alone_on_the_device_and_on_the_complement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfere, "Peer", ActingPeer)
    found = interfere.measure_arms({}, 0.001, time.monotonic() + 60)
    rows = found["rows"]
    assert len(rows) == len(interfere.plans())
    assert {row["mode"] for row in rows if row["decoder"] == "decode_gemm"} == {
        "plain MPS",
        *(f"encoder masked {group}" for group, _ in SPLITS),
        *(f"both masked {group}/{rest}" for group, rest in SPLITS),
        "decoder masked 64",
    }
    assert all(row["times_alone_on_all"] == BESIDE_MS / ALONE_MS for row in rows)
    plain = [row for row in rows if row["mode"] == "plain MPS"]
    assert plain
    assert not any("times_alone_on_complement" in row for row in plain)
    assert all(row["times_alone_on_complement"] == 1.5 for row in rows if row not in plain)
    assert all(row["encoder_share_of_alone"] == 1.0 for row in rows)
    lines = interfere_lines({"mps": found, "daemon_ended": True, "num_mps_servers": 1, "time_sliced": {}})
    (line,) = [text for text in lines if "encoder_layer" in text and "both masked 84/48" in text and "decode" in text]
    assert "3.00 ( 1.50)" in line


def test_arms_beyond_the_budget_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfere, "Peer", ActingPeer)
    found = interfere.measure_arms({}, 0.001, time.monotonic() - 1)
    assert all("left_out" in row for row in found["rows"])
    lines = interfere_lines({"mps": found})
    assert any(f"{len(found['rows'])} arms left out" in line for line in lines)
