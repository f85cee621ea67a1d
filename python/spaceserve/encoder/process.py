"""The encoder worker's process: sockets, threads and the loop around `EncoderService`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spaceserve.channels import Channels
from spaceserve.config import SpaceServeConfig
from spaceserve.families import Family
from spaceserve.heap import fix_heap_thresholds, trim_heap

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

    from spaceserve.encoder.long_attention import LongAttention
    from spaceserve.encoder.model import VisionEncoder
    from spaceserve.encoder.service import EncoderService
    from spaceserve.encoder.split import EncoderSplit

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16
# Files decoded ahead of their batch; an image of 2048x2048 takes 12.6 MB of RGB bytes.
MAX_PREPARED_AHEAD = 32
CPU_CACHE_GB = 0.25
GPU_CACHE_FRACTION = 0.02
# A device that has not finished a batch in this time is taken for hung; the heartbeat stops.
BATCH_HANG_S = 120.0
HEAP_TRIM_S = 10.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker process is started with; picklable."""

    server_args: ServerArgs
    config: SpaceServeConfig
    family: Family
    channels: Channels
    epoch: int


def slab_tokens(config: SpaceServeConfig, feature_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of the slab: whole blocks within `--encoder-feature-cache-gb`.

    Raises:
        ValueError: not even one block fits, or the GPU's memory is smaller.
    """
    import torch

    cache_gb = config.encoder_feature_cache_gb
    if device.type == "cuda":
        memory_gb = torch.cuda.get_device_properties(device).total_memory / 1e9
        if cache_gb is None:
            cache_gb = GPU_CACHE_FRACTION * memory_gb
        elif cache_gb > memory_gb:
            raise ValueError(f"--encoder-feature-cache-gb {cache_gb:g}: the GPU has {memory_gb:.1f} GB of memory")
    elif cache_gb is None:
        cache_gb = CPU_CACHE_GB
    return blocks_in(cache_gb, feature_dim, dtype, "cache") * BLOCK_TOKENS


def blocks_in(size_gb: float, feature_dim: int, dtype: torch.dtype, name: str) -> int:
    """Whole blocks within `--encoder-feature-NAME-gb`.

    Raises:
        ValueError: not even one fits.
    """
    num_blocks = int(size_gb * 1e9) // (BLOCK_TOKENS * feature_dim * dtype.itemsize)
    if num_blocks < 1:
        block_kb = BLOCK_TOKENS * feature_dim * dtype.itemsize / 1e3
        raise ValueError(
            f"--encoder-feature-{name}-gb {size_gb:g} holds no block of features ({BLOCK_TOKENS} tokens, "
            f"{block_kb:.1f} kB)"
        )
    return num_blocks


def _warm_up(encoder: VisionEncoder, capacity_patches: int) -> None:
    """Run the largest batch once, so that its memory is taken and its kernels are ready before anybody measures."""
    import torch

    merge = int(encoder.hf_config.vision_config.spatial_merge_size)
    patch = encoder.hf_config.vision_config
    patch_dim = patch.in_chans * patch.temporal_patch_size * patch.patch_size**2
    side = max(merge, int(capacity_patches**0.5) // merge * merge) if encoder.device.type == "cuda" else 4 * merge
    for grid in ((1, merge, merge), (1, side, side)):
        pixels = torch.zeros(grid[1] * grid[2], patch_dim)
        encoder.encode([pixels], [grid])
    if encoder.device.type == "cuda":
        torch.cuda.synchronize()


def _choose_attention(
    chosen: LongAttention, encoder: VisionEncoder, image_processor: Any, spec: WorkerSpec, split: EncoderSplit
) -> None:
    """Measure which attention is quicker for the longest images of this server; SGLang's where that fails."""
    from spaceserve.encoder.long_attention import heads_of
    from spaceserve.families import image_grid

    if spec.epoch > 0:
        logger.info("Encoder attention: FA3 only; this worker replaces one that failed, and is to be ready soon")
        return
    try:
        found = heads_of(encoder.blocks(), encoder.dtype)
        if found is None:
            logger.info("Encoder attention: SGLang's; its layers are not those that are known")
            return
        side = int(spec.config.encoder_max_image_pixels**0.5)
        _, rows, columns = image_grid(image_processor, spec.server_args.mm_process_config.get("image", {}), side, side)
        chosen.choose(encoder.device, *found, rows * columns, split.usual_groups())
    except Exception as error:
        logger.warning("Encoder attention: FA3 only; %s", reason_of(error))


def run_encoder_process(spec: WorkerSpec) -> None:
    """Entry point of the process. Returns never, except through an exception, which ends the process with code 1."""
    from sglang.srt.utils import configure_logger, kill_itself_when_parent_died

    kill_itself_when_parent_died()
    if spec.server_args.device == "cpu":
        fix_heap_thresholds()
    import setproctitle

    setproctitle.setproctitle("spaceserve::encoder")
    configure_logger(spec.server_args, prefix=" encoder")
    try:
        _serve(spec)
    except Exception as error:
        reason = reason_of(error)
        # The supervisor says what is wrong with a setting; a traceback would only hide that.
        logger.error("The encoder worker failed: %s", reason, exc_info=not SpaceServeConfig.is_at_fault(reason))
        Path(spec.channels.run_dir, f"encoder-error-{spec.epoch}").write_text(reason)
        # Threads of a failed encoder may hang in the driver: do not wait for them.
        os._exit(1)


def reason_of(error: Exception) -> str:
    """One line that says what went wrong: the error's first, after its type where that is no ValueError."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0] if isinstance(error, ValueError) else f"{type(error).__name__}: {lines[0]}"


@contextmanager
def _memory_for(setting: str) -> Iterator[None]:
    """Name the setting that asks for more memory than the GPU has left."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{setting}: {reason_of(error)}") from error


