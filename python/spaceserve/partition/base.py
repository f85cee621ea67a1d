"""What every partition back end offers: a ladder of unit groups and their complements."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Generic

from typing_extensions import Self, TypeVar

from .ladder import complement_units, round_to_rung

if TYPE_CHECKING:
    import torch


class PartitionUnavailable(ValueError):
    """A back end cannot work here; the message says why, in words for the user."""


class UnitGroup(ABC):
    """Units (SMs, CUs or cores) on which the work of a thread can be confined.

    Attributes:
        requested: units that the caller asked for. For a complement, what the device has besides the group.
        granted: units that the group really has, ``granted >= requested``.
        total_units: units of the device.
        is_complement: the group is the other side of a split (the decoder's, where both sides are masked).
    """

    def __init__(self, *, requested: int, granted: int, total_units: int, is_complement: bool) -> None:
        assert 1 <= requested <= granted <= total_units, (requested, granted, total_units)
        self.requested = requested
        self.granted = granted
        self.total_units = total_units
        self.is_complement = is_complement

    @property
    def complement_units(self) -> int:
        """Units of the device that are not in this group."""
        return self.total_units - self.granted

    @property
    def is_whole_device(self) -> bool:
        return self.granted == self.total_units

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream whose kernels are confined to the group; None where the device has no streams (CPU)."""
        return None

    @abstractmethod
    def activate(self) -> AbstractContextManager[UnitGroup]:
        """Context manager: inside it the calling thread's torch work goes to this group.

        On a GPU, work submitted inside runs after all work submitted before on the stream that was current, and work
        submitted after the block runs after that of the block (one event each way, no host synchronisation).
        """

    @abstractmethod
    def make_current(self) -> None:
        """Like entering :meth:`activate`, without a way back: for the choice between two layers of one batch."""

    def __repr__(self) -> str:
        side = "complement" if self.is_complement else "group"
        return f"<{side} of {self.granted} units (requested {self.requested}) of {self.total_units}>"


GroupT_co = TypeVar("GroupT_co", bound=UnitGroup, covariant=True, default=UnitGroup)


class Partitioner(ABC, Generic[GroupT_co]):
    """A ladder of unit groups on one device. Make one with :func:`spaceserve.partition.make_partitioner`.

    One process may hold several. Methods may be called from any thread; a group is *activated* by one thread at a
    time.

    Attributes:
        backend: ``green_ctx``, ``libsmctrl``, ``mps_percentage``, ``hip_cu_mask``, ``cpu_affinity``, ``none``, or
            ``simulated`` (tests).
        total_units: SMs, CUs or cores of the device.
        rungs: sizes granted to a group, ascending. The last is the whole device, without a mask.
        min_complement: a complement smaller than this is not offered.
        unit_name: "SMs", "CUs" or "cores", for messages.
    """

    backend: str
    unit_name: str = "units"

    def __init__(self, *, total_units: int, rungs: tuple[int, ...], min_complement: int) -> None:
        assert list(rungs) == sorted(set(rungs)), rungs
        assert rungs[-1:] == (total_units,), (rungs, total_units)
        self.total_units = total_units
        self.rungs = rungs
        self.min_complement = min_complement
        self.closed = False
        self._groups: dict[tuple[int, int, bool], GroupT_co] = {}
        self._lock = threading.RLock()

    @abstractmethod
    def _make_group(self, *, requested: int, granted: int, is_complement: bool) -> GroupT_co:
        """A group of exactly ``granted`` units. Called under the lock, once for each pair of sizes and side."""

    def group(self, requested: int) -> GroupT_co:
        """The group of the smallest rung that is at least ``requested`` (see :func:`ladder.round_to_rung`).

        On 132 SMs in steps of 8: 60 gives 64, 64 gives 64, 65 gives 72, 129 gives the whole device.

        Raises:
            ValueError: ``requested`` is below 1 or above :attr:`total_units`.
        """
        return self._cached(requested, round_to_rung(self.rungs, requested), is_complement=False)

    def complement(self, group: UnitGroup) -> GroupT_co | None:
        """All units that ``group`` does not have, or None where too few are left (:attr:`min_complement`).

        The same split gives the same physical units in every process on a device, so a decoder process that calls
        ``complement(group(n))`` is disjoint from an encoder process that calls ``group(n)``.

        Raises:
            ValueError: ``group`` is itself a complement, or belongs to a device of another size.
        """
        if group.is_complement or group.total_units != self.total_units:
            raise ValueError(f"{group!r} is not a group of this partitioner ({self.total_units} {self.unit_name})")
        return self.complement_of(group.granted)

    def complement_of(self, requested: int) -> GroupT_co | None:
        """``complement(group(requested))`` without making the group, which only the other process needs."""
        granted = round_to_rung(self.rungs, requested)
        rest = complement_units(self.total_units, granted, min_complement=self.min_complement)
        return None if rest is None else self._cached(rest, rest, is_complement=True)

    def prepare(self, *, groups: bool = True, complements: bool = False) -> None:
        """Make the whole ladder now, so that no later call pays for a first use."""
        for rung in self.rungs:
            if groups:
                self.group(rung)
            if complements:
                self.complement_of(rung)

    def describe(self) -> str:
        """One line for the log: back end, units and rungs."""
        return f"{self.backend}, {self.total_units} {self.unit_name}, rungs {', '.join(map(str, self.rungs))}"

    def close(self) -> None:
        """Give the groups back. Their streams must be idle. A second call does nothing."""
        self.closed = True
        self._groups.clear()

    def _cached(self, requested: int, granted: int, *, is_complement: bool) -> GroupT_co:
        if self.closed:
            raise ValueError("the partitioner is closed")
        key = (requested, granted, is_complement)
        group = self._groups.get(key)
        if group is None:
            with self._lock:
                group = self._groups.get(key)
                if group is None:
                    group = self._make_group(requested=requested, granted=granted, is_complement=is_complement)
                    self._groups[key] = group
        return group

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
