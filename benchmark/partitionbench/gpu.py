"""torch, the ladder and the probe of one process, and the loads that all sections use."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

SEED = 0
# The sections of one process look at this split, the interference of two processes at all of these: SMs of the group
# (what the driver leaves) and of its complement (what the driver splits off), on 132 SMs.
ENCODER_SMS = 68
SPLITS = ((68, 64), (84, 48), (100, 32))
# Qwen2-VL's encoder at 1024x1024 (5,329 patches) and 2048x2048 (21,316): width 1280, 16 heads of 80, MLP 5120.
NUM_PATCHES = (5329, 21316)
WIDTH, QKV_WIDTH, MLP_WIDTH, NUM_HEADS, HEAD_DIM = 1280, 3840, 5120, 16, 80

Json = dict[str, Any]


def guarded(function: Callable[..., Json], *arguments: Any) -> Json:
    """The function's result, or its failure in words: a failed part must be seen, not stop the others."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def failures(result: Any) -> list[str]:
    """Every "failed" in a result, however deep."""
    if isinstance(result, dict):
        own = [result["failed"]] if "failed" in result else []
        return own + [text for value in result.values() for text in failures(value)]
    if isinstance(result, list):
        return [text for value in result for text in failures(value)]
    return []


class Gpu:
    """torch, the ladder and the probe of one process."""

    def __init__(self) -> None:
        import torch

        from spaceserve.partition.green_ctx import GreenCtxPartitioner
        from spaceserve.partition.probe import Probe

        self.torch = torch
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.manual_seed(SEED)
        begin = time.perf_counter()
        self.partitioner: Any = GreenCtxPartitioner(device=self.device)
        self.split_ms = (time.perf_counter() - begin) * 1e3
        self.total = self.partitioner.total_units
        self.probe = Probe(self.device)

    def versions(self) -> Json:
        torch = self.torch
        from cuda.bindings import __version__ as bindings_version

        from spaceserve.partition.cuda_driver import check, load_driver

        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "num_sms": self.total,
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "driver": int(check(load_driver().cuDriverGetVersion(), "cuDriverGetVersion")),
            "cuda_bindings": str(bindings_version),
            "rungs": list(self.partitioner.rungs),
        }

    def bf16(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16)

    def groups(self) -> list[Any]:
        """Every group and every complement of 16 SMs or more, ascending by size."""
        partitioner = self.partitioner
        found = [partitioner.group(rung) for rung in partitioner.rungs if rung >= 16]
        rests = [partitioner.complement_of(rung) for rung in partitioner.rungs]
        found += [rest for rest in rests if rest is not None and rest.granted >= 16]
        return sorted(found, key=lambda group: (group.granted, group.is_complement))

    def time_ms(self, group: Any, work: Callable[[], Any], repeats: int, warmups: int = 2) -> float:
        """Mean time of ``work`` on the group's stream, from events on it."""
        torch = self.torch
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(group.stream):
            for _ in range(warmups):
                work()
            start.record()
            for _ in range(repeats):
                work()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def attention(self, num_patches: int, sm_margin: int = 0) -> tuple[str, Callable[[], Any]]:
        """(name, call) of FA3 where sgl_kernel has it, else torch's SDPA."""
        torch = self.torch
        q, k, v = (self.bf16(num_patches, NUM_HEADS, HEAD_DIM) for _ in range(3))
        try:
            from sgl_kernel.flash_attn import flash_attn_varlen_func
        except Exception:
            heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
            return "torch SDPA", lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first)
        lengths = torch.tensor([0, num_patches], dtype=torch.int32, device=self.device)

        def call() -> Any:
            return flash_attn_varlen_func(
                q, k, v, lengths, lengths, max_seqlen_q=num_patches, max_seqlen_k=num_patches, sm_margin=sm_margin
            )

        return "FA3 (sgl_kernel)", call

    def gemm(self, m: int, n: int, k: int) -> Callable[[], Any]:
        a, b, out = self.bf16(m, k), self.bf16(k, n), self.bf16(m, n)
        return lambda: self.torch.mm(a, b, out=out)
