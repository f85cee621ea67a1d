"""y = x W^T (+ b) for the few rows of a decode batch, at the speed at which the given SMs can read W.

A decode step reads every weight once for a handful of tokens, so it takes as long as its SMs take to stream the
weights. On few SMs the way from the L2 cache into an SM (64 bytes a clock) is the limit, and only a kernel that keeps
it busy all the time comes near: one block per SM runs from the first to the last tile without a pause, TMA copies run
several stages ahead, across the ends of tiles, and the products (wgmma, weights as the operand with many rows) wait in
their shadow.

Work is split evenly: a tile of rows is cut into parts along K, and each block takes an equal, contiguous range of all
parts ("stream-K"). A tile that lies in several blocks' ranges is summed by whichever of them ends last. Each part is
summed for itself and the parts are added in their order, whoever does it: with one tile the result has the same bits on
any number of SMs.

Triton only; needs Hopper's TMA and wgmma to be worth it. `tiling` says how a product is cut, `choice` whether to use
this or cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spaceserve.skinny_gemm.tiling import Product, Tile, batch_rows


@triton.jit
def _store_result(  # type: ignore[no-untyped-def]
    y, y_ptr, bias_ptr, rows, cells, mask, n, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A tile's sums, with the bias, to their cells of the result."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + cells, y.to(y_ptr.dtype.element_ty), mask=mask)


# Batch and cut vary: a kernel for each of their values would be compiled in vain.
@triton.jit(do_not_specialize=["m", "parts", "steps"])
def _skinny_gemm(  # type: ignore[no-untyped-def]
    w_desc, x_desc, y_ptr, bias_ptr, sums_ptr, counts_ptr, m, n, parts, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BATCH: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One block of a persistent grid. ``sums`` is (parts, m, n) fp32, ``counts`` (tiles,) int32 and zero.

    A part has ``steps`` stages of ``COLUMNS``. Parts and steps are no constants: one compiled kernel does all shapes.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    units = (n + ROWS - 1) // ROWS * parts
    first = block * units // blocks
    last = (block + 1) * units // blocks
    tile = first // parts
    part = first % parts
    step = 0  # of the part
    batch = tl.arange(0, BATCH)
    acc = tl.full((ROWS, BATCH), 0.0, dtype=tl.float32)
    total = tl.full((ROWS, BATCH), 0.0, dtype=tl.float32)
    for _ in tl.range(0, (last - first) * steps, num_stages=STAGES):
        column = (part * steps + step) * COLUMNS
        w = w_desc.load([tile * ROWS, column])
        x = x_desc.load([0, column])
        acc = tl.dot(w, x.T, acc)
        if step == steps - 1:
            rows = tile * ROWS + tl.arange(0, ROWS)
            mask = (rows[:, None] < n) & (batch[None, :] < m)
            cells = batch[None, :] * n + rows[:, None]
            if (tile * parts >= first) & ((tile + 1) * parts <= last):
                total = acc if part == 0 else total + acc
                if part == parts - 1:
                    _store_result(total, y_ptr, bias_ptr, rows, cells, mask, n, HAS_BIAS)
            else:
                tl.store(sums_ptr + part * m * n + cells, acc, mask=mask, cache_modifier=".cg")
            acc = tl.full((ROWS, BATCH), 0.0, dtype=tl.float32)
        # Counted on rather than divided: the copies' addresses are computed in every stage.
        step += 1
        ended = step == steps
        step = tl.where(ended, 0, step)
        part = tl.where(ended, part + 1, part)
        tile = tl.where(part == parts, tile + 1, tile)
        part = tl.where(part == parts, 0, part)
    for end in tl.static_range(2):
        # A block shares the first and the last tile of its range at most.
        tile = first // parts if end == 0 else (last - 1) // parts
        ours = min((tile + 1) * parts, last) - max(tile * parts, first)
        if (ours < parts) & ((end == 0) | (tile != first // parts)):
            tl.debug_barrier()  # all threads' sums are written before the block says so
            others = tl.atomic_add(counts_ptr + tile, ours, sem="acq_rel", scope="gpu")
            if others + ours == parts:
                rows = tile * ROWS + tl.arange(0, ROWS)
                mask = (rows[:, None] < n) & (batch[None, :] < m)
                cells = batch[None, :] * n + rows[:, None]
                y = tl.load(sums_ptr + cells, mask=mask, other=0.0, cache_modifier=".cg")
                for other in range(1, parts):
                    y += tl.load(sums_ptr + other * m * n + cells, mask=mask, other=0.0, cache_modifier=".cg")
                _store_result(y, y_ptr, bias_ptr, rows, cells, mask, n, HAS_BIAS)
                tl.store(counts_ptr + tile, 0)  # for the next product


class Workspace:
    """Memory for tiles that several blocks share. One for products that run one after another, as on one stream.

    Args:
        products: those it is made for.
        max_batch: the largest number of rows of x.
    """

    def __init__(self, products: list[Product], max_batch: int, device: torch.device) -> None:
        sums = max((p.parts * p.n for p in products if p.parts > 1), default=1) * max_batch
        self.sums = torch.empty(sums, dtype=torch.float32, device=device)
        # A kernel leaves its counts at zero.
        self.counts = torch.zeros(max((p.n for p in products), default=1), dtype=torch.int32, device=device)


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
        product: n, k and how k is cut (`tiling.product`).
        num_sms: of the current stream's group: the grid is one round of blocks on them.

    Returns (m, n), for one `tile` equal in its bits for every `num_sms`.
    """
    m = x.shape[0]
    y = torch.empty((m, product.n), dtype=x.dtype, device=x.device)
    rows = batch_rows(m)
    blocks = min(num_sms * tile.blocks_per_sm, tile.units(product))
    _skinny_gemm[(blocks,)](
        TensorDescriptor(weight, [product.n, product.k], [weight.stride(0), 1], [tile.rows, tile.columns]),
        TensorDescriptor(x, [m, product.k], [x.stride(0), 1], [rows, tile.columns]),
        y,
        weight if bias is None else bias,
        workspace.sums,
        workspace.counts,
        m,
        product.n,
        product.parts,
        product.k // product.parts // tile.columns,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BATCH=rows,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
    )
    return y
