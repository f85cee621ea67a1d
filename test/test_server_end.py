"""How servers end, and how they refuse to start: nothing is left, and one line says what to do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests

from servers import Server, free_port, picture_url, running, user
from spaceserve import reaper

pytestmark = pytest.mark.cpu


def shm_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def mapped_shm_names(processes: list[psutil.Process]) -> set[str]:
    """Names in /dev/shm that one of the processes has mapped."""
    paths = (Path(mapping.path) for process in processes for mapping in process.memory_maps())
    return {path.name for path in paths if path.parent == Path("/dev/shm")}


@pytest.mark.parametrize(
    ("how", "send", "status"),
    [
        (signal.SIGTERM, os.kill, -signal.SIGKILL),  # SGLang ends so, once the requests in flight are answered
        (signal.SIGTERM, os.killpg, -signal.SIGKILL),
        (signal.SIGINT, os.killpg, 0),  # Ctrl-C in a terminal
        (signal.SIGKILL, os.kill, -signal.SIGKILL),
    ],
    ids=["SIGTERM", "SIGTERM-group", "SIGINT-group", "SIGKILL"],
)
def test_nothing_is_left(how: signal.Signals, send: Callable[[int, int], None], status: int) -> None:
    temp_dirs_before = set(Path("/tmp").glob("pymp-*"))
    server = Server("spaceserve.launch_server")
    try:
        server.wait_until_up()
        assert server.answer([user("Hi", picture_url(1))]) is not None
        requests.post(
            f"{server.url}/generate", json={"text": "Hi", "sampling_params": {"max_new_tokens": 1}}, timeout=60
        )
        prefix, run_dir, reaper = server.shm_prefix(), server.run_dir(), server.reaper()
        processes = server.processes()
        mapped = mapped_shm_names(processes)
        assert any(name.startswith(prefix) for name in mapped)
        assert any(name.startswith("sglang_loads") for name in mapped)
        said_before = len(server.log)
        send(server.process.pid, how)
        assert server.process.wait(60) == status
        reaper.wait(60)
        said = server.log[said_before:]
        for crash in ("starting it again", "SIGQUIT", "crashed", "Traceback", "KeyboardInterrupt", "ERROR"):
            assert crash not in said, said
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive, [process.cmdline() for process in alive]
        assert not run_dir.exists()
        assert not shm_names() & mapped
        assert set(Path("/tmp").glob("pymp-*")) <= temp_dirs_before
        assert not any(name.startswith(prefix) for name in shm_names())
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{server.url}/health", timeout=5)
    finally:
        server.stop()


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spaceserve.launch_server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_a_missing_model_folder_is_one_line() -> None:
    result = start("--model-path", "/nonexistent/model")
    assert result.returncode != 0
    assert "no model folder /nonexistent/model" in last_line(result)
    assert "Traceback" not in result.stderr


def test_an_unknown_architecture_is_one_line(tmp_path: Path) -> None:
    from spaceserve.demo import model_path

    shutil.copytree(model_path(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such_model"}')
    result = start("--model-path", str(tmp_path))
    assert result.returncode != 0
    assert f"the model in {tmp_path} cannot be served" in last_line(result)
    assert "Traceback" not in result.stderr


def test_an_architecture_that_sglang_does_not_know_is_one_line(tmp_path: Path) -> None:
    from spaceserve.demo import model_path

    shutil.copytree(model_path(), tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen2VLForConditionalGeneration", "FooForConditionalGeneration"))
    result = start("--model-path", str(tmp_path))
    assert result.returncode != 0
    assert "FooForConditionalGeneration is not one that SGLang" in last_line(result)
    assert "Traceback" not in result.stderr


def test_a_setting_out_of_range_is_named() -> None:
    result = start("--encoder-window-ms", "-1")
    assert result.returncode != 0
    assert "--encoder-window-ms must be greater than 0" in last_line(result)


def test_a_mistyped_option_of_sglangs_is_one_line() -> None:
    result = start("--mem-fraction-statik", "0.5")
    assert result.returncode == 2
    assert "did you mean --mem-fraction-static?" in last_line(result)
    assert "usage:" not in result.stderr


def test_a_port_in_use_is_one_line() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = start("--port", str(taken.getsockname()[1]))
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "choose another --port" in last_line(result)


def test_help_shows_our_group() -> None:
    result = start("--help")
    assert result.returncode == 0
    assert "SpaceServe:" in result.stdout
    for option in ("--encoder-worker", "--encoder-feature-cache-gb", "--sm-partition", "--model-path"):
        assert option in result.stdout


# The launcher, which says what it calls its folder and its segments.
NAMES_SAID = """
import sys