def _serve(spec: WorkerSpec) -> None:
    import torch
    import zmq
    from sglang.srt.managers.tokenizer_manager import _get_processor_wrapper

    from spaceserve.encoder.capacity import batch_capacity
    from spaceserve.encoder.fused import fused_hooks
    from spaceserve.encoder.heartbeat import Heartbeat
    from spaceserve.encoder.host_tier import HostTier
    from spaceserve.encoder.long_attention import LongAttention
    from spaceserve.encoder.model import VisionEncoder, encoder_only_hooks
    from spaceserve.encoder.preprocess import Preprocessor
    from spaceserve.encoder.runner import BatchRunner
    from spaceserve.encoder.service import EncoderService
    from spaceserve.encoder.split import make_split
    from spaceserve.encoder_schedule import EncodeQueue
    from spaceserve.families import feature_dim
    from spaceserve.feature_store.host_store import HostStore
    from spaceserve.feature_store.store import FeatureStore
    from spaceserve.hooks import install
    from spaceserve.messages import ImageSource, ToScheduler, WorkerUp, decode_to_worker, encode
    from spaceserve.slab import Slab

    channels, config = spec.channels, spec.config
    install(encoder_only_hooks(spec.family))
    long_attention = LongAttention() if config.encoder_attention == "auto" else None
    if spec.server_args.device == "cuda":
        install(fused_hooks(spec.family, long_attention=long_attention))
    heartbeat = Heartbeat(channels.heartbeat)
    heartbeat.beat_while_starting()
    num_cores = len(os.sched_getaffinity(0))
    if spec.server_args.device == "cpu":
        torch.set_num_threads(max(1, num_cores // 2))
    encoder = VisionEncoder(spec.server_args, f"{channels.run_dir}/encoder-init-{spec.epoch}")
    dim = feature_dim(encoder.hf_config)
    num_tokens = slab_tokens(config, dim, encoder.dtype, encoder.device)
    with _memory_for("--encoder-feature-cache-gb"):
        slab = Slab.create(num_tokens, dim, encoder.dtype, encoder.device, channels.slab_segment(spec.epoch))
    gpu = torch.cuda.get_device_properties(encoder.device) if encoder.device.type == "cuda" else None
    capacity = batch_capacity(
        config.encoder_batch_capacity_patches,
        None if gpu is None else gpu.name,
        0 if gpu is None else gpu.multi_processor_count,
        spec.server_args.model_path,
    )
    processor = _get_processor_wrapper(spec.server_args)
    preprocessor = Preprocessor(processor, spec.server_args.mm_process_config, encoder.device)
    num_threads = config.encoder_preprocess_threads or max(1, min(8, num_cores // 2))
    split = make_split(
        config,
        encoder.device,
        spec.server_args.model_path,
        channels.state_board(0),
        own_board_name=channels.encoder_board,
        ladder_path=Path(channels.decoder_sms_file),
    )
    if long_attention is not None and gpu is not None:
        # Before the warm-up, whose memory stays taken: what was needed to measure goes back.
        _choose_attention(long_attention, encoder, processor.image_processor, spec, split)
    with _memory_for("--encoder-batch-capacity-patches"):
        _warm_up(encoder, capacity)
    split.attach(encoder.blocks())
    sm_partition_path = Path(channels.sm_partition_file)
    split.follow(sm_partition_path)
    runner = BatchRunner(encoder, preprocessor, slab, split, num_threads)

    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)
    inbox.bind(channels.requests)
    outboxes: dict[str, zmq.Socket[bytes]] = {}

    def send(address: str, message: ToScheduler) -> None:
        if address not in outboxes:
            outbox = outboxes[address] = context.socket(zmq.PUSH)
            outbox.set_hwm(0)
            outbox.connect(address)
        outboxes[address].send(encode(message))

    def prepare(key: bytes, sources: Sequence[ImageSource]) -> None:
        if runner.num_prepared < MAX_PREPARED_AHEAD:
            runner.prepare(key, sources)

    host = None
    host_store = None
    if config.encoder_feature_host_gb is not None:
        host_tokens = blocks_in(config.encoder_feature_host_gb, dim, encoder.dtype, "host") * BLOCK_TOKENS
        host = HostTier(slab, host_tokens)
        host_store = HostStore(host_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
    queue = EncodeQueue(config.encoder_schedule_policy, config.encoder_window_ms / 1000, capacity)
    split.num_waiting = lambda: queue.num_requests
    service = EncoderService(
        FeatureStore(
            num_tokens // BLOCK_TOKENS, BLOCK_TOKENS, host=host_store, save=None if host is None else host.save
        ),
        queue,
        spec.epoch,
        send,
        prepare,
        runner.forget,
        None if host is None else host.restore,
    )
    for address in channels.all_features():
        send(address, WorkerUp(spec.epoch, slab.handle.dump()))
    logger.info(
        "Encoder worker ready: %.1f M parameters, features of %d x %s, store of %d tokens (%.2f GB), "
        "%.2f GB in host memory, batches of %d patches, %d preprocessing threads",
        encoder.num_parameters() / 1e6,
        dim,
        encoder.dtype,
        num_tokens,
        num_tokens * dim * encoder.dtype.itemsize / 1e9,
        0.0 if host is None else host.num_bytes / 1e9,
        capacity,
        num_threads,
    )

    metrics = None
    if spec.server_args.enable_metrics:
        from spaceserve.encoder.split_metrics import SplitMetrics
        from spaceserve.feature_store.metrics import FeatureStoreMetrics

        labels = {"model_name": str(spec.server_args.served_model_name)}
        metrics = FeatureStoreMetrics(labels, BLOCK_TOKENS * dim * encoder.dtype.itemsize)
        split.metrics = SplitMetrics(labels)
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(runner.wakeup_fd, zmq.POLLIN)
    if host is not None:
        poller.register(host.wakeup_fd, zmq.POLLIN)
    check_at_idle = os.environ.get("SPACESERVE_DEBUG") == "1"
    status_path = Path(channels.status_file)
    status_s = trimmed_s = 0.0
    while True:
        now_s = time.monotonic()
        if service.oldest_in_flight_s(now_s) < BATCH_HANG_S:
            heartbeat.beat()
        events = dict(poller.poll(1000))
        now_s = time.monotonic()
        if inbox in events:
            while True:
                try:
                    frame = inbox.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                service.handle(decode_to_worker(frame), now_s)
        for batch in runner.take_finished():
            service.finish(batch, time.monotonic())
        if host is not None:
            for key, copied in host.take_restored():
                service.restored(key, copied=copied)
        for batch in service.next_batches(time.monotonic()):
            runner.submit(batch, after=None if host is None else host.last_copy)
        if check_at_idle and service.is_idle:
            service.check_integrity()
        if now_s - status_s > 0.5:
            status_s = now_s
            if metrics is not None:
                metrics.update(service.store.stats())
            split.follow(sm_partition_path)
            _write_status(status_path, service, split, spec.epoch, now_s)
        if now_s - trimmed_s > HEAP_TRIM_S:
            trimmed_s = now_s
            trim_heap()


def gpu_memory() -> dict[str, int] | None:
    """Device memory of this process that PyTorch has: the encoder's weights, the slab and the workspace of batches.

    `reserved_bytes` is what it holds, `allocated_bytes` what is in use now. None on the CPU.
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    return {"reserved_bytes": torch.cuda.memory_reserved(), "allocated_bytes": torch.cuda.memory_allocated()}


def _write_status(path: Path, service: EncoderService, split: EncoderSplit, epoch: int, now_s: float) -> None:
    """Leave the worker's state where the main process can read it for the status page."""
    stats = service.store.stats()
    status = {
        "epoch": epoch,
        "num_requests": service.num_requests,
        "num_encoded": service.num_encoded,
        "num_failed": service.num_failed,
        "store": {
            name: getattr(stats, name) for name in stats.__dataclass_fields__ if name not in ("evictions", "host")
        },
        "evictions": dict(stats.evictions),
        "host": None if stats.host is None else asdict(stats.host),
        "queue": service.queue.snapshot(now_s),
        "split": split.snapshot(),
        "gpu_memory": gpu_memory(),
    }
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(status))
    scratch.replace(path)
