r"""The skinny product on a Hopper GPU: results on groups of SMs, in CUDA graphs. Also under compute-sanitizer:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
    python3 -m pytest -q -m gpu test/test_skinny_gemm_gpu.py
"""

from collections.abc import Iterator

import pytest
import torch

from spaceserve.partition import make_partitioner
from spaceserve.skinny_gemm.choice import agrees, choose, graph_timer
from spaceserve.skinny_gemm.kernel import Workspace, skinny_gemm
from spaceserve.skinny_gemm.tiling import TILES, Product, Tile, product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an NVIDIA GPU of the Hopper generation",
    ),
]

# Few and many tiles and parts, rows that are no multiple of a tile's.
SHAPES = [(4608, 3584), (1024, 8960), (152064 // 8, 256), (200, 512)]


@pytest.fixture(scope="module")
def streams() -> Iterator[dict[int, torch.cuda.Stream]]:
    """By SMs: the whole device and two groups that decode would have."""
    with make_partitioner("green_ctx", device="cuda", min_units=16, prepare="nothing") as partitioner:
        found = {partitioner.total_units: torch.cuda.Stream()}
        for sms in (48, 24):
            group = partitioner.complement_of(partitioner.total_units - sms)
            assert group is not None
            assert group.stream is not None
            found[group.granted] = group.stream
        yield found


def operands(made: Product, m: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(made.n + m)
    x, w, b = (
        torch.randn(shape, device="cuda", generator=generator).to(dtype)
        for shape in ((m, made.k), (made.n, made.k), (made.n,))
    )
    return x, w, b


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_results_on_groups(
    streams: dict[int, torch.cuda.Stream], tile: Tile, dtype: torch.dtype, n: int, k: int
) -> None:
    made = product(n, k)
    assert made is not None
    workspace = Workspace([made], max(streams), torch.device("cuda"))
    workspace.sums.fill_(float("nan"))
    for m in (m for m in (1, 7, 16, 17, 32) if tile.fits(m)):
        x, w, b = operands(made, m, dtype)
        reference = (x.float() @ w.float().T + b.float()).to(dtype)
        torch.cuda.synchronize()
        for sms, stream in streams.items():
            with torch.cuda.stream(stream):
                y, again = (skinny_gemm(x, w, b, made, tile, sms, workspace) for _ in range(2))
            stream.synchronize()
            assert agrees(y, reference), f"{m} rows on {sms} SMs"
            assert torch.equal(y, again), f"{m} rows on {sms} SMs: other bits"
            assert not workspace.counts.any()


def test_a_graph_replays_with_new_inputs(streams: dict[int, torch.cuda.Stream]) -> None:
    made = product(4608, 3584)
    assert made is not None
    workspace = Workspace([made], max(streams), torch.device("cuda"))
    for sms, stream in streams.items():
        x, w, b = operands(made, 8, torch.bfloat16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            skinny_gemm(x, w, b, made, TILES[0], sms, workspace)
        with torch.cuda.graph(graph, stream=stream):
            y = skinny_gemm(x, w, b, made, TILES[0], sms, workspace)
        for _ in range(20):
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            assert agrees(y, torch.nn.functional.linear(x.float(), w.float(), b.float()).bfloat16())


def test_a_choice_is_measured(streams: dict[int, torch.cuda.Stream]) -> None:
    made = product(3584, 18944)
    assert made is not None
    weights = [operands(made, 1, torch.bfloat16)[1] for _ in range(2)]
    workspace = Workspace([made], max(streams), torch.device("cuda"))
    for sms, stream in streams.items():
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            rows = choose({made: weights}, [1, 8, 32], sms, workspace, graph_timer(stream))
        assert [row.batch for row in rows] == [1, 8, 32]
        assert all(row.cublas_ms > 0 and 0 < row.skinny_ms < float("inf") for row in rows)
