"""Request bodies, built before a run and kept in one file, so that the client only sends bytes."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from servebench import images
from servebench.workload import Trace, TraceRequest

APIS = {"generate": "/generate", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class BodyFile:
    """Bodies of a trace's requests, one after another; ``spans`` holds (offset, length) in bytes."""

    path: Path
    spans: tuple[tuple[int, int], ...]

    def read(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for offset, length in self.spans:
                file.seek(offset)
                yield file.read(length)


def messages(request: TraceRequest, uris: Sequence[str]) -> list[dict[str, Any]]:
    """OpenAI messages: the images with the first user turn, then turn, fixed answer, turn, ..."""
    result: list[dict[str, Any]] = []
    for turn, seed in enumerate(request.text_seeds):
        content: list[dict[str, Any]] = []
        if turn == 0:
            content += [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
        content.append({"type": "text", "text": images.text(seed, request.num_words)})
        result.append({"role": "user", "content": content})
        if turn + 1 < len(request.text_seeds):
            result.append({"role": "assistant", "content": images.text(seed + 1_000_003, request.num_words)})
    return result


def qwen_prompt(chat: Sequence[dict[str, Any]]) -> str:
    """The chat as Qwen-VL's template writes it, for the API that takes a prompt instead of messages."""
    parts = []
    for message in chat:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(
                item["text"] if item["type"] == "text" else "<|vision_start|><|image_pad|><|vision_end|>"
                for item in content
            )
        parts.append(f"<|im_start|>{message['role']}\n{content}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def build_body(request: TraceRequest, *, api: str, model: str) -> bytes:
    """JSON body of one request; decodes exactly ``output_len`` tokens, greedily.

    ``generate`` is SGLang's own streaming API: it sends an event for every decoded token. ``chat`` is OpenAI's, where
    SGLang sends nothing for a token without visible text (half a UTF-8 character, a special token); with random
    weights that is common, and would look like a gap in decoding.
    """
    uris = []
    for image in request.images:
        encoded = base64.b64encode(images.render(image)).decode()
        uris.append(f"data:image/{image.format};base64,{encoded}")
    chat = messages(request, uris)
    if api == "chat":
        body: dict[str, Any] = {
            "model": model,
            "messages": chat,
            "temperature": 0,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    elif api == "generate":
        body = {
            "text": qwen_prompt(chat),
            "sampling_params": {"temperature": 0, "max_new_tokens": request.output_len, "ignore_eos": True},
            "stream": True,
        }
        if uris:
            body["image_data"] = uris
    else:
        raise ValueError(f"unknown API {api!r}, expected one of {sorted(APIS)}")
    return json.dumps(body, separators=(",", ":")).encode()


def write_bodies(trace: Trace, path: Path, *, api: str, model: str, workers: int | None = None) -> BodyFile:
    """Render and encode every request of ``trace`` into ``path``, on ``workers`` processes (all cores but one), which
    give way to others: servers may be starting."""
    workers = workers or max(1, (os.cpu_count() or 2) - 1)
    build = partial(build_body, api=api, model=model)
    spans = []
    with path.open("wb") as file:
        if workers == 1 or len(trace.requests) < 4:
            bodies: Iterator[bytes] = map(build, trace.requests)
            spans = [_append(file, body) for body in bodies]
        else:
            with ProcessPoolExecutor(workers, initializer=os.nice, initargs=(10,)) as pool:
                spans = [_append(file, body) for body in pool.map(build, trace.requests, chunksize=2)]
    return BodyFile(path, tuple(spans))


def _append(file: Any, body: bytes) -> tuple[int, int]:
    offset = file.tell()
    file.write(body)
    return offset, len(body)
