"""Section interfere: an encoder-like and a decoder-like process on one GPU, under MPS and without."""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

from partitionbench.gpu import MLP_WIDTH, NUM_PATCHES, QKV_WIDTH, SPLITS, WIDTH, Gpu, Json, failures, guarded

ALL = "all"
TARGETS = ("decode_gemm", "stream_read", "prefill_gemm")
# Saturating encoders: its layer, its products alone, its attention alone, and products that load memory more.
LOADS = ("encoder_layer", "encoder_gemm", "encoder_attention", "large_gemm")
# What the last part, without MPS, takes at most: two processes set up the GPU.
TIME_SLICED_S = 20.0


def interference(arm_s: float, deadline: float) -> Json:
    """Orchestrates an encoder-like and a decoder-like process. This process makes no CUDA context.

    Nothing new is begun after `deadline`, a time of the monotonic clock; what is left out is named.
    """
    from spaceserve.partition.mps import MpsDaemon

    with MpsDaemon() as daemon:
        if daemon.reason is not None:
            return {"failed": f"MPS does not run: {daemon.reason}"}
        # The pair for the comparison without MPS imports torch meanwhile. A pipe directory without a daemon keeps it
        # from finding one in the default place.
        without_mps = [Peer({"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent-mps"}) for _ in range(2)]
        result: Json = {"mps": guarded(measure_arms, daemon.client_environ, arm_s, deadline)}
        result["daemon_alive_after"] = daemon.is_alive()
        if failures(result):
            result["mps_log"] = daemon.log_tail()
        result["num_mps_servers"] = len(daemon.server_pids())
    result["daemon_ended"] = not daemon.is_alive()
    if time.monotonic() + TIME_SLICED_S < deadline:
        result["time_sliced"] = guarded(measure_time_sliced, *without_mps, arm_s)
    else:
        result["time_sliced"] = {"left_out": "the budget was spent"}
        for peer in without_mps:
            peer.close()
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
        partitioner = gpu.partitioner
        groups = {ALL: partitioner.group(gpu.total)}
        for group_sms, rest_sms in SPLITS:
            groups[group_of(group_sms)] = group = partitioner.group(group_sms)
            groups[rest_of(rest_sms)] = rest = partitioner.complement(group)
            assert (group.granted, rest.granted) == (group_sms, rest_sms), (group, rest)
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


def group_of(num_sms: int) -> str:
    """Name of an encoder's group."""
    return f"group of {num_sms}"


def rest_of(num_sms: int) -> str:
    """Name of a decoder's complement."""
    return f"complement of {num_sms}"


def make_loads(gpu: Gpu) -> dict[str, Callable[[], Any]]:
    torch = gpu.torch
    # Decode's shape: 16 rows against 0.8 GB of weights.
    decode = gpu.gemm(16, 49152, 8192)
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=gpu.device)
    sink = torch.zeros(512 * 4 * gpu.total, dtype=torch.float32, device=gpu.device)
    layers = [gpu.gemm(NUM_PATCHES[1], n, WIDTH) for n in (QKV_WIDTH, MLP_WIDTH)]

    def encoder_gemm() -> None:
        for layer in layers:
            layer()

    patches = NUM_PATCHES[0]
    attention = gpu.attention(patches)[1]
    one_layer = [
        gpu.gemm(patches, QKV_WIDTH, WIDTH),
        attention,
        gpu.gemm(patches, WIDTH, WIDTH),
        gpu.gemm(patches, MLP_WIDTH, WIDTH),
        gpu.gemm(patches, WIDTH, MLP_WIDTH),
    ]

    def encoder_layer() -> None:
        for kernel in one_layer:
            kernel()

    return {
        "decode_gemm": decode,
        "stream_read": lambda: gpu.probe.stream_read(torch.cuda.current_stream(), source, 1, sink),
        "encoder_layer": encoder_layer,
        "encoder_gemm": encoder_gemm,
        "large_gemm": gpu.gemm(8192, 8192, 8192),
        "encoder_attention": attention,
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


def modes() -> list[tuple[str, str, str, int | None]]:
    """(mode, where the encoder runs, where the decoder runs, SMs of the complement); the plain one first."""
    found: list[tuple[str, str, str, int | None]] = [("plain MPS", ALL, ALL, None)]
    for group_sms, rest_sms in SPLITS:
        found.append((f"encoder masked {group_sms}", group_of(group_sms), ALL, rest_sms))
        found.append((f"both masked {group_sms}/{rest_sms}", group_of(group_sms), rest_of(rest_sms), rest_sms))
    rest_sms = SPLITS[0][1]
    found.append((f"decoder masked {rest_sms}", ALL, rest_of(rest_sms), rest_sms))
    return found


def plans() -> list[tuple[str, str, tuple[str, str, str, int | None]]]:
    """(encoder's load, decoder's kernel, mode) of every arm, what matters most first."""
    arms = modes()
    found = [(load, "decode_gemm", mode) for load in LOADS for mode in arms]
    found += [("large_gemm", "stream_read", mode) for mode in arms]
    return found + [(load, "prefill_gemm", mode) for load in ("encoder_layer", "encoder_attention") for mode in arms]


def measure_arms(environ: dict[str, str], arm_s: float, deadline: float) -> Json:
    """Every arm of `plans`, and before them each side alone: on the device and on its part of it."""
    encoder, decoder = Peer(environ), Peer(environ)
    try:
        result: Json = {**ready(encoder, decoder), "splits": [list(split) for split in SPLITS], "rows": []}
        rests = [rest_of(rest_sms) for _, rest_sms in SPLITS]
        alone = {
            name: {where: decoder.call("timed", name, where, arm_s / 2) for where in (ALL, *rests)} for name in TARGETS
        }
        result["decoder_alone"] = alone
        encoder_alone: dict[str, dict[str, float]] = {}
        for load in LOADS:
            encoder_alone[load] = {}
            for where in (ALL, *(group_of(group_sms) for group_sms, _ in SPLITS)):
                encoder.send("until_told", load, where)
                assert encoder.receive() == "started"
                time.sleep(arm_s / 2)
                encoder_alone[load][where] = encoder.call("stop")["per_s"]
        result["encoder_alone_per_s"] = encoder_alone
        for load, target, (mode, where_encoder, where_decoder, rest_sms) in plans():
            row: Json = {"mode": mode, "encoder": load, "decoder": target}
            if time.monotonic() > deadline:
                result["rows"].append({**row, "left_out": "the budget was spent"})
                continue
            arm = guarded(beside, encoder, decoder, (load, where_encoder), (target, where_decoder), arm_s)
            row |= arm
            if "failed" not in arm:
                median_ms = arm["timed"]["median_ms"]
                row["times_alone_on_all"] = median_ms / alone[target][ALL]["median_ms"]
                if rest_sms is not None:
                    row["times_alone_on_complement"] = median_ms / alone[target][rest_of(rest_sms)]["median_ms"]
                row["encoder_share_of_alone"] = arm["encoder_per_s"] / encoder_alone[load][where_encoder]
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
            where: beside(encoder, decoder, ("large_gemm", where), ("decode_gemm", ALL), arm_s)
            for where in (ALL, group_of(SPLITS[0][0]))
        }
    finally:
        encoder.close()
        decoder.close()
