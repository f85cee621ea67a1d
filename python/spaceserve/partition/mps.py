"""The CUDA Multi-Process Service: a private control daemon for one server, or the user's own.

Without MPS the processes on a GPU take turns; with it their kernels run side by side, which is what SM masks need.
The daemon is an ordinary process with a pipe directory; its compute mode, clocks and MIG settings are not touched.

The daemon of our own is started without ``CUDA_VISIBLE_DEVICES``. It would number the devices anew for its clients,
which read the same variable once more: with ``CUDA_VISIBLE_DEVICES=1`` they would look for the second of one device.

Environment that decides (NVIDIA's names): where ``CUDA_MPS_PIPE_DIRECTORY`` is set, the daemon there is the user's,
and is used and left alone. Otherwise a daemon of our own is started, with directories that no other server shares,
and ended with the process that started it. A daemon left behind by a server that was killed is ended by the next
server's start.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from . import mps_processes
from .mps_processes import CONTROL, PIPE_VARIABLE, MpsError

logger = logging.getLogger(__name__)

LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

# Where driver installations of container runtimes put it without extending the PATH.
_EXTRA_DIRECTORIES = ("/usr/local/nvidia/bin",)

_PREFIX = "spaceserve-mps-"
_OWNER_FILE = "owner"
_COMMAND_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 10.0
_QUIT_TIMEOUT_S = 10.0
# A Unix socket's path has 107 bytes; the daemon's longest name in the pipe directory takes some 20 of them.
_MAX_DIRECTORY_CHARS = 70


def gpu_is_present() -> bool:
    """Whether the NVIDIA driver library and a GPU's device file are there. Makes no CUDA context."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return any(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


