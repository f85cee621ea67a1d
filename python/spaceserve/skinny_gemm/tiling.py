"""How a skinny product is cut: pure numbers, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of x that one wgmma instruction takes at least, and the most for which reading weights is still all that counts.
BATCHES = (16, 32)
MAX_BATCH = BATCHES[-1]
# Every tile's columns divide it.
COLUMN_GRAIN = 256
MIN_ROWS = 64


@dataclass(frozen=True)
class Product:
    """y (m, n) = x (m, k) W^T with W (n, k)."""

    n: int
    k: int


@dataclass(frozen=True)
class Tile:
    """What one block reads at a time, and how far ahead.

    Attributes:
        rows, columns: of the weight in one stage.
        stages: in shared memory at once.
        warps: of a block.
        blocks_per_sm: that fit into an SM's shared memory and are started.
    """

    rows: int
    columns: int
    stages: int
    warps: int = 4
    blocks_per_sm: int = 1

    def tiles(self, product: Product) -> int:
        """Tiles of rows."""
        return -(-product.n // self.rows)

    def units(self, product: Product) -> int:
        """Stages of all tiles: what is shared out among the blocks."""
        return self.tiles(product) * (product.k // self.columns)

    def shared_bytes(self, batch: int, element_bytes: int = 2) -> int:
        """Shared memory of a block, for x of `batch` rows: stages, a tile's sums, and what is the same for all."""
        rows = batch_rows(batch)
        stages = self.stages * (self.rows + rows) * self.columns * element_bytes
        return stages + self.rows * rows * 4 + SHARED_BYTES_BESIDE

    def fits(self, batch: int) -> bool:
        """Whether an SM has the shared memory of its blocks, for x of `batch` rows."""
        return self.blocks_per_sm * self.shared_bytes(batch) <= SHARED_BYTES_PER_SM


# Of an SM of Hopper.
SHARED_BYTES_PER_SM = 228 << 10
# Of a block: 1 KiB for the system, and barriers.
SHARED_BYTES_BESIDE = 1280
# Candidates that `choice` measures. To take 64 bytes a clock from an L2 cache that is 1 us away, an SM needs about
# 100 KiB in flight. Of a dozen tiles these three are all that pays on 32 to 132 SMs of an H200 (decode_products.py).
TILES = (Tile(64, 256, 5), Tile(128, 128, 5), Tile(64, 128, 4, blocks_per_sm=2))


def product(n: int, k: int) -> Product | None:
    """The product with W (n, k), or None where this kernel does not do it: k must be a multiple of 256, n of 8."""
    if n < MIN_ROWS or n % 8 or k % COLUMN_GRAIN or k == 0:
        return None
    return Product(n, k)


def batch_rows(m: int) -> int:
    """Rows of x that the kernel multiplies for `m` that there are: the next of BATCHES."""
    assert 1 <= m <= MAX_BATCH, m
    return next(rows for rows in BATCHES if rows >= m)
