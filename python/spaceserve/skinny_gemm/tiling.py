"""How a skinny product is cut: pure numbers, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of x that one wgmma instruction takes at least, and the most for which reading weights is still all that counts.
BATCHES = (16, 32)
MAX_BATCH = BATCHES[-1]
# k is cut at multiples of this, which every tile's columns divide.
COLUMN_GRAIN = 256
# So many equal parts keep 132 SMs busy to within a few percent, whatever the tile.
TARGET_UNITS = 2048
UNIT_TILE_ROWS = 64


@dataclass(frozen=True)
class Product:
    """y (m, n) = x (m, k) W^T with W (n, k); k is summed in `parts` equal parts."""

    n: int
    k: int
    parts: int


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

    def units(self, product: Product) -> int:
        """Tiles times parts: what is shared out among the blocks."""
        return -(-product.n // self.rows) * product.parts

    def shared_bytes(self, batch: int, element_bytes: int = 2) -> int:
        """Shared memory of the stages of a block, for x of `batch` rows."""
        return self.stages * (self.rows + batch_rows(batch)) * self.columns * element_bytes

    def fits(self, batch: int) -> bool:
        """Whether an SM has the shared memory of its blocks, for x of `batch` rows."""
        return self.blocks_per_sm * (self.shared_bytes(batch) + SHARED_BYTES_BESIDE_STAGES) <= SHARED_BYTES_PER_SM


# Of an SM of Hopper. A block takes more than its stages: 1 KiB for the system, the rest for barriers and results.
SHARED_BYTES_PER_SM = 228 << 10
SHARED_BYTES_BESIDE_STAGES = 6 << 10
# Candidates that `choice` measures. To take 64 bytes a clock from an L2 cache that is 1 us away, an SM needs about
# 100 KiB in flight. A stage of 36 KiB arrives every 600 clocks then: one warp group can hardly multiply 128 x 128
# weights in that time, two groups or two blocks can.
TILES = (
    Tile(128, 128, 5, warps=8),
    Tile(128, 256, 3, warps=8),
    Tile(64, 256, 5),
    Tile(256, 64, 5, warps=8),
    Tile(64, 128, 4, blocks_per_sm=2),
    Tile(128, 64, 5, blocks_per_sm=2),
)


def product(n: int, k: int) -> Product | None:
    """The product with W (n, k), or None where this kernel does not do it: k must be a multiple of 256, n of 8.

    The cut depends on the shape alone, not on the device or the number of SMs, because the order of summation does.
    """
    if n < UNIT_TILE_ROWS or n % 8 or k % COLUMN_GRAIN or k == 0:
        return None
    grains, tiles = k // COLUMN_GRAIN, -(-n // UNIT_TILE_ROWS)
    divisors = [d for d in range(1, grains + 1) if grains % d == 0]
    parts = next((d for d in divisors if tiles * d >= TARGET_UNITS), divisors[-1])
    return Product(n, k, parts)


def batch_rows(m: int) -> int:
    """Rows of x that the kernel multiplies for `m` that there are: the next of BATCHES."""
    assert 1 <= m <= MAX_BATCH, m
    return next(rows for rows in BATCHES if rows >= m)
