"""The delay that work beside decode causes, summed over all requests: what SIS and prefill's share minimise.

While the work runs, each waiting request waits for it, and so does who comes before the queue is empty: 1 / (1 - load)
for each of them (the mean number served in a busy period; Kleinrock, Queueing Systems I, 5.9). Each decoding request
makes a token every `beside_ms` instead of every `alone_ms`, and falls behind by the share of its speed that this takes.
"""

from __future__ import annotations

# w where nothing else is asked for: an answer that streams counts as much as a request that waits. With 3, tokens came
# sooner than with 1 and first tokens later than stock's (docs/sis.md).
DECODE_WEIGHT = 1.0


def summed_delay_ms(
    work_ms: float,
    *,
    num_waiting: int,
    load: float,
    decode_batch: int,
    alone_ms: float,
    beside_ms: float,
    decode_weight: float,
    latency_ms: float = 0.0,
) -> float:
    """Milliseconds of delay, summed over requests.

    Args:
        work_ms: time of the work on its units.
        num_waiting: requests that wait for it; load: share of time that such work is done, in [0, 1).
        decode_batch: requests that decode; alone_ms, beside_ms: their step without the work and beside it.
        decode_weight: what a decoding request's delay counts against a waiting one's.
        latency_ms: the least that the work takes on any units, such as the host's time to launch it. Requests wait for
            it, and decode does not suffer from it.
    """
    lost = max(0.0, 1.0 - alone_ms / beside_ms) if beside_ms > 0 else 0.0
    return max(work_ms, latency_ms) * num_waiting / (1 - load) + work_ms * decode_weight * decode_batch * lost
