"""Whether a server's model lies on several ranks, which what is made for one rank must know."""

from __future__ import annotations

from typing import Any


def has_several_ranks(server_args: Any) -> bool:
    """Whether SGLang splits or copies the model: tensor, pipeline or data parallel."""
    return bool(server_args.tp_size > 1 or server_args.pp_size > 1 or server_args.dp_size > 1)
