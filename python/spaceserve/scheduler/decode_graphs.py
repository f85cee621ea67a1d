"""Decode on the SMs that encoder and prefill leave it: CUDA graphs for a short ladder of groups.

The kernels of a CUDA graph keep the SMs of the stream that they were captured on, wherever the graph is replayed. So
SGLang's decode graphs are captured once more on each group of the ladder, by SGLang's own runner, into its own buffers,
and before each decode step the runner's key is exchanged for that of the group that is clear of what runs beside it.
Everything else of a step is SGLang's: stream, batch, attention metadata, buffers.

Why the graphs of all groups may share what SGLang's graphs share:

- Input buffers, logits and FA3's metadata are slices of the runner's and the back end's own static tensors, for every
  capture of a batch size alike; a later capture only makes another record of the same slices. Back ends that keep
  state for each capture (FlashInfer's plans, for one) would lose that of the first, and are refused.
- Memory: one pool, as for all batch sizes, because graphs are replayed one after another on one stream. The allocator
  does not hand a block to another stream, so each group takes as much as its largest graph.
- cuBLAS has a workspace for each stream; nothing else runs on those captured on here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from spaceserve.config import SmPartition
from spaceserve.hooks import Hook
from spaceserve.partition import Partitioner, serving_partitioner
from spaceserve.ranks import has_several_ranks
from spaceserve.scheduler.encoder_watch import EncoderWatch
from spaceserve.scheduler.side_lanes import lanes_beside_decode
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.skinny_gemm.linears import SkinnyLinears

logger = logging.getLogger(__name__)

# Attention back ends whose graphs of one batch size share all they read.
SHARING_ATTENTION_BACKENDS = ("fa3",)
# KV heads for which attention's plan may be made for fewer SMs than the graph was captured for.
PLANNED_KV_HEADS = (1, 2, 4, 8, 16)
# Larger batches decode on the whole device: each graph costs time at the start and a few MiB.
MAX_BATCH = 64
# Left free for what comes after the graphs.
MIN_FREE_BYTES = 1 << 30
WRITE_INTERVAL_S = 1.0

NOT_ASKED_FOR = (
    "decode has no CUDA graphs for groups of SMs: start the server with --sm-partition auto, both+sis or both+static:N"
)
ON_CPU = "decode has no CUDA graphs for groups of SMs: there are none on the CPU"


def obstacle(model_runner: Any) -> str | None:
    """Why decode cannot be confined in this scheduler, None where it can."""
    args, runner = model_runner.server_args, model_runner.decode_cuda_graph_runner
    if model_runner.device != "cuda":
        return f"there are no CUDA graphs on the device {model_runner.device}"
    if has_several_ranks(args):
        return "not with several ranks"
    if not model_runner.spec_algorithm.is_none() or model_runner.is_draft_worker:
        return "not with speculative decoding"
    if args.enable_lora or args.enable_pdmux or args.enable_two_batch_overlap or args.enable_memory_saver:
        return "not with LoRA, PD multiplexing, two-batch overlap or the memory saver"
    if type(runner).__name__ != "DecodeCudaGraphRunner":
        return "SGLang runs decode without CUDA graphs"
    if type(runner.backend).__name__ != "FullCudaGraphBackend":
        return f"not with decode graphs of the kind {type(runner.backend).__name__}"
    if runner.enable_torch_compile:
        return "not with torch.compile"
    other = sorted({str(name) for name in args.get_attention_backends()} - set(SHARING_ATTENTION_BACKENDS))
    if other:
        return f"attention backend {', '.join(other)}, whose graphs keep state of their own"
    return None


class DecodeGraphs:
    """Captures the graphs and chooses among them. One thread.

    Args:
        ladder_path: file for the encoder worker and the status page (`DecoderLadder.write`).
        watch: what the encoder worker runs.
        prefill_in_flight: whether a prefill runs beside decode; `note_lane` says where.
        count_step: called with the units of each decode step.
        partitioner_factory: makes the ladder of a device, given its name.

    Attributes:
        on_group: entered while graphs are captured on a group, given its units and its stream.
        was_asked_for: False where it is the default.
    """

    def __init__(
        self,
        ladder_path: Path,
        watch: EncoderWatch,
        prefill_in_flight: Callable[[], bool],
        count_step: Callable[[int], None] = lambda units: None,
        partitioner_factory: Callable[[str], Partitioner] = lambda device: serving_partitioner(
            device, prepare="nothing"
        ),
    ) -> None:
        self.ladder = DecoderLadder(reason=NOT_ASKED_FOR)
        self._path = ladder_path
        self._watch = watch
        self._prefill_in_flight = prefill_in_flight
        self._lane_units = 0
        self._count_step = count_step
        self._partitioner_factory = partitioner_factory
        self.on_group: Callable[[int, Any], AbstractContextManager[None]] = lambda units, stream: nullcontext()
        self.was_asked_for = True
        self._partitioner: Partitioner | None = None  # green contexts must outlive the graphs
        self._runner: Any = None
        self._keys: dict[tuple[int, int], Any] = {}  # by decoder units and captured batch size
        self._cost: dict[str, Any] = {}
        self._steps: dict[int, int] = {}
        self._loading_for: int | None = None
        self._written_s = 0.0

    # ---- at the start

    def capture(self, model_runner: Any) -> None:
        """Capture the ladder with the runner that has SGLang's own graphs; where it cannot be done, say why."""
        reason = obstacle(model_runner)
        # What cannot be here is no fault of a server that was not asked for it; a capture that fails is one.
        level = logging.WARNING if self.was_asked_for or reason is None else logging.INFO
        if reason is None:
            try:
                self._capture(model_runner)
            except Exception as error:
                # Whatever it was (no memory, a kernel that cannot be captured there): SGLang's graphs are there.
                torch.cuda.synchronize()
                self._forget(model_runner.decode_cuda_graph_runner)
                reason = f"capturing the graphs failed: {type(error).__name__}: {error}"
        if reason is not None:
            self.ladder = DecoderLadder(reason=f"decode cannot keep to SMs of its own: {reason}")
            logger.log(level, "Decode cannot keep to SMs of its own, only the encoder: %s", reason)
        self._write()

    def _capture(self, model_runner: Any) -> None:
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

        runner = model_runner.decode_cuda_graph_runner
        began_s = time.monotonic()
        free_before, _ = torch.cuda.mem_get_info()
        partitioner = self._partitioner = self._partitioner_factory(f"cuda:{model_runner.gpu_id}")
        if partitioner.backend != "green_ctx":
            raise ValueError(f"no CUDA graphs of groups of the back end {partitioner.backend}")
        groups = decoder_groups(partitioner)
        if not groups:
            raise ValueError(f"no group of {partitioner.describe()} leaves decode a quarter of the device")
        sizes = [size for size in runner.capture_bs if size <= MAX_BATCH]
        # As SGLang before its own capture: these buffers are what attention metadata is made from.
        runner.buffers.seq_lens.fill_(runner.seq_len_fill_value)
        runner.buffers.seq_lens_cpu.fill_(runner.seq_len_fill_value)
        runner.buffers.reset_index_buffers()
        captured: list[int] = []
        with (
            model_capture_mode(),
            freeze_gc(model_runner.server_args.enable_cudagraph_gc),
            _on_one_stream(model_runner.token_to_kv_pool),
        ):
            for group in groups:
                free, _ = torch.cuda.mem_get_info()
                if free < MIN_FREE_BYTES:
                    logger.warning("No CUDA graphs of decode on %d SMs: %d MiB are free", group.granted, free >> 20)
                    continue
                with (
                    self.on_group(group.granted, group.stream),
                    graph_capture(stream=group.stream) as context,
                    runner.backend.capture_session(context.stream),
                ):
                    for size in reversed(sizes):  # the small ones fit into the memory of the large ones
                        label = f"sms{group.granted}"
                        runner.capture_one_shape(size, model_runner.model.forward, None, label)
                        key = runner._make_graph_key(size, None, label)
                        assert runner.backend.can_run(None, key), key
                        self._keys[group.granted, size] = key
                group.stream.synchronize()
                captured.append(group.granted)
        torch.cuda.synchronize()
        if not captured or not sizes:
            raise RuntimeError("no memory is left for them" if sizes else f"no batch size within {MAX_BATCH}")
        self._runner = runner
        self._plan_attention(runner.attn_backend)
        self.ladder = DecoderLadder(total_units=partitioner.total_units, rungs=tuple(sorted(captured)))
        free_after, _ = torch.cuda.mem_get_info()
        self._cost = {
            "batch_sizes": sizes,
            "capture_s": round(time.monotonic() - began_s, 2),
            "capture_mib": max(0, free_before - free_after) >> 20,
        }
        logger.info(
            "CUDA graphs of decode on %s SMs, batches of up to %d: %d graphs, %.1f s, %d MiB",
            ", ".join(map(str, self.ladder.rungs)),
            sizes[-1],
            len(self._keys),
            self._cost["capture_s"],
            self._cost["capture_mib"],
        )

    def _plan_attention(self, backend: Any) -> None:
        """Let FA3 split a step's keys among the SMs of its graph, not among all of the device.

        The graphs were captured with room for the splits of the whole device. For a power of two of KV heads fewer SMs
        never make more of them; for others nothing is changed.
        """
        plan = backend._get_scheduler_metadata
        if plan is None:
            return

        def for_group(*, batch_size: int, num_heads_k: int, **rest: Any) -> Any:
            arguments = {"batch_size": batch_size, "num_heads_k": num_heads_k, **rest}
            idle = self.idle_units(batch_size) if num_heads_k in PLANNED_KV_HEADS else 0
            if idle:
                try:
                    return plan(sm_margin=idle, **arguments)
                except Exception as error:
                    # A step that is planned for the whole device is slower, but a step.
                    logger.warning("Attention cannot be planned for groups of SMs: %s", error)
                    backend._get_scheduler_metadata = plan
            return plan(**arguments)

        backend._get_scheduler_metadata = for_group

    def _forget(self, runner: Any) -> None:
        """Give back the graphs of a capture that failed."""
        for key in self._keys.values():
            runner.backend._graphs.pop(key, None)
            runner.backend._outputs.pop(key, None)
        self._keys.clear()

    # ---- before each decode step

    @contextmanager
    def loading(self, runner: Any) -> Iterator[None]:
        """While `runner` loads a batch; then let it replay the graph of the group that is clear of encoder and prefill.

        Where the batch goes is looked up at the beginning, because attention is planned for it (`idle_units`).
        """
        if runner is not self._runner:
            yield
            return
        units = self._loading_for = self._units()
        try:
            yield
        finally:
            self._loading_for = None
        ours = self._keys.get((units, runner._replay_graph_key.size))
        if ours is None:
            units = self.ladder.total_units
        else:
            runner._replay_graph_key = ours
        self._count(units)

    def idle_units(self, size: int) -> int:
        """Units that the batch being loaded, padded to `size`, will not run on; 0 where none is loaded."""
        units = self._loading_for
        return 0 if units is None or (units, size) not in self._keys else self.ladder.total_units - units

    def note_lane(self, num_sms: int) -> None:
        """The next prefill beside decode runs on `num_sms` SMs."""
        self._lane_units = num_sms

    def _units(self) -> int:
        encoder_units, masked = self._watch.look()
        if not masked:
            return self.ladder.total_units
        return self.ladder.units(max(encoder_units, self._lane_units if self._prefill_in_flight() else 0))

    def _count(self, units: int) -> None:
        self._steps[units] = self._steps.get(units, 0) + 1
        self._count_step(units)
        now_s = time.monotonic()
        if now_s - self._written_s > WRITE_INTERVAL_S:
            self._written_s = now_s
            self._write()

    def _write(self) -> None:
        steps = {str(units): count for units, count in sorted(self._steps.items())}
        self.ladder.write(self._path, **self._cost, steps=steps)


