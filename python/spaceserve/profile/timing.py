"""Time of a piece of work inside a group of units: CUDA events (and graphs for short work), or a clock on the CPU."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from spaceserve.partition import UnitGroup

logger = logging.getLogger(__name__)

Run = Callable[[], object]


def first_line(error: BaseException) -> str:
    """What a log line says of an error: CUDA's messages go on for a page."""
    return (str(error).splitlines() or [type(error).__name__])[0]


GRAPH_BELOW_MS = 0.5  # work shorter than this is launched from a graph: Python's launches would be what is timed
NUM_SAMPLES = 5
LONG_MS = 30.0  # work longer than this is timed NUM_LONG_SAMPLES times: its relative noise is small
NUM_LONG_SAMPLES = 2


class Timer(ABC):
    """Median time of one call of `run` in ms, in `group`, after warm-up."""

    @abstractmethod
    def measure(self, run: Run, group: UnitGroup, budget_ms: float, *, long_graph: bool = False) -> float:
        """Spends about `budget_ms` on the samples, at least one call. Errors of `run` pass through.

        `long_graph`: launch from a graph however long the work is, where graphs are in use (whole forwards of many
        small kernels).
        """


class CpuTimer(Timer):
    def measure(self, run: Run, group: UnitGroup, budget_ms: float, *, long_graph: bool = False) -> float:
        with group.activate():
            run()
            samples: list[float] = []
            spent_ms = 0.0
            while not samples or (spent_ms < budget_ms and len(samples) < 50):
                start = time.perf_counter()
                run()
                samples.append((time.perf_counter() - start) * 1e3)
                spent_ms += samples[-1]
        return statistics.median(samples)


class CudaTimer(Timer):
    """use_graphs: capture short work; `check_graphs` clears it where graphs leave their group."""

    def __init__(self, use_graphs: bool = True) -> None:
        self.use_graphs = use_graphs

    def measure(self, run: Run, group: UnitGroup, budget_ms: float, *, long_graph: bool = False) -> float:
        with group.activate():
            stream = torch.cuda.current_stream()
            run()
            stream.synchronize()
            single_ms = self._timed(run, 1)
            if self.use_graphs and (single_ms < GRAPH_BELOW_MS or long_graph):
                try:
                    return self._measure_graph(run, budget_ms, probe_launches=16 if single_ms < GRAPH_BELOW_MS else 1)
                except RuntimeError as error:
                    # The plain launches below fail as well where the work itself does.
                    logger.warning("no CUDA graph on %d units (%s): timed without", group.granted, first_line(error))
                    stream.synchronize()
            per_sample = max(1, int(budget_ms / NUM_SAMPLES / max(single_ms, 1e-3)))
            num_samples = NUM_SAMPLES if single_ms * NUM_SAMPLES < 4 * budget_ms else NUM_LONG_SAMPLES
            return statistics.median(self._timed(run, per_sample) / per_sample for _ in range(num_samples))

    def _measure_graph(self, run: Run, budget_ms: float, probe_launches: int) -> float:
        with self.captured(run, probe_launches) as probe:
            probe.replay()
            single_ms = self._timed(probe.replay, 1) / probe_launches
            launches = min(1000, max(probe_launches, int(budget_ms / NUM_SAMPLES / max(single_ms, 1e-4))))
            if launches == probe_launches:
                num_samples = NUM_LONG_SAMPLES if single_ms > LONG_MS else NUM_SAMPLES
                return statistics.median(self._timed(probe.replay, 1) / launches for _ in range(num_samples))
        with self.captured(run, launches) as graph:
            graph.replay()
            return statistics.median(self._timed(graph.replay, 1) / launches for _ in range(NUM_SAMPLES))

    @contextlib.contextmanager
    def captured(self, run: Run, launches: int) -> Iterator[torch.cuda.CUDAGraph]:
        """A graph of `launches` calls, captured on the current stream; its memory goes back at the end."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(launches):
                run()
        finally:
            graph.capture_end()
        try:
            yield graph
        finally:
            torch.cuda.current_stream().synchronize()
            graph.reset()

    @staticmethod
    def _timed(run: Run, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def check_graphs(self, run: Run, group: UnitGroup) -> float:
        """Time of `run` from a graph over its time from a stream, in the smallest group.

        A graph whose nodes did not keep the group would run on the whole device and be several times as fast: then
        graphs are switched off and it is said.
        """
        with group.activate():
            run()
            eager_ms = min(self._timed(run, 8) / 8 for _ in range(3))
            with self.captured(run, 8) as graph:
                graph.replay()
                graph_ms = min(self._timed(graph.replay, 1) / 8 for _ in range(3))
        ratio = graph_ms / eager_ms
        if ratio < 0.7:
            self.use_graphs = False
            logger.warning("CUDA graphs leave their SM group (%.2f of the stream's time): timing without graphs", ratio)
        return ratio
