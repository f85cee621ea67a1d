"""benchmark/mps_faults.py against a stand-in: a small HTTP server with MPS processes of its own that does as it should.

The stand-in starts a "control daemon" again when it is killed, and ends with status 1 when its "MPS server" is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import mps_faults
from mpsfaults.load import Load
from mpsfaults.watched import CONTROL, MPS_SERVER, Watched
from servebench import servers
from servebench.arms import ServerSpec

pytestmark = pytest.mark.cpu

STAND_IN = r"""
import http.server, json, os, subprocess, sys, threading, time

folder, port, faithful = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "faithful"
environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/spaceserve-mps-x/pipe"}

def process(name, *options):
    command = [name, *options, "-c", "import time; time.sleep(60)"]
    return subprocess.Popen(command, executable=sys.executable, env=environ)

control, server = process("nvidia-cuda-mps-control", "-d"), process("nvidia-cuda-mps-server")
restarts = 0

def watch():
    global control, restarts
    while True:
        time.sleep(0.05)
        if server.poll() is not None:
            if faithful:
                print("every GPU context on it is lost", flush=True)
                control.kill()
            os._exit(1 if faithful else 9)
        if control.poll() is not None:
            restarts += 1
            control = process("nvidia-cuda-mps-control", "-d")

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments): pass

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        mps = {"state": "running", "num_restarts": restarts}
        self.answer({"/spaceserve/status": json.dumps({"epoch": 0, "num_requests": 0, "mps": mps}),
                     "/metrics": f'spaceserve:mps_restarts_total{{model_name="m"}} {restarts}.0\n'}.get(self.path, ""))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/generate":
            return self.answer("{}")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for count in range(1, 513):
            event = f'data: {json.dumps({"meta_info": {"completion_tokens": count}})}\n\n'
            self.wfile.write(f"{len(event):x}\r\n{event}\r\n".encode())
            time.sleep(0.002)
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

threading.Thread(target=watch, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@contextlib.contextmanager
def standing_in(tmp_path: Path, manner: str) -> Iterator[tuple[mps_faults.Faults, Watched]]:
    options = argparse.Namespace(out=tmp_path / "out", budget_s=30.0, ours_flags="", burst_side=56)
    options.out.mkdir()
    folder = tmp_path / "served"
    folder.mkdir()
    (script := tmp_path / "stand_in.py").write_text(STAND_IN)
    spec = ServerSpec("server", f"{{python}} {script} {folder} {{port}} {manner}")
    (port,) = servers.free_ports(1)
    server = servers.start_server(spec, tmp_path / "log", port, {}, {"model": "m", "port": str(port)})
    watched = Watched(server, folder)
    faults = mps_faults.Faults(options, tmp_path)
    faults.all["served"] = watched
    try:
        server.wait_ready(time.monotonic() + 20)
        assert faults.wait(lambda: bool(watched.mps_processes(MPS_SERVER)), 5)
        yield faults, watched
    finally:
        watched.note_processes()
        server.stop()
        for pid in watched.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def test_a_control_daemon_that_is_started_again(tmp_path: Path) -> None:
    with standing_in(tmp_path, "faithful") as (faults, watched), Load(watched.url, 56) as load:
        (before,) = watched.mps_processes(CONTROL)
        part = faults.kill_control(watched, load)
        assert part["ok"], part
        assert part["restarts_metric"] == 1
        assert part["load"]["stream_tokens"] > 10
        assert not before.is_running()


@pytest.mark.parametrize(("manner", "is_ok", "status"), [("faithful", True, 1), ("careless", False, 9)])
def test_a_lost_mps_server_must_end_the_server_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str, is_ok: bool, status: int
) -> None:
    monkeypatch.setattr(mps_faults, "CLEAN_UP_TIMEOUT_S", 1.0)
    with standing_in(tmp_path, manner) as (faults, watched):
        part = faults.kill_mps_server(watched)
    assert part["exit_status"] == status
    assert part["ended"]
    assert part["ok"] is is_ok, part
    assert bool(part["left_processes"]) is not is_ok
    assert part["tokens_before"] > 10


def test_what_the_load_saw_is_counted_within_the_window() -> None:
    load = Load("http://127.0.0.1:1", 56, num_streams=2)
    load.tokens = [[1.0, 2.0, 3.0, 9.0], [1.5, 2.5, 3.5]]
    load.images = [{"begin": 1.0, "end": 2.0, "status": 200, "error": ""}, {"begin": 8.0, "end": 9.0, "status": 0}]
    load.errors = [(0.5, "before"), (2.2, "inside")]
    found = load.between(1.0, 4.0)
    assert found["stream_tokens"] == 6
    assert found["longest_pause_s"] == 1.0
    assert found["stream_errors"] == ["inside"]
    assert (found["images_answered"], found["image_errors"]) == (1, [])


def test_the_control_program_is_hidden_and_others_of_its_folder_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    for name in (CONTROL, "other"):
        (folder / name).write_text("#!/bin/sh\necho here\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(mps_faults, "OTHER_CONTROL", tmp_path / "none")
    env, _ = mps_faults.environment_without_mps(tmp_path / "bin")
    command = f"other && ! command -v {CONTROL}"
    assert subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=True).stdout == b"here\n"
    monkeypatch.setattr(mps_faults, "OTHER_CONTROL", Path(sys.executable))
    assert "CUDA_MPS_PIPE_DIRECTORY" in mps_faults.environment_without_mps(tmp_path / "bin2")[0]
