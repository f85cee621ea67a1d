#!/usr/bin/env python3
"""What SM partitions do on a GPU: confinement, interference, cost of a switch, kernels inside a group.

    PYTHONPATH=python python3 benchmark/gpu_partition.py --out results/

Each section runs in processes of its own and is reported as failed where it fails; the others still run. Writes
gpu_partition.json to --out and prints a table last. About a minute on one H200, compilation included.

    confine    one process: SMs seen by %smid for every rung and complement; cuBLAS and attention kernels run only on
               their group's SMs (they wait while it is full, and do not feel it when all others are)
    switch     cost of another group for the next layer; whether CUDA graphs keep the group of their capture
    kernels    time of GEMMs and attention over the number of SMs, with and without cuBLAS's SM target and FA3's margin
    interfere  two processes under a private MPS daemon: a bandwidth-bound kernel beside a saturating encoder, without
               masks, with the encoder masked, with both masked; and what a prefill-like load does to the encoder
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECTIONS = ("confine", "switch", "kernels", "interfere")
SEED = 0
ENCODER_SMS = 64
# Qwen2-VL's encoder at 1024x1024 (5,329 patches) and 2048x2048 (21,316): width 1280, 16 heads of 80, MLP 5120.
NUM_PATCHES = (5329, 21316)
WIDTH, QKV_WIDTH, MLP_WIDTH, NUM_HEADS, HEAD_DIM = 1280, 3840, 5120, 16, 80
SECTION_TIMEOUT_S = {"confine": 60.0, "switch": 60.0, "kernels": 90.0, "interfere": 120.0}

Json = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_partition.json")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--arm-s", type=float, default=0.5, help="seconds measured per arm of the section interfere")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: Json = {"command": sys.argv, "seed": SEED, "commit": git_commit(), "host": platform.platform()}
    workers = {section: Worker(section) for section in arguments.sections if section != "interfere"}
    for section in arguments.sections:
        begin = time.monotonic()
        result = guarded(interference, arguments.arm_s) if section == "interfere" else workers[section].run()
        result["section_s"] = round(time.monotonic() - begin, 1)
        report[section] = result
        report["wall_s"] = round(time.monotonic() - started, 1)
        (arguments.out / "gpu_partition.json").write_text(json.dumps(report, indent=1))
    print_table(report)
    failed = [section for section in arguments.sections if failures(report[section])]
    return 1 if failed else 0


def git_commit() -> str:
    result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def guarded(function: Callable[..., Json], *arguments: Any) -> Json:
    """The function's result, or its failure in words: a failed part must be seen, not stop the others."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def failures(result: Any) -> list[str]:
    """Every "failed" in a result, however deep."""
    if isinstance(result, dict):
        own = [result["failed"]] if "failed" in result else []
        return own + [text for value in result.values() for text in failures(value)]
    if isinstance(result, list):
        return [text for value in result for text in failures(value)]
    return []


