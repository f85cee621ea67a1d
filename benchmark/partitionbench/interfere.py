"""Section interfere: an encoder-like and a decoder-like process on one GPU, under MPS and without."""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

from partitionbench.gpu import ENCODER_SMS, MLP_WIDTH, NUM_PATCHES, QKV_WIDTH, WIDTH, Gpu, Json, failures, guarded


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
    # Decode's shape: 16 rows against 0.8 GB of weights.
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
