"""What evicted features become: a copy in the host tier where there is one, which comes back when it is wanted.

`host_store.py` decides where a copy lies and which one goes; here it is decided what is copied out and back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from spaceserve.feature_store.answers import Ticket
from spaceserve.feature_store.host_store import HostStats, HostStore


class HostSpill:
    """The way from slab to host tier and back; without a host tier evicted features are lost.

    Args:
        host: places of the copies; None for no host tier.
        save: see `FeatureStore`.
    """

    def __init__(self, host: HostStore | None, save: Callable[[Ticket, int], None] | None) -> None:
        self._host = host
        self._save = save

    def __contains__(self, key: bytes) -> bool:
        return self._host is not None and key in self._host

    def keep(self, ticket: Ticket, rebuild_us: int, keep: Collection[bytes] = ()) -> None:
        """The features at `ticket` are evicted: have them copied out, unless their copy is there or has no room.

        keep: what must not give way in the host tier, since the room in the slab is for it.
        """
        if self._host is None:
            return
        host_row = self._host.put(ticket.key, ticket.num_tokens, rebuild_us, keep)
        if host_row is not None and self._save is not None:
            self._save(ticket, host_row)

    def take_back(self, key: bytes) -> int:
        """The features of `key` are to be copied back now: first row of their copy, which stays.

        Raises ValueError where there is no copy.
        """
        if self._host is None:
            raise ValueError("there is no host tier")
        return self._host.use(key)

    def discard(self, key: bytes) -> None:
        """The copy of `key` is not to be used; unknown keys are ignored."""
        if self._host is not None:
            self._host.discard(key)

    def clear(self) -> None:
        """Forget every copy."""
        if self._host is not None:
            self._host.clear()

    def stats(self) -> HostStats | None:
        """Counts as of now; None without a host tier."""
        return None if self._host is None else self._host.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError where the host tier contradicts itself."""
        if self._host is not None:
            self._host.check_integrity()
