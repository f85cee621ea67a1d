"""How busy something was lately. Pure: time is passed in."""

from __future__ import annotations

import math

# A queue that could not be served at all would weigh without bound.
MAX_SHARE = 0.9


class BusyShare:
    """Exponentially weighted share of time that was spent working. Not thread-safe.

    Args:
        time_constant_s: after so long without work the share has fallen to 1/e.
    """

    def __init__(self, time_constant_s: float = 5.0) -> None:
        self._time_constant_s = time_constant_s
        self._share = 0.0
        self._last_s: float | None = None

    def add(self, now_s: float, busy_s: float) -> None:
        """A piece of work that took `busy_s` has just ended. Times must not decrease."""
        elapsed_s = busy_s if self._last_s is None else now_s - self._last_s
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / self._time_constant_s)
            self._share = kept * self._share + (1 - kept) * min(1.0, busy_s / elapsed_s)
        self._last_s = now_s

    def share(self, now_s: float) -> float:
        """In [0, MAX_SHARE], as of `now_s`."""
        if self._last_s is None:
            return 0.0
        idle_s = max(0.0, now_s - self._last_s)
        return min(MAX_SHARE, self._share * math.exp(-idle_s / self._time_constant_s))