class Worker:
    """A process for one one-process section: a broken CUDA context ends with it.

    It imports torch at once, so that the imports of all sections overlap, and touches the GPU when told to.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(section, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def run(self) -> Json:
        timeout_s = SECTION_TIMEOUT_S[self._section]
        try:
            self._pipe.send("go")
            if not self._pipe.poll(timeout_s):
                return {"failed": f"no result within {timeout_s:.0f} s"}
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            return {"failed": f"the process died with status {self._process.exitcode}"}
        finally:
            self._process.join(5)
            if self._process.is_alive():
                self._process.kill()


def worker_main(section: str, pipe: Any) -> None:
    import torch  # noqa: F401

    pipe.recv()
    pipe.send(guarded({"confine": confinement, "switch": switching, "kernels": kernel_scaling}[section]))


# --- helpers of the processes that use the GPU


class Gpu:
    """torch, the ladder and the probe of one process."""

    def __init__(self) -> None:
        import torch

        from spaceserve.partition.green_ctx import GreenCtxPartitioner
        from spaceserve.partition.probe import Probe

        self.torch = torch
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.manual_seed(SEED)
        begin = time.perf_counter()
        self.partitioner: Any = GreenCtxPartitioner(device=self.device)
        self.split_ms = (time.perf_counter() - begin) * 1e3
        self.total = self.partitioner.total_units
        self.probe = Probe(self.device)

    def versions(self) -> Json:
        torch = self.torch
        from cuda.bindings import __version__ as bindings_version

        from spaceserve.partition.cuda_driver import check, load_driver

        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "num_sms": self.total,
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "driver": int(check(load_driver().cuDriverGetVersion(), "cuDriverGetVersion")),
            "cuda_bindings": str(bindings_version),
            "rungs": list(self.partitioner.rungs),
        }

    def bf16(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16)

    def groups(self) -> list[Any]:
        """Every group and every complement of 16 SMs or more, ascending by size."""
        partitioner = self.partitioner
        found = [partitioner.group(rung) for rung in partitioner.rungs if rung >= 16]
        rests = [partitioner.complement_of(rung) for rung in partitioner.rungs]
        found += [rest for rest in rests if rest is not None and rest.granted >= 16]
        return sorted(found, key=lambda group: (group.granted, group.is_complement))

    def time_ms(self, group: Any, work: Callable[[], Any], repeats: int, warmups: int = 2) -> float:
        """Mean time of ``work`` on the group's stream, from events on it."""
        torch = self.torch
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(group.stream):
            for _ in range(warmups):
                work()
            start.record()
            for _ in range(repeats):
                work()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def attention(self, num_patches: int, sm_margin: int = 0) -> tuple[str, Callable[[], Any]]:
        """(name, call) of FA3 where sgl_kernel has it, else torch's SDPA."""
        torch = self.torch
        q, k, v = (self.bf16(num_patches, NUM_HEADS, HEAD_DIM) for _ in range(3))
        try:
            from sgl_kernel.flash_attn import flash_attn_varlen_func
        except Exception:
            heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
            return "torch SDPA", lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first)
        lengths = torch.tensor([0, num_patches], dtype=torch.int32, device=self.device)

        def call() -> Any:
            return flash_attn_varlen_func(
                q, k, v, lengths, lengths, max_seqlen_q=num_patches, max_seqlen_k=num_patches, sm_margin=sm_margin
            )

        return "FA3 (sgl_kernel)", call

    def gemm(self, m: int, n: int, k: int) -> Callable[[], Any]:
        a, b, out = self.bf16(m, k), self.bf16(k, n), self.bf16(m, n)
        return lambda: self.torch.mm(a, b, out=out)


# --- confine: one process


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


# --- switch: one process


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

    arms = {"64 only": [a], "72 only": [b], "64 and 72 in turn": [a, b]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for groups in arms.values():
        chain(groups)
    for _ in range(7):
        for name, groups in arms.items():
            times[name].append(chain(groups))
    device_ms = {name: statistics.median(t[0] for t in runs) for name, runs in times.items()}
    submit_ms = {name: statistics.median(t[1] for t in runs) for name, runs in times.items()}
    expected_ms = (device_ms["64 only"] + device_ms["72 only"]) / 2
    expected_submit_ms = (submit_ms["64 only"] + submit_ms["72 only"]) / 2

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
        "switch_device_us": 1e3 * (device_ms["64 and 72 in turn"] - expected_ms) / num_layers,
        "switch_submit_us": 1e3 * (submit_ms["64 and 72 in turn"] - expected_submit_ms) / num_layers,
        "make_current_host_us": make_current_us,
        "activate_and_leave_host_us": activate_us,
    }


