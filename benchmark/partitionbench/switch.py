"""Section switch: what another group for the next layer costs, and whether CUDA graphs keep their group."""

from __future__ import annotations

import statistics
import time
from typing import Any

from partitionbench.gpu import ENCODER_SMS, NUM_PATCHES, QKV_WIDTH, WIDTH, Gpu, Json, guarded


def switching() -> Json:
    gpu = Gpu()
    gpu.partitioner.prepare()
    return {
        "versions": gpu.versions(),
        "cost": guarded(switch_cost, gpu),
        "graphs": guarded(graph_confinement, gpu),
        "memory": guarded(workspace_memory, gpu),
    }


def switch_cost(gpu: Gpu) -> Json:
    """A chain of dependent layers that changes group after each, against the same chain without changes."""
    torch = gpu.torch
    a, b = gpu.partitioner.group(ENCODER_SMS), gpu.partitioner.group(ENCODER_SMS + 8)
    only_a, only_b = f"{a.granted} only", f"{b.granted} only"
    in_turn = f"{a.granted} and {b.granted} in turn"
    x, w = gpu.bf16(NUM_PATCHES[0], WIDTH), gpu.bf16(WIDTH, WIDTH) / WIDTH**0.5
    buffers = [torch.empty_like(x) for _ in range(2)]
    num_layers = 200

    def chain(groups: list[Any]) -> tuple[float, float]:
        """(ms of the chain on the device, ms to submit it)."""
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        groups[0].make_current()
        start.record()
        begin = time.perf_counter()
        source = x
        for i in range(num_layers):
            if len(groups) > 1:
                groups[i % 2].make_current()
            source = torch.mm(source, w, out=buffers[i % 2])
        submit_ms = (time.perf_counter() - begin) * 1e3
        groups[(num_layers - 1) % len(groups)].make_current()
        end.record()
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
        return start.elapsed_time(end), submit_ms

    arms = {only_a: [a], only_b: [b], in_turn: [a, b]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for groups in arms.values():
        chain(groups)
    for _ in range(7):
        for name, groups in arms.items():
            times[name].append(chain(groups))
    device_ms = {name: statistics.median(t[0] for t in runs) for name, runs in times.items()}
    submit_ms = {name: statistics.median(t[1] for t in runs) for name, runs in times.items()}
    expected_ms = (device_ms[only_a] + device_ms[only_b]) / 2
    expected_submit_ms = (submit_ms[only_a] + submit_ms[only_b]) / 2

    begin = time.perf_counter()
    for i in range(1000):
        (a, b)[i % 2].make_current()
    make_current_us = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(1000):
        with a.activate():
            pass
    activate_us = (time.perf_counter() - begin) * 1e3
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    return {
        "layer_us": 1e3 * expected_ms / num_layers,
        "device_ms": device_ms,
        "submit_ms": submit_ms,
        "switch_device_us": 1e3 * (device_ms[in_turn] - expected_ms) / num_layers,
        "switch_submit_us": 1e3 * (submit_ms[in_turn] - expected_submit_ms) / num_layers,
        "make_current_host_us": make_current_us,
        "activate_and_leave_host_us": activate_us,
    }


def graph_confinement(gpu: Gpu) -> Json:
    """Capture on one group's stream, replay on others: where do the blocks run?"""
    torch = gpu.torch
    rows = []
    whole = gpu.partitioner.group(gpu.total)
    small = gpu.partitioner.group(32)
    for captured in (gpu.partitioner.group(ENCODER_SMS), gpu.partitioner.complement_of(ENCODER_SMS), whole):
        size = captured.granted
        reference = gpu.probe.occupy(captured.stream, 50_000, gpu.probe.new_occupation(4 * size)).sms()
        occupation = gpu.probe.new_occupation(4 * size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=captured.stream):
            gpu.probe.occupy(torch.cuda.current_stream(), 50_000, occupation)
        for name, stream in (
            ("its own stream", captured.stream),
            ("the default stream", torch.cuda.default_stream()),
            (f"a {small.granted}-SM group's stream", small.stream),
            ("the whole device's stream", whole.stream),
        ):
            occupation.sm_ids.fill_(-1)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.replay()
            # Whether waiting for the device covers a graph on a green context's stream was a question once.
            torch.cuda.synchronize()
            unwritten = int((occupation.sm_ids.cpu() < 0).sum())
            stream.synchronize()
            seen = occupation.sms() - {-1}
            rows.append(
                {
                    "captured_sms": size,
                    "is_complement": captured.is_complement,
                    "replayed_on": name,
                    "seen": len(seen),
                    "same_as_captured": seen == reference,
                    "blocks_missing_after_device_wait": unwritten,
                    "blocks_missing_after_stream_wait": int((occupation.sm_ids.cpu() < 0).sum()),
                }
            )
    # A cuBLAS kernel, which picks its grid when captured: by time.
    work = gpu.gemm(NUM_PATCHES[0], QKV_WIDTH, WIDTH)
    group = gpu.partitioner.group(ENCODER_SMS)
    with torch.cuda.stream(group.stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.stream):
        work()
    gemm_ms = {
        f"eager in {group.granted}": gpu.time_ms(group, work, 20),
        f"graph of {group.granted}, replayed in {group.granted}": gpu.time_ms(group, graph.replay, 20),
        f"graph of {group.granted}, replayed on all": gpu.time_ms(whole, graph.replay, 20),
        "eager on all": gpu.time_ms(whole, work, 20),
    }
    kept = all(row["same_as_captured"] for row in rows)
    return {"nodes_keep_the_group_of_capture": kept, "rows": rows, "gemm_ms": gemm_ms}


def workspace_memory(gpu: Gpu) -> Json:
    """Device memory that a first matrix product on another group's stream takes (cuBLAS workspaces)."""
    torch = gpu.torch
    work = gpu.gemm(NUM_PATCHES[0], QKV_WIDTH, WIDTH)
    taken = []
    for rung in [rung for rung in gpu.partitioner.rungs if rung > ENCODER_SMS + 8][:4]:
        torch.cuda.synchronize()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        with torch.cuda.stream(gpu.partitioner.group(rung).stream):
            work()
        torch.cuda.synchronize()
        taken.append(
            {
                "rung": rung,
                "device_bytes": free - torch.cuda.mem_get_info()[0],
                "torch_reserved_bytes": torch.cuda.memory_reserved() - reserved,
            }
        )
    return {"rows": taken}
