"""Starts the encoder worker, notices when it dies or hangs, and starts it again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from spaceserve.encoder.heartbeat import Heartbeat
from spaceserve.encoder.process import WorkerSpec, run_encoder_process
from spaceserve.messages import WorkerDown, encode
from spaceserve.processes import WithEnvironment, context
from spaceserve.shared_memory import unlink

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from sglang.srt.server_args import ServerArgs

    from spaceserve.channels import Channels
    from spaceserve.config import SpaceServeConfig
    from spaceserve.families import Family

logger = logging.getLogger(__name__)

POLL_S = 0.2
START_PATIENCE = 5
MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
FAILED_START_INTERVAL_S = 1.0


class EncoderSupervisor:
    """Keeps one encoder worker alive, from a thread of the main process.

    A worker that fails before it has ever been up is not started again: its settings are at fault. One that dies later
    is, at most `MAX_RESTARTS` times in `RESTART_WINDOW_S`; after that requests with images get HTTP 503 and text goes
    on.

    Args:
        on_failed_start: called with the reason where the first worker does not come up; the server has to end then.
            Called from the supervisor's thread, again every second until `stop`.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        config: SpaceServeConfig,
        family: Family,
        channels: Channels,
        on_failed_start: Callable[[str], None],
        *,
        forked: bool,
    ) -> None:
        self._server_args = server_args
        self._config = config
        self._family = family
        self._channels = channels
        self._on_failed_start = on_failed_start
        self._heartbeat = Heartbeat(channels.heartbeat)
        self._context = context(forked=forked)
        self._process: BaseProcess | None = None
        self._epoch = -1
        self._was_up = False
        self._restarts: deque[float] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="encoder-supervisor", daemon=True)

    def start(self) -> None:
        """Start the first worker and the thread that watches it.

        The thread starts every worker: Linux ends a child with the thread that started it.
        """
        self._thread.start()

    def stop(self) -> None:
        """End the worker and the watch."""
        self._stopping.set()
        self._thread.join(timeout=5)
        self._kill()

    def _spawn(self) -> None:
        self._epoch += 1
        self._was_up = False
        self._heartbeat.reset()
        spec = WorkerSpec(
            server_args=self._server_args,
            config=self._config,
            family=self._family,
            channels=self._channels,
            epoch=self._epoch,
        )
        # Not daemonic: SGLang's layers may start helper processes.
        run = WithEnvironment(run_encoder_process)
        self._process = self._context.Process(target=run, args=(spec,), name="encoder")  # type: ignore[attr-defined]
        self._process.start()

    def _kill(self) -> None:
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.join(timeout=5)

    def _watch(self) -> None:
        self._spawn()
        while not self._stopping.wait(POLL_S):
            assert self._process is not None
            cause = None
            if not self._process.is_alive():
                cause = f"exited with code {self._process.exitcode}"
            elif self._is_silent():
                cause = f"was silent for {self._silence_limit_s():g} s"
            if cause is not None and not self._stopping.is_set() and not self._replace(cause):
                return

    def _is_silent(self) -> bool:
        self._was_up |= self._heartbeat.is_serving()
        return self._heartbeat.age_s() > self._silence_limit_s()

    def _silence_limit_s(self) -> float:
        # A start holds the interpreter for seconds at a time, in imports and while a device is set up.
        patience = 1 if self._was_up else START_PATIENCE
        return patience * self._config.encoder_heartbeat_timeout_s

    def _replace(self, cause: str) -> bool:
        self._kill()
        unlink(self._channels.slab_segment(self._epoch))
        now_s = time.monotonic()
        while self._restarts and now_s - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        error_file = Path(self._channels.run_dir, f"encoder-error-{self._epoch}")
        reason = error_file.read_text() if error_file.exists() else cause
        if not self._was_up and self._epoch == 0:
            # Again and again: code that the main thread happens to run may swallow what is raised in it.
            self._on_failed_start(f"the encoder worker did not start: {reason}")
            while not self._stopping.wait(FAILED_START_INTERVAL_S):
                self._on_failed_start(f"the encoder worker did not start: {reason}")
            return False
        if len(self._restarts) >= MAX_RESTARTS:
            self._give_up(f"the encoder worker failed {MAX_RESTARTS + 1} times, last: {reason}")
            return False
        logger.error("The encoder worker (epoch %d) %s; starting it again", self._epoch, cause)
        self._restarts.append(now_s)
        self._spawn()
        return True

    def _give_up(self, reason: str) -> None:
        logger.error("%s", reason)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        for address in self._channels.all_features():
            outbox = context.socket(zmq.PUSH)
            outbox.connect(address)
            outbox.send(encode(WorkerDown(self._epoch, reason)))
            outbox.close(linger=5000)
