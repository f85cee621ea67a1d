"""The private MPS daemon, with a stand-in for nvidia-cuda-mps-control that behaves like it and needs no GPU."""

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from spaceserve.partition import mps, mps_processes
from spaceserve.partition.mps import MpsDaemon
from spaceserve.partition.mps_supervisor import MpsMetrics, MpsSupervisor

pytestmark = pytest.mark.cpu

# Daemonises with -d, owns a socket and a pid file in the pipe directory, keeps one server process that is started by
# "start_server", and answers the documented commands. FAKE_MPS sets what goes wrong.
FAKE_CONTROL = r"""#!{python} -SE
import os, signal, socket, subprocess, sys, time

pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
mode = os.environ.get("FAKE_MPS", "")
path = os.path.join(pipe, "control")

def serve():
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    with open(os.path.join(pipe, "nvidia-cuda-mps-control.pid"), "w") as f:
        f.write(str(os.getpid()))
    servers = []
    while True:
        connection, _ = listener.accept()
        command = connection.recv(4096).decode().split()
        reply = ""
        if command[:1] == ["start_server"]:
            # Named as the real server is, for who looks at command lines.
            servers.append(subprocess.Popen(["nvidia-cuda-mps-server", "-c", "import time; time.sleep(600)"],
                                            executable=sys.executable))
        elif command[:1] == ["get_server_list"]:
            reply = "".join(f"{{s.pid}}\n" for s in servers if s.poll() is None)
        elif command[:1] == ["get_server_status"]:
            fault = os.path.join(pipe, "status")
            reply = open(fault).read() if os.path.exists(fault) else "ACTIVE"
        elif command[:1] == ["quit"]:
            if mode != "stubborn":
                for s in servers:
                    s.kill(); s.wait()
                os.unlink(path)
                os.unlink(os.path.join(pipe, "nvidia-cuda-mps-control.pid"))
                connection.sendall(b"\0"); connection.close()
                os._exit(0)
        else:
            reply = "unknown command\n"
        connection.sendall(reply.encode() + b"\0")
        connection.close()

if sys.argv[1:] == ["-d"]:
    if mode == "fail":
        print("An instance of this daemon is already running"); sys.exit(1)
    if mode == "mute":
        sys.exit(0)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            serve()
        os._exit(0)
    deadline = time.time() + 5
    while not os.path.exists(path) and time.time() < deadline:
        time.sleep(0.01)
    sys.exit(0)

line = sys.stdin.readline()
client = socket.socket(socket.AF_UNIX)
try:
    client.connect(path)
except OSError:
    print("Cannot find MPS control daemon process"); sys.exit(1)
client.sendall(line.encode())
data = b""
while not data.endswith(b"\0"):
    part = client.recv(4096)
    if not part:
        break
    data += part
sys.stdout.write(data.decode().strip("\0"))
"""


def own_processes() -> set[int]:
    """Every process of the stand-in on this machine that belongs to this test run."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or not mps_processes.is_running(int(entry)):
            continue
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if b"nvidia-cuda-mps-" in command and f"SPACESERVE_TEST={os.getpid()}".encode() in environ.split(b"\0"):
            found.add(int(entry))
    return found


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An environment whose PATH has the stand-in, whose temporary directory is the test's own."""
    directory = tmp_path / "bin"
    directory.mkdir()
    control = directory / mps.CONTROL
    control.write_text(FAKE_CONTROL.format(python=sys.executable))
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    # pytest's own directories are too long for a socket's path.
    temp = Path(f"/tmp/ssmps{os.getpid()}")
    temp.mkdir(exist_ok=True)
    monkeypatch.setattr(mps_processes, "_KILL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(mps, "_EXTRA_DIRECTORIES", ())
    environ = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "TMPDIR": str(temp),
        "SPACESERVE_TEST": str(os.getpid()),
    }
    yield environ
    left = own_processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    remaining = sorted(path.name for path in temp.iterdir())
    for path in temp.iterdir():
        shutil.rmtree(path)
    temp.rmdir()
    assert not left, "processes were left behind"
    assert not remaining, "directories were left behind"


