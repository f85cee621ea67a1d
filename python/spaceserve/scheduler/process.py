"""The scheduler's process: SGLang's, with the hooks that connect it to the encoder worker."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spaceserve.channels import Channels
from spaceserve.config import SpaceServeConfig
from spaceserve.encoder.model import weights_hook
from spaceserve.families import Family
from spaceserve.heap import fix_heap_thresholds
from spaceserve.hooks import Hook, install
from spaceserve.messages import FeaturesFailed, FeaturesReady, WorkerDown, WorkerUp
from spaceserve.scheduler.decode_graphs import decode_graph_hooks, decode_graphs
from spaceserve.scheduler.feature_view import FeatureView
from spaceserve.scheduler.gate import EncoderGate
from spaceserve.scheduler.link import EncoderLink
from spaceserve.scheduler.log_line import ImagesInLogLine
from spaceserve.scheduler.publisher import DecodePublisher
from spaceserve.scheduler.side_lanes import lanes_for
from spaceserve.scheduler.side_prefill import SidePrefill, side_prefill_hooks
from spaceserve.scheduler.tracking import AnswersExpired
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.skinny_gemm.linears import SkinnyLinears, skinny_linear_hooks

# While everything waits for the encoder, the scheduler sleeps up to this long instead of spinning.
IDLE_POLL_MS = 5


class VisionStub(nn.Module):
    """Stands where the encoder would be: this process has no encoder weights and cannot encode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("the scheduler holds no encoder: features come from the encoder worker")


def decoder_only_hooks(family: Family) -> list[Hook]:
    """The hooks that make SGLang's loader leave the encoder out."""
    return [
        Hook(
            target=family.target(family.vision_class),
            function=VisionStub,
            kind="replace",
            why="no encoder in the scheduler",
        ),
        weights_hook(family, vision=False),
    ]


