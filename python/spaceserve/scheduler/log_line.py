"""What SGLang's line about each prefill batch says more: images that wait, the feature store, the last prefill."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The worker writes its state twice a second; a line about each batch need not read the file each time.
READ_INTERVAL_S = 1.0


def store_summary(status: dict[str, Any]) -> str:
    """The worker's state (its status file) in the style of SGLang's log lines; empty where it holds no store's."""
    store = status.get("store")
    if not isinstance(store, dict):
        return ""
    held = store["num_blocks"] - store["free_blocks"]
    parts = [
        f"feature usage: {held / store['num_blocks']:.2f}",
        f"#pinned-block: {store['pinned_blocks']}",
        f"#feature-hit: {store['hits']}",
        f"#coalesced-encode: {store['coalesced']}",
        f"#encode: {status['num_encoded']}",
        f"#evicted-feature: {sum(status['evictions'].values())}",
    ]
    host = status.get("host")
    if host is not None:
        parts.append(f"#host-hit: {host['hits']}")
    return ", ".join(parts)


class ImagesInLogLine(logging.Filter):
    """Adds to SGLang's line about each prefill batch.

    Args:
        summaries: what this process says of its state now: the gate's requests, the last prefill.
        status_file: where the encoder worker leaves its state; it may not exist yet.
    """

    def __init__(self, summaries: Sequence[Callable[[], str]], status_file: Path) -> None:
        super().__init__()
        self._summaries = summaries
        self._status_file = status_file
        self._store_summary = ""
        self._read_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Always passes the record."""
        if isinstance(record.msg, str) and record.msg.startswith("Prefill batch"):
            self._read()
            ours = [summary() for summary in self._summaries]
            record.msg = ", ".join(part for part in (record.msg, *ours, self._store_summary) if part)
        return True

    def _read(self) -> None:
        now_s = time.monotonic()
        if now_s - self._read_s < READ_INTERVAL_S:
            return
        self._read_s = now_s
        try:
            self._store_summary = store_summary(json.loads(self._status_file.read_text()))
        except (OSError, ValueError, KeyError):
            self._store_summary = ""  # a log line must never be why a batch fails
