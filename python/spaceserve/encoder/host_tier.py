"""The host tier's copies: evicted features to host memory, and back into the slab when they are wanted again.

`feature_store/host_store.py` decides what lies where; this carries it out. All copies of a worker run on one stream,
in the order in which they were decided, and only one thread asks for them: so a place in host memory is read before
it is given to the next features, and rows of the slab are read before anything restored is written there. Encodes
write on streams of their own and wait for `last_copy`.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from spaceserve.encoder.polled_queue import PolledQueue
from spaceserve.feature_store.store import Ticket
from spaceserve.slab import Slab

logger = logging.getLogger(__name__)


def _available_memory_bytes() -> int:
    """What Linux estimates could be allocated now without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


class HostTier:
    """Host memory for `num_tokens` rows of features beside a slab. One thread calls it.

    Pinned on a GPU, where nothing blocks: a copy there is 20 microseconds of launching. On the CPU a copy is made
    within the call. `wakeup_fd` becomes readable when a restored image is ready.
    """

    def __init__(self, slab: Slab, num_tokens: int) -> None:
        """Raises ValueError where the host has not that much memory, or may not pin it."""
        rows = slab.rows
        self._slab = slab
        self._on_gpu = rows.device.type == "cuda"
        num_bytes = num_tokens * rows.shape[1] * rows.itemsize
        available_bytes = _available_memory_bytes()
        if num_bytes > available_bytes:
            raise ValueError(
                f"--encoder-feature-host-gb: the host has {available_bytes / 1e9:.1f} GB of memory left, "
                f"the tier would take {num_bytes / 1e9:.1f}"
            )
        self._rows = torch.empty(num_tokens, rows.shape[1], dtype=rows.dtype)
        if self._on_gpu:
            # Pinned in place: torch's own pinned allocations are rounded up to the next power of two.
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._rows.data_ptr(), num_bytes, 0))
            except RuntimeError as error:
                raise ValueError(
                    f"--encoder-feature-host-gb: {num_bytes / 1e9:.1f} GB of host memory cannot be pinned ({error})"
                ) from error
        self._stream = torch.cuda.Stream(rows.device) if self._on_gpu else None
        self._completion_thread = ThreadPoolExecutor(1, thread_name_prefix="host-tier")
        self._restored: PolledQueue[tuple[bytes, bool]] = PolledQueue()
        self.wakeup_fd = self._restored.wakeup_fd
        self.last_copy: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the host memory."""
        return self._rows.numel() * self._rows.itemsize

    def save(self, ticket: Ticket, host_row: int) -> None:
        """Copy the features at `ticket` to host memory from row `host_row` on; they must be complete."""
        self._copy(self._rows[host_row : host_row + ticket.num_tokens], self._view(ticket))

    def restore(self, ticket: Ticket, host_row: int) -> None:
        """Copy features from host memory to the rows of `ticket`; `take_restored` says when they are there."""
        try:
            event = self._copy(self._view(ticket), self._rows[host_row : host_row + ticket.num_tokens])
        except RuntimeError:
            logger.exception("Features could not be copied back from host memory")
            self._restored.put((ticket.key, False))
            return
        if event is None:
            self._restored.put((ticket.key, True))
        else:
            self._completion_thread.submit(self._wait, ticket.key, event)

    def take_restored(self) -> list[tuple[bytes, bool]]:
        """Keys whose copy back has ended since the last call, and whether the features are there."""
        return self._restored.take_all()

    def close(self) -> None:
        """Stop the thread."""
        self._completion_thread.shutdown(wait=False, cancel_futures=True)

    def _view(self, ticket: Ticket) -> torch.Tensor:
        return self._slab.view(ticket.offset_tokens, ticket.num_tokens)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            to.copy_(source)
            return None
        event = torch.cuda.Event(blocking=True)  # its waiter sleeps instead of spinning
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event.record()
        self.last_copy = event
        return event

    def _wait(self, key: bytes, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()
        except RuntimeError:
            logger.exception("Features could not be copied back from host memory")
            self._restored.put((key, False))
            return
        self._restored.put((key, True))
