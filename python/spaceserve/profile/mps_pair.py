"""Both sides in two processes under MPS, as a server runs them: what one costs the other there.

Inside one process a neighbour without a mask also takes turns on the SMs of a green context, and slows its work
several times as much as a neighbour of another process does: an encoder beside an unmasked prefill on an H200 took 2
to 3 times as long as alone in one process, and its products 1.2 times in two (docs/partition.md). So contention is
measured as it is served.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spaceserve.partition import MpsDaemon, Partitioner, UnitGroup, make_partitioner
from spaceserve.sis.shapes import ModelShape

from .contention import CudaPairTimer, LoadSizes, _stream_of, _timed_calls, make_loads
from .decode_products import DecodeProducts, Tiles
from .timing import Run, first_line

logger = logging.getLogger(__name__)

CALLS_AHEAD = 4  # of the neighbour, twice: while one lot runs the next is launched
ANSWER_TIMEOUT_S = 120.0

# Starts the neighbour and returns this side's end of its pipe, and how to wait for its end.
Start = Callable[[], "tuple[Any, Callable[[], None]]"]


@contextlib.contextmanager
def mps_if_possible() -> Iterator[bool]:
    """MPS for this process and its children, where it runs; yields whether. Before anything makes a CUDA context."""
    with MpsDaemon() as daemon:
        before = dict(os.environ)
        os.environ.update(daemon.client_environ)
        try:
            yield daemon.reason is None
        finally:
            for name in daemon.client_environ:
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]


class MpsPairTimer(CudaPairTimer):
    """Times one side here while a neighbour process runs the other all the time.

    Raises RuntimeError where the neighbour fails or does not answer.
    """

    def __init__(self, loads: Mapping[str, Run], use_graphs: bool, start: Start, budget_ms: float = 60.0) -> None:
        super().__init__(loads, use_graphs, budget_ms)
        self._pipe, self._join = start()
        try:
            self._expect("ready")
        except RuntimeError:
            self.close()
            raise

    def _expect(self, word: str) -> None:
        try:
            answer = self._pipe.recv() if self._pipe.poll(ANSWER_TIMEOUT_S) else "no answer"
        except (EOFError, OSError) as error:
            raise RuntimeError("the neighbour process has ended") from error
        if answer != word:
            raise RuntimeError(f"the neighbour process: {answer}")

    def beside(self, side: str, group: UnitGroup, other: str, other_group: UnitGroup) -> float:
        own_ms = self.alone(side, group)
        stream = _stream_of(group)
        run = self._prepared(side, stream)
        torch.cuda.synchronize()
        try:
            self._pipe.send((other, other_group.granted, other_group.is_complement))
        except OSError as error:
            raise RuntimeError("the neighbour process has ended") from error
        self._expect("running")
        try:
            with torch.cuda.stream(stream):
                return statistics.median(_timed_calls(run, max(5, int(self._budget_ms / own_ms))))
        finally:
            self._pipe.send("stop")
            self._expect("stopped")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._join()
        super().close()


def neighbour(
    pipe: Any,
    loads: Mapping[str, Run],
    partitioner: Partitioner,
    use_graphs: bool,
    register: Callable[[UnitGroup], None] = lambda group: None,
) -> None:
    """Runs what it is told, in the group it is told, until it is told otherwise; None ends it.

    `register` is called with each group before anything runs on it.
    """
    timer = CudaPairTimer(loads, use_graphs)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        side, granted, is_complement = command
        try:
            group = (
                partitioner.complement_of(partitioner.total_units - granted)
                if is_complement
                else partitioner.group(granted)
            )
            assert group is not None, command
            register(group)
            stream = _stream_of(group)
            run = timer._prepared(side, stream)
            with torch.cuda.stream(stream):
                _launch(run).synchronize()
                marks = [_launch(run), _launch(run)]
                pipe.send("running")
                while not pipe.poll():
                    marks.append(_launch(run))
                    marks.pop(0).synchronize()
                marks[-1].synchronize()
        except Exception as error:
            logger.exception("the neighbour failed")
            pipe.send(f"{type(error).__name__}: {first_line(error)}")
            return
        assert pipe.recv() == "stop"
        pipe.send("stopped")
    timer.close()


def _launch(run: Run) -> torch.cuda.Event:
    """A lot of calls on the current stream. Returns the event of their end."""
    for _ in range(CALLS_AHEAD):
        run()
    mark = torch.cuda.Event()
    mark.record()
    return mark


def _neighbour_process(
    pipe: Any,
    shape_json: Mapping[str, Any],
    sizes: LoadSizes,
    device_name: str,
    min_units: int,
    use_graphs: bool,
    tiles: Tiles,
) -> None:
    device = torch.device(device_name)
    torch.cuda.set_device(device)
    with (
        torch.inference_mode(),
        make_partitioner("green_ctx", device=device_name, min_units=min_units, prepare="nothing") as partitioner,
    ):
        products = DecodeProducts(tiles, partitioner.total_units, device)
        loads = make_loads(ModelShape.from_json(shape_json), device, torch.bfloat16, sizes, products.linear)
        neighbour(pipe, loads, partitioner, use_graphs, products.register)


def process_starter(
    shape: ModelShape, sizes: LoadSizes, device: torch.device, min_units: int, use_graphs: bool, tiles: Tiles
) -> Start:
    """Starts the neighbour as a process of its own, with this one's environment (and so its MPS).

    tiles: kernels of the decode products, by group (`DecodeProducts`).
    """

    def start() -> tuple[Any, Callable[[], None]]:
        context = multiprocessing.get_context("spawn")
        pipe, child = context.Pipe()
        arguments = (child, shape.to_json(), sizes, str(device), min_units, use_graphs, tiles)
        process = context.Process(target=_neighbour_process, args=arguments, daemon=True)
        process.start()
        child.close()

        def join() -> None:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

        return pipe, join

    return start
