"""The products of a decode step with the kernels that a server with `--skinny-gemm auto` takes on each group of SMs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from spaceserve.partition import UnitGroup
from spaceserve.sis.shapes import ModelShape
from spaceserve.skinny_gemm.choice import choose, graph_timer
from spaceserve.skinny_gemm.kernel import Workspace, skinny_gemm
from spaceserve.skinny_gemm.tiling import Product, Tile, product

from .workloads import cold_weights

# By units of the group and product: the kernel for batches of up to so many, None for cuBLAS, the smallest first.
Tiles = Mapping[tuple[int, Product], Sequence[tuple[int, Tile | None]]]


class DecodeProducts:
    """Computes x W^T on the current stream, which has the units of its `register`ed group, or else `total_units`."""

    def __init__(self, tiles: Tiles, total_units: int, device: torch.device) -> None:
        self.tiles, self._total_units = tiles, total_units
        self._units: dict[int, int] = {}
        # One for each stream: groups run beside each other here.
        self._workspaces: dict[int, Workspace] = {}
        self._products = sorted({made for _, made in tiles}, key=lambda made: (made.n, made.k))
        self._device = device

    def register(self, group: UnitGroup) -> None:
        """The group's stream has its units."""
        if group.stream is not None:
            self._units[group.stream.cuda_stream] = group.granted

    def idle_units(self) -> int:
        """Units of the device that the current stream does not have."""
        if not self._units:
            return 0
        return self._total_units - self._units.get(torch.cuda.current_stream().cuda_stream, self._total_units)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x (m, k), weight (n, k); (m, n)."""
        made = product(*weight.shape)
        stream = torch.cuda.current_stream().cuda_stream
        units = self._units.get(stream, self._total_units)
        choices = () if made is None else self.tiles.get((units, made), ())
        tile = next((tile for most, tile in choices if x.shape[0] <= most), None)
        if made is None or tile is None:
            return torch.nn.functional.linear(x, weight)
        workspace = self._workspaces.get(stream)
        if workspace is None:
            workspace = self._workspaces[stream] = Workspace(self._products, self._total_units, self._device)
        return skinny_gemm(x, weight, None, made, tile, units, workspace)


def measure_tiles(
    shape: ModelShape,
    groups: Iterable[UnitGroup],
    total_units: int,
    batches: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tiles:
    """Choose kernels for the decoder's products on each group, as the scheduler does where it starts."""
    tiles: dict[tuple[int, Product], list[tuple[int, Tile | None]]] = {}
    groups = list(groups)
    for spec in shape.decoder.gemms():
        made = product(spec.n, spec.k)
        if made is None:
            continue
        weights = cold_weights(spec, device, dtype)
        workspace = Workspace([made], total_units, device)
        for group in groups:
            assert group.stream is not None, f"{group!r} has no stream"
            with torch.cuda.stream(group.stream):
                rows = choose({made: weights}, batches, group.granted, workspace, graph_timer(group.stream))
            tiles[group.granted, made] = [(row.batch, row.tile) for row in rows]
    return tiles