if __name__ == "__main__":
    from spaceserve.channels import Channels
    from spaceserve.launch_server import main

    create = Channels.create

    def create_and_say(dp_size):
        channels = create(dp_size)
        print("NAMES", channels.run_dir, channels.shm_prefix)
        return channels

    Channels.create = staticmethod(create_and_say)
    sys.exit(main(sys.argv[1:]))
"""


def test_a_worker_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    """How many cores there are is known to the worker alone. Its reason is the last line, and nothing is left."""
    (tmp_path / "names_said.py").write_text(NAMES_SAID)
    result = subprocess.run(
        [sys.executable, "-m", "names_said", "--sm-partition", "static:9999", "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert result.returncode == 1
    assert last_line(result).startswith(
        "spaceserve: the encoder worker did not start: --sm-partition static:9999: the device has "
    )
    assert "Traceback" not in result.stderr
    assert "OOM" not in result.stderr
    run_dir, prefix = next(line.split()[1:] for line in result.stdout.splitlines() if line.startswith("NAMES "))
    assert not Path(run_dir).exists()
    assert not any(name.startswith(prefix) for name in shm_names())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            assert process.environ().get(reaper.OWNER_VARIABLE) != prefix, process.cmdline()


def test_without_an_encoder_worker_it_is_stock() -> None:
    with running("spaceserve.launch_server", "--encoder-worker", "off") as server:
        assert server.answer([user("Hi", picture_url(1))]) is not None
        assert requests.get(f"{server.url}/spaceserve/status", timeout=10).status_code == 404
        titles = [" ".join(process.cmdline()) for process in server.processes()]
        assert not any("spaceserve::encoder" in title for title in titles)


def test_the_reaper_knows_a_semaphore_by_the_name_that_it_has() -> None:
    """A process that is killed leaves it, and what maps shows is not its name."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name  # type: ignore[attr-defined]
    assert f"/dev/shm/sem.{name.lstrip('/')}" in reaper._semaphores(os.getpid())


def test_the_reaper_does_not_end_itself(tmp_path: Path) -> None:
    """While its first process has not ended, it is below the launcher, as what it is to end is."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "python")!r})
from spaceserve import reaper
exit = os._exit
os._exit = lambda status: (time.sleep(1), exit(status))
reaper.GRACE_S = 0.5
reaper.main(os.getppid(), "spaceserve-reaper-self-test-", {str(tmp_path / "run")!r})
"""
    (tmp_path / "run").mkdir()
    started = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdin is not None
    assert started.stdout is not None
    time.sleep(0.5)  # it has looked
    started.stdin.close()
    started.stdout.read()  # until it has ended
    started.wait(30)
    assert not (tmp_path / "run").exists()


def test_the_reaper_waits_for_its_launcher(tmp_path: Path) -> None:
    """It ends what the launcher started and removes what was named, and only after the launcher has gone."""
    code = f"""
import subprocess, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "python")!r})
from spaceserve.reaper import Reaper
reaper = Reaper("spaceserve-reaper-test-", {str(tmp_path / "run")!r})
reaper.remove_too({str(tmp_path / "extra")!r})
reaper.end_mps({str(tmp_path / "pipe")!r})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
# Nobody's child by the time the reaper looks: known by its environment alone.
orphan = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])"
script = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {{orphan!r}}], stdout=2).pid)"
print(child.pid, subprocess.check_output([sys.executable, "-c", script], text=True).strip(), flush=True)
time.sleep(600)
"""
    (tmp_path / "run").mkdir()
    (tmp_path / "extra").write_text("x")
    segment = Path("/dev/shm/spaceserve-reaper-test-segment")
    segment.write_text("x")
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $(cat)" > {tmp_path}/mps\n')
    control.chmod(0o755)
    environ = {**os.environ, "PATH": f"{control.parent}:{os.environ['PATH']}"}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
    assert launcher.stdout is not None
    children = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(children) == 2
    assert all(map(psutil.pid_exists, children))
    time.sleep(1.5)
    assert segment.exists()
    assert (tmp_path / "run").exists()
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    deadline_s = time.monotonic() + 20
    files = (segment, tmp_path / "run", tmp_path / "extra")
    while time.monotonic() < deadline_s and (
        any(path.exists() for path in files) or any(map(psutil.pid_exists, children))
    ):
        time.sleep(0.1)
    assert not segment.exists()
    assert not any(map(psutil.pid_exists, children))
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "extra").exists()
    assert (tmp_path / "mps").read_text() == f"{tmp_path / 'pipe'} quit\n"
