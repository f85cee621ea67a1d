"""Order in which the encoder worker encodes images: TWSRFT, and FCFS and SRF to compare with.

Everything here is pure: no torch, no sockets, no clock. `queue.EncodeQueue` holds what is still to encode,
`order` says who comes first, `capacity` how many patches share one forward, `video` where a long video may be cut.
docs/twsrft.md states the guarantees and the figures behind the defaults.
"""

from spaceserve.encoder_schedule.capacity import (
    DEFAULT_BATCH_CAPACITY_PATCHES,
    DEFAULT_WINDOW_S,
    batch_capacity_from_curve,
)
from spaceserve.encoder_schedule.order import POLICIES, SchedulePolicy
from spaceserve.encoder_schedule.queue import EncodeItem, EncodeQueue
from spaceserve.encoder_schedule.video import split_video

__all__ = [
    "DEFAULT_BATCH_CAPACITY_PATCHES",
    "DEFAULT_WINDOW_S",
    "POLICIES",
    "EncodeItem",
    "EncodeQueue",
    "SchedulePolicy",
    "batch_capacity_from_curve",
    "split_video",
]
