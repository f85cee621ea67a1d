"""The load client: sends prepared bodies at stored instants and records when tokens arrive. Its own process.

Started by the runner as ``python -m servebench.client JOB.json``; tests call ``run_job`` and ``read_events`` directly.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from servebench.bodies import BodyFile

COUNT_KEY = b'"completion_tokens":'
Clock = Callable[[], float]


@dataclass
class RequestRecord:
    """What the client saw of one request. Times in ms; planned and sent count from the start of the run, ``events_ms``
    from the planned arrival, so that a late client makes TTFT worse, never better."""

    id: int
    planned_ms: float
    sent_ms: float = 0.0
    events_ms: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished_ms: float = 0.0
    error: str = ""
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(self.event_tokens)


async def read_events(lines: AsyncIterable[bytes], record: RequestRecord, clock: Clock, start: float) -> None:
    """Read server-sent events into ``record`` until the stream ends.

    ``start`` is the planned arrival on ``clock`` (s). Each event that raises the server's count of completion tokens
    is noted with the number of tokens it adds; a server that sends no count gets one token per event with content.
    """
    seen = 0
    last = b""
    content: list[str] = []
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        now_ms = (clock() - start) * 1e3
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        if data.startswith((b'{"error"', b'{"object":"error"')):
            record.error = data[:300].decode(errors="replace")
            break
        at = data.rfind(COUNT_KEY)
        if at >= 0:
            last = data
            count = _leading_int(data[at + len(COUNT_KEY) : at + len(COUNT_KEY) + 12])
        else:
            delta = _chat_delta(data)
            count = seen + (1 if delta else 0)
        if data.startswith(b'{"id"') and (delta := _chat_delta(data)):
            content.append(delta)
        if count > seen:
            record.events_ms.append(now_ms)
            record.event_tokens.append(count - seen)
            seen = count
    record.finished_ms = (clock() - start) * 1e3
    if last:
        final: dict[str, Any] = json.loads(last)
        usage = final.get("meta_info") or final.get("usage") or {}
        record.prompt_tokens = usage.get("prompt_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = usage.get("cached_tokens", details.get("cached_tokens", 0))
        record.text = final.get("text") or "".join(content)
    else:
        record.text = "".join(content)


def _leading_int(data: bytes) -> int:
    digits = data.lstrip()
    end = 0
    while end < len(digits) and 48 <= digits[end] <= 57:
        end += 1
    return int(digits[:end] or b"0")


def _chat_delta(data: bytes) -> str:
    try:
        choices = json.loads(data).get("choices") or [{}]
    except json.JSONDecodeError:
        return ""
    return (choices[0].get("delta") or {}).get("content") or ""


async def send(
    session: aiohttp.ClientSession, url: str, body: bytes, record: RequestRecord, clock: Clock, origin: float
) -> None:
    """Send one request and read its stream; failures end up in ``record.error``."""
    start = origin + record.planned_ms / 1e3
    record.sent_ms = (clock() - origin) * 1e3
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            await read_events(response.content, record, clock, start)
    except asyncio.CancelledError:
        record.error = "timeout"
        raise
    except (aiohttp.ClientError, ValueError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"[:300]


async def run_job(
    url: str,
    bodies: Sequence[bytes],
    arrivals_s: Sequence[float],
    *,
    concurrency: int | None,
    timeout_s: float,
    clock: Clock = time.perf_counter,
    on_finish: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send every body: at its arrival time (open loop), or ``concurrency`` at a time (closed loop, each request's
    planned time being the moment it is sent). After ``timeout_s`` what still runs is recorded as ``timeout``."""
    records = [RequestRecord(i, arrival * 1e3) for i, arrival in enumerate(arrivals_s)]
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    tasks: list[asyncio.Task[None]] = []
    # One SSE line carries the whole answer so far: allow for long ones.
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        origin = clock()

        async def one(index: int) -> None:
            record = records[index]
            await send(session, url, bodies[index], record, clock, origin)
            if on_finish is not None:
                on_finish(record)

        async def open_loop() -> None:
            for index, record in enumerate(records):
                delay = origin + record.planned_ms / 1e3 - clock()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(one(index)))
            await asyncio.gather(*tasks)

        async def closed_loop(width: int) -> None:
            pending = iter(range(len(records)))

            async def worker() -> None:
                for index in pending:
                    records[index].planned_ms = (clock() - origin) * 1e3
                    await one(index)

            tasks.extend(asyncio.create_task(worker()) for _ in range(width))
            await asyncio.gather(*tasks)

        try:
            await asyncio.wait_for(closed_loop(concurrency) if concurrency else open_loop(), timeout_s)
        except asyncio.TimeoutError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for record in records:
        if not record.error and not record.finished_ms:
            record.error = "timeout"
    return records


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    bodies = list(BodyFile(Path(job["bodies"]), tuple((o, n) for o, n in job["spans"])).read())
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the middle of a run would show as a gap between tokens
    records: list[RequestRecord] = []
    for concurrency in job["concurrencies"]:
        timeout_s = float(job["timeout_s"])
        records = asyncio.run(
            run_job(job["url"], bodies, job["arrivals_s"], concurrency=concurrency, timeout_s=timeout_s)
        )
    Path(job["out"]).write_text(json.dumps([asdict(record) for record in records]))


if __name__ == "__main__":
    main()