def daemon(environ: dict[str, str], **settings: str) -> MpsDaemon:
    return MpsDaemon(environ={**environ, **settings}, gpu_present=lambda: True)


def test_own_daemon_starts_answers_and_ends(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), daemon(environ) as running:
        assert running.reason is None
        assert running.is_owned
        assert running.is_alive()
        assert running.server_pids() == []
        assert len(own_processes()) == 1
        assert running.pipe_directory is not None
        assert running.log_directory is not None
        names = running.client_environ
        assert names[mps.PIPE_VARIABLE] == str(running.pipe_directory)
        assert names[mps.LOG_VARIABLE] == str(running.log_directory)
        # 107 bytes is the limit of a socket's path.
        assert len(str(running.pipe_directory / "control")) < 100
        assert running.pipe_directory.stat().st_mode & 0o077 == 0
        assert running.log_tail() == []
        (running.log_directory / "server.log").write_text("first\nlast\n")
        assert running.log_tail(1) == ["server.log: last"]
        assert running.start() is running
        assert len(own_processes()) == 1
        running._command("start_server -uid 0")
        (server,) = running.server_pids()
        assert own_processes() >= {server}
        root = running.pipe_directory.parent
    assert running.reason == "stopped"
    assert not running.is_alive()
    assert running.client_environ == {}
    assert not own_processes()
    assert not root.exists()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_daemon_numbers_no_device_anew(environ: dict[str, str]) -> None:
    """With CUDA_VISIBLE_DEVICES in both, clients would count among the devices that the daemon has counted already."""
    with daemon(environ, CUDA_VISIBLE_DEVICES="1") as running:
        for _ in range(2):
            (pid,) = own_processes()
            names = [entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
            assert b"SPACESERVE_TEST" in names
            assert b"CUDA_VISIBLE_DEVICES" not in names
            assert "CUDA_VISIBLE_DEVICES" not in running.client_environ  # clients keep the user's
            assert running.restart()


def test_two_servers_have_daemons_of_their_own(environ: dict[str, str]) -> None:
    with daemon(environ) as first, daemon(environ) as second:
        assert first.pipe_directory != second.pipe_directory
        assert len(own_processes()) == 2
        first.stop()
        assert second.is_alive()
        assert len(own_processes()) == 1


def test_the_users_daemon_is_used_and_left_alone(environ: dict[str, str]) -> None:
    with daemon(environ) as users:
        with daemon(environ, **users.client_environ) as guest:
            assert guest.reason is None
            assert not guest.is_owned
            assert guest.client_environ == users.client_environ
            assert guest.is_alive()
            assert len(own_processes()) == 1
        assert users.is_alive()


def test_a_named_directory_without_a_daemon_is_a_reason_not_a_new_daemon(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon(environ, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path)) as guest:
        assert "no control daemon answers at CUDA_MPS_PIPE_DIRECTORY" in (guest.reason or "")
        assert guest.client_environ == {}
        assert not own_processes()
    assert sum("take turns" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("settings", "gpu", "words"),
    [
        ({"PATH": "/nowhere"}, True, "not on the PATH"),
        ({}, False, "no NVIDIA GPU"),
        ({"FAKE_MPS": "fail"}, True, "already running"),
    ],
)
def test_where_mps_cannot_run_there_is_a_reason_and_one_warning(
    environ: dict[str, str], settings: dict[str, str], gpu: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = MpsDaemon(environ={**environ, **settings}, gpu_present=lambda: gpu)
    running.start()
    assert words in (running.reason or "")
    assert not running.restart()
    assert not running.is_alive()
    assert running.client_environ == {}
    running.stop()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "take turns on the GPU" in warnings[0]


def test_a_daemon_that_never_answers_is_a_reason(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_START_TIMEOUT_S", 0.5)
    with daemon(environ, FAKE_MPS="mute") as running:
        assert "does not answer" in (running.reason or "")


def test_a_killed_daemon_is_noticed_and_restarted_in_place(environ: dict[str, str]) -> None:
    with daemon(environ) as running:
        names = running.client_environ
        running._command("start_server -uid 0")
        (old_server,) = running.server_pids()
        assert running._control_pid is not None
        os.kill(running._control_pid, signal.SIGKILL)
        wait_until(lambda: not running.is_alive())
        assert running.restart()
        assert running.is_alive()
        assert running.client_environ == names
        # The server of the dead daemon must not stay beside the new one's.
        assert not mps_processes.is_running(old_server)
        assert len(own_processes()) == 1


def test_a_daemon_that_ignores_quit_and_sigterm_is_killed(environ: dict[str, str]) -> None:
    with daemon(environ, FAKE_MPS="stubborn") as running:
        running._command("start_server -uid 0")
        assert len(running.server_pids()) == 1
        assert len(own_processes()) == 2
    assert not own_processes()


def test_a_forked_child_does_not_end_the_daemon(environ: dict[str, str]) -> None:
    with daemon(environ) as running:
        code = os.fork()
        if code == 0:
            running.stop()
            os._exit(0)
        os.waitpid(code, 0)
        assert running.is_alive()


OWNER = """
import sys, time, types
# The package's own __init__ would import torch, which takes seconds.
package = types.ModuleType("spaceserve.partition")
package.__path__ = [sys.argv[2]]
sys.modules["spaceserve.partition"] = package
from spaceserve.partition.mps import MpsDaemon
running = MpsDaemon(gpu_present=lambda: True).start()
print(running.reason, running.pipe_directory, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
"""


def run_owner(environ: dict[str, str], how: str) -> subprocess.Popen[str]:
    env = {**os.environ, **environ}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, how, str(Path(mps.__file__).parent)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("None "), "the daemon did not start"
    return process


def test_the_daemon_ends_when_its_server_exits(environ: dict[str, str]) -> None:
    with run_owner(environ, "exit") as process:
        assert process.wait(timeout=60) == 0
    assert not own_processes()


def test_a_daemon_left_by_a_killed_server_is_ended_by_the_next(environ: dict[str, str]) -> None:
    with run_owner(environ, "wait") as process:
        (abandoned,) = own_processes()
        with daemon(environ):
            assert mps_processes.is_running(abandoned), "its owner still ran"
        process.kill()
        process.wait(timeout=10)
        assert mps_processes.is_running(abandoned), "a killed process cannot end its daemon"
        with daemon(environ) as running:
            assert not mps_processes.is_running(abandoned)
            assert running.is_alive()


@pytest.mark.parametrize("space", ["another-boot pid:[1]", ""])
def test_a_daemon_of_another_container_is_left_alone(environ: dict[str, str], space: str) -> None:
    """Its owner's process id means nothing here: it must not be taken for dead."""
    foreign = Path(environ["TMPDIR"]) / "spaceserve-mps-foreign"
    foreign.mkdir()
    (foreign / "owner").write_text(f"{2**22 + 1} 17\n{space}")
    with daemon(environ):
        assert foreign.is_dir()
    (foreign / "owner").write_text(f"{2**22 + 1} 17\n{mps_processes.process_space()}")
    with daemon(environ):
        assert not foreign.exists()


def supervised(running: MpsDaemon) -> tuple[MpsSupervisor, list[str], CollectorRegistry]:
    """A supervisor whose looks the test makes itself, what it was told of lost contexts, and its metrics."""
    lost: list[str] = []
    registry = CollectorRegistry()
    supervisor = MpsSupervisor(running, lost.append)
    supervisor.metrics = MpsMetrics({"model_name": "m"}, registry)
    supervisor._publish()
    assert supervisor.look()
    return supervisor, lost, registry


def metric(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"spaceserve:{name}", {"model_name": "m"})


def test_a_dead_control_daemon_is_replaced_and_its_server_left_to_its_clients(environ: dict[str, str]) -> None:
    with daemon(environ) as running:
        running._command("start_server -uid 0")
        supervisor, lost, registry = supervised(running)
        (server,) = supervisor.snapshot()["servers"]
        assert metric(registry, "mps_up") == 1
        assert running._control_pid is not None
        os.kill(running._control_pid, signal.SIGKILL)
        wait_until(lambda: not running.control_is_running())
        assert supervisor.look()
        assert mps_processes.is_running(server)
        assert running.is_alive(), "a new client would find no daemon"
        snapshot = supervisor.snapshot()
        assert (snapshot["state"], snapshot["num_restarts"], snapshot["is_owned"]) == ("running", 1, True)
        assert metric(registry, "mps_restarts_total") == 1
        assert not lost
        # The old server is still watched: its clients' contexts go with it.
        supervisor._ask()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not mps_processes.is_running(server))
        assert not supervisor.look()
        assert len(lost) == 1
        assert supervisor.snapshot()["state"] == "lost"
        assert metric(registry, "mps_up") == 0


def test_a_control_daemon_that_keeps_dying_is_given_up(environ: dict[str, str]) -> None:
    with daemon(environ) as running:
        supervisor, lost, registry = supervised(running)
        running._environ["FAKE_MPS"] = "fail"
        assert running._control_pid is not None
        os.kill(running._control_pid, signal.SIGKILL)
        wait_until(lambda: not running.control_is_running())
        for _ in range(8):
            assert supervisor.look()
        snapshot = supervisor.snapshot()
        assert snapshot["state"] == "no daemon"
        assert "already running" in snapshot["problem"]
        assert metric(registry, "mps_restarts_total") == 5
        assert metric(registry, "mps_up") == 0
        assert not lost


def test_a_clients_fault_that_takes_the_server_is_told_at_once(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    reasons: list[str] = []

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        told.set()

    with daemon(environ) as running:
        running._command("start_server -uid 0")
        assert running.log_directory is not None
        assert running.pipe_directory is not None
        (running.log_directory / "server.log").write_text("Client 17 caused a fault\n")
        (server,) = running.server_pids()
        assert running.server_status(server) == "ACTIVE"
        (running.pipe_directory / "status").write_text("FAULT\n")
        supervisor = MpsSupervisor(running, on_lost, poll_s=0.01)
        supervisor.start()
        assert told.wait(10)
        supervisor.stop()
        assert supervisor.snapshot()["state"] == "lost"
    assert len(reasons) == 1
    assert "every GPU context" in reasons[0]
    assert "Client 17 caused a fault" in caplog.text


@pytest.mark.parametrize("how", ["killed", "fault"])
def test_when_a_process_fails_a_lost_server_is_found_before_the_next_look(environ: dict[str, str], how: str) -> None:
    with daemon(environ) as running:
        running._command("start_server -uid 0")
        supervisor, lost, _ = supervised(running)
        supervisor.look_now()
        assert not lost, "a process failed for another reason"
        (server,) = supervisor.snapshot()["servers"]
        assert running.pipe_directory is not None
        if how == "killed":
            os.kill(server, signal.SIGKILL)
            wait_until(lambda: not mps_processes.is_running(server))
        else:
            (running.pipe_directory / "status").write_text("FAULT\n")
        supervisor.look_now()
        supervisor.look_now()
        assert len(lost) == 1, "said once"
        assert not supervisor.look()


def test_a_users_daemon_that_goes_away_is_reported_and_found_again(environ: dict[str, str]) -> None:
    with daemon(environ) as users, daemon(environ, **users.client_environ) as guest:
        supervisor, lost, registry = supervised(guest)
        assert users._control_pid is not None
        os.kill(users._control_pid, signal.SIGKILL)
        wait_until(lambda: not users.control_is_running())
        assert supervisor._ask()
        assert supervisor.snapshot()["state"] == "silent"
        assert metric(registry, "mps_up") == 0
        assert users.restart(keep_servers=True)
        assert supervisor._ask()
        assert supervisor.snapshot()["state"] == "running"
        assert metric(registry, "mps_up") == 1
        assert supervisor.snapshot()["num_restarts"] == 0
        assert not lost


def test_without_mps_the_state_says_why_and_nothing_is_watched(environ: dict[str, str]) -> None:
    running = MpsDaemon(environ={**environ, "PATH": "/nowhere"}, gpu_present=lambda: True).start()
    supervisor = MpsSupervisor(running, lambda reason: None)
    supervisor.start()
    assert supervisor.snapshot()["state"] == "off"
    assert "not on the PATH" in supervisor.snapshot()["problem"]
    supervisor.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
