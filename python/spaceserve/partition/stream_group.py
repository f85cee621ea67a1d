"""Groups whose confinement is a property of a stream: CUDA green contexts, libsmctrl, HIP CU masks, and no mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

import torch

from .base import Partitioner, PartitionUnavailable, UnitGroup


def gpu_device(device: str | torch.device) -> torch.device:
    """The torch device with its index filled in, and its primary context made.

    Raises:
        PartitionUnavailable: not a GPU, or torch sees none.
    """
    resolved = torch.device(device)
    if resolved.type != "cuda":
        raise PartitionUnavailable(f"{resolved} is not a GPU")
    if not torch.cuda.is_available():
        raise PartitionUnavailable("torch sees no GPU")
    if resolved.index is None:
        resolved = torch.device("cuda", torch.cuda.current_device())
    if resolved.index >= torch.cuda.device_count():
        raise PartitionUnavailable(f"torch sees {torch.cuda.device_count()} GPUs, {resolved} is not among them")
    # Masks are laid over the primary context: it must exist, or each mask would make and destroy it.
    torch.zeros(1, device=resolved)
    return resolved


class StreamLane(ABC):
    """What confines the streams of one group; owns these streams."""

    stream: torch.cuda.Stream

    @abstractmethod
    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Another stream with the same confinement. Lower numbers are higher priorities."""

    @abstractmethod
    def destroy(self) -> None:
        """Give back streams and masks. The streams must be idle."""


class PlainLane(StreamLane):
    """The whole device: torch's own streams, no mask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = self.new_stream()

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._device, priority=priority)

    def destroy(self) -> None:
        """torch owns its streams."""


class StreamGroup(UnitGroup):
    """A group that stands for one stream of a device.

    A change of group is a change of the calling thread's current torch stream, plus one event so that the new stream
    waits for the old one on the device. Nothing waits on the host.

    The caching allocator keeps freed blocks per stream: a tensor allocated under one group and last used under
    another needs ``tensor.record_stream(group.stream)`` or must live in a static workspace.
    """

    def __init__(
        self,
        *,
        requested: int,
        granted: int,
        total_units: int,
        is_complement: bool,
        device: torch.device,
        lane: StreamLane,
    ) -> None:
        super().__init__(requested=requested, granted=granted, total_units=total_units, is_complement=is_complement)
        self.device = device
        self._lane = lane

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._lane.stream

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Another stream on the same units (preprocessing beside a forward, say). Lives as long as the partitioner."""
        return self._lane.new_stream(priority)

    def activate(self) -> _StreamActivation:
        return _StreamActivation(self)

    def make_current(self) -> None:
        stream = self._lane.stream
        previous = torch.cuda.current_stream(self.device)
        if previous != stream:
            stream.wait_stream(previous)
        torch.cuda.set_stream(stream)


class _StreamActivation:
    """A class and not a generator: it is entered between layers, where microseconds count."""

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self._previous: torch.cuda.Stream | None = None

    def __enter__(self) -> StreamGroup:
        self._previous = torch.cuda.current_stream(self._group.device)
        self._group.make_current()
        return self._group

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        previous, self._previous = self._previous, None
        assert previous is not None, "left without having been entered"
        if previous != self._group.stream:
            previous.wait_stream(self._group.stream)
        torch.cuda.set_stream(previous)


class StreamPartitioner(Partitioner[StreamGroup]):
    """A partitioner whose groups are lanes of streams, one lane for each size and side."""

    unit_name = "SMs"

    def __init__(self, *, device: torch.device, total_units: int, rungs: tuple[int, ...], min_complement: int) -> None:
        super().__init__(total_units=total_units, rungs=rungs, min_complement=min_complement)
        self.device = device
        self._lanes: dict[tuple[int, bool], StreamLane] = {}

    @abstractmethod
    def _make_lane(self, *, granted: int, is_complement: bool) -> StreamLane:
        """The confinement of a group smaller than the device."""

    def _make_whole_lane(self) -> StreamLane:
        return PlainLane(self.device)

    def _make_group(self, *, requested: int, granted: int, is_complement: bool) -> StreamGroup:
        key = (granted, is_complement)
        if key not in self._lanes:
            if granted == self.total_units:
                self._lanes[key] = self._make_whole_lane()
            else:
                self._lanes[key] = self._make_lane(granted=granted, is_complement=is_complement)
        return StreamGroup(
            requested=requested,
            granted=granted,
            total_units=self.total_units,
            is_complement=is_complement,
            device=self.device,
            lane=self._lanes[key],
        )

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for the device, then destroy streams and masks. No thread may use a group's stream afterwards."""
        with self._lock:
            if self.closed:
                return
            super().close()
            if self._lanes:
                self._synchronize()
            while self._lanes:
                _, lane = self._lanes.popitem()
                lane.destroy()
