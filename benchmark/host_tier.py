"""Is it worth keeping evicted features in host memory? Copies against encodes, and a worker and a server with both.

  host_tier.py OUT.json --model DIR [--device cuda] [--load-format dummy] [--parts copy worker serve]

copy    for each image side: the time to encode it, to copy its features to pinned host memory and back.
worker  the encoder worker's own parts in this process, without a language model: requests for one of ``--images``
        images of ``--side`` pixels each, over a slab that holds a tenth of them, without and with a host tier that
        holds all. Counted are the requests after every image was asked for once.
serve   the same through a whole server (started twice), with a text of its own before each image, so that the
        RadixCache cannot help. Takes two server starts.

Writes OUT.json with commit and versions, prints a table last. DIR may be a folder of dummy_model.py, with
``--load-format dummy``: times depend on shapes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import io
import json
import random
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servebench.environment import describe, scrub
from servebench.results import write_atomic

if TYPE_CHECKING:
    import torch

    from spaceserve.encoder.model import VisionEncoder
    from spaceserve.encoder.preprocess import Preprocessor
    from spaceserve.messages import ImageSource

REPO = Path(__file__).resolve().parent.parent
BLOCK_TOKENS = 16


@functools.cache
def photo(seed: int, side: int) -> bytes:
    """A JPEG file of coloured patches and noise, `side` pixels square; another seed is another image."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 256, (max(1, side // 32), max(1, side // 32), 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(cells).resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels = np.clip(pixels + rng.integers(-8, 9, (side, side, 1), dtype=np.int16), 0, 255)
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


class Worker:
    """The encoder of a model with its preprocessor, loaded into this process as the encoder worker loads them."""

    def __init__(self, options: argparse.Namespace, work_dir: str) -> None:
        from sglang.srt.managers.tokenizer_manager import _get_processor_wrapper
        from sglang.srt.server_args import prepare_server_args

        from spaceserve.encoder.model import VisionEncoder, encoder_only_hooks
        from spaceserve.encoder.preprocess import Preprocessor
        from spaceserve.families import feature_dim, find_family
        from spaceserve.hooks import install

        arguments = ["--model-path", options.model, "--load-format", options.load_format, "--device", options.device]
        server_args = prepare_server_args(arguments)
        config = server_args.get_model_config().hf_config
        family = find_family(config.architectures)
        if family is None:
            raise ValueError(f"the encoder of {config.architectures} cannot be loaded by itself")
        install(encoder_only_hooks(family))
        self.family = family
        self.encoder: VisionEncoder = VisionEncoder(server_args, f"{work_dir}/init")
        self.device: torch.device = self.encoder.device
        self.dim = feature_dim(self.encoder.hf_config)
        self.processor = _get_processor_wrapper(server_args)
        self.preprocessor: Preprocessor = Preprocessor(self.processor, server_args.mm_process_config, self.device)

    def source(self, key: bytes, segment: str, num_bytes: int, side: int) -> ImageSource:
        """What the main process would send for a square image."""
        from spaceserve.families import image_grid
        from spaceserve.messages import ImageSource

        image_processor = self.processor.image_processor
        grid = image_grid(image_processor, {}, side, side)
        num_tokens = grid[0] * grid[1] * grid[2] // image_processor.merge_size**2
        return ImageSource(key, segment, num_bytes, side, side, grid, num_tokens)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def median_ms(self, run: Callable[[], Any], repeats: int) -> float:
        """Median wall-clock milliseconds of a call, the device idle before and after; one call warms up."""
        run()
        times = []
        for _ in range(repeats):
            self.synchronize()
            begin = time.perf_counter()
            run()
            self.synchronize()
            times.append((time.perf_counter() - begin) * 1000)
        return statistics.median(times)