@contextmanager
def _on_one_stream(kv_pool: Any) -> Iterator[None]:
    """While a graph is captured SGLang writes V on another stream where it has no kernel for both: on all SMs."""
    alt_stream = getattr(kv_pool, "alt_stream", None)
    if alt_stream is not None:
        kv_pool.alt_stream = None
    try:
        yield
    finally:
        if alt_stream is not None:
            kv_pool.alt_stream = alt_stream


def decoder_groups(partitioner: Partitioner) -> list[Any]:
    """The decoder's groups, largest first: the complements of prefill's lanes.

    64, 48 and 32 of an H200's 132 SMs, beside 68, 84 and 100 of the encoder. Smaller ones cost more than they bring: on
    16 SMs a step took 14 ms beside the encoder, for an encoder that was 8 % quicker.
    """
    groups = [partitioner.complement_of(units) for units in lanes_beside_decode(partitioner.rungs)]
    return [group for group in groups if group is not None]


def step_counter(labels: dict[str, str]) -> Callable[[int], None]:
    """A Prometheus counter of decode steps by SMs. Make it once per process, after PROMETHEUS_MULTIPROC_DIR is set."""
    from prometheus_client import Counter

    steps = Counter("spaceserve:decode_steps_total", "Decode steps, by the SMs of their graph.", [*labels, "sms"])
    children: dict[int, Any] = {}

    def count(units: int) -> None:
        if units not in children:
            children[units] = steps.labels(**labels, sms=str(units))
        children[units].inc()

    return count


