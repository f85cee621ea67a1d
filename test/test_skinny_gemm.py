"""The skinny product: its cut, its results in Triton's interpreter, that it compiles for Hopper, where it is used."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spaceserve.hooks import check_signature
from spaceserve.profile import decode_products
from spaceserve.profile.decode_products import DecodeProducts, Tiles
from spaceserve.skinny_gemm import choice, kernel, linears
from spaceserve.skinny_gemm.choice import Measured, agrees, choose
from spaceserve.skinny_gemm.kernel import Workspace
from spaceserve.skinny_gemm.linears import SkinnyLinears, linears_of
from spaceserve.skinny_gemm.tiling import (
    BATCHES,
    MAX_BATCH,
    TILES,
    Product,
    Tile,
    batch_rows,
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


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """The module of the kernel, once more, with a kernel that Triton interprets on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location("interpreted_skinny_gemm", kernel.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_a_whole_number_of_stages_for_any_tile(n: int, k: int) -> None:
    found = product(n, k)
    assert found is not None
    for tile in TILES:
        assert k % tile.columns == 0
        assert tile.units(found) * tile.rows * tile.columns >= n * k
        # The kernel computes shares in 32 bits.
        assert (tile.units(found) + 1) * 132 * tile.blocks_per_sm < 2**31


@pytest.mark.parametrize(("n", "k"), [(3584, 3712), (3584, 0), (32, 3584), (3588 + 2, 3584)])
def test_other_products_are_left_to_cublas(n: int, k: int) -> None:
    assert product(n, k) is None


def test_batches() -> None:
    assert [batch_rows(m) for m in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert max(BATCHES) == MAX_BATCH


@pytest.mark.parametrize("m", [1, 5, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_result_is_that_of_a_linear_layer_on_any_number_of_sms(interpreted: ModuleType, m: int, bias: bool) -> None:
    # Not a multiple of the tile's rows; fp16, because the interpreter cannot multiply bf16.
    made = Product(n=200, k=512)
    generator = torch.Generator().manual_seed(m)
    x, w, b = (torch.randn(shape, generator=generator).half() for shape in ((m, 512), (200, 512), (200,)))
    workspace = Workspace([made], 132, torch.device("cpu"))
    workspace.sums.fill_(float("nan"))
    reference = (x.float() @ w.float().T + (b.float() if bias else 0.0)).half()
    for tile in (Tile(64, 128, 3), Tile(128, 64, 2)):
        # Whole tiles; tiles shared by two; by up to six, some blocks within one tile; one stage for each block.
        for num_sms in (1, 3, 5, 11, 100):
            y = interpreted.skinny_gemm(x, w, b if bias else None, made, tile, num_sms, workspace)
            assert not workspace.counts.any(), "the next product begins with counts of zero"
            assert agrees(y, reference), f"{tile} on {num_sms} SMs"


def test_tiles_shared_by_many_blocks_wait_for_the_last(interpreted: ModuleType) -> None:
    """More blocks than tiles: each tile is summed by one of them, from what all wrote."""
    made = Product(n=64, k=1024)
    x, w = torch.ones((2, 1024), dtype=torch.float16), torch.full((64, 1024), 0.5, dtype=torch.float16)
    workspace = Workspace([made], 132, torch.device("cpu"))
    workspace.sums.fill_(float("nan"))
    for num_sms in (5, 8):
        y = interpreted.skinny_gemm(x, w, None, made, Tile(64, 128, 2), num_sms, workspace)
        assert torch.equal(y, torch.full((2, 64), 512.0, dtype=torch.float16))


def test_a_workspace_for_fewer_sms_is_refused(interpreted: ModuleType) -> None:
    made = Product(n=4096, k=512)
    x, w = torch.ones((1, 512), dtype=torch.float16), torch.ones((4096, 512), dtype=torch.float16)
    workspace = Workspace([made], 2, torch.device("cpu"))
    with pytest.raises(AssertionError, match="made for fewer"):
        interpreted.skinny_gemm(x, w, None, made, Tile(256, 64, 2, blocks_per_sm=2), 64, workspace)


def compiled(tile: Tile, batch: int) -> Any:
    constants = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "BATCH": batch,
        "STAGES": tile.stages,
        "HAS_BIAS": True,
    }
    signature = {
        "w_desc": f"tensordesc<bf16[{tile.rows},{tile.columns}]>",
        "x_desc": f"tensordesc<bf16[{batch},{tile.columns}]>",
        **dict.fromkeys(("y_ptr", "bias_ptr"), "*bf16"),
        "sums_ptr": "*fp32",
        "counts_ptr": "*i32",
        **dict.fromkeys(("m", "n", "steps"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(kernel._skinny_gemm, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_kernel_compiles_for_hopper_as_it_is_meant(tile: Tile, batch: int) -> None:
    if not tile.fits(batch):
        assert batch > min(BATCHES), "a tile for no batch"
        return
    binary = compiled(tile, batch)
    ptx = binary.asm["ptx"]
    assert "wgmma.mma_async" in ptx, "products on the tensor cores, weights from shared memory"
    # Two operands in each stage but one before the loop, and two within it: copies run ahead.
    assert ptx.count("cp.async.bulk.tensor") == 2 * tile.stages
    assert tile.shared_bytes(batch) - 256 <= binary.metadata.shared + 1024 <= tile.shared_bytes(batch), "for `fits`"


def times(skinny_ms: dict[Tile, float], cublas_ms: float) -> Callable[[Sequence[Any]], float]:
    def time_ms(calls: Sequence[Any]) -> float:
        return skinny_ms[calls[0].keywords["tile"]] if "tile" in (calls[0].keywords or {}) else cublas_ms

    return time_ms


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize(("cublas_ms", "taken"), [(2.0, TILES[1]), (1.01, None), (0.5, None)])
def test_the_quicker_kernel_is_chosen_for_each_batch(cublas_ms: float, taken: Tile | None) -> None:
    made = Product(64, 256)
    weights = {made: [torch.randn(64, 256) for _ in range(3)]}
    workspace = Workspace([made], 132, torch.device("cpu"))
    skinny_ms = {tile: 1.0 if tile == TILES[1] else 1.5 for tile in TILES}
    rows = choose(weights, [1, 8, 24, 64], 32, workspace, times(skinny_ms, cublas_ms), linear)
    assert [(row.batch, row.num_sms, row.tile) for row in rows] == [(size, 32, taken) for size in (1, 8, 24)]


def test_a_kernel_that_fails_or_is_wrong_is_not_chosen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = (*TILES, Tile(64, 64, 2))
    monkeypatch.setattr(choice, "TILES", tiles)
    made = Product(64, 256)
    weights = {made: [torch.randn(64, 256)]}
    workspace = Workspace([made], 132, torch.device("cpu"))
    skinny_ms = {tile: float(1 + number) for number, tile in enumerate(tiles)}

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
    assert row.tile == tiles[3]
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
    assert products.idle_units() == 100
    current = SimpleNamespace(cuda_stream=0)
    assert products.idle_units() == 0
    assert DecodeProducts({}, 132, torch.device("cpu")).idle_units() == 0, "no groups: nothing is asked of CUDA"
    products.linear(torch.randn(3, 512), weight)
    assert used[-1] == (TILES[2], 132), "a stream of no group has the whole device"
    assert torch.equal(products.linear(torch.ones(1, 500), torch.ones(4, 500)), torch.full((1, 4), 500.0))


def test_hooks_fit_sglang() -> None:
    for hook in linears.skinny_linear_hooks(SkinnyLinears(), lambda model: []):
        check_signature(hook)
