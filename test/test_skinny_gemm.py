"""The skinny product: its cut, its results on a CPU for which it is compiled, that it compiles for Hopper, its use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spaceserve.hooks import check_signature
from spaceserve.nvrtc import compile_cubin
from spaceserve.profile import decode_products
from spaceserve.profile.decode_products import DecodeProducts, Tiles
from spaceserve.skinny_gemm import kernel, linears
from spaceserve.skinny_gemm.choice import Measured, agrees, choose
from spaceserve.skinny_gemm.kernel import Workspace
from spaceserve.skinny_gemm.linears import SkinnyLinears, linears_of
from spaceserve.skinny_gemm.tiling import (
    BATCHES,
    MAX_BATCH,
    TILES,
    Product,
    Tile,
    batch_tiles,
    product,
)

pytestmark = pytest.mark.cpu

# Shapes of Qwen2-VL-2B and 7B, Qwen2.5-VL-3B and 32B: qkv, o, gate and up, down, head.
SHAPES = [
    (2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960), (151936, 1536),
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584),
    (2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008),
    (7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648),
]  # fmt: skip


HEADERS = Path(__file__).resolve().parent.parent / "csrc" / "testing"
Run = Callable[..., None]


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tile, int, torch.dtype], Run]:
    """Compiles the kernel for the CPU, where the lanes of a warp are threads."""
    folder = tmp_path_factory.mktemp("skinny_gemm")

    @cache
    def build(tile: Tile, batch: int, dtype: torch.dtype) -> Run:
        library = folder / f"{tile.row_tiles}-{tile.stages}-{tile.warps}-{batch}-{dtype}.so"
        source = library.with_suffix(".cpp")
        parameters = (
            "const u16 *w, const u16 *x, const u16 *bias, u16 *y, float *sums, int *counts, int m, int n, int k"
        )
        source.write_text(
            f'#include "{kernel.SOURCE}"\n'
            f'extern "C" void run(int blocks, {parameters}) '
            "{ run_grid(skinny_gemm, blocks, WARPS, w, x, bias, y, sums, counts, m, n, k); }\n"
        )
        macros = [f"-D{name}={value}" for name, value in kernel.defines(tile, batch, dtype).items()]
        flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{HEADERS}", "-DON_HOST"]
        subprocess.run(["c++", *flags, *macros, "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).run
        function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 6, *[ctypes.c_int] * 3]

        def run(blocks: int, tensors: Sequence[torch.Tensor | None], m: int, made: Product) -> None:
            pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            function(blocks, *pointers, m, made.n, made.k)

        return run

    return build


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_shapes_of_models_are_products_of_the_kernel(n: int, k: int) -> None:
    found = product(n, k)
    assert found == Product(n, k)
    for tile in TILES:
        assert tile.tiles(found) * tile.rows >= n
        assert n % (16 * tile.row_tiles) == 0


@pytest.mark.parametrize(("n", "k"), [(3584, 3600), (3584, 0), (16, 3584), (3584 + 16, 3584)])
def test_other_products_are_left_to_cublas(n: int, k: int) -> None:
    assert product(n, k) is None


def test_batches() -> None:
    assert [batch_tiles(m) for m in (1, 8, 9, 16, 17, 32)] == [1, 1, 2, 2, 4, 4]
    assert max(BATCHES) == MAX_BATCH


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("tile", "m", "dtype"),
    [
        (Tile(1, 4, warps=2), 1, torch.bfloat16),
        (Tile(1, 3, warps=2), 5, torch.float16),
        (Tile(2, 2, warps=1), 8, torch.bfloat16),
        (Tile(1, 4, warps=1), 13, torch.bfloat16),
        (Tile(2, 2, warps=2), 27, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_result_is_that_of_a_linear_layer_on_any_number_of_blocks(
    on_host: Callable[[Tile, int, torch.dtype], Run], tile: Tile, m: int, dtype: torch.dtype, bias: bool
) -> None:
    run = on_host(tile, m, dtype)
    # A tile of a block is not full, one is; a multiple of no number of stages.
    made = Product(n=tile.rows + 32 if tile.rows > 32 else 96, k=448)
    generator = torch.Generator().manual_seed(m)
    x, w, b = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((m, made.k), (made.n, made.k), (made.n,))
    )
    reference = (x.float() @ w.float().T + (b.float() if bias else 0.0)).to(dtype)
    counts = torch.zeros(tile.tiles(made) * tile.warps, dtype=torch.int32)
    # Whole tiles; tiles shared by two; by more, some blocks within one tile; one unit for each block.
    for blocks in (1, 2, 3, 5, tile.units(made)):
        y = torch.full((m, made.n), float("nan"), dtype=dtype)
        sums = torch.full((blocks * 2 * tile.warps * tile.sums(m) * 32,), float("nan"))
        run(blocks, (w, x, b if bias else None, y, sums, counts), m, made)
        assert not counts.any(), "the next product begins with counts of zero"
        assert agrees(y, reference), f"{blocks} blocks"


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_kernel_compiles_for_hopper(tile: Tile, batch: int) -> None:
    cubin = compile_cubin(kernel.SOURCE, "sm_90", kernel.defines(tile, batch, torch.bfloat16))
    assert cubin[:4] == b"\x7fELF"
    assert b"skinny_gemm" in cubin


def times(skinny_ms: dict[Tile, float], cublas_ms: float) -> Callable[[Sequence[Any]], float]:
    def time_ms(calls: Sequence[Any]) -> float:
        return skinny_ms[calls[0].keywords["tile"]] if "tile" in (calls[0].keywords or {}) else cublas_ms

    return time_ms


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize(("cublas_ms", "taken"), [(2.0, TILES[0]), (1.01, None), (0.5, None)])
def test_the_quicker_kernel_is_chosen_for_each_batch(cublas_ms: float, taken: Tile | None) -> None:
    made = Product(64, 256)
    weights = {made: [torch.randn(64, 256) for _ in range(3)]}
    workspace = Workspace([made], 132, torch.device("cpu"))
    skinny_ms = {tile: 1.0 if tile == TILES[0] else 1.5 for tile in TILES}
    rows = choose(weights, [1, 8, 24, 64], 32, workspace, times(skinny_ms, cublas_ms), linear)
    assert [(row.batch, row.num_sms, row.tile) for row in rows] == [(size, 32, taken) for size in (1, 8, 24)]


def test_a_kernel_that_fails_or_is_wrong_is_not_chosen(caplog: pytest.LogCaptureFixture) -> None:
    made = Product(64, 256)
    weights = {made: [torch.randn(64, 256)]}
    workspace = Workspace([made], 132, torch.device("cpu"))
    skinny_ms = {tile: float(1 + number) for number, tile in enumerate(TILES)}

    def run(x: torch.Tensor, weight: torch.Tensor, *, tile: Tile, **rest: Any) -> torch.Tensor:
        if tile == TILES[0]:
            raise RuntimeError("no such instruction")
        y = linear(x, weight)
        if tile == TILES[1]:
            y[0, 0] = float("nan")
        if tile == TILES[2]:
            y[-1, 3] += y.abs().max() / 10
        return y

    (row,) = choose(weights, [4], 132, workspace, times(skinny_ms, 100.0), run)
    assert row.tile == TILES[3]
    assert "no such instruction" in caplog.text
    assert caplog.text.count("is wrong on this device") == 2


class Layer(nn.Module):
    def __init__(self, n: int, k: int, method: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k).half(), requires_grad=False)
        self.quant_method = type(method, (), {})()


def test_only_graphs_of_measured_groups_and_batches_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    used: list[tuple[Tile, int]] = []

    def choose_all(
        weights: Any, batches: Sequence[int], num_sms: int, workspace: Workspace, time_ms: Any
    ) -> list[Measured]:
        asked.append(num_sms)
        return [Measured(made, 4, num_sms, 2.0, 1.0, TILES[0]) for made in weights]

    def run(x: Any, weight: Any, bias: Any, made: Product, tile: Tile, num_sms: int, workspace: Any) -> torch.Tensor:
        used.append((tile, num_sms))
        return linear(x, weight, bias)

    monkeypatch.setattr(linears.torch.cuda, "stream", lambda stream: nullcontext())
    block = nn.ModuleList([Layer(256, 512, "UnquantizedLinearMethod"), Layer(256, 512, "Fp8LinearMethod")])
    head, odd = Layer(1024, 512, "UnquantizedEmbeddingMethod"), Layer(100, 500, "UnquantizedLinearMethod")
    found = linears_of([block, odd], head)
    assert found == [block[0], odd, head]
    weight = found[0].weight
    assert isinstance(weight, torch.Tensor)
    skinny = SkinnyLinears(choose_all, run)
    skinny.register(found, [1, 4, 64], 132)
    x = torch.randn(4, 512).half()
    assert skinny.apply(block[0], x, None) is None, "no graph is being captured"
    with skinny.on(32, None):
        result = skinny.apply(block[0], x, None)
        assert result is not None
        assert torch.equal(result, linear(x, weight))
        assert skinny.apply(head, x, None) is not None
        assert skinny.apply(block[1], x, None) is None, "quantized"
        assert skinny.apply(odd, torch.randn(4, 500).half(), None) is None, "not a shape of the kernel"
        assert skinny.apply(block[0], x[:3], None) is None, "cuBLAS was quicker at this batch, or it was not measured"
        assert skinny.apply(block[0], x.float(), None) is None
    with skinny.on(132, None), skinny.on(32, None):
        pass
    assert asked == [32, 132], "each group is measured once"
    assert used == [(TILES[0], 32)] * 2
    assert skinny.apply(block[0], x, None) is None


def test_where_it_cannot_be_decode_keeps_cublas(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    calls: list[bool] = []
    capture = linears.skinny_linear_hooks(SkinnyLinears(), lambda model: [])[0].function
    runner = SimpleNamespace(device="cpu", server_args=None)
    capture(lambda model_runner, flag: calls.append(flag), runner, False)
    assert calls == [False]
    assert "Products of decode are cuBLAS's" in caplog.text


def test_profiled_products_take_the_kernel_of_the_streams_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made = product(256, 512)
    assert made is not None
    used: list[tuple[Tile, int]] = []
    current = SimpleNamespace(cuda_stream=7)

    def run(x: Any, weight: Any, bias: Any, made: Product, tile: Tile, units: int, workspace: Any) -> torch.Tensor:
        used.append((tile, units))
        return linear(x, weight)

    monkeypatch.setattr(decode_products, "skinny_gemm", run)
    monkeypatch.setattr(decode_products.torch.cuda, "current_stream", lambda: current)
    tiles: Tiles = {(32, made): [(4, TILES[0]), (8, None), (32, TILES[1])], (132, made): [(32, TILES[2])]}
    products = DecodeProducts(tiles, 132, torch.device("cpu"))
    group: Any = SimpleNamespace(granted=32, stream=current)
    products.register(group)
    weight = torch.randn(256, 512)
    for batch in (3, 6, 20, 33):
        x = torch.randn(batch, 512)
        assert torch.equal(products.linear(x, weight), linear(x, weight))
    assert used == [(TILES[0], 32), (TILES[1], 32)], "for 6 cuBLAS is quicker, 33 is not a skinny batch"
    current = SimpleNamespace(cuda_stream=0)
    products.linear(torch.randn(3, 512), weight)
    assert used[-1] == (TILES[2], 132), "a stream of no group has the whole device"
    assert torch.equal(products.linear(torch.ones(1, 500), torch.ones(4, 500)), torch.full((1, 4), 500.0))


def test_hooks_fit_sglang() -> None:
    for hook in linears.skinny_linear_hooks(SkinnyLinears(), lambda model: []):
        check_signature(hook)
