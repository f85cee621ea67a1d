"""Who comes first: one sort key whose parameters make it TWSRFT, FCFS or SRF.

All three sort by (window, remaining patches, arrival, request id) and differ only in what a window is. TWSRFT cuts
time into windows of fixed width; FCFS is the limit of width 0 (a window per arrival time, so that the size does not
matter), SRF the limit of infinite width (one window for ever, so that only the size matters).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

SchedulePolicy = Literal["twsrft", "fcfs", "srf"]
POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)


class OrderKey(NamedTuple):
    """Position of a request in the queue; smaller is served first. Keys of one queue are totally ordered."""

    window: float  # index of the arrival's window (TWSRFT), the arrival itself in seconds (FCFS), 0 (SRF)
    remaining_patches: int  # patches not yet encoded or in flight; 0 for every request under FCFS
    arrival_s: float
    rid: str


class RequestOrder:
    """Makes the sort key of a request under one policy.

    TWSRFT's windows lie on the fixed grid floor(arrival / window), not at the first arrival after an idle time: the
    window of a request is then a function of its arrival alone. The order depends neither on how fast the encoder
    happens to be nor on what was queued before, and replaying a trace gives the same windows under every cost. What
    the grid costs is that two arrivals either side of an edge are served in order of arrival.
    """

    def __init__(self, policy: SchedulePolicy, window_s: float) -> None:
        """Raises ValueError for an unknown policy, and under TWSRFT for a window that is not positive and finite."""
        if policy not in POLICIES:
            raise ValueError(f"encoder schedule policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if policy == "twsrft" and not (window_s > 0 and math.isfinite(window_s)):
            raise ValueError(f"the TWSRFT window must be a positive, finite number of seconds, not {window_s!r}")
        self.policy: SchedulePolicy = policy
        self.window_s = window_s

    def window(self, arrival_s: float) -> float:
        """Window of a request that arrived at arrival_s; windows are served in ascending order."""
        if self.policy == "twsrft":
            return math.floor(arrival_s / self.window_s)
        return arrival_s if self.policy == "fcfs" else 0

    def key(self, rid: str, arrival_s: float, remaining_patches: int) -> OrderKey:
        rank = 0 if self.policy == "fcfs" else remaining_patches
        return OrderKey(self.window(arrival_s), rank, arrival_s, rid)