def measure_copies(worker: Worker, sides: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Encode and copies of one image, each alone on the device."""
    import torch

    patch = worker.encoder.hf_config.vision_config
    patch_dim = patch.in_chans * patch.temporal_patch_size * patch.patch_size**2
    on_gpu = worker.device.type == "cuda"
    rows = []
    for side in sides:
        source = worker.source(b"side", "", 0, side)
        pixels = torch.randn(source.num_patches, patch_dim, device=worker.device, dtype=worker.encoder.dtype)
        features = worker.encoder.encode([pixels], [source.grid_thw])
        slab = torch.empty_like(features)
        host = torch.empty(features.shape, dtype=features.dtype, pin_memory=on_gpu)

        def encode(pixels: torch.Tensor = pixels, source: ImageSource = source) -> None:
            worker.encoder.encode([pixels], [source.grid_thw])

        def copy_out(to: torch.Tensor = host, rows: torch.Tensor = slab) -> None:
            to.copy_(rows, non_blocking=True)

        def copy_back(to: torch.Tensor = slab, rows: torch.Tensor = host) -> None:
            to.copy_(rows, non_blocking=True)

        encode_ms = worker.median_ms(encode, repeats)
        out_ms, back_ms = worker.median_ms(copy_out, repeats), worker.median_ms(copy_back, repeats)
        num_bytes = features.numel() * features.itemsize
        rows.append(
            {
                "side": side,
                "patches": source.num_patches,
                "tokens": source.num_tokens,
                "mb": round(num_bytes / 1e6, 3),
                "encode_ms": round(encode_ms, 3),
                "copy_out_ms": round(out_ms, 4),
                "copy_back_ms": round(back_ms, 4),
                "copy_back_gb_per_s": round(num_bytes / back_ms / 1e6, 2),
                "encode_over_copy_back": round(encode_ms / back_ms, 1),
            }
        )
    return rows


def draw(num_images: int, num_requests: int, seed: int) -> list[int]:
    """Every image once, then `num_requests` drawn at random: the order of the requests."""
    rng = random.Random(f"host tier {seed}")
    first = list(range(num_images))
    rng.shuffle(first)
    return first + rng.choices(range(num_images), k=num_requests)


def run_worker(worker: Worker, options: argparse.Namespace, with_host: bool) -> dict[str, Any]:
    """Requests of one image each, `options.concurrency` at a time, to the encoder worker's service in this process."""
    from spaceserve import shared_memory
    from spaceserve.encoder.host_tier import HostTier
    from spaceserve.encoder.runner import BatchRunner
    from spaceserve.encoder.service import EncoderService
    from spaceserve.encoder.split import EncoderSplit
    from spaceserve.encoder_schedule import DEFAULT_BATCH_CAPACITY_PATCHES, EncodeQueue
    from spaceserve.feature_store import FeatureStore, HostStore
    from spaceserve.messages import EncodeRequest, FeaturesReady, FinishRequest, ToScheduler
    from spaceserve.slab import Slab

    prefix = f"host-tier-{time.monotonic_ns()}-"
    writer = shared_memory.SegmentWriter(prefix)
    sources = []
    for index in range(options.images):
        data = photo(index, options.side)
        sources.append(worker.source(b"%016d" % index, writer.write(data), len(data), options.side))
    blocks_each = -(-sources[0].num_tokens // BLOCK_TOKENS)
    num_blocks = max(1, options.images // 10) * blocks_each
    slab = Slab.create(num_blocks * BLOCK_TOKENS, worker.dim, worker.encoder.dtype, worker.device, f"{prefix}slab")
    host = HostTier(slab, options.images * blocks_each * BLOCK_TOKENS) if with_host else None
    runner = BatchRunner(worker.encoder, worker.preprocessor, slab, EncoderSplit(worker.device), options.threads)
    answered: list[FeaturesReady] = []

    def send(address: str, message: ToScheduler) -> None:
        if not isinstance(message, FeaturesReady):
            raise RuntimeError(f"an image could not be encoded: {message}")
        answered.append(message)

    store = FeatureStore(
        num_blocks,
        BLOCK_TOKENS,
        host=HostStore(options.images * blocks_each, BLOCK_TOKENS) if with_host else None,
        save=None if host is None else host.save,
    )
    queue = EncodeQueue("twsrft", 0.05, DEFAULT_BATCH_CAPACITY_PATCHES if worker.device.type == "cuda" else 1024)
    restore = None if host is None else host.restore
    service = EncoderService(store, queue, 0, send, runner.prepare, runner.forget, restore)
    fds = [runner.wakeup_fd] + ([] if host is None else [host.wakeup_fd])
    order = draw(options.images, options.requests, options.seed)
    started_s: dict[str, float] = {}
    waits_ms: dict[int, float] = {}
    begin_s = warm_s = time.perf_counter()
    encoded_cold = 0
    try:
        num_sent = 0
        while len(waits_ms) < len(order):
            while num_sent < len(order) and num_sent - len(waits_ms) < options.concurrency:
                if num_sent == options.images and len(waits_ms) < num_sent:
                    break  # the second part begins when the first has ended
                if num_sent == options.images:
                    warm_s, encoded_cold = time.perf_counter(), service.num_encoded
                rid = f"r{num_sent}"
                started_s[rid] = time.perf_counter()
                service.handle(EncodeRequest(rid, 0, [sources[order[num_sent]]], ""), time.monotonic())
                num_sent += 1
            for batch in service.next_batches(time.monotonic()):
                runner.submit(batch, after=None if host is None else host.last_copy)
            if not answered:
                select.select(fds, [], [], 1.0)
            for batch in runner.take_finished():
                service.finish(batch, time.monotonic())
            for key, copied in [] if host is None else host.take_restored():
                service.restored(key, copied=copied)
            while answered:
                rid = answered.pop().rid
                waits_ms[int(rid[1:])] = (time.perf_counter() - started_s.pop(rid)) * 1000
                service.handle(FinishRequest(rid), time.monotonic())
        end_s = time.perf_counter()
        service.check_integrity()
    finally:
        runner.close()
        if host is not None:
            host.close()
        for source in sources:
            shared_memory.unlink(source.segment)
        if worker.device.type != "cuda":
            shared_memory.unlink(f"{prefix}slab")
    warm = [waits_ms[number] for number in range(options.images, len(order))]
    stats = store.stats()
    return {
        "host_tier": with_host,
        "first_pass_s": round(warm_s - begin_s, 3),
        "requests": len(warm),
        "requests_per_s": round(len(warm) / (end_s - warm_s), 2),
        "wait_mean_ms": round(statistics.mean(warm), 2),
        "wait_p50_ms": round(statistics.median(warm), 2),
        "encodes": service.num_encoded - encoded_cold,
        "hits": stats.hits,
        "host_hits": 0 if stats.host is None else stats.host.hits,
    }


def run_served(options: argparse.Namespace, with_host: bool) -> dict[str, Any]:
    """The same through a server: time to the answer's only token, text before the image, each text sent once."""
    import base64

    import requests

    from servebench import arms, servers

    flags = f"--device {options.device} --load-format {options.load_format} {options.server_flags}"
    flags += f" --encoder-feature-cache-gb {options.serve_cache_gb}"
    if with_host:
        flags += f" --encoder-feature-host-gb {options.serve_host_gb}"
    arm = arms.parse_arm(f"host-tier=spaceserve {flags}")
    uris = [
        "data:image/jpeg;base64," + base64.b64encode(photo(index, options.serve_side)).decode()
        for index in range(options.images)
    ]
    order = draw(options.images, options.requests, options.seed)
    with (
        tempfile.TemporaryDirectory() as work_dir,
        servers.running_arm(
            arm, model=options.model, work_dir=Path(work_dir), start_timeout_s=options.start_timeout_s
        ) as group,
    ):
        url = group[-1].url

        def ask(number: int) -> float:
            content = [
                {"type": "text", "text": f"Question {number}:"},
                {"type": "image_url", "image_url": {"url": uris[order[number]]}},
            ]
            body: dict[str, Any] = {
                "model": "m",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 1,
                "temperature": 0,
            }
            begin = time.perf_counter()
            requests.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
            return (time.perf_counter() - begin) * 1000

        def status() -> dict[str, Any]:
            time.sleep(1.2)  # it is written twice a second
            found: dict[str, Any] = requests.get(f"{url}/spaceserve/status", timeout=10).json()
            return found

        with concurrent.futures.ThreadPoolExecutor(options.concurrency) as pool:
            list(pool.map(ask, range(options.images)))
            before = status()
            begin_s = time.perf_counter()
            latencies = list(pool.map(ask, range(options.images, len(order))))
            duration_s = time.perf_counter() - begin_s
            after = status()
    return {
        "host_tier": with_host,
        "requests": len(latencies),
        "requests_per_s": round(len(latencies) / duration_s, 2),
        "ttft_mean_ms": round(statistics.mean(latencies), 1),
        "ttft_p50_ms": round(statistics.median(latencies), 1),
        "encodes": after["num_encoded"] - before["num_encoded"],
        "host_hits": after["host"]["hits"] - before["host"]["hits"] if with_host else 0,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned columns."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", help="what the result calls the model (default: the folder's name)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--parts", nargs="+", choices=("copy", "worker", "serve"), default=["copy", "worker"])
    parser.add_argument("--sides", type=int, nargs="+", default=[448, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--requests", type=int, default=60, help="after every image was asked for once")
    parser.add_argument("--side", type=int, default=2048, help="of the worker's images, in pixels")
    parser.add_argument("--concurrency", type=int, default=2, help="requests at a time; the slab holds a tenth")
    parser.add_argument("--threads", type=int, default=4, help="that decode images")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server-flags", default="")
    parser.add_argument("--serve-side", type=int, default=1024)
    parser.add_argument("--serve-cache-gb", type=float, default=0.02)
    parser.add_argument("--serve-host-gb", type=float, default=1.0)
    parser.add_argument("--start-timeout-s", type=float, default=200.0)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "environment": describe(REPO),
        "command": scrub(" ".join(["host_tier.py", *sys.argv[1:]])),
        "model": options.model_name or Path(options.model).name,
    }
    if "serve" in options.parts:  # first: this process must hold no CUDA context beside a server
        result["serve"] = [run_served(options, with_host) for with_host in (False, True)]
    if {"copy", "worker"} & set(options.parts):
        with tempfile.TemporaryDirectory() as work_dir:
            worker = Worker(options, work_dir)
            if "copy" in options.parts:
                result["copy"] = measure_copies(worker, options.sides, options.repeats)
            if "worker" in options.parts:
                result["worker"] = [run_worker(worker, options, with_host) for with_host in (False, True)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out, json.dumps(result, indent=1) + "\n")
    for part in ("copy", "worker", "serve"):
        if part in result:
            print(f"\n{part}\n{table(result[part])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