def graph_confinement(gpu: Gpu) -> Json:
    """Capture on one group's stream, replay on others: where do the blocks run?"""
    torch = gpu.torch
    rows = []
    whole = gpu.partitioner.group(gpu.total)
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
            ("a 32-SM group's stream", gpu.partitioner.group(32).stream),
            ("the whole device's stream", whole.stream),
        ):
            occupation.sm_ids.fill_(-1)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.replay()
            seen = occupation.sms()
            rows.append(
                {
                    "captured_sms": size,
                    "is_complement": captured.is_complement,
                    "replayed_on": name,
                    "seen": len(seen),
                    "same_as_captured": seen == reference,
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
        "eager in 64": gpu.time_ms(group, work, 20),
        "graph of 64, replayed in 64": gpu.time_ms(group, graph.replay, 20),
        "graph of 64, replayed on all": gpu.time_ms(whole, graph.replay, 20),
        "eager on all": gpu.time_ms(whole, work, 20),
    }
    kept = all(row["same_as_captured"] for row in rows)
    return {"nodes_keep_the_group_of_capture": kept, "rows": rows, "gemm_ms": gemm_ms}


def workspace_memory(gpu: Gpu) -> Json:
    """Device memory that a first matrix product on another group's stream takes (cuBLAS workspaces)."""
    torch = gpu.torch
    work = gpu.gemm(NUM_PATCHES[0], QKV_WIDTH, WIDTH)
    taken = []
    for rung in (80, 88, 96, 104):
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


# --- kernels: one process


def kernel_scaling() -> Json:
    gpu = Gpu()
    gpu.partitioner.prepare(complements=True)
    return {
        "versions": gpu.versions(),
        "gemm": guarded(gemm_scaling, gpu),
        "linear_carveout": guarded(carveout_effect, gpu),
        "attention": guarded(attention_scaling, gpu),
    }


def gemm_scaling(gpu: Gpu) -> Json:
    rows = []
    for m in NUM_PATCHES:
        for n in (QKV_WIDTH, MLP_WIDTH):
            work = gpu.gemm(m, n, WIDTH)
            whole_ms = gpu.time_ms(gpu.partitioner.group(gpu.total), work, 20, warmups=10)
            for group in gpu.groups():
                row: Json = {"m": m, "n": n, "k": WIDTH, "sms": group.granted, "is_complement": group.is_complement}
                try:
                    row["ms"] = gpu.time_ms(group, work, 8)
                    # 1 where time falls as SMs grow; the dips are waves of tiles that do not fill.
                    row["efficiency"] = whole_ms * gpu.total / (row["ms"] * group.granted)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"
                rows.append(row)
    return {"rows": rows}


def carveout_effect(gpu: Gpu) -> Json:
    """cuBLAS told to leave out the SMs that the group lacks (torch's experimental carveout), against not told."""
    torch = gpu.torch
    set_carveout = torch._C._set_sm_carveout_experimental
    rows = []
    for m in NUM_PATCHES:
        x, weight, bias = gpu.bf16(m, WIDTH), gpu.bf16(MLP_WIDTH, WIDTH), gpu.bf16(MLP_WIDTH)
        calls: dict[str, Callable[[], Any]] = {
            "mm": gpu.gemm(m, MLP_WIDTH, WIDTH),
            "linear+bias": functools.partial(torch.nn.functional.linear, x, weight, bias),
        }
        for sms in (32, 64, 72, 96):
            group = gpu.partitioner.group(sms)
            for name, work in calls.items():
                plain_ms = gpu.time_ms(group, work, 10)
                try:
                    set_carveout(gpu.total - group.granted)
                    told_ms = gpu.time_ms(group, work, 10)
                finally:
                    set_carveout(None)
                rows.append({"call": name, "m": m, "sms": group.granted, "plain_ms": plain_ms, "told_ms": told_ms})
    return {"rows": rows}


def attention_scaling(gpu: Gpu) -> Json:
    rows = []
    for num_patches in NUM_PATCHES:
        name, plain = gpu.attention(num_patches)
        groups = gpu.groups()
        if num_patches > 10_000:
            groups = [group for group in groups if group.granted in (32, 60, 64, 68, 72, 96, gpu.total)]
        for group in groups:
            row: Json = {
                "kernel": name,
                "patches": num_patches,
                "sms": group.granted,
                "is_complement": group.is_complement,
            }
            try:
                row["ms"] = gpu.time_ms(group, plain, 3, warmups=1)
                if name.startswith("FA3") and not group.is_whole_device:
                    _, told = gpu.attention(num_patches, sm_margin=gpu.total - group.granted)
                    row["sm_margin_ms"] = gpu.time_ms(group, told, 3, warmups=1)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            rows.append(row)
    return {"rows": rows}


# --- interfere: two processes under MPS


def interference(arm_s: float) -> Json:
    """Orchestrates an encoder-like and a decoder-like process. This process makes no CUDA context."""
    from spaceserve.partition.mps import MpsDaemon

    with MpsDaemon() as daemon:
        if daemon.reason is not None:
            return {"failed": f"MPS does not run: {daemon.reason}"}
        # The pair for the comparison without MPS imports torch meanwhile. A pipe directory without a daemon keeps it
        # from finding one in the default place.
        without_mps = [Peer({"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent-mps"}) for _ in range(2)]
        result: Json = {"mps": guarded(measure_arms, daemon.client_environ, arm_s)}
        result["daemon_alive_after"] = daemon.is_alive()
        if failures(result):
            result["mps_log"] = daemon.log_tail()
        result["num_mps_servers"] = len(daemon.server_pids())
    result["daemon_ended"] = not daemon.is_alive()
    result["time_sliced"] = guarded(measure_time_sliced, *without_mps, arm_s)
    return result


class Peer:
    """A process that runs load on command, with its own environment."""

    def __init__(self, environ: dict[str, str]) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        saved = {name: os.environ.get(name) for name in environ}
        os.environ.update(environ)
        try:
            self._process = context.Process(target=peer_main, args=(theirs,), daemon=True)
            self._process.start()
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def receive(self, timeout_s: float = 60.0) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a peer did not answer within {timeout_s:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, dict) and "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def call(self, *command: Any) -> Any:
        self.send(*command)
        return self.receive()

    def close(self) -> None:
        try:
            self._pipe.send(("end",))
            self._process.join(10)
        except (BrokenPipeError, OSError):
            pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


def peer_main(pipe: Any) -> None:
    import torch  # noqa: F401

    pipe.recv()
    try:
        gpu = Gpu()
        loads = make_loads(gpu)
        groups = {
            "all": gpu.partitioner.group(gpu.total),
            "group": gpu.partitioner.group(ENCODER_SMS),
            "rest": gpu.partitioner.complement_of(ENCODER_SMS),
        }
        for work in loads.values():
            for group in groups.values():
                gpu.time_ms(group, work, 1)
        pipe.send({"versions": gpu.versions(), "attention": gpu.attention(64)[0]})
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"})
        return
    while True:
        command, *arguments = pipe.recv()
        if command == "end":
            return
        try:
            if command == "timed":
                name, where, seconds = arguments
                pipe.send(timed_load(gpu, loads[name], groups[where], seconds))
            elif command == "until_told":
                name, where = arguments
                pipe.send("started")
                pipe.send(saturate(gpu, loads[name], groups[where], pipe))
        except Exception as error:
            pipe.send({"failed": f"{type(error).__name__}: {error}"})


def make_loads(gpu: Gpu) -> dict[str, Callable[[], Any]]:
    torch = gpu.torch
    # Decode's shape: 16 rows against 0.8 GB of weights; as in DESIGN's first measurement.
    decode = gpu.gemm(16, 49152, 8192)
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=gpu.device)
    sink = torch.zeros(512 * 4 * gpu.total, dtype=torch.float32, device=gpu.device)
    layers = [gpu.gemm(NUM_PATCHES[1], n, WIDTH) for n in (QKV_WIDTH, MLP_WIDTH)]

    def encoder_gemm() -> None:
        for layer in layers:
            layer()

    return {
        "decode_gemm": decode,
        "stream_read": lambda: gpu.probe.stream_read(torch.cuda.current_stream(), source, 1, sink),
        "encoder_gemm": encoder_gemm,
        "large_gemm": gpu.gemm(8192, 8192, 8192),
        "encoder_attention": gpu.attention(NUM_PATCHES[0])[1],
        "prefill_gemm": gpu.gemm(2048, 18944, 3584),
    }


