"""Core groups by thread affinity: real threads on the cores that this machine has."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from spaceserve.partition import make_partitioner
from spaceserve.partition.cpu_affinity import CpuAffinityPartitioner, order_by_siblings, pin_process

pytestmark = pytest.mark.cpu

needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


def affinities() -> dict[int, set[int]]:
    """Affinity of every thread of this process."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        try:
            found[int(name)] = os.sched_getaffinity(int(name))
        except ProcessLookupError:
            continue
    return found


@pytest.fixture
def parked_thread() -> Iterator[threading.Thread]:
    """A thread that existed before any group was activated."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield thread
    stop.set()
    thread.join()


@needs_two_cores
def test_every_thread_moves_to_the_group_and_back(parked_thread: threading.Thread) -> None:
    (torch.randn(256, 256) @ torch.randn(256, 256)).sum().item()  # torch's workers exist now
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    with make_partitioner("cpu_affinity", device="cpu", total_units=2) as partitioner:
        assert isinstance(partitioner, CpuAffinityPartitioner)
        assert partitioner.rungs == (1, 2)
        group = partitioner.group(1)
        complement = partitioner.complement(group)
        assert complement is not None
        assert not set(group.cores) & set(complement.cores)
        assert sorted(group.cores + complement.cores) == sorted(partitioner.cores)
        for side in (group, complement, partitioner.group(2)):
            with side.activate():
                (torch.randn(256, 256) @ torch.randn(256, 256)).sum().item()
                seen = affinities()
                assert parked_thread.native_id in seen
                assert all(cores == set(side.cores) for cores in seen.values()), (side, seen)
                assert torch.get_num_threads() == side.granted
            assert all(cores == before for cores in affinities().values())
            assert torch.get_num_threads() == num_threads


@needs_two_cores
def test_groups_nest_and_close_gives_everything_back() -> None:
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    partitioner = CpuAffinityPartitioner()
    group = partitioner.group(1)
    other = partitioner.complement(group)
    assert other is not None
    with group.activate():
        with pytest.raises(RuntimeError, match="inside"), other.activate():
            raise RuntimeError("inside")
        assert os.sched_getaffinity(0) == set(group.cores)
    other.make_current()
    assert os.sched_getaffinity(0) == set(other.cores)
    born_inside: list[set[int]] = []
    thread = threading.Thread(target=lambda: born_inside.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert born_inside == [set(other.cores)]
    partitioner.close()
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == num_threads


@needs_two_cores
def test_two_processes_that_compute_the_same_split_are_disjoint() -> None:
    code = (
        "import os; from spaceserve.partition.cpu_affinity import CpuAffinityPartitioner as P; "
        "P().complement_of(1).make_current(); print(*os.sched_getaffinity(0))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    theirs = set(map(int, other.stdout.split()))
    with CpuAffinityPartitioner() as partitioner:
        before = os.sched_getaffinity(0)
        with partitioner.group(1).activate():
            mine = os.sched_getaffinity(0)
    assert not mine & theirs
    assert mine | theirs == before


@needs_two_cores
def test_pinning_to_a_core_that_is_not_there_is_an_error() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="Invalid argument"):
        pin_process([4095])
    assert os.sched_getaffinity(0) == before


def test_hardware_threads_of_a_core_lie_side_by_side() -> None:
    siblings = {core: f"{core % 4},{core % 4 + 4}\n" for core in range(8)}
    assert order_by_siblings(range(8), siblings) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert order_by_siblings([3, 1, 2], {1: "1-2", 2: "1-2", 3: "3"}) == [1, 2, 3]
    assert order_by_siblings([5, 4], {}) == [4, 5]


def test_one_core_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="needs 2 cores"):
        CpuAffinityPartitioner(cores=[0])


def test_rungs_of_a_server_with_many_cores() -> None:
    partitioner = CpuAffinityPartitioner(cores=range(96), min_units=8, step=8)
    assert partitioner.rungs == (*range(8, 96, 8), 96)
    group = partitioner.group(20)
    assert group.granted == 24
    assert group.cores == tuple(range(24))
    complement = partitioner.complement(group)
    assert complement is not None
    assert complement.cores == tuple(range(24, 96))
    assert partitioner.complement(partitioner.group(96)) is None
