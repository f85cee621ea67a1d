"""Section confine: on which SMs the kernels of a group run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from partitionbench.gpu import (
    ENCODER_SMS,
    HEAD_DIM,
    MLP_WIDTH,
    NUM_HEADS,
    NUM_PATCHES,
    QKV_WIDTH,
    WIDTH,
    Gpu,
    Json,
    guarded,
)


def confinement() -> Json:
    gpu = Gpu()
    result: Json = {"versions": gpu.versions(), "split_all_rungs_ms": gpu.split_ms}
    begin = time.perf_counter()
    gpu.partitioner.prepare(complements=True)
    result["make_all_groups_ms"] = (time.perf_counter() - begin) * 1e3
    result["num_green_contexts"] = len(gpu.partitioner._lanes)
    result["rungs"] = guarded(confinement_by_smid, gpu)
    result["kernels"] = guarded(confinement_of_kernels, gpu)
    return result


def confinement_by_smid(gpu: Gpu) -> Json:
    """Granted SMs = seen SMs, disjoint from the complement's, together all; and how groups of two sizes lie."""

    def seen(stream: Any, num_sms: int) -> set[int]:
        return gpu.probe.occupy(stream, 50_000, gpu.probe.new_occupation(4 * num_sms)).sms()

    everything = seen(gpu.torch.cuda.current_stream(), gpu.total)
    rows: list[Json] = []
    previous: set[int] = set()
    nested = True
    for rung in gpu.partitioner.rungs:
        group = gpu.partitioner.group(rung)
        mine = seen(group.stream, rung)
        complement = gpu.partitioner.complement(group)
        theirs = seen(complement.stream, complement.granted) if complement else set()
        nested &= previous <= mine
        previous = mine
        rows.append(
            {
                "granted": rung,
                "seen": len(mine),
                "complement_seen": len(theirs) if complement else None,
                "disjoint": not mine & theirs,
                "complete": (mine | theirs == everything) if complement else None,
                "first_sms": sorted(mine)[:8],
            }
        )
    holds = (
        all(row["granted"] == row["seen"] and row["disjoint"] and row["complete"] is not False for row in rows)
        and len(everything) == gpu.total
    )
    result: Json = {"holds_for_every_rung": holds, "groups_are_nested": nested, "rows": rows}
    if not holds:
        result["failed"] = "a group ran outside its SMs, or not on all of them"
    return result


def confinement_of_kernels(gpu: Gpu) -> Json:
    """Timing evidence for kernels that cannot report where they run.

    The occupier fills SMs so that no other block fits. A kernel of a group must not feel that all *other* SMs are
    full (else it uses them), and must not end before its *own* SMs are free again (else it ran elsewhere).
    """
    torch = gpu.torch
    group = gpu.partitioner.group(ENCODER_SMS)
    complement = gpu.partitioner.complement(group)
    assert complement is not None
    own_second_stream, stay_ms = group.new_stream(), 30.0
    attention_name, attention = gpu.attention(NUM_PATCHES[0])
    x, bias = gpu.bf16(NUM_PATCHES[0], WIDTH), gpu.bf16(MLP_WIDTH)
    weight, norm = gpu.bf16(MLP_WIDTH, WIDTH), gpu.bf16(WIDTH)
    heads_first = [gpu.bf16(1, NUM_HEADS, NUM_PATCHES[0], HEAD_DIM) for _ in range(3)]
    works: dict[str, Callable[[], Any]] = {
        "cuBLAS mm 5329x3840x1280": gpu.gemm(NUM_PATCHES[0], QKV_WIDTH, WIDTH),
        "cuBLASLt linear+bias 5329x5120x1280": lambda: torch.nn.functional.linear(x, weight, bias),
        f"attention 5329, {attention_name}": attention,
        "attention 5329, torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first),
        "layer norm + GELU": lambda: torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (WIDTH,), norm)),
    }

    def elapsed_ms(work: Callable[[], Any], occupied: Any, num_sms: int) -> tuple[float, int]:
        """(ms from before the occupier's launch to the work's end, fewest blocks on one occupied SM)."""
        occupation = gpu.probe.new_occupation(2 * num_sms)
        start, before, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record(group.stream)
        gpu.probe.occupy(occupied, int(stay_ms * 1e6), occupation)
        time.sleep(0.004)
        with torch.cuda.stream(group.stream):
            before.record()
            work()
            end.record()
        blocks = occupation.blocks_by_sm()
        fewest = min(blocks.values()) if len(blocks) == num_sms else 0
        return (before if occupied is complement.stream else start).elapsed_time(end), fewest

    rows = []
    for name, work in works.items():
        row: Json = {"kernel": name}
        try:
            row["alone_ms"] = gpu.time_ms(group, work, 10)
            one = gpu.time_ms(group, work, 1)
            others_full_ms, others_blocks = elapsed_ms(work, complement.stream, complement.granted)
            own_full_ms, own_blocks = elapsed_ms(work, own_second_stream, group.granted)
            row |= {
                "alone_once_ms": one,
                "others_full_ms": others_full_ms,
                "own_full_ms": own_full_ms,
                "occupied_fully": others_blocks == 2 and own_blocks == 2,
                "needs_no_other_sm": others_full_ms < stay_ms / 2,
                "waits_for_own_sms": own_full_ms >= 0.95 * stay_ms,
            }
            if not (row["occupied_fully"] and row["needs_no_other_sm"] and row["waits_for_own_sms"]):
                row["failed"] = f"{name}: not shown to run on its group's SMs alone"
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return {"group_sms": group.granted, "occupied_ms": stay_ms, "rows": rows}
