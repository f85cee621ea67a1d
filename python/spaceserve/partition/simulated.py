"""A partitioner of units that do not exist, for schedulers that are tested on topologies the machine lacks."""

from __future__ import annotations

from types import TracebackType

from .base import Partitioner, UnitGroup
from .ladder import make_rungs


class SimulatedPartitioner(Partitioner["SimulatedGroup"]):
    """The full ladder logic on ``total_units`` imaginary units; confines nothing.

    Attributes:
        active: the group that is active now, None outside of all.
        history: every group that became active, oldest first, None for a return to no group.
    """

    backend = "simulated"

    def __init__(self, *, total_units: int, min_units: int = 8, step: int = 8) -> None:
        super().__init__(
            total_units=total_units,
            rungs=make_rungs(total_units, min_units=min_units, step=step),
            min_complement=min_units,
        )
        self.active: SimulatedGroup | None = None
        self.history: list[SimulatedGroup | None] = []

    def _make_group(self, *, requested: int, granted: int, is_complement: bool) -> SimulatedGroup:
        return SimulatedGroup(self, requested=requested, granted=granted, is_complement=is_complement)

    def _switch(self, group: SimulatedGroup | None) -> None:
        self.active = group
        self.history.append(group)


class SimulatedGroup(UnitGroup):
    """Group of a :class:`SimulatedPartitioner`."""

    def __init__(self, owner: SimulatedPartitioner, *, requested: int, granted: int, is_complement: bool) -> None:
        super().__init__(
            requested=requested, granted=granted, total_units=owner.total_units, is_complement=is_complement
        )
        self._owner = owner

    def activate(self) -> _SimulatedActivation:
        return _SimulatedActivation(self._owner, self)

    def make_current(self) -> None:
        self._owner._switch(self)


class _SimulatedActivation:
    def __init__(self, owner: SimulatedPartitioner, group: SimulatedGroup) -> None:
        self._owner = owner
        self._group = group
        self._previous: SimulatedGroup | None = None

    def __enter__(self) -> SimulatedGroup:
        self._previous = self._owner.active
        self._owner._switch(self._group)
        return self._group

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner._switch(self._previous)