def timed_load(gpu: Gpu, work: Callable[[], Any], group: Any, seconds: float) -> Json:
    """Median and spread of single runs, each waited for, as a decode step is."""
    torch = gpu.torch
    times_ms: list[float] = []
    deadline = time.monotonic() + seconds
    with torch.cuda.stream(group.stream):
        work()
        torch.cuda.current_stream().synchronize()
        while time.monotonic() < deadline:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    times_ms.sort()
    return {
        "runs": len(times_ms),
        "median_ms": statistics.median(times_ms),
        "mean_ms": statistics.fmean(times_ms),
        "p99_ms": times_ms[min(len(times_ms) - 1, int(0.99 * len(times_ms)))],
    }


def saturate(gpu: Gpu, work: Callable[[], Any], group: Any, pipe: Any) -> Json:
    """Keep up to four runs queued until any message comes; returns the rate."""
    torch = gpu.torch
    pending: list[Any] = []
    num_done = 0
    with torch.cuda.stream(group.stream):
        begin = time.perf_counter()
        while not pipe.poll():
            work()
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) >= 4:
                pending.pop(0).synchronize()
                num_done += 1
        for event in pending:
            event.synchronize()
            num_done += 1
        seconds = time.perf_counter() - begin
    pipe.recv()
    return {"runs": num_done, "per_s": num_done / seconds}


def beside(
    encoder: Peer, decoder: Peer, encoder_arm: tuple[str, str], decoder_arm: tuple[str, str], arm_s: float
) -> Json:
    """One arm: the encoder's load runs throughout, the decoder's is timed."""
    encoder.send("until_told", *encoder_arm)
    assert encoder.receive() == "started"
    time.sleep(0.1)
    timed = decoder.call("timed", *decoder_arm, arm_s)
    rate = encoder.call("stop")
    return {"timed": timed, "encoder_per_s": rate["per_s"]}


