"""Products of a small decode batch on few SMs: memory bandwidth of cuBLAS against a deeply pipelined Triton kernel.

  decode_products.py OUT.json [--budget-s 85]

Times the five products of Qwen2-VL-7B's decode step (weights larger than the L2 cache in rotation, from CUDA graphs) on
the whole device, on SM groups that the driver splits off, and on remainders: what it tells is whether a side of the
split has enough of the way to memory, and whether a kernel of one's own would have more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from spaceserve.partition import make_partitioner

# name -> (rows of the weight, columns)
PRODUCTS = {
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
}
BATCHES = {"gate_up": (1, 16)}
SPLIT_OFF_SMS = (16, 24)
REMAINDER_SMS = (36, 52, 68)
# rows and columns of a tile, stages, warps, parts of the reduction
CONFIGS = [
    (rows, columns, stages, warps, parts)
    for rows, columns, stages, warps in [(64, 128, 4, 4), (64, 128, 6, 4), (128, 64, 4, 4), (128, 64, 6, 4)]
    for parts in (1, 2, 4)
]


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, m, n, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    batch = tl.arange(0, BM)
    part = tl.program_id(1)
    columns = part * (K // PARTS) + tl.arange(0, BK)
    w = w_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    x = x_ptr + batch[None, :] * K + columns[:, None]
    sums = tl.zeros((BN, BM), dtype=tl.float32)
    for _ in tl.range(0, K // PARTS, BK, num_stages=STAGES):
        weights = tl.load(w, mask=rows[:, None] < n, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(weights, tl.load(x, mask=batch[None, :] < m, other=0.0), sums)
        w += BK
        x += BK
    y = y_ptr + part * BM * n + batch[None, :] * n + rows[:, None]
    tl.store(y, sums, mask=(rows[:, None] < n) & (batch[None, :] < m))


def triton_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: Sequence[int]) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T by parts into out [parts, 16, n] float32; returns their sum [m, n] in x's dtype."""
    (m, k), n = x.shape, weight.shape[0]
    rows, columns, stages, warps, parts = config
    _product[(triton.cdiv(n, rows), parts)](x, weight, out, m, n, k, rows, columns, 16, parts, stages, num_warps=warps)
    return out.flatten()[: parts * 16 * n].view(parts, 16, n)[:, :m].sum(0).to(x.dtype)


def time_ms(calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> float:
    """Least time of a call out of three replays of a graph that holds all of them."""
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / len(calls))
    return float(min(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=85.0)
    options = parser.parse_args()
    partitioner = make_partitioner("green_ctx", device="cuda", min_units=16, prepare="nothing")
    streams: dict[str, Any] = {"132 whole": torch.cuda.Stream()}
    for sms in SPLIT_OFF_SMS:
        group: Any = partitioner.complement_of(partitioner.total_units - sms)
        streams[f"{sms} split off"] = group.stream
    for sms in REMAINDER_SMS:
        group = partitioner.group(sms)
        streams[f"{sms} remainder"] = group.stream
    end_s = time.monotonic() + options.budget_s
    rows: list[dict[str, Any]] = []
    for name, (n, k) in PRODUCTS.items():
        copies = max(1, min(8, int(400e6 // (n * k * 2))))
        weights = [0.02 * torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        out = torch.empty(4 * 16 * n, device="cuda", dtype=torch.float32)
        for batch in BATCHES.get(name, (4,)):
            x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
            expected = torch.nn.functional.linear(x, weights[0])
            candidates: dict[str, Callable[[torch.Tensor], object]] = {
                "cuBLAS": lambda w, x=x: torch.nn.functional.linear(x, w)  # type: ignore[misc]
            }
            for config in CONFIGS:
                if k % (config[1] * config[4]) == 0 and time.monotonic() < end_s:
                    torch.testing.assert_close(
                        triton_product(x, weights[0], out, config), expected, rtol=0.05, atol=0.05
                    )
                    candidates[f"Triton {config}"] = lambda w, x=x, c=config, o=out: triton_product(x, w, o, c)  # type: ignore[misc]
            for kernel, call in candidates.items():
                times = {
                    place: time_ms([lambda w=w, call=call: call(w) for w in weights], stream)  # type: ignore[misc]
                    for place, stream in streams.items()
                }
                rows.append({"product": name, "batch": batch, "kernel": kernel, "ms": times})
                print(name, batch, kernel, {p: f"{n * k * 2e-6 / ms:.0f} GB/s" for p, ms in times.items()}, flush=True)
    options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