def gate_hooks(
    gate: EncoderGate, view: FeatureView, side: SidePrefill, publisher: DecodePublisher | None, *, on_gpu: bool
) -> list[Hook]:
    """The hooks that hold requests back until their features are ready, and hand these to the prefill."""

    def use_view(result: None, max_size: int = 0) -> None:
        sys.modules["sglang.srt.managers.mm_utils"].embedding_cache = view  # type: ignore[attr-defined]

    def add_messages(result: None, scheduler: Any) -> None:
        from sglang.utils import TypeBasedDispatcher

        gate.attach(scheduler)
        ours = (WorkerUp, WorkerDown, FeaturesReady, FeaturesFailed, AnswersExpired)
        scheduler._request_dispatcher += TypeBasedDispatcher([(kind, gate.on_message) for kind in ours])

    def pull_messages(result: list[Any] | None, receiver: Any) -> list[Any] | None:
        if result is not None:
            result.extend(gate.incoming())
        return result

    def track(scheduler: Any, recv_req: Any) -> None:
        if recv_req.mm_inputs is not None:
            gate.track(recv_req.rid, recv_req.mm_inputs.mm_items)

    def admit(
        original: Callable[..., Any], scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any
    ) -> Any:
        if side.in_flight:  # one prefill at a time: this pass is for decode
            if publisher is not None:
                publisher.publish(scheduler, side.num_tokens)
            return None, running_batch
        # SGLang moves requests whose grammar is ready into the queue at the start of its pass, past the gate: do it
        # before, and let the pass find none.
        if scheduler.grammar_manager.has_waiting_grammars():
            for req in scheduler.grammar_manager.get_ready_grammar_requests():
                scheduler._add_request_to_queue(req)
        waiting = scheduler.waiting_queue
        eligible, held = gate.partition(waiting)
        if eligible is not waiting:
            scheduler.waiting_queue = eligible
        candidates = list(eligible)
        gate.in_pass = True
        try:
            batch, running_batch = original(scheduler, prefill_delayer_single_pass, running_batch)
        finally:
            gate.in_pass = False
            left = scheduler.waiting_queue
            if held:
                # Back in order of arrival; what the pass itself added (preempted requests) stays behind.
                order = {id(req): position for position, req in enumerate(waiting)}
                scheduler.waiting_queue = sorted(left + held, key=lambda req: order.get(id(req), len(order)))
            gate.after_pass(candidates, scheduler.waiting_queue)
            gate.num_ready = len(left)
            if publisher is not None:
                publisher.publish(scheduler, 0 if batch is None else batch.extend_num_tokens)
        if held and batch is None and running_batch.is_empty() and scheduler.chunked_req is None:
            gate.wait_a_little(IDLE_POLL_MS)
        return batch, running_batch

    def has_waiting_grammars(original: Callable[..., bool], manager: Any) -> bool:
        return not gate.in_pass and original(manager)

    def after_batch(scheduler: Any, batch: Any) -> None:
        gate.after_batch(batch.reqs)

    def abort_chunked(original: Callable[..., Any], scheduler: Any) -> None:
        req = scheduler._pending_chunked_abort_req
        original(scheduler)
        if req is not None and req.finished() and scheduler._pending_chunked_abort_req is None:
            gate.on_abort(req.rid)

    def flushed(result: bool, scheduler: Any, empty_cache: bool = True) -> bool:
        if result:
            gate.on_flush()
        return result

    def removed(cache: Any, node: Any, medium: Any = None) -> None:
        if cache.token_to_kv_pool_allocator is not None:  # not the one that the scheduling policy simulates with
            gate.on_radix_removed(node.key.token_ids)

    def cleared(cache: Any) -> None:
        if cache.token_to_kv_pool_allocator is not None:
            gate.on_radix_cleared()

    scheduler_class = "sglang.srt.managers.scheduler.Scheduler"
    events = "sglang.srt.mem_cache.events.KVCacheEventMixin"
    receiver = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
    hooks = [
        Hook(
            target="sglang.srt.managers.mm_utils.init_mm_embedding_cache",
            function=use_view,
            kind="after",
            why="prefill reads features from the slab",
            parameters=("max_size",),
        ),
        Hook(
            target=f"{scheduler_class}.init_request_dispatcher",
            function=add_messages,
            kind="after",
            why="the scheduler understands the encoder worker's messages",
        ),
        Hook(
            target=f"{receiver}._pull_raw_reqs",
            function=pull_messages,
            kind="after",
            why="the encoder worker's messages reach every rank in one order",
        ),
        Hook(
            target=f"{scheduler_class}.handle_generate_request",
            function=track,
            kind="before",
            why="follow requests with images",
            parameters=("recv_req",),
        ),
        Hook(
            target=f"{scheduler_class}._get_new_batch_prefill_raw",
            function=admit,
            kind="around",
            why="pass over requests whose features are not ready",
            parameters=("prefill_delayer_single_pass", "running_batch"),
        ),
        Hook(
            target="sglang.srt.constrained.grammar_manager.GrammarManager.has_waiting_grammars",
            function=has_waiting_grammars,
            kind="around",
            why="requests with a grammar pass the gate like all others",
        ),
        Hook(
            target=f"{scheduler_class}._maybe_clear_mm_inputs",
            function=after_batch,
            kind="before",
            why="release features after the prefill",
            parameters=("batch",),
        ),
        Hook(
            target=f"{scheduler_class}.process_pending_chunked_abort",
            function=abort_chunked,
            kind="around",
            why="a request aborted between two chunks releases its features",
        ),
        Hook(
            target=f"{scheduler_class}.flush_cache",
            function=flushed,
            kind="after",
            why="a flush empties the feature store too",
            parameters=("empty_cache",),
        ),
        Hook(
            target=f"{events}._record_remove_event",
            function=removed,
            kind="before",
            why="features are wanted again when the RadixCache loses their tokens",
            parameters=("node", "medium"),
        ),
        Hook(
            target=f"{events}._record_all_cleared_event",
            function=cleared,
            kind="before",
            why="the same, when the RadixCache is reset",
        ),
    ]
    if on_gpu:

        def trust_length(original: Callable[..., Any], embedding: torch.Tensor, mask: Any, logger: Any) -> torch.Tensor:
            return embedding

        hooks.append(
            Hook(
                target="sglang.srt.managers.mm_utils._adjust_embedding_length",
                function=trust_length,
                kind="around",
                why="the number of placeholders is known; counting them on the device would stall the scheduler",
                parameters=("embedding", "mask", "logger"),
            )
        )
    return hooks