def decode_graphs(
    mode: str,
    ladder_path: Path,
    board_name: str,
    prefill_in_flight: Callable[[], bool],
    metric_labels: dict[str, str] | None,
    linears: SkinnyLinears | None = None,
    *,
    on_gpu: bool,
) -> DecodeGraphs | None:
    """Decode's graphs where `--sm-partition` (`mode`) masks both sides; else the reason is left, and None returned.

    metric_labels: of the server's metrics; None where it has none.
    linears: choose the kernels of the decoder's products for each group; None: cuBLAS's.
    """
    asked = SmPartition.parse(mode)
    if asked.mask_mode != "both" or (asked.is_default and not on_gpu):
        DecoderLadder(reason=NOT_ASKED_FOR if on_gpu else ON_CPU).write(ladder_path)
        return None
    count_step = (lambda units: None) if metric_labels is None else step_counter(metric_labels)
    graphs = DecodeGraphs(ladder_path, EncoderWatch(board_name), prefill_in_flight, count_step)
    graphs.was_asked_for = not asked.is_default
    if linears is not None:
        graphs.on_group = linears.on
    return graphs


def decode_graph_hooks(graphs: DecodeGraphs) -> list[Hook]:
    """The hooks that capture the ladder after SGLang's graphs and choose from it."""

    def capture(result: None, model_runner: Any, capture_decode_cuda_graph: bool = True) -> None:
        graphs.capture(model_runner)

    def load(original: Callable[..., None], runner: Any, forward_batch: Any, pp_proxy_tensors: Any = None) -> None:
        with graphs.loading(runner):
            original(runner, forward_batch, pp_proxy_tensors)

    return [
        Hook(
            target="sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
            function=capture,
            kind="after",
            why="decode graphs for groups of SMs",
            parameters=("capture_decode_cuda_graph",),
        ),
        Hook(
            target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.load_batch",
            function=load,
            kind="around",
            why="decode keeps clear of the SMs of encoder and prefill",
            parameters=("forward_batch", "pp_proxy_tensors"),
        ),
    ]
