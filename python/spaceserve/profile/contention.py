"""What each side costs the other: encoder beside decode, encoder beside prefill, in both mask modes.

On a GPU both sides run in this process on streams of two groups; on the CPU the neighbour is a process of its own,
because a group of cores binds a whole process. Factors are times beside over times alone: the encoder's relative to
the encoder alone on as many units, decode's and prefill's to the same work alone on the complement (for an encoder
on the whole device: on the whole device).
"""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from spaceserve.partition import Partitioner, UnitGroup, make_partitioner
from spaceserve.sis.shapes import ModelShape

from .kernels import choose_kernels
from .models import DecoderModel, EncoderModel
from .timing import CpuTimer, Run, first_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadSizes:
    """One typical piece of work of each side; few layers of each, for memory and time."""

    patches: int
    batch: int
    context: int
    tokens: int
    num_layers: int


GPU_LOAD = LoadSizes(patches=4096, batch=16, context=2048, tokens=2048, num_layers=4)
CPU_LOAD = LoadSizes(patches=64, batch=4, context=64, tokens=32, num_layers=2)


def make_loads(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    sizes: LoadSizes,
    decode_linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.linear,
) -> dict[str, Run]:
    """Callables of each side: a few layers of the encoder, of a decode step and of a prefill chunk."""
    kernels = choose_kernels(device, dtype, decode_linear)
    encoder = EncoderModel(shape, device, dtype, kernels, num_layers=min(sizes.num_layers, shape.encoder.num_layers))
    decoder = DecoderModel(shape, device, dtype, kernels, num_layers=min(sizes.num_layers, shape.decoder.num_layers))
    return {
        "encoder": encoder.forward_fn([sizes.patches]),
        "decode": decoder.decode_fn(sizes.batch, sizes.context),
        "prefill": decoder.prefill_fn(sizes.tokens, 0),
    }


class PairTimer(ABC):
    """Time of one side's load alone, and of both beside each other."""

    @abstractmethod
    def alone(self, side: str, group: UnitGroup) -> float:
        """ms of one call."""

    @abstractmethod
    def beside(self, side: str, group: UnitGroup, other: str, other_group: UnitGroup) -> float:
        """ms of one call of `side` while `other` runs in `other_group` all the time."""

    @abstractmethod
    def close(self) -> None:
        """Ends what the timer started and lets its loads go."""


class CudaPairTimer(PairTimer):
    """Both sides on streams of two groups, from graphs. Raises RuntimeError where the neighbour never lasts."""

    def __init__(self, loads: Mapping[str, Run], use_graphs: bool, budget_ms: float = 60.0) -> None:
        self._loads = dict(loads)
        self._use_graphs = use_graphs
        self._budget_ms = budget_ms
        self._second_streams: dict[int, torch.cuda.Stream] = {}
        self._ready: dict[tuple[str, int], Run] = {}
        self._alone_ms: dict[tuple[str, int], float] = {}

    def alone(self, side: str, group: UnitGroup) -> float:
        stream = _stream_of(group)
        key = (side, stream.cuda_stream)
        if key not in self._alone_ms:
            run = self._prepared(side, stream)
            with torch.cuda.stream(stream):
                first_ms = _timed_calls(run, 2)[-1]
                calls = max(5, int(self._budget_ms / first_ms))
                self._alone_ms[key] = statistics.median(_timed_calls(run, calls))
        return self._alone_ms[key]

    def beside(self, side: str, group: UnitGroup, other: str, other_group: UnitGroup) -> float:
        own_stream = _stream_of(group)
        other_stream = _stream_of(other_group)
        if other_stream == own_stream:
            # Both on the whole device: one stream would make them take turns.
            other_stream = self._second_streams.setdefault(group.granted, torch.cuda.Stream(own_stream.device))
        own_ms, other_ms = self.alone(side, group), self.alone(other, other_group)
        own, neighbour = self._prepared(side, own_stream), self._prepared(other, other_stream)
        calls = max(5, int(self._budget_ms / own_ms))
        neighbour_calls = max(4, int(2.0 * calls * own_ms / other_ms))
        for _ in range(6):
            samples, lasted = _run_pair(own, own_stream, calls, neighbour, other_stream, neighbour_calls)
            if lasted:
                return statistics.median(samples)
            neighbour_calls *= 2
        raise RuntimeError(f"{other} never outlasted {side}: no time beside it")

    def close(self) -> None:
        torch.cuda.synchronize()
        self._ready = {}
        self._loads = {}

    def _prepared(self, side: str, stream: torch.cuda.Stream) -> Run:
        """A graph of one call captured on the stream, or the plain call where graphs are off."""
        key = (side, stream.cuda_stream)
        if key not in self._ready:
            self._ready[key] = self._capture(self._loads[side], stream)
        return self._ready[key]

    def _capture(self, run: Run, stream: torch.cuda.Stream) -> Run:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            if not self._use_graphs:
                return run
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay


