"""`spaceserve.launch_server` that also writes down which features the encoder made and which a prefill read.

  FEATURE_RECORD=FILE feature_probe.py --model-path DIR ...

While FILE exists, each process appends lines of JSON to it: `side` ("encoder": written to the slab, "prefill": read
from it), `key` (the image's), `tokens`, `sha` (SHA-256 of the rows' bytes), and `max_delta`, for an image that was
encoded before, against its first features. Reading waits for the device: not for measurements of time.

The records are made in the server's own processes. They import this file as `__mp_main__` before they run, as
multiprocessing does with every main script, and are hooked there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from spaceserve.encoder.runner import Batch, BatchRunner
    from spaceserve.feature_store.store import Ticket
    from spaceserve.scheduler.feature_view import FeatureView
    from spaceserve.slab import Slab

RECORD = os.environ.get("FEATURE_RECORD", "")
# First features of this many images are kept, to say by how much later ones differ.
NUM_KEPT = 64


def record(side: str, key: bytes, rows: torch.Tensor, **more: Any) -> None:
    """Append one line for features `rows` [tokens, dim]."""
    import torch

    raw = rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    line = {"side": side, "key": key.hex(), "tokens": rows.shape[0], "sha": hashlib.sha256(raw).hexdigest(), **more}
    descriptor = os.open(RECORD, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def watch_encoder() -> None:
    """Record the features of every batch once the device has finished it."""
    from spaceserve.encoder.runner import BatchRunner

    finish = BatchRunner._finish
    first: dict[bytes, torch.Tensor] = {}

    def watched(self: BatchRunner, batch: Batch) -> None:
        if os.path.exists(RECORD):
            for ticket in batch.tickets:
                if ticket.key in batch.failures:
                    continue
                rows = self._slab.view(ticket.offset_tokens, ticket.num_tokens)
                before = first.get(ticket.key)
                delta = None if before is None else float((rows.cpu().float() - before.float()).abs().max())
                if before is None and len(first) < NUM_KEPT:
                    first[ticket.key] = rows.to("cpu", copy=True)
                record("encoder", ticket.key, rows, max_delta=delta)
        finish(self, batch)

    BatchRunner._finish = watched  # type: ignore[method-assign]


def watch_prefill() -> None:
    """Record the features of every image that a prefill asks for, at that moment."""
    from spaceserve.scheduler.feature_view import FeatureView

    hold, get_single = FeatureView.hold, FeatureView.get_single
    keys: dict[int, bytes] = {}

    def watched_hold(self: FeatureView, rid: str, slab: Slab, tickets: Iterable[tuple[int, Ticket]]) -> None:
        tickets = list(tickets)
        keys.update({mm_hash: ticket.key for mm_hash, ticket in tickets})
        hold(self, rid, slab, tickets)

    def watched_get_single(self: FeatureView, mm_hash: int) -> Any:
        found = get_single(self, mm_hash)
        if os.path.exists(RECORD):
            record("prefill", keys[mm_hash], found.embedding)
        return found

    FeatureView.hold = watched_hold  # type: ignore[method-assign]
    FeatureView.get_single = watched_get_single  # type: ignore[method-assign]


if __name__ == "__mp_main__":
    import spaceserve.processes  # noqa: F401 - it comes before all else of SGLang's

    watch_encoder()
    watch_prefill()
elif __name__ == "__main__":
    from spaceserve.launch_server import main

    if not RECORD:
        sys.exit("feature_probe: FEATURE_RECORD must name a file")
    sys.exit(main(sys.argv[1:]))
