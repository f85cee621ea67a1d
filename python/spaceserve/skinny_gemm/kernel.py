"""y = x W^T (+ b) for the few rows of a decode batch, at the speed at which the given SMs can read W.

A decode step reads every weight once for a handful of tokens, so it takes as long as its SMs take to stream the
weights. On few SMs the way from the L2 cache into an SM (64 bytes a clock) is the limit. Plain loads into registers
come to it (measured on an H200: 105 GB/s for each SM, 4.2 TB/s on 40 of them), where copies into shared memory by the
TMA unit came to 76, and those of cuBLAS's kernels to 60 to 97. So the kernel (``kernel.cu``) has no shared memory: what
a lane loads is what the tensor core takes from it.

Compiled with NVRTC where it is first used, 0.3 s for each `Tile` and batch size of `BATCHES`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spaceserve.nvrtc import compile_cubin
from spaceserve.partition.cuda_driver import check, load_driver
from spaceserve.skinny_gemm.tiling import MAX_BATCH, TILES, Product, Tile, batch_tiles

SOURCE = Path(__file__).with_name("kernel.cu")


def defines(tile: Tile, batch: int, dtype: torch.dtype) -> dict[str, int]:
    """The macros with which ``kernel.cu`` is compiled, for x of `batch` rows."""
    return {
        "ROW_TILES": tile.row_tiles,
        "BATCH_TILES": batch_tiles(batch),
        "STAGES": tile.stages,
        "WARPS": tile.warps,
        "BLOCKS": tile.blocks_per_sm,
        "FP16": int(dtype == torch.float16),
    }


class Workspace:
    """Memory for tiles that several blocks share. One for products that run one after another, as on one stream.

    Args:
        products: those it is made for.
        num_sms: of the device.
    """

    def __init__(self, products: list[Product], num_sms: int, device: torch.device) -> None:
        sums = max(tile.blocks_per_sm * tile.warps * tile.sums(MAX_BATCH) for tile in TILES) * num_sms * 2 * 32
        self.sums = torch.empty(sums, dtype=torch.float32, device=device)
        # A kernel leaves its counts at zero.
        counts = max((tile.tiles(product) * tile.warps for product in products for tile in TILES), default=1)
        self.counts = torch.zeros(counts, dtype=torch.int32, device=device)


@cache
def _function(device: torch.device, tile: Tile, batch: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """The driver's module and the kernel compiled for x of up to `batch` rows."""
    driver = load_driver()
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cubin(SOURCE, f"sm_{major}{minor}", defines(tile, batch, dtype))
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the module goes into the primary context, which this makes
        module = check(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
    return module, check(driver.cuModuleGetFunction(module, b"skinny_gemm"), "cuModuleGetFunction")


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    tile: Tile,
    num_sms: int,
    workspace: Workspace,
) -> torch.Tensor:
    """x W^T + b on the current stream.

    Args:
        x: (m, k), contiguous, m at most `tiling.MAX_BATCH`; bf16 or fp16 like all others.
        weight: (n, k), contiguous.
        bias: (n,) or None.
        product: n and k (`tiling.product`).
        num_sms: of the current stream's group: the grid is one round of blocks on them.

    Returns (m, n), equal in its bits for the same `tile` and `num_sms`.

    Raises:
        RuntimeError: it cannot be compiled or launched.
    """
    driver = load_driver()
    m, device = x.shape[0], x.device
    y = torch.empty((m, product.n), dtype=x.dtype, device=device)
    _, function = _function(device, tile, 8 * batch_tiles(m), x.dtype)
    config = driver.CUlaunchConfig()
    config.gridDimX = min(num_sms * tile.blocks_per_sm, tile.units(product))
    config.blockDimX = 32 * tile.warps
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    assert config.gridDimX * 2 * tile.warps * tile.sums(m) * 32 <= workspace.sums.numel(), "a workspace for fewer SMs"
    if tile.early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    pointers = (weight, x, bias, y, workspace.sums, workspace.counts)
    values = (*(0 if tensor is None else tensor.data_ptr() for tensor in pointers), m, product.n, product.k)
    types = (*[ctypes.c_void_p] * len(pointers), *[ctypes.c_int] * 3)
    check(driver.cuLaunchKernelEx(config, function, (values, types), 0), "cuLaunchKernelEx(skinny_gemm)")
    return y
