"""A scripted server with the endpoints that the harness uses. It checks the client without a model: what the client
reports must be what the script says. ``python -m servebench.fake_server --port N --ttft-ms 40 --tpot-ms 5``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """Delays in ms. ``stall_ms`` is added before the token at ``stall_at`` (0 for none); requests whose number is in
    ``fail`` get a 400; at request number ``die_at`` the server ends (0: never). ``seen`` collects the bodies' digests
    in order of arrival."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    stall_at: int = 0
    stall_ms: float = 0.0
    fail: tuple[int, ...] = ()
    die_at: int = 0
    seen: list[str] = field(default_factory=list)
    mode: str = "sis"

    @property
    def step_ms(self) -> float:
        """``static:N`` decodes with N / 32 of the scripted time, as if the encoder's N SMs were missing."""
        kind, _, num_sms = self.mode.partition(":")
        return self.tpot_ms * (int(num_sms) / 32 if kind == "static" else 1.0)


def prompt_tokens(body: dict[str, Any]) -> int:
    """One token per word, and one per 28 x 28 pixels' worth of an image's bytes: a number that depends on both."""
    if "text" in body:
        return len(body["text"].split()) + sum(len(image) // 784 for image in body.get("image_data", []))
    total = 0
    for message in body["messages"]:
        parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        for part in parts:
            total += len(part["text"].split()) if "text" in part else len(part["image_url"]["url"]) // 784
    return total


def make_app(script: Script) -> web.Application:
    """The application; ``script.seen`` changes as it is used."""

    async def pace(index: int) -> None:
        delay = script.ttft_ms if index == 0 else script.step_ms
        if script.stall_at and index == script.stall_at:
            delay += script.stall_ms
        if delay:
            await asyncio.sleep(delay / 1e3)

    async def answer(request: web.Request, *, chat: bool) -> web.StreamResponse:
        raw = await request.read()
        number = len(script.seen)
        script.seen.append(hashlib.sha256(raw).hexdigest())
        if script.die_at and number >= script.die_at:
            os._exit(9)
        if number in script.fail:
            return web.json_response({"error": "scripted"}, status=400)
        body = json.loads(raw)
        count = body["max_tokens"] if chat else body["sampling_params"]["max_new_tokens"]
        prompt = prompt_tokens(body)
        word = script.seen[-1][:4]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(data: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")

        text = ""
        for index in range(count):
            await pace(index)
            text += f"{word}{index} "
            usage = {"prompt_tokens": prompt, "completion_tokens": index + 1}
            if chat:
                if index == 0:
                    await event({"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
                delta = {"content": f"{word}{index} "}
                await event({"id": "x", "choices": [{"index": 0, "delta": delta}], "usage": usage})
            else:
                await event({"text": text, "meta_info": {"id": "x", **usage, "cached_tokens": 0}})
        if chat:
            await event({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            await event({"id": "x", "choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def generate(request: web.Request) -> web.StreamResponse:
        return await answer(request, chat=False)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await answer(request, chat=True)

    async def flush(_: web.Request) -> web.Response:
        return web.Response(text="flushed")

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=f"spaceserve:fake_requests {len(script.seen)}\n")

    async def sm_partition(request: web.Request) -> web.Response:
        script.mode = (await request.json())["mode"]
        return web.json_response({"mode": script.mode})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_route("*", "/flush_cache", flush)
    app.router.add_post("/spaceserve/sm-partition", sm_partition)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--tpot-ms", type=float, default=0.0)
    parser.add_argument("--stall-at", type=int, default=0)
    parser.add_argument("--stall-ms", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, default=0)
    options = parser.parse_args()
    script = Script(options.ttft_ms, options.tpot_ms, options.stall_at, options.stall_ms, die_at=options.die_at)
    web.run_app(make_app(script), host=options.host, port=options.port, print=None, handle_signals=True)


if __name__ == "__main__":
    main()
