"""Core groups on the CPU: the same partitioner with cores for SMs, by thread affinity."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from .base import Partitioner, PartitionUnavailable, UnitGroup
from .ladder import make_rungs, unit_range

_TASKS = Path("/proc/self/task")
_CPUS = Path("/sys/devices/system/cpu")


def order_by_siblings(cores: Iterable[int], siblings: dict[int, str]) -> list[int]:
    """Cores in ascending order, hardware threads of one physical core side by side.

    Args:
        cores: core numbers.
        siblings: the kernel's ``thread_siblings_list`` for each core that has one, e.g. ``"0,64"`` or ``"0-1"``.
    """

    def first_sibling(core: int) -> int:
        text = siblings.get(core, "")
        head = text.replace("-", ",").split(",")[0].strip()
        return int(head) if head.isdigit() else core

    return sorted(set(cores), key=lambda core: (first_sibling(core), core))


def usable_cores() -> list[int]:
    """The cores this process may use now, physical neighbours side by side.

    Raises:
        PartitionUnavailable: the platform has no thread affinity (not Linux).
    """
    if not hasattr(os, "sched_getaffinity") or not _TASKS.is_dir():
        raise PartitionUnavailable("thread affinity needs Linux with /proc")
    cores = os.sched_getaffinity(0)
    siblings: dict[int, str] = {}
    for core in cores:
        try:
            siblings[core] = (_CPUS / f"cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            continue
    return order_by_siblings(cores, siblings)


def pin_process(cores: Iterable[int]) -> int:
    """Bind every thread of this process to ``cores``; threads made later inherit it from the thread that makes them.

    Returns:
        The number of threads bound. A thread that ends meanwhile is passed over.

    Raises:
        OSError: a core does not exist, or is not among those the process may use.
    """
    wanted = set(cores)
    # The calling thread first: workers that it starts meanwhile inherit its affinity.
    os.sched_setaffinity(0, wanted)
    num_threads = 0
    for name in os.listdir(_TASKS):
        try:
            os.sched_setaffinity(int(name), wanted)
        except ProcessLookupError:
            continue
        num_threads += 1
    return num_threads


class CpuAffinityPartitioner(Partitioner["CoreGroup"]):
    """Groups of cores for the process that calls it.

    A group takes the first cores, its complement the others. Activating a group binds *all* threads of the process
    and sets torch's thread count to the group's size, so the encoder's and the decoder's process each hold one side.
    torch keeps its thread count per thread: activate from the thread that computes.

    Args:
        cores: the cores to split, in order; None takes those that the process may use now. Processes that shall be
            disjoint must be given, or start with, the same cores.
        total_units: use only the first so many of these cores; None takes all.
        min_units: smallest group and complement in cores.
        step: distance of the rungs in cores.

    Raises:
        PartitionUnavailable: no thread affinity here, fewer than 2 cores, or more units asked for than cores.
    """

    backend = "cpu_affinity"
    unit_name = "cores"

    def __init__(
        self,
        *,
        cores: Sequence[int] | None = None,
        total_units: int | None = None,
        min_units: int | None = None,
        step: int | None = None,
    ) -> None:
        available = usable_cores() if cores is None else list(dict.fromkeys(cores))
        total = len(available) if total_units is None else total_units
        if total > len(available):
            raise PartitionUnavailable(
                f"{total} units asked for, but the process may use {len(available)} cores "
                "(the back end 'simulated' has ladders of any size)"
            )
        if total < 2:
            raise PartitionUnavailable(f"a split needs 2 cores, the process may use {total}")
        self.cores = tuple(available[:total])
        min_units = 1 if min_units is None else min_units
        super().__init__(
            total_units=total,
            rungs=make_rungs(total, min_units=min_units, step=1 if step is None else step),
            min_complement=min_units,
        )
        self._initial = (tuple(available), _torch_num_threads())
        self._active = self._initial

    def _make_group(self, *, requested: int, granted: int, is_complement: bool) -> CoreGroup:
        return CoreGroup(self, requested=requested, granted=granted, is_complement=is_complement)

    def _apply(self, state: tuple[tuple[int, ...], int | None]) -> None:
        with self._lock:
            if state[0] != self._active[0]:
                pin_process(state[0])
            _set_torch_num_threads(state[1])
            self._active = state

    def close(self) -> None:
        """Give every thread all cores and torch its thread count back, if a group is still active."""
        if not self.closed:
            super().close()
            if self._active != self._initial:
                self._apply(self._initial)


class CoreGroup(UnitGroup):
    """Group of a :class:`CpuAffinityPartitioner`.

    Attributes:
        cores: the core numbers of the group.
    """

    def __init__(self, owner: CpuAffinityPartitioner, *, requested: int, granted: int, is_complement: bool) -> None:
        super().__init__(
            requested=requested, granted=granted, total_units=owner.total_units, is_complement=is_complement
        )
        self._owner = owner
        units = unit_range(owner.total_units, granted, is_complement=is_complement)
        self.cores = owner.cores[units.start : units.stop]

    def activate(self) -> _CoreActivation:
        return _CoreActivation(self._owner, self)

    def make_current(self) -> None:
        self._owner._apply((self.cores, self.granted))


class _CoreActivation:
    def __init__(self, owner: CpuAffinityPartitioner, group: CoreGroup) -> None:
        self._owner = owner
        self._group = group
        self._previous: tuple[tuple[int, ...], int | None] | None = None

    def __enter__(self) -> CoreGroup:
        self._previous = self._owner._active
        self._group.make_current()
        return self._group

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._previous is not None, "left without having been entered"
        self._owner._apply(self._previous)


def _torch_num_threads() -> int | None:
    """torch's thread count, or None where torch is not imported (then nothing of it needs setting)."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _set_torch_num_threads(num_threads: int | None) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and num_threads is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
