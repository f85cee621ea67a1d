"""Cut a long video into pieces that can be encoded, and overtaken, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def split_video(grid_thw: Sequence[int], capacity_patches: int) -> list[tuple[int, int]]:
    """Half-open ranges [t0, t1) of temporal slices, in order, that together cover the video once.

    grid_thw is (temporal slices, patch rows, patch columns) as the processor gives it; a slice is one pair of frames
    for Qwen2-VL and has rows * columns patches, so piece [t0, t1) is rows [t0 * h * w, t1 * h * w) of pixel_values.
    Each piece fits capacity_patches, except that a slice is never cut: where a single slice is larger than the
    capacity, pieces are single slices. The number of pieces is the smallest that allows this, and they differ by one
    slice at most, because a short last piece would pay a whole forward's fixed cost for little work.

    Pieces give the features of the whole only where the encoder's attention ends at the slice. Qwen2-VL's and
    Qwen2.5-VL's does: cu_seqlens has one segment per slice in every layer, rotary positions hold rows and columns
    only, and the merger joins 2x2 patches of one slice. An encoder that attends across frames must not be cut.

    Raises ValueError where grid_thw is not three positive numbers or the capacity is not positive.
    """
    if len(grid_thw) != 3 or any(side < 1 for side in grid_thw):
        raise ValueError(f"grid_thw must be three positive numbers, not {tuple(grid_thw)}")
    if capacity_patches < 1:
        raise ValueError(f"capacity must be at least one patch, not {capacity_patches}")
    num_slices, height, width = (int(side) for side in grid_thw)
    slices_per_piece = max(1, capacity_patches // (height * width))
    num_pieces = -(-num_slices // slices_per_piece)
    cuts = [piece * num_slices // num_pieces for piece in range(num_pieces + 1)]
    return list(pairwise(cuts))
