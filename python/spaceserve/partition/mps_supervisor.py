"""Watches the Multi-Process Service while a server runs: what failed is said, restarted, or ends the server.

Three failures are told apart:

- The control daemon has ended, its MPS servers run: contexts of running processes survive, and so do their answers.
  Only new processes (an encoder worker that is started again) would find no daemon. A private one is started again,
  beside the servers.
- An MPS server has ended, or is in the state FAULT: a client's fault (an illegal address, say) is every client's, and
  from Volta on the server takes no new client before all old ones have gone. No context survives, the decoder's
  among them: the server has to be started again, and is ended with a clear error, lest its processes hang.
- The daemon does not answer, but lives: reported; nothing is done, for a busy machine looks the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from . import mps_processes
from .mps import MpsDaemon
from .mps_processes import MpsError

logger = logging.getLogger(__name__)

POLL_S = 1.0
# The control program is asked at every so many polls: it is a process of its own, some milliseconds of a core.
POLLS_BETWEEN_QUESTIONS = 10
MAX_RESTARTS = 5


class MpsSupervisor:
    """Thread that looks after one daemon; made and ended by the thread that owns the daemon.

    Args:
        daemon: started. While the supervisor runs, nobody else calls it.
        on_lost: called once, in the supervisor's thread, with the reason, when every GPU context is lost.
        poll_s: seconds between two looks.
    """

    def __init__(self, daemon: MpsDaemon, on_lost: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._daemon = daemon
        self._on_lost = on_lost
        self._poll_s = poll_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._looking = threading.RLock()
        self._servers: list[int] = []
        self._orphans: list[int] = []  # servers of a control daemon that has ended
        self._polls = 0
        self._num_restarts = 0
        self._state = "running" if daemon.reason is None else "off"
        self._problem = daemon.reason
        self.metrics: MpsMetrics | None = None
        self._thread = threading.Thread(target=self._watch, name="mps-supervisor", daemon=True)

    def start(self) -> None:
        """Begin to watch. Where MPS does not run there is nothing to watch, and the state says why."""
        self._publish()
        if self._state == "running":
            self._thread.start()

    def stop(self) -> None:
        """End the watch; the daemon is its owner's again."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def snapshot(self) -> dict[str, Any]:
        """For the status page. `state`: "running", "off", "no daemon", "silent" or "lost"; `problem`: in words."""
        with self._lock:
            return {
                "state": self._state,
                "problem": self._problem,
                "is_owned": self._daemon.is_owned,
                "num_restarts": self._num_restarts,
                "servers": list(self._servers),
            }

    def _set(self, state: str, problem: str | None) -> None:
        with self._lock:
            self._state, self._problem = state, problem
        self._publish()

    def _publish(self) -> None:
        if self.metrics is not None:
            self.metrics.update(self._state == "running", self._num_restarts)

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_s):
            try:
                if not self.look():
                    return
            except Exception:
                logger.exception("MPS: the look at the daemon failed")

    def look(self) -> bool:
        """One look. Returns whether there is anything left to watch."""
        with self._looking:
            return self._state != "lost" and self._look()

    def look_now(self) -> None:
        """From any thread: a process of the server has failed, perhaps because MPS did, which then is said first.

        A client sees the end of its MPS server within milliseconds, long before the next look.
        """
        with self._looking:
            try:
                if self._state not in ("off", "lost") and self._look():
                    self._ask()
            except Exception:
                logger.exception("MPS: the look at the daemon failed")

    def _look(self) -> bool:
        dead = [pid for pid in self._servers if not mps_processes.is_running(pid)]
        if dead:
            return self._lose(f"the MPS server (process {', '.join(map(str, dead))}) has ended")
        if not self._daemon.control_is_running():
            self._revive()
            return True
        self._polls += 1
        if self._polls % POLLS_BETWEEN_QUESTIONS == 1:
            return self._ask()
        return True

    def _ask(self) -> bool:
        """Ask the daemon for its servers and their states."""
        try:
            servers = self._daemon.server_pids()
            faulty = [pid for pid in servers if self._daemon.server_status(pid) == "FAULT"]
        except MpsError as error:
            if self._state == "running":
                logger.error("MPS: the control daemon does not answer: %s", error)
            self._set("silent", str(error))
            return True
        if faulty:
            return self._lose(f"a client's fault has taken the MPS server (process {faulty[0]}) with it")
        with self._lock:
            self._servers = sorted({*servers, *self._orphans})
        if self._state in ("silent", "no daemon"):
            logger.warning("MPS: the control daemon answers again")
        self._set("running", None)
        return True

    def _revive(self) -> None:
        if self._state != "no daemon":
            logger.error(
                "MPS: the control daemon has ended; running processes keep their GPU contexts. %s",
                "\n".join(self._daemon.log_tail(5)),
            )
        if self._daemon.is_owned and self._num_restarts < MAX_RESTARTS:
            self._num_restarts += 1
            self._orphans = list(self._servers)
            if self._daemon.restart(keep_servers=True):
                self._set("running", None)
                return
        self._set("no daemon", self._daemon.reason or "the control daemon has ended and is not started again")

    def _lose(self, what: str) -> bool:
        reason = f"{what}: every GPU context on it is lost, the decoder's too. The server has to be started again."
        self._set("lost", reason)
        for line in self._daemon.log_tail(5):
            logger.error("MPS: %s", line)
        logger.error("MPS: %s", reason)
        self._on_lost(reason)
        return False


class MpsMetrics:
    """Prometheus metrics of MPS; make it once per process, after PROMETHEUS_MULTIPROC_DIR is set.

    labels: label names and values, the same as of SGLang's own metrics (model_name, ...).
    """

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY
        self._labels = dict(labels)
        self._up = Gauge(
            "spaceserve:mps_up",
            "Whether the Multi-Process Service runs, so that encoder and decoder share the GPU at the same time.",
            list(labels),
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._restarts = Counter(
            "spaceserve:mps_restarts_total", "Restarts of the MPS control daemon.", list(labels), registry=registry
        )
        self._restarts.labels(**self._labels)
        self._counted = 0

    def update(self, is_up: bool, num_restarts: int) -> None:
        """Export the state; `num_restarts` never falls."""
        self._up.labels(**self._labels).set(is_up)
        self._restarts.labels(**self._labels).inc(num_restarts - self._counted)
        self._counted = num_restarts
