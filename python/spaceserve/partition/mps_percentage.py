"""SM limit of an MPS client: one size for the life of a process, chosen by its parent.

``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` is read once, when the process makes its context. The parent sets it with
:func:`environ_for`; in the process itself the ladder has a single rung. Where the SMs lie is the driver's choice, so
there is no complement.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from .base import PartitionUnavailable
from .ladder import mps_percentage_for
from .stream_group import StreamLane, StreamPartitioner, gpu_device

PERCENTAGE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def environ_for(requested: int, total_units: int) -> dict[str, str]:
    """Environment of a child process that shall have at least ``requested`` of ``total_units`` SMs.

    Raises:
        ValueError: ``requested`` is below 1 or above ``total_units``.
    """
    return {PERCENTAGE_VARIABLE: str(mps_percentage_for(requested, total_units))}


def percentage_in(environ: Mapping[str, str]) -> float:
    """The limit that an environment sets, in percent.

    Raises:
        PartitionUnavailable: there is none.
        ValueError: it is not a number above 0 and up to 100.
    """
    text = environ.get(PERCENTAGE_VARIABLE)
    if text is None:
        raise PartitionUnavailable(f"{PERCENTAGE_VARIABLE} was not set when this process started")
    try:
        percentage = float(text)
    except ValueError:
        percentage = -1.0
    if not 0 < percentage <= 100:
        raise ValueError(f"{PERCENTAGE_VARIABLE}={text!r} is not a percentage above 0 and up to 100")
    return percentage


class MpsPercentagePartitioner(StreamPartitioner):
    """The one size that MPS left to this process: ``total_units`` and the only rung are what the device reports.

    MPS lowers the number of multiprocessors that the client sees to its limit.

    Raises:
        PartitionUnavailable: no GPU, or no limit was set.
    """

    backend = "mps_percentage"

    def __init__(self, *, device: str | torch.device = "cuda") -> None:
        self.percentage = percentage_in(os.environ)
        resolved = gpu_device(device)
        total = torch.cuda.get_device_properties(resolved).multi_processor_count
        super().__init__(device=resolved, total_units=total, rungs=(total,), min_complement=total)

    def _make_lane(self, *, granted: int, is_complement: bool) -> StreamLane:
        raise AssertionError("an MPS client has one size")
