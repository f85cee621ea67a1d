"""KV slot allocator of the CPU platform."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator


class SingleTokenKVAllocator(TokenToKVPoolAllocator):
    """SGLang's token allocator behind the constructor that SGLang uses for out-of-tree platforms.

    SGLang passes `page_size` to every out-of-tree allocator; its own allocator of page size 1 has no such
    parameter.
    """

    def __init__(self, size: int, *, page_size: int, **kwargs: Any) -> None:
        if page_size != 1:
            raise ValueError(f"the CPU platform serves with --page-size 1, got {page_size}")
        super().__init__(size, **kwargs)
