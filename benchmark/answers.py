"""Pictures, questions, and greedy answers with log-probabilities: what scripts that compare two servers share."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import requests
from PIL import Image

from servebench.bodies import qwen_prompt

MAX_TOKENS = 24
TOP_LOGPROBS = 5
ANSWER_TIMEOUT_S = 60.0

Message = dict[str, Any]
Answer = list[dict[str, Any]]  # of each token: its number, its log-probability, those of the likeliest tokens


def picture_url(seed: int, width: int, height: int) -> str:
    """Data URL of a PNG of coloured cells; another seed is another picture."""
    shape = (max(1, height // 28), max(1, width // 28), 3)
    cells = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def message(text: str, *urls: str, text_first: bool = False) -> list[Message]:
    """One user's turn: pictures, then text; or the text first, so that no two requests have a prefix in common."""
    parts: list[Message] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.insert(0 if text_first else len(parts), {"type": "text", "text": text})
    return [{"role": "user", "content": parts}]


def ask(
    url: str, messages: Sequence[Message], *, max_tokens: int = MAX_TOKENS, top_logprobs: int = TOP_LOGPROBS
) -> Answer:
    """The greedy answer's tokens, from SGLang's own API: OpenAI's has texts of tokens, and many tokens share one.

    Raises RuntimeError where the server answers with an error.
    """
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    urls = [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]
    body: dict[str, Any] = {
        "text": qwen_prompt(messages),
        "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": top_logprobs,
    }
    if urls:
        body["image_data"] = urls
    response = requests.post(f"{url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
    if response.status_code != 200:
        raise RuntimeError(f"HTTP {response.status_code}: {response.text[:300]}")
    found = response.json()["meta_info"]
    return [
        {"token": token, "logprob": logprob, "top": [[other, value] for value, other, *_ in likeliest]}
        for (logprob, token, *_), likeliest in zip(
            found["output_token_logprobs"], found["output_top_logprobs"], strict=True
        )
    ]


def compare(ours: Answer, stock: Answer, tie: float) -> dict[str, Any]:
    """Where an answer leaves stock's, and by how much stock preferred its own token there.

    Returns:
        ``ok``; ``equal_tokens``, the length of the common beginning; ``gap``, stock's log-probability of its own token
        less that of ours, where they part (None if they do not, or ours is not among stock's likeliest);
        ``max_delta``, the largest difference of the log-probabilities in the common beginning.
    """
    if len(ours) != len(stock):
        return {"ok": False, "equal_tokens": 0, "gap": None, "max_delta": None, "reason": "lengths differ"}
    num_equal = next(
        (i for i, (a, b) in enumerate(zip(ours, stock, strict=True)) if a["token"] != b["token"]), len(ours)
    )
    pairs = list(zip(ours, stock, strict=True))[:num_equal]
    max_delta = max((abs(a["logprob"] - b["logprob"]) for a, b in pairs), default=None)
    gap = None
    ok = max_delta is None or max_delta <= tie
    if num_equal < len(ours):
        likeliest = dict(stock[num_equal]["top"])
        token = ours[num_equal]["token"]
        if token in likeliest:
            gap = stock[num_equal]["logprob"] - likeliest[token]
        ok = ok and gap is not None and gap <= tie
    return {"ok": ok, "equal_tokens": num_equal, "gap": gap, "max_delta": max_delta}
