"""Prefill beside decode: the scheduler's loop with the prefill on a stream, and SMs, of its own.

SGLang runs prefill and decode in turns, so that an image's prefill (130 ms of an H200 for 2048x2048 on a 7B model)
stops every running answer. Here at most one prefill batch is in flight on a side stream while decode steps go on on
SGLang's forward stream; when the device has finished it, its results are processed and its requests join the running
batch. SGLang's scheduling, batches, result processing and CUDA graphs are used as they are.

Launching a prefill keeps the host busy for 10 to 20 ms on a 7B model, four decode steps long, because its kernels are
launched one by one. So before each of its layers the loop looks at decode, and processes the step that has ended and
launches the next one from inside the prefill's forward.

What keeps the two apart:

- The KV cache. Slots are given out and taken back by the host, in program order, while the device is behind. A slot
  freed by decode may still be written by the decode step in flight: the side stream waits for the forward stream when
  a prefill is launched. Slots of the prefill in flight are freed only once it is finished: until then its requests are
  in no batch that decodes, its chunked request is hidden from SGLang's pass (which would file, or release, its
  tokens), and an abort only marks it.
- Rows of the request table and of the relay of sampled tokens: each request has its own.
- What SGLang's forward keeps outside its arguments: the attention back end's metadata of the batch is put back after a
  decode step between layers, and inputs of eager forwards stay in tensors of their own (SGLang copies them into buffers
  that eager decode, and decode graphs of the same size, use too).
- Scratch memory. PyTorch's allocator keeps blocks per stream, the decode graphs have a pool of their own. Attention
  back ends with one workspace for all calls cannot run twice at once: see `obstacle`.

On the CPU, where nothing is asynchronous, a launch runs the prefill at once, one decode step runs in the middle of its
layers, and the next pass takes its results: the same loop, which the tests run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from spaceserve.hooks import Hook
from spaceserve.ranks import has_several_ranks
from spaceserve.sis.busy_share import BusyShare

logger = logging.getLogger(__name__)

# Back ends without state that a prefill and a decode step in flight would share.
CONCURRENT_ATTENTION_BACKENDS = ("fa3",)

HOST_TIME_ALPHA = 0.2
# How long a launch is waited for that may be over in a moment: a small part of a decode step.
QUICK_WAIT_S = 0.001


@dataclass(frozen=True)
class Lane:
    """A stream for prefills, and how many SMs its kernels may use."""

    stream: Any
    num_sms: int


class LaneChooser(Protocol):
    """Says where a prefill batch runs; `side_lanes.PrefillLanes` is the one with SM groups."""

    def choose(self, scheduler: Any, batch: Any, prefill_load: float, host_ms: float) -> Lane: ...


@dataclass
class _Flight:
    batch: Any
    result: Any
    done: Any  # torch.cuda.Event; None on the CPU
    num_tokens: int
    keep_alive: Any
    launched_s: float


def obstacle(scheduler: Any) -> str | None:
    """Why this scheduler must take turns, None where prefill may run beside decode."""
    args = scheduler.server_args
    if has_several_ranks(args):
        # Ranks would have to agree when a prefill is finished, and their collectives would meet in two orders.
        return "several ranks"
    if not scheduler.is_generation:
        return "the model does not generate"
    if not scheduler.spec_algorithm.is_none():
        return "speculative decoding"
    if scheduler.is_mixed_chunk:
        return "--enable-mixed-chunk"
    if args.enable_lora:
        return "LoRA"
    if scheduler.enable_hierarchical_cache or scheduler.enable_priority_preemption or scheduler.is_hybrid_swa:
        return "hierarchical cache, priority preemption or sliding windows"
    if args.device == "cpu":
        return None
    if not scheduler.enable_overlap:
        return "--disable-overlap-schedule"
    shared = sorted({str(name) for name in args.get_attention_backends()} - set(CONCURRENT_ATTENTION_BACKENDS))
    if shared:
        return f"attention backend {', '.join(shared)}, whose workspace serves one batch at a time"
    return None


class SidePrefill:
    """The loop, and the prefill in flight. `attach` before `run`; one thread."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._lanes: LaneChooser | None = None
        self._copy_stream: Any = None
        self._flight: _Flight | None = None
        self._launching: Any = None  # the batch whose prefill is being launched
        self._theirs: dict[str, Any] = {}  # the scheduler's attributes that `_on` has replaced
        self._decoding_between = False
        self._between_s = 0.0  # spent with decode inside the prefill that is being launched
        self._between_steps = 0
        self._last = ""
        self._host_ms = 0.0  # what launching a prefill takes, without that: mean of the last few
        self._busy = BusyShare()

    def attach(self, scheduler: Any, lanes: LaneChooser | None) -> None:
        """Take over `scheduler`'s loop. `lanes` is None on the CPU, where a prefill has no stream."""
        self._scheduler = scheduler
        self._lanes = lanes
        if lanes is not None:
            self._copy_stream = torch.cuda.Stream()

    def decode_between(self, layers: Sequence[nn.Module]) -> None:
        """Let decode go on while a prefill is being launched: before each of the decoder's `layers`.

        On the CPU a prefill computes where it is launched, so that a step before each layer would halve its speed:
        there it is one, before the middle layer.
        """
        from sglang.srt.environ import envs

        # Eager decode and prefill would share buffers, also where they run one behind the other on two streams.
        envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)
        if self._scheduler.tp_worker.model_runner.device_timer is not None:
            logger.info("No decode while a prefill is launched: SGLang's device timer times one forward at a time")
            return
        for layer in layers if self._lanes is not None else layers[len(layers) // 2 :][:1]:
            layer.register_forward_pre_hook(self._before_layer)

    @property
    def in_flight(self) -> bool:
        """A prefill is being launched, or has been and its results were not processed yet."""
        return self._flight is not None or self._launching is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefill in flight."""
        if self._launching is not None:
            return int(self._launching.extend_num_tokens)
        return 0 if self._flight is None else self._flight.num_tokens

    def summary(self) -> str:
        """The prefill launched last, in the style of SGLang's log lines; empty before the first, and on the CPU."""
        return self._last

    def run(self) -> None:
        """SGLang's event loop, until the scheduler exits."""
        from sglang.srt.utils import DynamicGradMode

        scheduler = self._scheduler
        scheduler.result_queue = deque()
        with DynamicGradMode():
            while not scheduler.gracefully_exit:
                self._pass()

    def _pass(self) -> None:
        scheduler = self._scheduler
        requests = scheduler.request_receiver.recv_requests()
        if self.in_flight and any(not self._is_ordinary(request) for request in requests):
            self._finish(wait=True)  # a weight update, a pause: they know nothing of a prefill on the side
        scheduler.process_input_requests(requests)
        if scheduler._engine_paused:
            return
        if self._flight is not None and (self._flight.done is None or self._flight.done.query()):
            self._finish(wait=False)
        if self.in_flight and not scheduler.running_batch.is_empty() and not scheduler.running_batch.check_decode_mem():
            self._finish(wait=True)  # so that SGLang may choose among all requests which to retract
        batch = self._next_batch()
        if batch is not None and batch.forward_mode.is_extend():
            self._launch(batch)
            self._finish_if_quick()
            batch = self._next_batch()
        scheduler.cur_batch_for_debug = batch
        self._decode(batch)

    @staticmethod
    def _is_ordinary(request: Any) -> bool:
        """Whether the scheduler only queues, marks or notes for this message."""
        from sglang.srt.managers import io_struct

        if type(request).__module__.startswith("spaceserve."):
            return True
        return isinstance(
            request,
            (io_struct.TokenizedGenerateReqInput, io_struct.BatchTokenizedGenerateReqInput, io_struct.AbortReq),
        )

    def _next_batch(self) -> Any:
        """SGLang's scheduling pass; while a prefill is in flight it finds decode only."""
        scheduler = self._scheduler
        chunked = scheduler.chunked_req
        hide = self.in_flight and chunked is not None
        if hide:
            scheduler.chunked_req = None
        try:
            plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=None)
        finally:
            if hide:
                scheduler.chunked_req = chunked
        scheduler.running_batch = plan.running_batch
        return plan.batch_to_run

    def _decode(self, batch: Any) -> None:
        """Launch a decode step and process the one before it (the same step where SGLang does not overlap)."""
        scheduler = self._scheduler
        had_work = bool(scheduler.result_queue) or batch is not None or self.in_flight
        result = None
        if batch is None:
            scheduler.last_batch = None
        else:
            result = self._launch_decode(batch)
        self._take_results(pending=int(result is not None))
        if not had_work:
            scheduler.on_idle()
        if scheduler.enable_overlap:
            scheduler.launch_batch_sample_if_needed(result, batch)

    def _launch_decode(self, batch: Any) -> Any:
        """Launch a decode step; its result, which is still to be processed, or None where SGLang does not overlap."""
        scheduler = self._scheduler
        scheduler.last_batch = batch
        result = scheduler.run_batch(batch)
        if not scheduler.enable_overlap:
            scheduler.process_batch_result(batch, result)
            return None
        scheduler._apply_war_barrier()
        scheduler.result_queue.append((batch.copy(), result))
        return result

    def _take_results(self, *, pending: int) -> None:
        """Process decode steps in their order until `pending` are left; waits for the device."""
        scheduler = self._scheduler
        while len(scheduler.result_queue) > pending:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())

    def _before_layer(self, layer: nn.Module, args: Any) -> None:
        """Called by each decoder layer of an eager forward, decode's own included."""
        if self._launching is None or self._decoding_between:
            return
        scheduler = self._scheduler
        pending = scheduler.result_queue
        # SGLang is one step ahead of the device, and so is this: two steps pending, the older one to be processed.
        if len(pending) > 1 and not pending[0][1].copy_done.query():
            return
        self._decoding_between = True
        started_s = time.monotonic()
        try:
            with self._as_before():
                self._take_results(pending=1)
                running = scheduler.running_batch
                if running.is_empty() or not running.check_decode_mem():
                    return  # memory for the next step is found by the loop, which can finish the prefill first
                batch = self._next_batch()
                if batch is None:
                    return
                result = self._launch_decode(batch)
                self._between_steps += 1
                if result is not None and result.delay_sample_func is not None:
                    self._take_results(pending=1)  # the grammar's next mask needs the token before
                    scheduler.launch_batch_sample_if_needed(result, batch)
        finally:
            self._decoding_between = False
            self._between_s += time.monotonic() - started_s

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Inside a prefill's forward, the state in which the loop calls SGLang."""
        scheduler = self._scheduler
        runner = scheduler.tp_worker.model_runner
        backend = runner.attn_backend
        metadata = {name: value for name, value in vars(backend).items() if name.startswith("forward_metadata")}
        ours = {name: getattr(scheduler, name) for name in self._theirs}
        for name, value in self._theirs.items():
            setattr(scheduler, name, value)
        try:
            with nullcontext() if self._lanes is None else torch.cuda.stream(scheduler.schedule_stream):
                yield
        finally:
            for name, value in ours.items():
                setattr(scheduler, name, value)
            for name, value in metadata.items():
                setattr(backend, name, value)

    def _launch(self, batch: Any) -> None:
        assert self._flight is None
        self._launching = batch
        try:
            self._flight = self._launched(batch, batch.extend_num_tokens, time.monotonic())
        finally:
            self._launching = None
        self._take_results(pending=1)  # the loop launches the next step with one pending

    def _launched(self, batch: Any, num_tokens: int, launched_s: float) -> _Flight:
        scheduler = self._scheduler
        if self._lanes is None:
            return _Flight(batch, scheduler.run_batch(batch), None, num_tokens, None, launched_s)
        lane = self._lanes.choose(scheduler, batch, self._busy.share(launched_s), self._host_ms)
        # A slot of this batch may have been freed by a request whose last decode step still runs.
        lane.stream.wait_stream(scheduler.forward_stream)
        keep_alive: list[Any] = [None, None]
        self._between_s, self._between_steps = 0.0, 0
        with self._on(lane, keep_alive):
            begun_s = time.monotonic()
            result = scheduler.run_batch(batch)
            host_ms = 1e3 * (time.monotonic() - begun_s - self._between_s)
            self._host_ms += HOST_TIME_ALPHA * (host_ms - self._host_ms)
            self._last = (
                f"last prefill: {lane.num_sms} SMs, {num_tokens} tokens launched in {host_ms:.1f} ms, "
                f"{self._between_steps} decode steps meanwhile"
            )
            scheduler.launch_batch_sample_if_needed(result, batch)
        self._copy_stream.wait_stream(lane.stream)
        done = torch.cuda.Event()
        done.record(self._copy_stream)
        return _Flight(batch, result, done, num_tokens, keep_alive, launched_s)

    @contextmanager
    def _on(self, lane: Lane, keep_alive: list[Any]) -> Iterator[None]:
        """SGLang's `run_batch` takes its streams, and the list that keeps tensors in use alive, from the scheduler."""
        scheduler = self._scheduler
        ours = {
            "forward_stream": lane.stream,
            "forward_stream_ctx": torch.cuda.stream(lane.stream),
            "copy_stream": self._copy_stream,
            "copy_stream_ctx": torch.cuda.stream(self._copy_stream),
            "batch_record_buf": keep_alive,
            "batch_record_ct": 0,
        }
        theirs = self._theirs = {name: getattr(scheduler, name) for name in ours}
        for name, value in ours.items():
            setattr(scheduler, name, value)
        try:
            yield
        finally:
            self._theirs = {}
            for name, value in theirs.items():
                setattr(scheduler, name, value)

    def _finish_if_quick(self) -> None:
        """Take the results of a prefill that is over with its launch, as short ones are, before the next decode step.

        Otherwise its first token would wait for a step, and its second for another. The device has a step to run
        meanwhile; once that is over there is something better to do than wait.
        """
        flight, pending = self._flight, self._scheduler.result_queue
        assert flight is not None
        if flight.done is None:
            return
        end_s = time.monotonic() + QUICK_WAIT_S
        while not flight.done.query():
            if time.monotonic() > end_s or (pending and pending[-1][1].copy_done.query()):
                return
        self._finish(wait=False)

    def _finish(self, *, wait: bool) -> None:
        """Process the results of the prefill in flight and let its requests decode."""
        flight = self._flight
        assert flight is not None
        if wait and flight.done is not None:
            flight.done.synchronize()
        self._flight = None
        now_s = time.monotonic()
        self._busy.add(now_s, now_s - flight.launched_s)
        scheduler = self._scheduler
        scheduler.process_batch_result(flight.batch, flight.result)
        batch, running = flight.batch, scheduler.running_batch
        chunked = [req for req in (scheduler.chunked_req, batch.chunked_req) if req is not None]
        size = batch.batch_size()
        batch.filter_batch(chunked_req_to_exclude=chunked)
        if batch.batch_size() < size:
            running.batch_is_full = False
        if batch.is_empty():
            return
        if running.is_empty():
            scheduler.running_batch = batch
        else:
            running.merge_batch(batch)

    def mark_aborted(self, rid: str, abort_all: bool) -> None:
        """Let the requests of the prefill in flight that an abort means end with it, as SGLang does for its own."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        for req in self._flight.batch.reqs if self._flight is not None else ():
            if not req.finished() and (abort_all or req.rid.startswith(rid)):
                req.to_finish = FINISH_ABORT()


def side_prefill_hooks(
    side: SidePrefill,
    lanes_for: Callable[[Any], LaneChooser | None],
    layers_of: Callable[[Any], Sequence[nn.Module]],
    mode: str,
) -> list[Hook]:
    """The hooks that run `side`'s loop in place of SGLang's.

    Args:
        lanes_for: makes the lanes for a scheduler, once it has its model and memory.
        layers_of: the layers of a scheduler's decoder, in order.
        mode: --prefill-beside-decode: 'on' fails where it cannot be, 'auto' says why and takes turns.
    """

    def loop(original: Any, scheduler: Any) -> None:
        reason = obstacle(scheduler)
        if reason is not None:
            if mode == "on":
                raise ValueError(f"--prefill-beside-decode on: not with {reason}")
            logger.info("Prefill and decode take turns: %s", reason)
            original(scheduler)
            return
        side.attach(scheduler, lanes_for(scheduler))
        side.decode_between(layers_of(scheduler))
        side.run()

    def also_abort(result: None, scheduler: Any, recv_req: Any) -> None:
        side.mark_aborted(recv_req.rid, recv_req.abort_all)

    def idle(result: bool, scheduler: Any, for_health_check: bool = False) -> bool:
        return result and not side.in_flight

    scheduler_class = "sglang.srt.managers.scheduler.Scheduler"
    hooks = [
        Hook(target=f"{scheduler_class}.{name}", function=loop, kind="around", why="prefill runs beside decode")
        for name in ("event_loop_overlap", "event_loop_normal")
    ]
    return [
        *hooks,
        Hook(
            target=f"{scheduler_class}.abort_request",
            function=also_abort,
            kind="after",
            why="an abort reaches the prefill in flight",
            parameters=("recv_req",),
        ),
        Hook(
            target=f"{scheduler_class}.is_fully_idle",
            function=idle,
            kind="after",
            why="a prefill in flight is work",
            parameters=("for_health_check",),
        ),
    ]
