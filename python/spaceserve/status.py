"""SpaceServe's own pages: `GET /spaceserve/status` and `POST /spaceserve/sm-partition`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool

from spaceserve.channels import Channels
from spaceserve.config import SmPartition

STATUS_ROUTE = "/spaceserve/status"
SM_PARTITION_ROUTE = "/spaceserve/sm-partition"
# The worker looks at the file, and writes its state, twice a second.
TAKEN_OVER_TIMEOUT_S = 5.0
_SM_PARTITION_LOCK = threading.Lock()


class SmPartitionRefused(Exception):
    """The worker cannot take over the mode, or does not answer; `status` is the HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def read_status(channels: Channels) -> dict[str, Any] | None:
    """The encoder worker's last state; None before it has written any."""
    return _read(channels.status_file)


def read_decoder(channels: Channels) -> dict[str, Any] | None:
    """The decoder's groups of SMs and its steps on each, as the scheduler left them; None before it has."""
    return _read(channels.decoder_sms_file)


def _read(file: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(Path(file).read_text())
    except FileNotFoundError:
        return None
    return found


def set_sm_partition(channels: Channels, mode: str) -> dict[str, Any]:
    """Tell the encoder worker how to choose its SMs from now on, and wait until it does.

    The mode stays in a file, so that a worker that is started again finds it.

    Args:
        mode: as `--sm-partition`.

    Returns:
        The worker's state of its split.

    Raises:
        SmPartitionRefused: the mode is unknown or more than the device has (400), or the worker is silent (503).
    """
    try:
        SmPartition.parse(mode)
    except ValueError as error:
        raise SmPartitionRefused(400, str(error)) from error
    with _SM_PARTITION_LOCK:  # one at a time: each waits for its own mode to be taken over
        return _hand_over(channels, mode)


def mode_in(body: bytes) -> str:
    """The mode that the body of a request asks for.

    Raises:
        SmPartitionRefused: it is not what it must be (400).
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):  # also what is no UTF-8
        found = None
    mode = found.get("mode") if isinstance(found, dict) else None
    if not isinstance(mode, str):
        raise SmPartitionRefused(400, 'the body must be a JSON object with a mode, as {"mode": "static:64"}')
    return mode


def _hand_over(channels: Channels, mode: str) -> dict[str, Any]:
    path = Path(channels.sm_partition_file)
    before = path.read_text() if path.exists() else None
    _write(path, mode)
    deadline = time.monotonic() + TAKEN_OVER_TIMEOUT_S
    while time.monotonic() < deadline:
        split: dict[str, Any] = (read_status(channels) or {}).get("split", {})
        if str(split.get("mode_error", "")).startswith(f"{mode}: "):
            # What a worker refuses must not be what the next one starts with.
            _write(path, before if before is not None else split["mode"])
            reason = split["mode_error"].removeprefix(f"{mode}: ")
            raise SmPartitionRefused(400, reason if mode in reason else f"--sm-partition {mode}: {reason}")
        # With a mask_error the mode is one of the start that could not be had in full.
        if split.get("mode") == mode and "mode_error" not in split and "mask_error" not in split:
            return split
        time.sleep(0.05)
    raise SmPartitionRefused(503, f"the encoder worker has not taken over {mode} within {TAKEN_OVER_TIMEOUT_S:g} s")


def _write(path: Path, mode: str) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(mode + "\n")
    scratch.replace(path)


def add_status_routes(channels: Channels, mps: Callable[[], dict[str, Any]] = dict) -> None:
    """Add the pages to SGLang's HTTP server of this process. `mps`: state of the Multi-Process Service, if any."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def status() -> dict[str, Any]:
        found = read_status(channels)
        if found is None:
            raise HTTPException(503, "the encoder worker is not up")
        return {**found, "decoder": read_decoder(channels), "mps": mps()}

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def sm_partition(request: Request) -> dict[str, Any]:
        # The body is read here: what FastAPI and SGLang say of one that is malformed names lines of our source.
        try:
            return await run_in_threadpool(set_sm_partition, channels, mode_in(await request.body()))
        except SmPartitionRefused as error:
            raise HTTPException(error.status, str(error)) from error

    app.add_api_route(STATUS_ROUTE, status, methods=["GET"])
    app.add_api_route(SM_PARTITION_ROUTE, sm_partition, methods=["POST"])
