"""SM, CU and core partitions: a ladder of unit groups, their complements, and the private MPS daemon.

partitioner = make_partitioner("auto", device="cuda", min_units=16, step=8)
with partitioner.group(62).activate() as group:   # granted 68 of 132 SMs
    encoder(pixels)
"""

from .base import Partitioner, PartitionUnavailable, UnitGroup
from .factory import BACKENDS, make_partitioner, serving_partitioner
from .mps import MpsDaemon
from .simulated import SimulatedPartitioner

__all__ = [
    "BACKENDS",
    "MpsDaemon",
    "PartitionUnavailable",
    "Partitioner",
    "SimulatedPartitioner",
    "UnitGroup",
    "make_partitioner",
    "serving_partitioner",
]
