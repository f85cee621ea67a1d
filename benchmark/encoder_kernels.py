"""The encoder's time on a GPU: attention kernels by length and SM group, and whole forwards, plain and fused.

  encoder_kernels.py OUT --tokenizer DIR [--attention-s 60]

Attention: FA3 as SGLang's vision layers call it, cuDNN through torch's SDPA, and FA4's kernel for Hopper (package
flash-attn-4, where it can be imported) with several tiles, over the heads of Qwen2-VL's encoder (16 of 80). Then the
encoder of Qwen2-VL-7B with random weights, as SGLang runs it, with `spaceserve.encoder.fused`, with the attention that
a server chooses for long images ("chosen"), and with its layers compiled as a whole ("layers"), and what one launch of
each kind costs the host. Writes encoder-kernels.json; one line for each row, times in ms. Nothing else should compute
on the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from servebench.environment import describe, scrub
from spaceserve.encoder import long_attention

HEADS, HEAD_DIM = 16, 80
REPO = Path(__file__).resolve().parent.parent
# Patches of the sequences that run together: 2048, 1024, four and one of 448, 224 pixels a side.
LENGTHS = {"2048": [21316], "1024": [5476], "4x448": [1024] * 4, "448": [1024], "224": [256]}
SIDES = {"2048": 146, "1024": 74, "448": 32, "224": 16}
GROUPS = (68, 84, 100)
# (rows of queries, rows of keys, whether probabilities stay in registers)
FA4_TILES = ((192, 144, False), (192, 160, False), (192, 176, False), (192, 128, False), (128, 192, True))

Attend = Callable[[Any], torch.Tensor]


def median_ms(call: Callable[[], Any], repeats: int = 5, warmup: int = 2) -> float:
    """Median time of `call` on the device."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Inputs:
    """Random queries, keys and values of packed sequences."""

    def __init__(self, lengths: list[int]) -> None:
        shape = (sum(lengths), HEADS, HEAD_DIM)
        self.q, self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.longest, self.lengths = max(lengths), lengths


def fa3(x: Inputs) -> torch.Tensor:
    return long_attention.fa3(x.q, x.k, x.v, x.starts, x.longest, None)


def cudnn(x: Inputs) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(x.lengths) > 1:
        raise ValueError("one sequence at a time")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


def fa4(tile: tuple[int, int, bool]) -> Attend:
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    rows, keys, in_registers = tile

    def attend(x: Inputs) -> torch.Tensor:
        found: torch.Tensor = forward(
            x.q,
            x.k,
            x.v,
            cu_seqlens_q=x.starts,
            cu_seqlens_k=x.starts,
            max_seqlen_q=x.longest,
            max_seqlen_k=x.longest,
            tile_mn=(rows, keys),
            mma_pv_is_rs=in_registers,
            intra_wg_overlap=True,
        )[0]
        return found

    return attend


def measure_attention(budget_s: float, result: dict[str, Any]) -> None:
    from spaceserve.partition import serving_partitioner

    end = time.monotonic() + budget_s
    inputs = {name: Inputs(lengths) for name, lengths in LENGTHS.items()}
    reference = {name: fa3(x).float() for name, x in inputs.items()}
    kernels: dict[str, Attend] = {"fa3": fa3, "cudnn": cudnn}
    try:
        kernels |= {f"fa4 {rows}x{keys}": fa4((rows, keys, rs)) for rows, keys, rs in FA4_TILES}
    except ImportError as error:
        result["fa4_missing"] = str(error)
    partitioner = serving_partitioner("cuda:0", prepare="groups")
    for kernel, attend in kernels.items():
        rows = result.setdefault("attention", {}).setdefault(kernel, {})
        for name, x in inputs.items():
            if time.monotonic() > end:
                return
            try:
                begun = time.monotonic()
                difference = (attend(x).float() - reference[name]).abs().max().item()
                first_s = time.monotonic() - begun
                ms = median_ms(partial(attend, x))
            except Exception as error:  # a kernel that cannot do this size
                rows[name] = {"error": str(error)[:200]}
                continue
            flops = sum(4 * n * n * HEADS * HEAD_DIM for n in x.lengths)
            rows[name] = {"ms": ms, "tflops": flops / ms / 1e9, "max_difference": difference, "first_s": first_s}
        for num_sms in GROUPS if "ms" in rows["2048"] else ():
            group: Any = partitioner.group(num_sms)
            with group.activate():
                rows[f"2048 on {num_sms} SMs"] = {"ms": median_ms(partial(attend, inputs["2048"]), 3, 1)}
        print(f"{kernel:14}", {name: round(row["ms"], 3) for name, row in rows.items() if "ms" in row}, flush=True)