def decoder_layers(family: Family, model: nn.Module) -> Sequence[nn.Module]:
    """The layers of the model's decoder, in order."""
    layers: Any = model.get_submodule(family.decoder_layers)
    return list(layers)


def run_scheduler_process(
    config: SpaceServeConfig,
    channels: Channels,
    family: Family,
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    attn_cp_rank: int,
    moe_dp_rank: int,
    moe_ep_rank: int,
    pp_rank: int,
    dp_rank: int | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """SGLang's `run_scheduler_process` behind our hooks; the first three arguments are bound by the launcher.

    It waits for the encoder worker first: SGLang sizes the KV cache by the device's free memory, and the worker must
    have taken its share before.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process as original

    if server_args.device == "cpu":
        fix_heap_thresholds()
    is_entry_rank = tp_rank == 0 and attn_cp_rank == 0 and pp_rank == 0
    link = EncoderLink(channels, dp_rank or 0) if is_entry_rank else None
    view = FeatureView()
    metrics = None
    labels = {"model_name": str(server_args.served_model_name)}
    if is_entry_rank and server_args.enable_metrics:
        from spaceserve.feature_store.metrics import FeatureStoreMetrics

        metrics = FeatureStoreMetrics(labels, block_bytes=0)
    gate = EncoderGate(view, link, config.encoder_timeout_s, metrics)
    publisher = DecodePublisher(channels.state_board(dp_rank or 0)) if is_entry_rank else None
    side = SidePrefill()
    log_line = ImagesInLogLine((gate.summary, side.summary), Path(channels.status_file))
    logging.getLogger("sglang.srt.managers.scheduler_components.metrics_reporter").addFilter(log_line)
    on_gpu = server_args.device == "cuda"
    layers_of = partial(decoder_layers, family)
    linears = SkinnyLinears() if config.skinny_gemm != "off" else None
    graphs = None
    if is_entry_rank:
        graphs = decode_graphs(
            config.sm_partition,
            Path(channels.decoder_sms_file),
            channels.encoder_board,
            lambda: side.in_flight,
            labels if server_args.enable_metrics else None,
            linears,
            on_gpu=on_gpu,
        )
    hooks = decoder_only_hooks(family) + gate_hooks(gate, view, side, publisher, on_gpu=on_gpu)
    if config.prefill_beside_decode != "off":
        hooks += side_prefill_hooks(
            side,
            partial(
                lanes_for,
                config,
                Path(channels.sm_partition_file),
                num_ready=lambda: gate.num_ready,
                ladder=DecoderLadder if graphs is None else lambda: graphs.ladder,
                chosen=(lambda num_sms: None) if graphs is None else graphs.note_lane,
            ),
            lambda scheduler: layers_of(scheduler.tp_worker.model_runner.model),
            config.prefill_beside_decode,
        )
    if linears is not None:
        hooks += skinny_linear_hooks(linears, layers_of)
    if graphs is not None:
        hooks += decode_graph_hooks(graphs)
    install(hooks)
    if link is not None:
        link.wait_for_worker()
    original(
        server_args,
        port_args,
        gpu_id,
        tp_rank,
        attn_cp_rank,
        moe_dp_rank,
        moe_ep_rank,
        pp_rank,
        dp_rank,
        *args,
        **kwargs,
    )
    # SGLang reports an exception to its parent with a signal and then ends with code 0. Where the parent is the
    # forkserver, only the exit code tells the launcher's watchdog.
    sys.exit(1)