def _stream_of(group: UnitGroup) -> torch.cuda.Stream:
    assert group.stream is not None, f"{group!r} has no stream"
    return group.stream


def _timed_calls(run: Run, calls: int) -> list[float]:
    """ms of each of `calls` calls back to back on the current stream."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _run_pair(
    own: Run,
    own_stream: torch.cuda.Stream,
    calls: int,
    neighbour: Run,
    neighbour_stream: torch.cuda.Stream,
    neighbour_calls: int,
) -> tuple[list[float], bool]:
    """Times of `own` beside the neighbour, and whether the neighbour ran until after the last of them."""
    torch.cuda.synchronize()
    started, finished = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
    launched = threading.Event()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    failures: list[BaseException] = []

    def launch_neighbour() -> None:
        # A thread of its own: eager launches of the two sides must not wait for one another.
        try:
            with torch.inference_mode(), torch.cuda.stream(neighbour_stream):
                for i in range(neighbour_calls):
                    neighbour()
                    if i == 0:
                        started.record()
                        launched.set()
                finished.record()
        except BaseException as error:
            failures.append(error)
        finally:
            launched.set()

    thread = threading.Thread(target=launch_neighbour)
    thread.start()
    launched.wait()
    with torch.cuda.stream(own_stream):
        # The neighbour has done its first call and goes on: from here to the end the two overlap.
        own_stream.wait_event(started)
        for i in range(calls):
            marks[i].record()
            own()
        marks[calls].record()
    thread.join()
    torch.cuda.synchronize()
    if failures:
        raise RuntimeError(f"the neighbour failed: {failures[0]}") from failures[0]
    return [a.elapsed_time(b) for a, b in pairwise(marks)], marks[calls].elapsed_time(finished) > 0.0


def _neighbour_main(pipe: Any, shape_json: Mapping[str, Any], sizes: LoadSizes, backend: str, total_units: int) -> None:
    """Process beside the profiler on the CPU: runs what it is told until it is told otherwise."""
    device = torch.device("cpu")
    loads = make_loads(ModelShape.from_json(shape_json), device, torch.float32, sizes)
    partitioner = make_partitioner(backend, device="cpu", total_units=total_units, prepare="nothing")
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        side, units, complement_of = command  # (side, units, None), or the complement of a group
        base = partitioner.group(complement_of or units)
        group = partitioner.complement(base) if complement_of else base
        assert group is not None
        with group.activate():
            loads[side]()
            pipe.send("running")
            while not pipe.poll():
                loads[side]()
        assert pipe.recv() == "stop"
        pipe.send("stopped")
    partitioner.close()


class CpuPairTimer(PairTimer):
    def __init__(self, shape: ModelShape, sizes: LoadSizes, partitioner: Partitioner, budget_ms: float = 10.0) -> None:
        self._loads = make_loads(shape, torch.device("cpu"), torch.float32, sizes)
        self._budget_ms = budget_ms
        self._timer = CpuTimer()
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        arguments = (child, shape.to_json(), sizes, partitioner.backend, partitioner.total_units)
        self._process = context.Process(target=_neighbour_main, args=arguments, daemon=True)
        self._process.start()
        child.close()
        self._expect("ready")

    def _expect(self, word: str) -> None:
        if not self._pipe.poll(60.0):
            raise RuntimeError("the neighbour process does not answer")
        answer = self._pipe.recv()
        assert answer == word, answer

    def alone(self, side: str, group: UnitGroup) -> float:
        return self._timer.measure(self._loads[side], group, self._budget_ms)

    def beside(self, side: str, group: UnitGroup, other: str, other_group: UnitGroup) -> float:
        complement_of = other_group.total_units - other_group.granted if other_group.is_complement else None
        self._pipe.send((other, other_group.granted, complement_of))
        self._expect("running")
        try:
            return self._timer.measure(self._loads[side], group, self._budget_ms)
        finally:
            self._pipe.send("stop")
            self._expect("stopped")

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._pipe.close()


def count_pairs(partitioner: Partitioner, rungs: Sequence[int]) -> int:
    return sum(4 if partitioner.complement(partitioner.group(n)) is not None else 2 for n in rungs)


def never() -> bool:
    """For measurements without a limit of time."""
    return False


def ends_first(rungs: Sequence[int]) -> list[int]:
    """The smallest and the largest rung, then those between, from the middle: what comes last matters least."""
    middle = (rungs[0] + rungs[-1]) / 2
    return sorted(rungs, key=lambda rung: (rung not in (rungs[0], rungs[-1]), abs(rung - middle), rung))


def measure_contention(
    partitioner: Partitioner,
    rungs: Sequence[int],
    pair: PairTimer,
    tick: Callable[[], object],
    is_over: Callable[[], bool] = never,
) -> dict[str, dict[int, float]]:
    """Factors for curves.DeviceCurves.contention, for each rung; the whole device only unmasked (plain sharing).

    No rung is begun once `is_over`.
    """
    whole = partitioner.group(partitioner.total_units)
    factors: dict[str, dict[int, float]] = {}
    for rung in ends_first(rungs):
        if is_over():
            break
        group = partitioner.group(rung)
        rest = partitioner.complement(group)
        for other in ("decode", "prefill"):
            modes = {"unmasked": whole} if rest is None else {"masked": rest, "unmasked": whole}
            if rest is None and not group.is_whole_device:
                tick()
                continue  # a rung without a complement is never chosen beside a decoder
            for mode, other_group in modes.items():
                tick()
                try:
                    encoder_alone = pair.alone("encoder", group)
                    other_alone = pair.alone(other, rest or whole)
                    encoder_ms = pair.beside("encoder", group, other, other_group)
                    other_ms = pair.beside(other, other_group, "encoder", group)
                except RuntimeError as error:
                    text = first_line(error)
                    logger.warning("%s beside an encoder on %d units, %s: %s", other, group.granted, mode, text)
                    continue
                for case, factor in (
                    (f"encoder_beside_{other}_{mode}", encoder_ms / encoder_alone),
                    (f"{other}_beside_encoder_{mode}", other_ms / other_alone),
                ):
                    factors.setdefault(case, {})[group.granted] = float(f"{factor:.4g}")
    return factors


def measure_sharing(
    partitioner: Partitioner,
    decode_units: Sequence[int],
    pair: PairTimer,
    tick: Callable[[], object],
    is_over: Callable[[], bool] = never,
) -> list[dict[str, Any]]:
    """What decode and prefill cost one another inside the decoder's process, for curves.DeviceCurves.sharing.

    One row for each size of the decoder's complement and each mode: "both masked" (prefill in the group), "prefill
    masked" (decode on every unit) and, once, "both unmasked" on two streams. Times of the few layers of the loads, in
    ms, alone and beside. No row is begun once `is_over`.
    """
    whole = partitioner.group(partitioner.total_units)
    splits: list[tuple[str, UnitGroup, UnitGroup]] = [("both unmasked", whole, whole)]
    for units in decode_units:
        rest = partitioner.complement_of(partitioner.total_units - units)
        assert rest is not None, units
        group = partitioner.group(partitioner.total_units - units)
        splits += [("both masked", rest, group), ("prefill masked", whole, group)]
    rows: list[dict[str, Any]] = []
    for mode, decode_group, prefill_group in splits:
        if is_over():
            break
        tick()
        row: dict[str, Any] = {"mode": mode, "decode_units": decode_group.granted}
        row["prefill_units"] = prefill_group.granted
        try:
            times = {
                "decode_alone_ms": pair.alone("decode", decode_group),
                "prefill_alone_ms": pair.alone("prefill", prefill_group),
                "decode_ms": pair.beside("decode", decode_group, "prefill", prefill_group),
                "prefill_ms": pair.beside("prefill", prefill_group, "decode", decode_group),
            }
        except RuntimeError as error:
            logger.warning("decode on %d units beside prefill, %s: %s", decode_group.granted, mode, first_line(error))
            continue
        rows.append(row | {name: float(f"{ms:.4g}") for name, ms in times.items()})
    return rows


def count_sharing(decode_units: Sequence[int]) -> int:
    return 1 + 2 * len(decode_units)