def measure_host(result: dict[str, Any]) -> None:
    """Microseconds of the host for one launch of each kind, with so little work that the device keeps up."""
    from spaceserve.encoder.fused import _compiled, quick_gelu

    x = torch.randn(16, 1280, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(1280, 1280, device="cuda", dtype=torch.bfloat16), x[0].clone()
    attended = Inputs([16])
    calls: dict[str, Callable[[], Any]] = {
        "add": partial(torch.add, x, x),
        "layer norm": partial(torch.nn.functional.layer_norm, x, (1280,), bias, bias, 1e-6),
        "linear": partial(torch.nn.functional.linear, x, weight, bias),
        "compiled gelu": partial(_compiled(quick_gelu), x),
        "attention": partial(fa3, attended),
    }
    rows = result.setdefault("host_us", {})
    with torch.inference_mode():
        for name, call in calls.items():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            begun = time.monotonic()
            for _ in range(200):
                call()
            rows[name] = 1e6 * (time.monotonic() - begun) / 200
            torch.cuda.synchronize()
    print(f"{'host, us':14}", {name: round(us, 1) for name, us in rows.items()}, flush=True)


def measure_encoder(tokenizer: Path, work_dir: Path, result: dict[str, Any]) -> None:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    from spaceserve.encoder.fused import fused_hooks
    from spaceserve.encoder.model import VisionEncoder, encoder_only_hooks
    from spaceserve.families import find_family
    from spaceserve.hooks import install
    from spaceserve.partition import serving_partitioner

    model = work_dir / "model"
    script = Path(__file__).with_name("dummy_model.py")
    subprocess.run(
        [sys.executable, str(script), "qwen2-vl-7b", str(model), "--tokenizer", str(tokenizer)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    args = prepare_server_args(["--model-path", str(model), "--load-format", "dummy"])
    family = find_family(ModelConfig.from_server_args(args).hf_config.architectures)
    assert family is not None
    install(encoder_only_hooks(family))
    encoder = VisionEncoder(args, str(work_dir / "init"))
    with torch.no_grad():
        for parameter in encoder.vision.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    grids = {name: [(1, side, side)] for name, side in SIDES.items()}
    pixels = {name: torch.randn(side * side, 1176, device="cuda", dtype=torch.bfloat16) for name, side in SIDES.items()}
    plain: dict[str, torch.Tensor] = {}
    chosen = long_attention.LongAttention()
    for tag in ("plain", "fused", "chosen", "layers"):
        if tag == "fused":
            install(fused_hooks(family, long_attention=chosen))
        elif tag == "chosen":
            found = long_attention.heads_of(encoder.blocks(), encoder.dtype)
            assert found is not None
            groups = long_attention.usual_groups(serving_partitioner("cuda:0", prepare="groups"))
            begun = time.monotonic()
            chosen.choose(encoder.device, *found, SIDES["2048"] ** 2, groups)
            result["choice"] = {
                "taken": chosen.choice,
                "seconds": time.monotonic() - begun,
                "measured": [vars(row) | {"gain": row.gain} for row in chosen.rows],
            }
            print(f"{'choice':14}", chosen.choice, long_attention.describe(chosen.rows), flush=True)
        elif tag == "layers":
            chosen.min_length = None
            hooks = fused_hooks(family, whole_layers=True)
            (layer,) = [hook for hook in hooks if hook.target.endswith("Block.forward")]
            block: Any = type(encoder.blocks()[0])
            block.forward = layer.function  # SGLang applies hooks to a target once
        rows = result.setdefault("encoder", {}).setdefault(tag, {})
        for name, grid in grids.items():
            features = encoder.encode([pixels[name]], grid)
            torch.cuda.synchronize()
            begun = time.monotonic()
            encoder.encode([pixels[name]], grid)
            host_ms = 1e3 * (time.monotonic() - begun)
            plain.setdefault(name, features.float())
            difference = (features.float() - plain[name]).pow(2).mean().sqrt() / plain[name].pow(2).mean().sqrt()
            rows[name] = {
                "ms": median_ms(partial(encoder.encode, [pixels[name]], grid)),
                "host_ms": host_ms,
                "relative_rms_difference": difference.item(),
            }
        print(f"{tag:14}", {name: (round(r["ms"], 1), round(r["host_ms"], 1)) for name, r in rows.items()}, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--attention-s", type=float, default=60.0, help="begin no kernel after this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    result: dict[str, Any] = {"command": scrub(shlex.join(sys.argv)), "environment": describe(REPO)}
    try:
        measure_host(result)
        measure_attention(options.attention_s, result)
        with tempfile.TemporaryDirectory() as work_dir:
            measure_encoder(options.tokenizer, Path(work_dir), result)
    finally:
        (options.out / "encoder-kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
