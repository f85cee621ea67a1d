"""Section kernels: time of GEMMs and attention over the number of SMs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from partitionbench.gpu import MLP_WIDTH, NUM_PATCHES, QKV_WIDTH, WIDTH, Gpu, Json, guarded


def kernel_scaling() -> Json:
    gpu = Gpu()
    gpu.partitioner.prepare(complements=True)
    return {
        "versions": gpu.versions(),
        "gemm": guarded(gemm_scaling, gpu),
        "linear_carveout": guarded(carveout_effect, gpu),
        "attention": guarded(attention_scaling, gpu),
    }


def gemm_scaling(gpu: Gpu) -> Json:
    rows = []
    for m in NUM_PATCHES:
        for n in (QKV_WIDTH, MLP_WIDTH):
            work = gpu.gemm(m, n, WIDTH)
            whole_ms = gpu.time_ms(gpu.partitioner.group(gpu.total), work, 20, warmups=10)
            for group in gpu.groups():
                row: Json = {"m": m, "n": n, "k": WIDTH, "sms": group.granted, "is_complement": group.is_complement}
                try:
                    row["ms"] = gpu.time_ms(group, work, 8)
                    # 1 where time falls as SMs grow; the dips are waves of tiles that do not fill.
                    row["efficiency"] = whole_ms * gpu.total / (row["ms"] * group.granted)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"
                rows.append(row)
    return {"rows": rows}


def carveout_effect(gpu: Gpu) -> Json:
    """cuBLAS told to leave out the SMs that the group lacks (torch's experimental carveout), against not told."""
    torch = gpu.torch
    set_carveout = torch._C._set_sm_carveout_experimental
    rows = []
    for m in NUM_PATCHES:
        x, weight, bias = gpu.bf16(m, WIDTH), gpu.bf16(MLP_WIDTH, WIDTH), gpu.bf16(MLP_WIDTH)
        calls: dict[str, Callable[[], Any]] = {
            "mm": gpu.gemm(m, MLP_WIDTH, WIDTH),
            "linear+bias": functools.partial(torch.nn.functional.linear, x, weight, bias),
        }
        for sms in (32, 64, 72, 96):
            group = gpu.partitioner.group(sms)
            for name, work in calls.items():
                plain_ms = gpu.time_ms(group, work, 10)
                try:
                    set_carveout(gpu.total - group.granted)
                    told_ms = gpu.time_ms(group, work, 10)
                finally:
                    set_carveout(None)
                rows.append({"call": name, "m": m, "sms": group.granted, "plain_ms": plain_ms, "told_ms": told_ms})
    return {"rows": rows}


def attention_scaling(gpu: Gpu) -> Json:
    rows = []
    for num_patches in NUM_PATCHES:
        name, plain = gpu.attention(num_patches)
        groups = gpu.groups()
        if num_patches > 10_000:
            groups = [group for group in groups if group.granted in (32, 60, 64, 68, 72, 96, gpu.total)]
        for group in groups:
            row: Json = {
                "kernel": name,
                "patches": num_patches,
                "sms": group.granted,
                "is_complement": group.is_complement,
            }
            try:
                row["ms"] = gpu.time_ms(group, plain, 3, warmups=1)
                if name.startswith("FA3") and not group.is_whole_device:
                    _, told = gpu.attention(num_patches, sm_margin=gpu.total - group.granted)
                    row["sm_margin_ms"] = gpu.time_ms(group, told, 3, warmups=1)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            rows.append(row)
    return {"rows": rows}
