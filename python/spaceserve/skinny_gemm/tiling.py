"""How a skinny product is cut: pure numbers, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of x for which the kernel is compiled, in tiles of 8, and the most for which reading weights is all that counts.
BATCHES = (8, 16, 32)
MAX_BATCH = BATCHES[-1]
# Columns of the weights in a unit of work.
COLUMNS = 64
# Every tile of a warp has so many rows, or half of them.
ROW_GRAIN = 32


@dataclass(frozen=True)
class Product:
    """y (m, n) = x (m, k) W^T with W (n, k)."""

    n: int
    k: int


@dataclass(frozen=True)
class Tile:
    """What a warp multiplies at a time, and how much it loads ahead.

    Attributes:
        row_tiles: tiles of 16 rows of W that a warp has at a time.
        stages: units (of 64 columns) that a warp has in registers or on the way to them.
        warps: of a block.
        blocks_per_sm: that an SM has the registers for, and that are started.
        early: whether the kernel may start before the one ahead of it has ended, to load its first weights.
    """

    row_tiles: int
    stages: int
    warps: int = 16
    blocks_per_sm: int = 1
    early: bool = False

    @property
    def rows(self) -> int:
        """Rows of W in a tile of a block."""
        return 16 * self.row_tiles * self.warps

    def tiles(self, product: Product) -> int:
        """Tiles of rows, the last one perhaps a part of one."""
        return -(-product.n // self.rows)

    def units(self, product: Product) -> int:
        """What is shared out among the blocks."""
        return self.tiles(product) * (product.k // COLUMNS)

    def sums(self, batch: int) -> int:
        """Sums that a lane has, for x of `batch` rows."""
        return 4 * self.row_tiles * batch_tiles(batch)


# Candidates that `choice` measures. To take 64 bytes a clock from an L2 cache that is 1 us away, an SM needs about
# 100 KiB in flight: 512 threads with 16 loads of 16 bytes have 128.
TILES = (
    Tile(1, 4),
    Tile(1, 3),
    Tile(2, 2),
    Tile(1, 4, warps=8, blocks_per_sm=2),
    Tile(1, 4, warps=4, blocks_per_sm=4),
)


def product(n: int, k: int) -> Product | None:
    """The product with W (n, k), or None where this kernel does not do it: n must be a multiple of 32, k of 64."""
    if n < ROW_GRAIN or n % ROW_GRAIN or k % COLUMNS or k == 0:
        return None
    return Product(n, k)


def batch_tiles(m: int) -> int:
    """Tiles of 8 rows of x that the kernel multiplies for `m` that there are: those of the next of BATCHES."""
    assert 1 <= m <= MAX_BATCH, m
    return next(rows for rows in BATCHES if rows >= m) // 8
