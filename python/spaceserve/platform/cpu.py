"""SGLang on any x86-64 CPU, as an out-of-tree platform.

SGLang's own CPU engine needs a kernel build with AMX that no package registry carries. Declared as an
out-of-tree platform, the same SGLang runs on plain PyTorch operators: slow, exact, and everywhere. It serves
tests, demos and development. Where an accelerator is present it never becomes active.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# SGLang sizes the KV pool from free memory, which on a CPU is the whole machine's. 64k tokens are enough for
# tests and demos; `--max-total-tokens` overrides it.
DEFAULT_MAX_TOTAL_TOKENS = 65536
DEFAULT_MAX_RUNNING_REQUESTS = 32


def has_accelerator() -> bool:
    """Whether PyTorch sees a device that SGLang has a platform of its own for."""
    return torch.cuda.is_available() or torch.xpu.is_available()


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`.

    Returns:
        The dotted name of the platform class, or None where an accelerator is present or the user asked for
        SGLang's own CPU engine.
    """
    if has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "spaceserve.platform.cpu.TorchCpuPlatform"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The CPU through PyTorch's native operators: no graph capture, no pinned memory, no overlap scheduling."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Choose the settings without which SGLang does not run on a plain CPU.

        Raises:
            ValueError: a setting was given that needs a GPU.
        """
        server_args.device = "cpu"
        if server_args.dtype == "auto":
            # Half-precision products run on emulated arithmetic on CPUs without AMX or AVX512-BF16.
            server_args.dtype = "float32"
        server_args.disable_overlap_schedule = True
        # SGLang's scheduler spins while it has nothing to do, which on a few cores starves the other processes.
        server_args.sleep_on_idle = True
        server_args.disable_fast_image_processor = True
        server_args.mm_feature_transport = "cpu"
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        # xgrammar's masks lie in pinned memory and are applied by CUDA kernels; outlines uses plain PyTorch.
        if server_args.grammar_backend == "xgrammar":
            raise ValueError("--grammar-backend xgrammar needs a GPU; the CPU has outlines")
        if server_args.grammar_backend is None:
            server_args.grammar_backend = "outlines"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS

    def get_device(self, device_id: int = 0) -> str:
        # SGLang 0.5.17 splits what it gets here as text where `--device` was not given.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from spaceserve.platform.kv_allocator import SingleTokenKVAllocator

        return SingleTokenKVAllocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"
