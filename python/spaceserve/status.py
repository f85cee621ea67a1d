"""The page that shows what the encoder worker is doing: `GET /spaceserve/status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spaceserve.channels import Channels

ROUTE = "/spaceserve/status"


def add_status_route(channels: Channels) -> None:
    """Add the page to SGLang's HTTP server of this process."""
    from fastapi import HTTPException
    from sglang.srt.entrypoints.http_server import app

    path = Path(channels.status_file)

    def status() -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise HTTPException(503, "the encoder worker is not up") from error
        return found

    app.add_api_route(ROUTE, status, methods=["GET"])