class MpsDaemon:
    """Control daemon of the processes that share a GPU. Start it before any of them makes a CUDA context.

        with MpsDaemon() as mps:
            subprocess.Popen(encoder, env={**os.environ, **mps.client_environ})

    Nothing is raised where MPS cannot run: :attr:`reason` says why, one warning is logged, :attr:`client_environ` is
    empty, and the processes take turns. Not thread-safe: one thread owns it. A forked child does not end it.

    Args:
        environ: environment to read, ``os.environ`` by default.
        executable: the control program; by default looked up on ``environ``'s PATH, then in
            ``/usr/local/nvidia/bin``.
        gpu_present: tells whether there is a GPU (tests).

    Attributes:
        reason: None while MPS runs, else why it does not.
        is_owned: the daemon was started here and is ended here.
        pipe_directory, log_directory: None where MPS does not run.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        executable: str | None = None,
        gpu_present: Callable[[], bool] = gpu_is_present,
    ) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        search_path = os.pathsep.join((self._environ.get("PATH", os.defpath), *_EXTRA_DIRECTORIES))
        self._executable = executable or shutil.which(CONTROL, path=search_path)
        self._gpu_present = gpu_present
        self._root: Path | None = None
        self._owner_pid = os.getpid()
        self._control_pid: int | None = None
        self._known_servers: list[int] = []
        self._has_warned = False
        self.reason: str | None = "not started"
        self.is_owned = False
        self.pipe_directory: Path | None = None
        self.log_directory: Path | None = None

    @property
    def client_environ(self) -> dict[str, str]:
        """What a process needs in its environment to be a client of this daemon. Empty where MPS does not run."""
        if self.pipe_directory is None:
            return {}
        environ = {PIPE_VARIABLE: str(self.pipe_directory)}
        if self.log_directory is not None:
            environ[LOG_VARIABLE] = str(self.log_directory)
        return environ

    def start(self) -> Self:
        """Use the environment's daemon or start one. Returns self; see :attr:`reason` for whether MPS runs."""
        if self.reason is None:
            return self
        try:
            if self._executable is None:
                raise MpsError(f"{CONTROL} is not on the PATH")
            if not self._gpu_present():
                raise MpsError("there is no NVIDIA GPU with its driver")
            if self._environ.get(PIPE_VARIABLE):
                self._use_users_daemon(Path(self._environ[PIPE_VARIABLE]))
            else:
                self._start_own_daemon()
        except (MpsError, OSError) as error:
            self._abandon()
            self.reason = str(error)
            self._warn_once()
        else:
            self.reason = None
            whose = "private" if self.is_owned else "the environment's"
            logger.info("MPS: %s control daemon, pipe directory %s", whose, self.pipe_directory)
        return self

    def is_alive(self) -> bool:
        """Whether the daemon runs and answers. Takes a few milliseconds: it runs the control program once."""
        if self.reason is not None:
            return False
        if self._control_pid is not None and not mps_processes.is_running(self._control_pid):
            return False
        try:
            self.server_pids()
        except MpsError:
            return False
        return True

    def server_pids(self) -> list[int]:
        """Process ids of the daemon's MPS servers: none until a client has connected.

        Raises:
            MpsError: the daemon does not answer.
        """
        pids = [int(line) for line in self._command("get_server_list").split() if line.isdigit()]
        self._known_servers = pids
        return pids

    def server_status(self, pid: int) -> str:
        """What the daemon says of an MPS server: INITIALIZING, ACTIVE, FAULT; empty from daemons that do not know.

        Raises:
            MpsError: the daemon does not answer.
        """
        words = self._command(f"get_server_status {pid}").split()
        return words[0] if len(words) == 1 and words[0].isupper() else ""

    def control_is_running(self) -> bool:
        """Whether the control daemon's process is there; True where its number is not known (the user's daemon)."""
        return self._control_pid is None or mps_processes.is_running(self._control_pid)

    def log_tail(self, num_lines: int = 20) -> list[str]:
        """Last lines of the daemon's logs, for a report of what went wrong. Empty where the directory is not known."""
        lines: list[str] = []
        for name in ("control.log", "server.log"):
            with contextlib.suppress(OSError):
                text = ((self.log_directory or Path("/nonexistent")) / name).read_text(errors="replace")
                lines += [f"{name}: {line}" for line in text.splitlines()[-num_lines:]]
        return lines

    def restart(self, *, keep_servers: bool = False) -> bool:
        """Start a daemon of our own again, in the same directories, so that new clients find it as the old ones did.

        Contexts of the clients of a server that died are lost with it: these processes have to be restarted too.

        Args:
            keep_servers: only the control daemon has died; leave its servers to their clients. New clients get a
                server of the new daemon, and take turns with the old one's.

        Returns:
            Whether MPS runs now. A user's daemon is not restarted, only asked again.
        """
        if self.is_owned:
            if not keep_servers:
                self._end_daemon()
            assert self.pipe_directory is not None
            for path in self.pipe_directory.iterdir():
                if keep_servers and not path.name.startswith(("control", CONTROL)):
                    continue
                with contextlib.suppress(OSError):
                    path.unlink()
            try:
                self._launch()
            except (MpsError, OSError) as error:
                self.reason = f"the control daemon could not be restarted: {error}"
                logger.error("MPS: %s", self.reason)
                return False
            self.reason = None
            logger.warning("MPS: the control daemon was restarted")
            return True
        if self.reason is None and self.is_alive():
            return True
        self.reason = "not started"
        return self.start().reason is None

    def stop(self) -> None:
        """End our own daemon and its servers, verify that they are gone, and remove the directories.

        The user's daemon is left alone. Called at exit; a second call, or one in a forked child, does nothing.
        """
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.stop)
        if self.is_owned:
            self._end_daemon()
        self._abandon()
        self.reason = "stopped"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("MPS does not run: %s. Encoder and decoder take turns on the GPU.", self.reason)

    def _use_users_daemon(self, pipe_directory: Path) -> None:
        self.pipe_directory = pipe_directory
        log_directory = self._environ.get(LOG_VARIABLE)
        self.log_directory = Path(log_directory) if log_directory else None
        try:
            self.server_pids()
        except MpsError as error:
            raise MpsError(f"no control daemon answers at {PIPE_VARIABLE}={pipe_directory} ({error})") from error

    def _start_own_daemon(self) -> None:
        parent = _short_temp_directory(self._environ)
        reap_abandoned(parent, self._executable)
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        (self._root / _OWNER_FILE).write_text(f"{mps_processes.identity(os.getpid())}\n{mps_processes.process_space()}")
        self.pipe_directory, self.log_directory = self._root / "pipe", self._root / "log"
        self.pipe_directory.mkdir(mode=0o700)
        self.log_directory.mkdir(mode=0o700)
        self.is_owned = True
        atexit.register(self.stop)
        self._launch()

    def _launch(self) -> None:
        """Run ``nvidia-cuda-mps-control -d`` and wait until it answers.

        Raises:
            MpsError: it ended with an error, or does not answer in time.
        """
        assert self._executable is not None
        environ = {name: value for name, value in self._environ.items() if name != VISIBLE_VARIABLE}
        # The daemon keeps what it inherits: files, not pipes, or reading its output would wait for its end.
        with tempfile.TemporaryFile() as output:
            try:
                code = subprocess.run(
                    [self._executable, "-d"],
                    env={**environ, **self.client_environ},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=_START_TIMEOUT_S,
                    check=False,
                    # A signal to the launcher's whole process group must not end it before its users.
                    start_new_session=True,
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise MpsError(f"{CONTROL} -d did not return within {_START_TIMEOUT_S:.0f} s") from error
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
        if code != 0:
            raise MpsError(f"{CONTROL} -d ended with status {code}: {text or 'no message'}")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self.server_pids()
                break
            except MpsError as error:
                if time.monotonic() > deadline:
                    raise MpsError(f"{CONTROL} was started and does not answer ({error})") from error
                time.sleep(0.05)
        assert self.pipe_directory is not None
        pids = mps_processes.daemon_pids(self.pipe_directory)
        self._control_pid = pids[0] if pids else None

    def _command(self, command: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Send one line to the control daemon and return what it prints.

        Raises:
            MpsError: no daemon, an error, or no answer in time.
        """
        if self._executable is None or self.pipe_directory is None:
            raise MpsError("no control daemon is known")
        return send_command(self._executable, self.pipe_directory, command, environ=self._environ, timeout_s=timeout_s)

    def _end_daemon(self) -> None:
        """``quit``, then the signals, until control daemon and servers are gone."""
        assert self.pipe_directory is not None
        with contextlib.suppress(MpsError):
            self.server_pids()
        with contextlib.suppress(MpsError):
            # Servers wait for their clients unless they are given a time.
            self._command(f"quit -t {_QUIT_TIMEOUT_S / 2:.0f}", timeout_s=_QUIT_TIMEOUT_S)
        mps_processes.end_processes(self.pipe_directory, self._known_servers)
        self._control_pid = None
        self._known_servers = []

    def _abandon(self) -> None:
        """Forget the daemon and remove our directories; a daemon that half started is ended."""
        if self.is_owned and self.pipe_directory is not None:
            mps_processes.end_processes(self.pipe_directory, self._known_servers)
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root = self.pipe_directory = self.log_directory = None
        self.is_owned = False


def send_command(
    executable: str, pipe_directory: Path, command: str, *, environ: Mapping[str, str], timeout_s: float
) -> str:
    """Pipe one line into ``nvidia-cuda-mps-control`` and return what it prints.

    Raises:
        MpsError: it failed or did not answer in time.
    """
    try:
        result = subprocess.run(
            [executable],
            input=command + "\n",
            env={**environ, PIPE_VARIABLE: str(pipe_directory)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MpsError(f"{command!r} was not answered within {timeout_s:.0f} s") from error
    except OSError as error:
        raise MpsError(f"{executable} cannot be run ({error})") from error
    if result.returncode != 0:
        message = (result.stderr + result.stdout).strip()
        raise MpsError(f"{command!r} ended with status {result.returncode}: {message or 'no message'}")
    return result.stdout


def reap_abandoned(parent: Path, executable: str | None) -> list[Path]:
    """End daemons that servers of this user left behind when they were killed, and remove their directories.

    Returns:
        The directories removed. Those whose owner still runs are left alone, and so are other users', and those of
        another container or boot that shares the temporary directory: their processes cannot be seen from here.
    """
    removed = []
    for root in sorted(parent.glob(_PREFIX + "*")):
        try:
            identity, _, space = (root / _OWNER_FILE).read_text().partition("\n")
            is_ours = root.stat().st_uid == os.getuid() and space == mps_processes.process_space()
        except OSError:
            continue
        pid_text = identity.partition(" ")[0]
        if not is_ours or not pid_text.isdigit() or mps_processes.identity(int(pid_text)) == identity:
            continue
        pipe_directory = root / "pipe"
        if executable is not None and mps_processes.daemon_pids(pipe_directory):
            with contextlib.suppress(MpsError):
                send_command(executable, pipe_directory, "quit -t 1", environ=os.environ, timeout_s=_COMMAND_TIMEOUT_S)
        try:
            mps_processes.end_processes(pipe_directory, [])
        except MpsError as error:
            logger.warning("MPS: %s", error)
            continue
        shutil.rmtree(root, ignore_errors=True)
        removed.append(root)
        logger.info("MPS: removed %s, left behind by process %s", root, pid_text)
    return removed


def _short_temp_directory(environ: Mapping[str, str]) -> Path:
    candidate = environ.get("TMPDIR") or tempfile.gettempdir()
    return Path(candidate if len(candidate) + len(_PREFIX) + 20 <= _MAX_DIRECTORY_CHARS else "/tmp")
