"""How a server's start ends where one of its processes fails."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, NoReturn

from spaceserve.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

SCHEDULER_FAILED = "the scheduler did not start: its error is above"


class ProcessFailed(BaseException):
    """A process of the server did not start. Not an Exception: nothing on the way up may take it for its own."""


class Starting:
    """Ends the launcher's start where a process of the server fails: with its reason, and not with SGLang's SIGKILL.

    The launcher waits in SGLang's code then, so the reason comes as a signal to its main thread.
    """

    def __init__(self) -> None:
        self._reason = ""
        signal.signal(signal.SIGUSR1, self._raise_reason)

    def fail(self, reason: str) -> None:
        """Raise `ProcessFailed` in the main thread, from another one."""
        self._reason = reason
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGUSR1)

    def over(self) -> None:
        """From now on nothing is raised."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    def hook(self) -> Hook:
        """SGLang's schedulers send SIGQUIT when they fail; while the server starts, this is what it does."""

        def handle_sigquit(result: None, server_args: ServerArgs) -> None:
            if server_args.custom_sigquit_handler is None:
                signal.signal(signal.SIGQUIT, self._raise_scheduler_failed)

        return Hook(
            target="sglang.srt.entrypoints.engine._set_envs_and_config",
            function=handle_sigquit,
            kind="after",
            why="a scheduler that does not start ends the server with one line",
            parameters=("server_args",),
        )

    def _raise_reason(self, signum: int, frame: object) -> NoReturn:
        raise ProcessFailed(self._reason)

    def _raise_scheduler_failed(self, signum: int, frame: object) -> NoReturn:
        raise ProcessFailed(SCHEDULER_FAILED)
