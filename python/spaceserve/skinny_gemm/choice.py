"""Which kernel a product of decode takes: cuBLAS or a tile of the skinny product, as measured on the SMs it will use.

Which is quicker depends on the shape, the batch and the number of SMs, and differs between devices: so it is measured
where the server starts, with the weights that it will read. A tile is compared with cuBLAS's result first; one that
computes something else on this device, or does not compile there, is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from spaceserve.skinny_gemm.kernel import Workspace, skinny_gemm
from spaceserve.skinny_gemm.tiling import BATCHES, MAX_BATCH, TILES, Product, Tile

logger = logging.getLogger(__name__)

# A tile must be this much quicker than cuBLAS to be taken.
MIN_GAIN = 1.03
# Of the largest result: bf16 has 8 bits, and both sum in fp32 in another order.
TOLERANCE = 2.0**-6
REPLAYS = 3

# Milliseconds of one call, from calls that use different weights, so that none is in a cache.
Timer = Callable[[Sequence[Callable[[], Any]]], float]


@dataclass(frozen=True)
class Measured:
    """One product at one batch size on one group of SMs. `tile` is None where cuBLAS is taken."""

    product: Product
    batch: int
    num_sms: int
    cublas_ms: float
    skinny_ms: float
    tile: Tile | None

    def describe(self) -> str:
        if self.tile is None:
            return f"{self.product.n}x{self.product.k} cuBLAS"
        return f"{self.product.n}x{self.product.k} {self.cublas_ms / self.skinny_ms:.2f}"


def graph_timer(stream: Any) -> Timer:
    """Times calls in one CUDA graph that is captured and replayed on `stream`."""

    def time_ms(calls: Sequence[Callable[[], Any]]) -> float:
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        with torch.cuda.stream(stream):
            graph.replay()
            for _ in range(REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / len(calls))
        return min(times)

    return time_ms


def agrees(result: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether two results of a product are the same but for rounding; not where either has a NaN."""
    scale = reference.float().abs().max()
    return bool((result.float() - reference.float()).abs().max() <= TOLERANCE * scale)


def choose(
    weights: Mapping[Product, Sequence[torch.Tensor]],
    batches: Sequence[int],
    num_sms: int,
    workspace: Workspace,
    time_ms: Timer,
    run: Callable[..., torch.Tensor] = skinny_gemm,
) -> list[Measured]:
    """Measure every product at every batch size on the current stream's group; one row for each.

    Args:
        weights: (n, k) matrices of each product; all are timed in turn.
        batches: batch sizes that decode will have; those above `MAX_BATCH` are left out.
        run: the skinny product.
    """
    rows = []
    for product, matrices in weights.items():
        sizes = sorted({size for size in batches if size <= MAX_BATCH})
        for least, most in zip((0, *BATCHES), BATCHES, strict=False):
            here = [size for size in sizes if least < size <= most]
            if here:
                rows += _choose(product, matrices, here, num_sms, workspace, time_ms, run)
    return rows


def _choose(
    product: Product,
    matrices: Sequence[torch.Tensor],
    sizes: Sequence[int],
    num_sms: int,
    workspace: Workspace,
    time_ms: Timer,
    run: Callable[..., torch.Tensor],
) -> list[Measured]:
    """For batch sizes that one compiled kernel serves: one tile for all, against cuBLAS for each."""
    first = matrices[0]
    generator = torch.Generator(device=first.device).manual_seed(0)
    x = torch.randn((sizes[-1], product.k), dtype=first.dtype, device=first.device, generator=generator)
    best: tuple[float, Tile] | None = None
    for tile in (tile for tile in TILES if tile.fits(sizes[-1])):
        call = partial(run, bias=None, product=product, tile=tile, num_sms=num_sms, workspace=workspace)
        try:
            right = agrees(call(x, first), torch.nn.functional.linear(x, first))
            if right:
                ms = time_ms([partial(call, x, weight) for weight in matrices])
        except Exception as error:
            # Whatever it was (not compiled, too much shared memory): cuBLAS is there.
            logger.warning("No skinny product with %s here: %s: %s", tile, type(error).__name__, error)
            continue
        if not right:
            logger.warning("The skinny product %s with %s is wrong on this device and not used", product, tile)
        elif best is None or ms < best[0]:
            best = (ms, tile)
    rows = []
    for size in sizes:
        cublas_ms = time_ms([partial(torch.nn.functional.linear, x[:size], weight) for weight in matrices])
        faster = best is not None and cublas_ms > MIN_GAIN * best[0]
        skinny_ms = float("inf") if best is None else best[0]
        rows.append(Measured(product, size, num_sms, cublas_ms, skinny_ms, best[1] if best and faster else None))
    return rows