def ready(encoder: Peer, decoder: Peer) -> Json:
    """Let both set up the GPU, one after the other; returns what the first says about itself."""
    about = encoder.call("go")
    decoder.call("go")
    return about


def measure_arms(environ: dict[str, str], arm_s: float) -> Json:
    """Plain MPS, encoder masked, both masked, decoder masked; then what a decoder does to the encoder."""
    encoder, decoder = Peer(environ), Peer(environ)
    try:
        result: Json = {**ready(encoder, decoder), "rows": []}
        alone = {name: decoder.call("timed", name, "all", arm_s) for name in ("decode_gemm", "stream_read")}
        alone_rest = {name: decoder.call("timed", name, "rest", arm_s) for name in ("decode_gemm", "stream_read")}
        result["decoder_alone"], result["decoder_alone_on_the_rest"] = alone, alone_rest
        modes = {
            "plain MPS": ("all", "all"),
            "encoder masked": ("group", "all"),
            "both masked": ("group", "rest"),
            "decoder masked": ("all", "rest"),
        }
        plans = [("large_gemm", "decode_gemm", mode) for mode in modes]
        plans += [("encoder_attention", "decode_gemm", mode) for mode in modes if mode != "decoder masked"]
        plans += [("encoder_gemm", "decode_gemm", mode) for mode in modes if mode != "decoder masked"]
        plans += [("large_gemm", "stream_read", mode) for mode in modes if mode != "decoder masked"]
        plans += [(load, "prefill_gemm", mode) for load in ("encoder_gemm", "encoder_attention") for mode in modes]
        encoder_alone: dict[tuple[str, str], float] = {}
        prefill_alone = {where: decoder.call("timed", "prefill_gemm", where, arm_s / 2) for where in ("all", "rest")}
        for load in ("large_gemm", "encoder_gemm", "encoder_attention"):
            for where in ("all", "group"):
                encoder.send("until_told", load, where)
                assert encoder.receive() == "started"
                time.sleep(arm_s / 2)
                encoder_alone[load, where] = encoder.call("stop")["per_s"]
        result["prefill_alone"] = prefill_alone
        result["encoder_alone_per_s"] = {f"{load} {where}": rate for (load, where), rate in encoder_alone.items()}
        for load, target, mode in plans:
            where_encoder, where_decoder = modes[mode]
            row: Json = {"mode": mode, "encoder": load, "decoder": target}
            arm = guarded(beside, encoder, decoder, (load, where_encoder), (target, where_decoder), arm_s)
            row |= arm
            if "failed" not in arm:
                base = prefill_alone["all"] if target == "prefill_gemm" else alone[target]
                row["decoder_times_alone"] = arm["timed"]["median_ms"] / base["median_ms"]
                row["encoder_share_of_alone"] = arm["encoder_per_s"] / encoder_alone[load, where_encoder]
            result["rows"].append(row)
        return result
    finally:
        encoder.close()
        decoder.close()


def measure_time_sliced(encoder: Peer, decoder: Peer, arm_s: float) -> Json:
    """The same without MPS: what a user gets where the daemon cannot run."""
    try:
        ready(encoder, decoder)
        return {
            where: beside(encoder, decoder, ("large_gemm", where), ("decode_gemm", "all"), arm_s)
            for where in ("all", "group")
        }
    finally:
        encoder.close()
        decoder.close()


# --- table


def print_table(report: Json) -> None:
    print(f"\ngpu_partition: {report['wall_s']} s, commit {report['commit'][:12]}")
    for section in SECTIONS:
        if section not in report:
            continue
        result = report[section]
        print(f"\n== {section} ({result['section_s']} s)")
        for text in failures(result):
            print(f"FAILED {text.strip().splitlines()[0]}")
        if "failed" in result:
            continue
        lines = guarded(lambda section=section, result=result: {"lines": TABLES[section](result)})
        for line in lines.get("lines", [f"(table incomplete: {lines.get('failed')})"]):
            print(line)


