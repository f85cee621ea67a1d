"""Who comes first: one sort key whose parameters make it TWSRFT, FCFS, SRF or slack order.

All sort by (window, remaining patches, arrival, request id) and differ only in what a window is. TWSRFT cuts time
into windows of fixed width; FCFS is the limit of width 0 (a window per arrival time, so that the size does not
matter), SRF the limit of infinite width (one window for ever, so that only the size matters). Slack order gives each
request a window of its own that opens the later the larger the request is.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

SchedulePolicy = Literal["twsrft", "slack", "fcfs", "srf"]
POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
# A request of this size, one 2048x2048 image of Qwen2-VL, has a slack of one window.
SLACK_REFERENCE_PATCHES = 21_316


class OrderKey(NamedTuple):
    """Position of a request in the queue; smaller is served first. Keys of one queue are totally ordered."""

    window: float  # see RequestOrder.window
    remaining_patches: int  # patches not yet encoded or in flight; 0 for every request under FCFS
    arrival_s: float
    rid: str


class RequestOrder:
    """Makes the sort key of a request under one policy.

    TWSRFT's windows lie on the fixed grid floor(arrival / window), not at the first arrival after an idle time: the
    window of a request is then a function of its arrival alone. The order depends neither on how fast the encoder
    happens to be nor on what was queued before, and replaying a trace gives the same windows under every cost. What
    the grid costs is that two arrivals either side of an edge are served in order of arrival.

    Slack order has no edges: a request may be overtaken by smaller ones for a time in proportion to its own size,
    window_s for SLACK_REFERENCE_PATCHES. It is served by ascending arrival + slack.
    """

    def __init__(self, policy: SchedulePolicy, window_s: float) -> None:
        """window_s is not used by FCFS and SRF.

        Raises ValueError for an unknown policy, and for a window that is needed and not positive and finite.
        """
        if policy not in POLICIES:
            raise ValueError(f"encoder schedule policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if policy in ("twsrft", "slack") and not (window_s > 0 and math.isfinite(window_s)):
            raise ValueError(f"the encoder's window must be a positive, finite number of seconds, not {window_s!r}")
        self.policy: SchedulePolicy = policy
        self.window_s = window_s

    def window(self, arrival_s: float, num_patches: int) -> float:
        """Window of a request of num_patches in all that arrived at arrival_s; it keeps it for life.

        Windows are served in ascending order: the index of the arrival's window (TWSRFT), the time in seconds after
        which no arrival goes first any more (slack), the arrival itself (FCFS), 0 (SRF).
        """
        if self.policy == "twsrft":
            return math.floor(arrival_s / self.window_s)
        if self.policy == "slack":
            return arrival_s + self.window_s * num_patches / SLACK_REFERENCE_PATCHES
        return arrival_s if self.policy == "fcfs" else 0

    def key(self, rid: str, window: float, arrival_s: float, remaining_patches: int) -> OrderKey:
        """Sort key of a request in its window (from `window`) with so many patches left."""
        return OrderKey(window, 0 if self.policy == "fcfs" else remaining_patches, arrival_s, rid)
