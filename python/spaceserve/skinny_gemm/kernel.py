"""y = x W^T (+ b) for the few rows of a decode batch, at the speed at which the given SMs can read W.

A decode step reads every weight once for a handful of tokens, so it takes as long as its SMs take to stream the
weights. On few SMs the way from the L2 cache into an SM (64 bytes a clock) is the limit, and only a kernel that keeps
it busy all the time comes near: as many blocks as fit run from the first to the last tile without a pause, TMA copies
run several stages ahead, across the ends of tiles, and the products (wgmma, weights as the operand with many rows) wait
in their shadow.

Work is split evenly, to one stage: each block takes an equal, contiguous range of the stages of all tiles ("stream-K").
A tile that lies in several blocks' ranges is summed, in the order of the blocks, by whichever of them ends last. So for
one grid the result has the same bits each time; with another number of SMs it differs by roundings.

Triton only; needs Hopper's TMA and wgmma to be worth it. `tiling` says how a product is cut, `choice` whether to use
this or cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spaceserve.skinny_gemm.tiling import MAX_BATCH, TILES, Product, Tile, batch_rows


@triton.jit
def _store_result(  # type: ignore[no-untyped-def]
    y, y_ptr, bias_ptr, tile, batch, m, n, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A tile's sums, with the bias, to their cells of the result."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    mask = (rows[:, None] < n) & (batch[None, :] < m)
    cells = batch[None, :] * n + rows[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + cells, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _share(sums_ptr, cells, block, last_block, tile, units, blocks, steps, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `block` summed of a tile that it shares; zeros beyond the last block of the tile."""
    # A block's first shared tile lies in its first slot, another in its second.
    slot = tl.where(tile == block * units // blocks // steps, 0, 1)
    cells += (block * 2 + slot) * SIZE
    return tl.load(sums_ptr + cells, mask=block <= last_block, other=0.0, cache_modifier=".cg")


# Batch and cut vary: a kernel for each of their values would be compiled in vain.
@triton.jit(do_not_specialize=["m", "steps"])
def _skinny_gemm(  # type: ignore[no-untyped-def]
    w_desc, x_desc, y_ptr, bias_ptr, sums_ptr, counts_ptr, m, n, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BATCH: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One block of a persistent grid. ``sums`` is (blocks, 2, ROWS, BATCH) fp32, ``counts`` (tiles,) int32 and zero.

    A tile has ``steps`` stages of ``COLUMNS``. Steps are no constant: one compiled kernel does all shapes.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    units = (n + ROWS - 1) // ROWS * steps
    first = block * units // blocks
    last = (block + 1) * units // blocks
    tile = first // steps
    step = first % steps
    batch = tl.arange(0, BATCH)
    shared = tl.arange(0, ROWS)[:, None] * BATCH + batch[None, :]
    acc = tl.full((ROWS, BATCH), 0.0, dtype=tl.float32)
    for unit in tl.range(first, last, num_stages=STAGES):
        w = w_desc.load([tile * ROWS, step * COLUMNS])
        x = x_desc.load([0, step * COLUMNS])
        acc = tl.dot(w, x.T, acc)
        # Counted on rather than divided: the copies' addresses are computed in every stage.
        step += 1
        ended = step == steps
        if ended | (unit == last - 1):
            if ended & (tile * steps >= first):
                _store_result(acc, y_ptr, bias_ptr, tile, batch, m, n, ROWS, HAS_BIAS)
            else:
                slot = block * 2 + tl.where(tile == first // steps, 0, 1)
                tl.store(sums_ptr + slot * ROWS * BATCH + shared, acc, cache_modifier=".cg")
            acc = tl.full((ROWS, BATCH), 0.0, dtype=tl.float32)
        step = tl.where(ended, 0, step)
        tile = tl.where(ended, tile + 1, tile)
    for end in tl.static_range(2):
        # A block shares the first and the last tile of its range at most.
        tile = first // steps if end == 0 else (last - 1) // steps
        ours = min((tile + 1) * steps, last) - max(tile * steps, first)
        if (ours < steps) & ((end == 0) | (tile != first // steps)):
            tl.debug_barrier()  # all threads' sums are written before the block says so
            others = tl.atomic_add(counts_ptr + tile, ours, sem="acq_rel", scope="gpu")
            if others + ours == steps:
                # The blocks that have the tile's first and its last stage.
                sharer = ((tile * steps + 1) * blocks - 1) // units
                last_sharer = ((tile + 1) * steps * blocks - 1) // units
                y = tl.full((ROWS, BATCH), 0.0, dtype=tl.float32)
                while sharer <= last_sharer:
                    # Four loads in flight: one after another each would take the way to memory and back.
                    y0 = _share(sums_ptr, shared, sharer, last_sharer, tile, units, blocks, steps, ROWS * BATCH)
                    y1 = _share(sums_ptr, shared, sharer + 1, last_sharer, tile, units, blocks, steps, ROWS * BATCH)
                    y2 = _share(sums_ptr, shared, sharer + 2, last_sharer, tile, units, blocks, steps, ROWS * BATCH)
                    y3 = _share(sums_ptr, shared, sharer + 3, last_sharer, tile, units, blocks, steps, ROWS * BATCH)
                    y += y0
                    y += y1
                    y += y2
                    y += y3
                    sharer += 4
                _store_result(y, y_ptr, bias_ptr, tile, batch, m, n, ROWS, HAS_BIAS)
                tl.store(counts_ptr + tile, 0)  # for the next product


class Workspace:
    """Memory for tiles that several blocks share. One for products that run one after another, as on one stream.

    Args:
        products: those it is made for.
        num_sms: of the device.
        tiles: with which it is used.
    """

    def __init__(
        self, products: Sequence[Product], num_sms: int, device: torch.device, tiles: Sequence[Tile] = TILES
    ) -> None:
        sums = max(tile.blocks_per_sm * tile.rows for tile in tiles) * num_sms * 2 * MAX_BATCH
        self.sums = torch.empty(sums, dtype=torch.float32, device=device)
        # A kernel leaves its counts at zero.
        counts = max((tile.tiles(product) for product in products for tile in tiles), default=1)
        self.counts = torch.zeros(counts, dtype=torch.int32, device=device)


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
        x: (m, k), contiguous rows, m at most `tiling.MAX_BATCH`; bf16 or fp16 like all others.
        weight: (n, k), contiguous.
        bias: (n,) or None.
        product: n and k (`tiling.product`).
        num_sms: of the current stream's group: the grid is one round of blocks on them.

    Returns (m, n), equal in its bits for the same `tile` and `num_sms`.
    """
    m = x.shape[0]
    y = torch.empty((m, product.n), dtype=x.dtype, device=x.device)
    rows = batch_rows(m)
    blocks = min(num_sms * tile.blocks_per_sm, tile.units(product))
    assert blocks * 2 * tile.rows * rows <= workspace.sums.numel(), f"{tile} on {num_sms} SMs: made for fewer"
    _skinny_gemm[(blocks,)](
        TensorDescriptor(weight, [product.n, product.k], [weight.stride(0), 1], [tile.rows, tile.columns]),
        TensorDescriptor(x, [m, product.k], [x.stride(0), 1], [rows, tile.columns]),
        y,
        weight if bias is None else bias,
        workspace.sums,
        workspace.counts,
        m,
        product.n,
        product.k // tile.columns,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BATCH=rows,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
    )
    return y