def confine_lines(result: Json) -> list[str]:
    rungs, kernels = result["rungs"], result["kernels"]
    lines = [
        f"{result['versions']['gpu']}, torch {result['versions']['torch']}, rungs {result['versions']['rungs']}",
        f"{result['num_green_contexts']} green contexts in {result['make_all_groups_ms']:.0f} ms",
        f"granted = seen, disjoint, complete for every rung: {rungs.get('holds_for_every_rung')}; "
        f"larger groups contain smaller: {rungs.get('groups_are_nested')}",
    ]
    lines += [f"  {r}" for r in rungs.get("rows", []) if r["granted"] != r["seen"] or not r["disjoint"]]
    for row in kernels.get("rows", []):
        if "own_full_ms" in row:
            lines.append(
                f"{row['kernel']:<44} alone {row['alone_ms']:.3f} ms, others full {row['others_full_ms']:.3f}, own "
                f"full {row['own_full_ms']:.2f} (30 occupied): needs no other SM {row['needs_no_other_sm']}, "
                f"waits for its own {row['waits_for_own_sms']}, occupier complete {row['occupied_fully']}"
            )
    return lines


def switch_lines(result: Json) -> list[str]:
    lines = []
    cost, graphs = result["cost"], result["graphs"]
    if "failed" not in cost:
        lines.append(
            f"switch per layer: device {cost['switch_device_us']:.1f} us (layer {cost['layer_us']:.0f} us), submit "
            f"{cost['switch_submit_us']:.1f} us; make_current {cost['make_current_host_us']:.1f} us, activate and "
            f"leave {cost['activate_and_leave_host_us']:.1f} us of host time"
        )
    if "failed" not in graphs:
        lines.append(f"graph nodes keep the group of their capture: {graphs['nodes_keep_the_group_of_capture']}")
        lines += [
            f"  captured on {row['captured_sms']}, replayed on {row['replayed_on']}: {row['seen']} SMs seen"
            for row in graphs["rows"]
            if not row["same_as_captured"]
        ]
        lines.append("  GEMM ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in graphs["gemm_ms"].items()))
    for row in result["memory"].get("rows", []):
        lines.append(f"first product on rung {row['rung']}: {row['device_bytes'] / 2**20:.0f} MiB of device memory")
    return lines


def kernels_lines(result: Json) -> list[str]:
    lines = ["GEMM K=1280, ms over SMs (efficiency against all SMs):"]
    shown = (32, 56, 60, 64, 68, 72, 76, 96, 132)
    rows = [row for row in result["gemm"].get("rows", []) if "ms" in row]
    for m, n in sorted({(row["m"], row["n"]) for row in rows}):
        cells = {row["sms"]: row for row in rows if (row["m"], row["n"]) == (m, n)}
        parts = [f"{s}: {cells[s]['ms']:.3f} ({cells[s]['efficiency']:.2f})" for s in shown if s in cells]
        lines.append(f"  {m}x{n}: " + ", ".join(parts))
    for row in result["linear_carveout"].get("rows", []):
        lines.append(
            f"  {row['call']:<12} {row['m']}x{MLP_WIDTH} in {row['sms']}: {row['plain_ms']:.3f} ms, SM target told "
            f"{row['told_ms']:.3f} ms"
        )
    for row in result["attention"].get("rows", []):
        if "ms" in row and row["sms"] in shown:
            margin = f", sm_margin {row['sm_margin_ms']:.3f}" if "sm_margin_ms" in row else ""
            lines.append(f"  {row['kernel']} {row['patches']} in {row['sms']}: {row['ms']:.3f} ms{margin}")
    return lines


def interfere_lines(result: Json) -> list[str]:
    mps = result.get("mps", {})
    lines = [f"daemon ended: {result.get('daemon_ended')}, MPS servers: {result.get('num_mps_servers')}"]
    for name, alone in mps.get("decoder_alone", {}).items():
        rest = mps["decoder_alone_on_the_rest"][name]["median_ms"]
        lines.append(f"{name} alone: {alone['median_ms']:.3f} ms, alone on the rest {rest:.3f} ms")
    for row in mps.get("rows", []):
        if "decoder_times_alone" in row:
            lines.append(
                f"{row['decoder']:<13} beside {row['encoder']:<18} {row['mode']:<15} "
                f"{row['timed']['median_ms']:.3f} ms = {row['decoder_times_alone']:5.2f} x alone, p99 "
                f"{row['timed']['p99_ms']:.3f} ms; encoder at {row['encoder_share_of_alone']:.2f} of its rate alone"
            )
    for where, arm in result.get("time_sliced", {}).items():
        if isinstance(arm, dict) and "timed" in arm:
            lines.append(f"no MPS, encoder on {where}: decode_gemm {arm['timed']['median_ms']:.3f} ms")
    return lines


TABLES: dict[str, Callable[[Json], list[str]]] = {
    "confine": confine_lines,
    "switch": switch_lines,
    "kernels": kernels_lines,
    "interfere": interfere_lines,
}

if __name__ == "__main__":
    sys.exit(main())
