"""Recording encode beside decode: the hook, in a process that stands for a server's, and what is made of intervals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import timeline_record
from servebench.arms import parse_arm
from timeline_record import DECODE, ENCODER

pytestmark = pytest.mark.cpu

WORKER = """
import sys, time
import setproctitle, torch
setproctitle.setproctitle(sys.argv[1])
print("up", flush=True)
end = time.monotonic() + 60
folder = sys.argv[2]
import os
a = torch.ones(8, 8)
while time.monotonic() < end and not any(name.endswith(".json") for name in os.listdir(folder)):
    a @ a
    time.sleep(0.002)
"""


def test_the_hook_records_a_worker_between_two_signals(tmp_path: Path) -> None:
    (server,) = timeline_record.traced(parse_arm("spaceserve"), tmp_path).servers
    assert server.env["PYTHONPATH"].startswith(str(timeline_record.HOOK))
    environ = {**os.environ, **server.env}
    command = [sys.executable, "-c", WORKER, "spaceserve::encoder", str(tmp_path)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert not list(tmp_path.iterdir())
            (tmp_path / "go").touch()
            (ready,) = timeline_record.wait_for_files(tmp_path, "ready-*", 1, 50)
            assert ready.name == f"ready-encoder-{process.pid}"
            time.sleep(0.3)
            (tmp_path / "stop").touch()
            (found,) = timeline_record.wait_for_files(tmp_path, "*.json", 1, 50)
        finally:
            process.terminate()
    recording = json.loads(found.read_text())
    assert (recording["lane"], recording["device"]) == ("encoder", "cpu")
    products = [row for row in recording["intervals_us"] if row[2] == "aten::matmul"]
    assert products
    assert all(start < end and abs(start / 1e6 - time.time()) < 120 for start, end, _, _ in products)
    with pytest.raises(ValueError, match="0 of 1 processes"):
        timeline_record.wait_for_files(tmp_path, "ready-scheduler*", 1, 0.1)


def recordings() -> list[dict[str, Any]]:
    """The encoder works from 100 to 160 ms; a decode step of two kernels every 10 ms; a prefill on its own stream."""
    base = 1.7e15
    encoder = [[base + 100_000 + n * 10_000, base + 100_000 + (n + 1) * 10_000, "layer", 3] for n in range(6)]
    decode = [
        [base + step * 10_000 + part * 2_000, base + step * 10_000 + (part + 1) * 2_000, f"decode{part}", 7]
        for step in range(20)
        for part in range(2)
    ]
    prefill = [[base + 165_000, base + 185_000, "prefill", 20]]
    return [
        {"lane": "encoder", "device": "cuda", "intervals_us": encoder},
        {"lane": "scheduler", "device": "cuda", "intervals_us": sorted(decode + prefill)},
    ]


def test_overlap_is_counted_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lanes = timeline_record.lanes_of(recordings())
    assert list(lanes) == [ENCODER, DECODE, "scheduler, stream 20"]
    found = timeline_record.figures(lanes)
    assert found["encoder_busy_ms"] == 60
    assert found["decode_stream_busy_ms"] == 80
    assert found["both_at_once_ms"] == 24
    assert found["share_of_encoder"] == 0.4
    assert found["decode_kernels_beside_encoder"] == 12
    assert set(found["most_frequent_beside"]) == {"decode0", "decode1"}
    begin, end = timeline_record.busiest_window(lanes)
    assert end - begin == pytest.approx(timeline_record.ZOOM_MS * 1e3)
    assert 1.7e15 + 90_000 <= begin <= 1.7e15 + 140_000
    summary = {**found, "device": "cuda"}
    timeline_record.write(lanes, (begin, end), summary, timeline_record.Load(), tmp_path / "t.json")
    stored = json.loads((tmp_path / "t.json").read_text())
    assert stored["joined_ms"][ENCODER] == [[100.0, 160.0]]
    assert stored["window_kernels_ms"][DECODE]
    timeline_record.draw(lanes, (begin, end), summary, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 3000
    with pytest.raises(ValueError, match="no work recorded in the encoder worker"):
        timeline_record.lanes_of([{"lane": "encoder", "device": "cuda", "intervals_us": []}, recordings()[1]])
