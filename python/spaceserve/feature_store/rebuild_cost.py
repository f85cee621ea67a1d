"""What it costs to compute an image's features again: the price the feature store puts on an eviction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RebuildCost:
    """Encode time of one image of n patches: a + b*n + c*n^2, in milliseconds.

    The linear part is the projections and MLPs, the square is the full attention over the image's patches.

    The defaults pass through two measured points of a 32-layer ViT of Qwen2-VL's shape with torch SDPA on a whole
    H200: 5,329 patches (1024x1024) 26.5 ms and 21,316 patches (2048x2048) 251 ms. Two points fix two coefficients;
    the constant stays 0 until a profile of the served model supplies all three. Only ratios matter to the store.
    """

    fixed_ms: float = 0.0
    per_patch_ms: float = 2.705e-3
    per_patch_squared_ms: float = 4.255e-7

    def __post_init__(self) -> None:
        if min(self.fixed_ms, self.per_patch_ms, self.per_patch_squared_ms) < 0:
            raise ValueError(f"coefficients of the rebuild cost must not be negative: {self}")

    def __call__(self, num_patches: int) -> float:
        """Milliseconds to encode `num_patches` patches of one image."""
        return self.fixed_ms + (self.per_patch_ms + self.per_patch_squared_ms * num_patches) * num_patches
