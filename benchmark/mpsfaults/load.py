"""What a server under test is asked for meanwhile: streams, images again and again, and bursts of large images."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import requests

from answers import message, picture_url

NUM_STREAMS = 4
STREAM_TOKENS = 512
BURST = 8  # images of BURST_SIDE x BURST_SIDE, some 0.2 s of encoder each
ANSWER_TIMEOUT_S = 60.0

Json = dict[str, Any]


class Load:
    """Text answers that stream and an image that is asked for again and again, from threads, until it is closed."""

    def __init__(self, url: str, image_side: int, num_streams: int = NUM_STREAMS) -> None:
        self._url = url
        self._image_side = image_side
        self._stopping = threading.Event()
        self.tokens: list[list[float]] = [[] for _ in range(num_streams)]
        self.images: list[Json] = []
        self.errors: list[tuple[float, str]] = []
        targets: list[Callable[[], None]] = [self._make_stream(i) for i in range(num_streams)]
        self._threads = [threading.Thread(target=target, daemon=True) for target in [*targets, self._ask_images]]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        end = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Begin to end: what fails from now on is no error."""
        self._stopping.set()

    def _failed(self, what: str) -> None:
        if not self._stopping.is_set():
            self.errors.append((time.monotonic(), what[:300]))
            self._stopping.wait(0.2)

    def _make_stream(self, index: int) -> Callable[[], None]:
        def loop() -> None:
            number = 0
            while not self._stopping.is_set():
                number += 1
                try:
                    self._stream(index, f"Stream {index}, answer {number}: tell a long story.")
                except (requests.RequestException, ValueError) as error:
                    self._failed(f"stream {index}: {type(error).__name__}: {error}")

        return loop

    def _stream(self, index: int, text: str) -> None:
        sampling = {"max_new_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
        body: Json = {"text": text, "sampling_params": sampling, "stream": True}
        count = 0
        with requests.post(f"{self._url}/generate", json=body, stream=True, timeout=(5, 30)) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}")
            for line in response.iter_lines(chunk_size=65536):
                if self._stopping.is_set():
                    return
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                self.tokens[index].append(time.monotonic())
                count = event["meta_info"]["completion_tokens"]
        if count < STREAM_TOKENS and not self._stopping.is_set():
            raise ValueError(f"the answer ended after {count} of {STREAM_TOKENS} tokens")

    def _ask_images(self) -> None:
        seed = 1_000_000
        while not self._stopping.wait(0.3):
            seed += 1
            row = ask_image(self._url, image_body(seed, self._image_side))
            if not self._stopping.is_set():
                self.images.append(row)

    def between(self, begin: float, end: float) -> Json:
        """What the load saw from `begin` to `end` (seconds of the monotonic clock)."""
        pauses = []
        for times in self.tokens:
            inside = [begin, *(at for at in times if begin <= at <= end), end]
            pauses.append(max(b - a for a, b in pairwise(inside)))
        images = [row for row in self.images if begin <= row["end"] and row["begin"] <= end]
        return {
            "seconds": round(end - begin, 2),
            "stream_tokens": sum(begin <= at <= end for times in self.tokens for at in times),
            "longest_pause_s": round(max(pauses, default=0.0), 3),
            "stream_errors": [text for at, text in list(self.errors) if begin <= at <= end],
            "images_answered": sum(row["status"] == 200 for row in images),
            "image_errors": [row["error"] for row in images if row["status"] != 200],
        }


def image_body(seed: int, side: int) -> bytes:
    """A request with an image that was never sent before."""
    body = {
        "model": "m",
        "messages": message("What is this?", picture_url(seed, side, side)),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    return json.dumps(body).encode()


def ask_image(url: str, body: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> Json:
    """The answer to one request: HTTP status (0: none), seconds, and the clock's begin and end."""
    begin = time.monotonic()
    error = ""
    try:
        response = requests.post(
            f"{url}/v1/chat/completions",
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=timeout_s,
        )
        status = response.status_code
        if status != 200:
            error = f"HTTP {status}: {response.text[:200]}"
    except requests.RequestException as exception:
        status, error = 0, f"{type(exception).__name__}: {exception}"[:300]
    end = time.monotonic()
    return {"status": status, "error": error, "seconds": round(end - begin, 2), "begin": begin, "end": end}


class Burst:
    """Large images asked for at once, so that the encoder is at work for a second or more."""

    def __init__(self, url: str, first_seed: int, side: int, count: int = BURST) -> None:
        self.rows: list[Json] = []
        # Drawn before the first is sent: a large PNG takes a while.
        bodies = [image_body(first_seed + i, side) for i in range(count)]

        def ask(body: bytes) -> None:
            self.rows.append(ask_image(url, body))

        self._threads = [threading.Thread(target=ask, args=(body,), daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> list[Json]:
        """The answers that came within `timeout_s`."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.monotonic()))
        return list(self.rows)
