"""Builds the tokenizer of the demo model: 256 bytes, the words of `vocabulary`, the special tokens of Qwen2-VL."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from spaceserve.demo.vocabulary import SPECIAL_TOKENS, word_tokens

# One word with the blank before it, one digit, one run of other signs, or white space.
SPLIT_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url', 'input_image') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary (GPT-2's rule)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@lru_cache(maxsize=1)
def vocabulary() -> dict[str, int]:
    """Return plain text -> id for words and special tokens; a byte's id is its value."""
    tokens = [*word_tokens(), *SPECIAL_TOKENS]
    return {token: 256 + i for i, token in enumerate(tokens)}


def special_id(token: str) -> int:
    """Return the id of a special token."""
    assert token in SPECIAL_TOKENS
    return vocabulary()[token]


_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")
_PIECE = re.compile(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s+(?!\S)|\s+|_")


@lru_cache(maxsize=200_000)
def _encode_plain(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    known = vocabulary()
    for piece in _PIECE.findall(text):
        token = known.get(piece)
        if token is None:
            ids.extend(piece.encode())
        else:
            ids.append(token)
    return tuple(ids)


def encode(text: str) -> list[int]:
    """Encode ASCII text with special tokens, as the saved tokenizer does, but fast enough to feed the training.

    The saved tokenizer is what counts; `test_demo_tokenizer` holds both against each other.
    """
    ids: list[int] = []
    for part in _SPECIAL.split(text):
        if part in SPECIAL_TOKENS:
            ids.append(vocabulary()[part])
        elif part:
            ids.extend(_encode_plain(part))
    return ids


def decode(ids: list[int]) -> str:
    """Decode ids to text; special tokens are left out and bytes that are no UTF-8 are replaced."""
    texts = {i: token for token, i in vocabulary().items()}
    data = b"".join(
        bytes([i]) if i < 256 else b"" if texts.get(i, "") in SPECIAL_TOKENS else texts.get(i, "").encode() for i in ids
    )
    return data.decode(errors="replace")


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    vocab |= {
        "".join(alphabet[byte] for byte in token.encode()): i
        for token, i in vocabulary().items()
        if token not in SPECIAL_TOKENS
    }
    # Without merges and with ignore_merges a piece is one known word, or its bytes: nothing is ever unknown.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert all(tokenizer.token_to_id(token) == special_id(token) for token in SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen2VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
