"""Real servers for tests: started once, shared by all tests that can share, ended with everything they left."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests
from PIL import Image

START_TIMEOUT_S = 400
ANSWER_TIMEOUT_S = 240


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server process and what a client does with it."""

    def __init__(self, module: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(tempfile.mkdtemp(prefix="server-test-")) / "log"
        command = [sys.executable, "-m", module, "--port", str(self.port), *flags]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_up(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log[-4000:]}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        raise AssertionError(f"the server did not come up:\n{self.log[-4000:]}")

    def stop(self) -> None:
        """End the server, politely first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)

    def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> requests.Response:
        body = {"model": "m", "messages": list(messages), "max_tokens": 16, "temperature": 0, **more}
        return requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=ANSWER_TIMEOUT_S)

    def answer(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Text of the first choice; fails on an error."""
        response = self.chat(messages, **more)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    def stream(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Text of a streamed answer; fails on an error."""
        response = self.chat(messages, stream=True, **more)
        assert response.status_code == 200, response.text
        parts = []
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[len("data: ") :])
                assert "error" not in event, event
                parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
        assert response.text.rstrip().endswith("data: [DONE]")
        return "".join(parts)

    def flush(self) -> None:
        """Flush the caches, once the last answers' requests are filed: a busy server refuses to."""
        response = requests.post(f"{self.url}/flush_cache", params={"timeout": 30}, timeout=60)
        assert response.status_code == 200, response.text

    def status(self) -> dict[str, Any]:
        """SpaceServe's status page, once it shows the worker's present state (it is written twice a second)."""
        time.sleep(1.2)
        response = requests.get(f"{self.url}/spaceserve/status", timeout=10)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def processes(self) -> list[psutil.Process]:
        """The server's process and all that it started."""
        try:
            parent = psutil.Process(self.process.pid)
        except psutil.NoSuchProcess:
            return []
        return [parent, *parent.children(recursive=True)]

    def process_titled(self, title: str) -> psutil.Process:
        """The process with this title (`spaceserve::encoder`, `sglang::scheduler`)."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process {title}")

    def shm_prefix(self) -> str:
        """Start of the names of the server's shared-memory segments, from what its encoder has mapped."""
        for mapping in self.process_titled("spaceserve::encoder").memory_maps():
            name = Path(mapping.path).name
            if name.startswith("spaceserve-") and "slab" in name:
                return name.partition("slab")[0]
        raise AssertionError("the encoder has no slab mapped")

    def reaper(self) -> psutil.Process:
        """The process that cleans up after the server; none of its descendants."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                arguments = process.cmdline()
                if any(argument.endswith("reaper.py") for argument in arguments) and self.shm_prefix() in arguments:
                    return process
        raise AssertionError("the server has no reaper")

    def run_dir(self) -> Path:
        """Folder of the server's sockets."""
        return Path(self.reaper().cmdline()[-1])


@contextlib.contextmanager
def running(module: str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that is up inside the block."""
    server = Server(module, *flags, env=env)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


def picture(seed: int, width: int = 224, height: int = 168, *, mode: str = "RGB") -> Image.Image:
    """A picture of coloured patches; another seed is another picture."""
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 256, (max(1, height // 28), max(1, width // 28), 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST).convert(mode)


def encoded(image: Image.Image, image_format: str = "PNG", **save: Any) -> bytes:
    """The file that a client would upload."""
    buffer = io.BytesIO()
    image.save(buffer, format=image_format, **save)
    return buffer.getvalue()


def data_url(data: bytes, file_format: str = "png", *, kind: str = "image") -> str:
    """A data URL of the file."""
    return f"data:{kind}/{file_format};base64,{base64.b64encode(data).decode()}"


def user(text: str, *urls: str) -> dict[str, Any]:
    """A user's message with images before the text."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def user_with_videos(text: str, videos: Sequence[str], images: Sequence[str] = ()) -> dict[str, Any]:
    """A user's message with videos, then images, then the text."""
    parts: list[dict[str, Any]] = [{"type": "video_url", "video_url": {"url": url}} for url in videos]
    message = user(text, *images)
    return {**message, "content": [*parts, *message["content"]]}


def picture_url(seed: int, width: int = 224, height: int = 168) -> str:
    """Data URL of `picture(seed, ...)` as PNG."""
    return data_url(encoded(picture(seed, width, height)))
