r"""Green contexts on a real GPU, in one process, where %smid is the physical SM.

Small and quick, so that it also runs under compute-sanitizer:
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python3 -m pytest -q -m gpu test/test_partition_gpu.py
API errors are left out: torch probes for driver entry points that may be absent, and our own calls check their results.
The figures are in benchmark/gpu_partition.py.
"""

from collections.abc import Iterator

import pytest
import torch

from spaceserve.partition import PartitionUnavailable, make_partitioner
from spaceserve.partition.green_ctx import GreenCtxPartitioner
from spaceserve.partition.probe import Probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]

STAY_NS = 50_000


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def partitioner(device: torch.device) -> Iterator[GreenCtxPartitioner]:
    with GreenCtxPartitioner(device=device) as made:
        yield made


@pytest.fixture(scope="module")
def probe(device: torch.device) -> Iterator[Probe]:
    made = Probe(device)
    yield made
    torch.cuda.synchronize(device)
    made.close()


def sms_of(probe: Probe, stream: torch.cuda.Stream, num_sms: int) -> set[int]:
    """SMs that four half-SM blocks per expected SM ran on."""
    return probe.occupy(stream, STAY_NS, probe.new_occupation(4 * num_sms)).sms()


def test_every_rung_runs_on_its_own_sms_only(partitioner: GreenCtxPartitioner, probe: Probe) -> None:
    everything = sms_of(probe, torch.cuda.current_stream(), partitioner.total_units)
    assert len(everything) == partitioner.total_units
    for rung in partitioner.rungs:
        group = partitioner.group(rung)
        assert group.granted == rung
        seen = sms_of(probe, group.stream, rung)
        assert len(seen) == rung, f"granted {rung}, seen {len(seen)}"
        complement = partitioner.complement(group)
        if complement is not None:
            others = sms_of(probe, complement.stream, complement.granted)
            assert not seen & others
            assert seen | others == everything


def test_a_second_partitioner_and_a_second_stream_get_the_same_sms(
    partitioner: GreenCtxPartitioner, probe: Probe, device: torch.device
) -> None:
    rung = partitioner.rungs[len(partitioner.rungs) // 2]
    group = partitioner.group(rung)
    seen = sms_of(probe, group.stream, rung)
    assert sms_of(probe, group.new_stream(), rung) == seen
    with GreenCtxPartitioner(device=device) as other:
        assert sms_of(probe, other.group(rung).stream, rung) == seen
        rest = other.complement_of(rung)
        assert rest is not None
        assert not sms_of(probe, rest.stream, rest.granted) & seen


def test_torch_work_goes_to_the_active_group_and_comes_back(partitioner: GreenCtxPartitioner) -> None:
    outside = torch.cuda.current_stream()
    group = partitioner.group(partitioner.rungs[-2])
    with group.activate() as active:
        assert active is group
        assert torch.cuda.current_stream() == group.stream
    assert torch.cuda.current_stream() == outside
    with pytest.raises(RuntimeError, match="inside"), group.activate():
        raise RuntimeError("inside")
    assert torch.cuda.current_stream() == outside


def test_changing_groups_between_layers_keeps_the_order(partitioner: GreenCtxPartitioner, device: torch.device) -> None:
    """A chain in which every layer needs the one before: lost ordering would give another number."""
    generator = torch.Generator(device).manual_seed(0)
    weights = [torch.randn(512, 512, device=device, generator=generator) / 512**0.5 for _ in range(24)]
    x = torch.randn(2048, 512, device=device, generator=generator)
    expected = x
    for weight in weights:
        expected = torch.tanh(expected @ weight)
    torch.cuda.synchronize(device)
    groups = [partitioner.group(rung) for rung in partitioner.rungs if rung >= 16]
    buffers = [torch.empty_like(x) for _ in weights]
    outside = torch.cuda.current_stream()
    with groups[0].activate():
        hidden = x
        for i, (weight, buffer) in enumerate(zip(weights, buffers, strict=True)):
            groups[i % len(groups)].make_current()
            torch.mm(hidden, weight, out=buffer)
            hidden = buffer.tanh_()
        groups[0].make_current()
    assert torch.cuda.current_stream() == outside
    torch.testing.assert_close(hidden, expected, rtol=2e-3, atol=2e-3)


def test_auto_takes_green_contexts_and_refuses_another_size(device: torch.device) -> None:
    with make_partitioner("auto", device=str(device), min_units=16, prepare="both") as made:
        assert made.backend == "green_ctx"
        assert made.complement(made.group(made.rungs[-1])) is None
        total = made.total_units
    with pytest.raises(ValueError, match="cannot be had"):
        make_partitioner("auto", device=str(device), total_units=total + 1)
    with pytest.raises(ValueError, match="multiples of"):
        make_partitioner("green_ctx", device=str(device), step=1)


def test_what_is_not_there_is_refused_with_a_reason() -> None:
    with pytest.raises(PartitionUnavailable, match="not among them"):
        GreenCtxPartitioner(device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(PartitionUnavailable, match="ROCm"):
        make_partitioner("hip_cu_mask", device="cuda")
    with make_partitioner("none", device="cuda") as made:
        assert made.rungs == (made.total_units,)


def peak_concurrency(starts_ns: torch.Tensor, ends_ns: torch.Tensor) -> int:
    """Most blocks that ran at one moment."""
    times = torch.cat([starts_ns.cpu(), ends_ns.cpu()])
    steps = torch.cat([torch.ones(len(starts_ns)), -torch.ones(len(ends_ns))])
    # Ends before starts of the same moment.
    order = sorted(range(len(times)), key=lambda i: (int(times[i]), float(steps[i])))
    return int(steps[order].cumsum(0).max())


def test_graphs_of_two_complements_stay_in_them_wherever_they_are_replayed(
    partitioner: GreenCtxPartitioner, probe: Probe, device: torch.device
) -> None:
    """As decode's graphs (scheduler/decode_graphs.py): one pool, captured on complements, replayed on one stream."""
    total = partitioner.total_units
    complements = [partitioner.complement_of(rung) for rung in (total // 2, total * 3 // 4)]
    num_blocks = 4 * total
    pool = torch.cuda.graph_pool_handle()
    weight = torch.randn(1024, 1024, device=device)
    x = torch.randn(32, 1024, device=device)
    expected = torch.tanh(x @ weight) @ weight
    replay_stream = torch.cuda.Stream(device)
    captured = []
    for group in complements:
        assert group is not None
        occupation = probe.new_occupation(num_blocks)
        with torch.cuda.stream(group.stream):
            torch.tanh(x @ weight) @ weight  # cuBLAS takes its workspace of this stream
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=group.stream):
            out = torch.tanh(x @ weight) @ weight
            probe.occupy(torch.cuda.current_stream(), STAY_NS, occupation)
        captured.append((group.granted, graph, out, occupation))
    for granted, graph, out, occupation in (*captured, *captured):  # from one to the other and back
        with torch.cuda.stream(replay_stream):
            graph.replay()
            seen = out.clone()
        replay_stream.synchronize()
        torch.cuda.synchronize(device)
        torch.testing.assert_close(seen, expected, rtol=2e-2, atol=2e-1)
        # Two blocks fill an SM, and there are enough of them for every SM of the device.
        assert granted < peak_concurrency(occupation.start_ns, occupation.end_ns) <= 2 * granted
    everywhere = probe.occupy(replay_stream, STAY_NS, probe.new_occupation(num_blocks))
    torch.cuda.synchronize(device)
    largest = max(granted for granted, *_ in captured)
    assert peak_concurrency(everywhere.start_ns, everywhere.end_ns) > 2 * largest
