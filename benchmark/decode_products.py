"""Products of a small decode batch on groups of SMs: cuBLAS against the skinny product, with every tile it has.

  decode_products.py OUT.json [--model-path DIR] [--batches 4 16 32] [--budget-s 90]

Times the five products of a decode step (weights larger than the L2 cache in rotation, from CUDA graphs) on the whole
device and on the groups that decode keeps where both sides are masked. Compares each result with a product in fp32,
and its bits with those of a second call. Ends with status 1 where a result is wrong or a second call's bits differ. The
table's last rows are sums over a decode step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spaceserve.partition import make_partitioner
from spaceserve.profile.workloads import cold_weights
from spaceserve.sis.shapes import QWEN2_VL_7B, ModelShape, shape_from_model_path
from spaceserve.skinny_gemm.choice import agrees, graph_timer
from spaceserve.skinny_gemm.kernel import Workspace, skinny_gemm
from spaceserve.skinny_gemm.tiling import TILES, Product, Tile, product

GROUPS = (64, 48, 40, 32, 24)
# Not among those that a server tries: to see whether one of them should be.
MORE_TILES = (
    Tile(128, 128, 5, warps=8),
    Tile(128, 256, 3, warps=8),
    Tile(256, 64, 5, warps=8),
    Tile(128, 64, 5, blocks_per_sm=2),
    Tile(64, 128, 3, blocks_per_sm=3),
    Tile(64, 64, 5, blocks_per_sm=4),
)


def streams_of(partitioner: Any) -> dict[int, Any]:
    """By SMs: the whole device's stream, and those of the decoder's side of a split."""
    found = {partitioner.total_units: torch.cuda.Stream()}
    for sms in GROUPS:
        group = partitioner.complement_of(partitioner.total_units - sms)
        if group is not None:
            found[group.granted] = group.stream
    return found


def measure(
    name: str, made: Product, weights: list[torch.Tensor], batch: int, streams: dict[int, Any], end_s: float
) -> list[dict[str, Any]]:
    """One row for each kernel: ms, GB/s and what is wrong, by SMs."""
    x = torch.randn(batch, made.k, device="cuda", dtype=torch.bfloat16)
    reference = (x.float() @ weights[0].float().T).bfloat16()
    total_sms = max(streams)
    workspace = Workspace([made], total_sms, x.device, (*TILES, *MORE_TILES))
    gigabytes = made.n * made.k * 2e-9
    rows = []
    for tile in (None, *TILES, *MORE_TILES):
        if time.monotonic() > end_s:
            break
        if tile is not None and not tile.fits(batch):
            continue
        row: dict[str, Any] = {"product": name, "n": made.n, "k": made.k, "batch": batch}
        row |= {"kernel": "cuBLAS" if tile is None else str(tile), "ms": {}, "gb_per_s": {}, "wrong": [], "bits": []}
        for sms, stream in streams.items():
            call: Any = torch.nn.functional.linear
            if tile is not None:
                call = partial(skinny_gemm, bias=None, product=made, tile=tile, num_sms=sms, workspace=workspace)
            try:
                with torch.cuda.stream(stream):
                    y, again = call(x, weights[0]), call(x, weights[0])
                    stream.synchronize()
                    if not agrees(y, reference):
                        row["wrong"].append(sms)
                    if not torch.equal(y, again):
                        row["bits"].append(sms)
                    ms = graph_timer(stream)([partial(call, x, weight) for weight in weights])
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                break
            row["ms"][str(sms)], row["gb_per_s"][str(sms)] = round(ms, 5), round(gigabytes / ms * 1e3)
        rows.append(row)
        print(name, batch, row["kernel"], row["gb_per_s"], row.get("failed", ""), flush=True)
    return rows


def per_step(shape: ModelShape, rows: list[dict[str, Any]], batch: int, sms: int) -> tuple[float, float] | None:
    """ms of all products of a step with cuBLAS, and with the quicker kernel for each; None where one is missing."""
    cublas = best = 0.0
    for spec in shape.decoder.gemms():
        here = [row for row in rows if row["product"] == spec.name and row["batch"] == batch and str(sms) in row["ms"]]
        times = {row["kernel"]: row["ms"][str(sms)] for row in here if not row["wrong"]}
        if "cuBLAS" not in times:
            return None
        cublas += spec.count * times["cuBLAS"]
        best += spec.count * min(times.values())
    return cublas, best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model-path", type=Path, help="its config.json is read; default: Qwen2-VL-7B's shapes")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--budget-s", type=float, default=90.0)
    options = parser.parse_args()
    end_s = time.monotonic() + options.budget_s
    shape = QWEN2_VL_7B if options.model_path is None else shape_from_model_path(options.model_path)
    partitioner = make_partitioner("green_ctx", device="cuda", min_units=16, prepare="nothing")
    streams = streams_of(partitioner)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for spec in sorted(shape.decoder.gemms(), key=lambda spec: -spec.count * spec.n * spec.k):
            made = product(spec.n, spec.k)
            if made is None:
                print(f"{spec.name}: not a product of the kernel")
                continue
            weights = cold_weights(spec, torch.device("cuda"), torch.bfloat16)
            for batch in options.batches:
                rows += measure(spec.name, made, weights, batch, streams, end_s)
            del weights
    steps = []
    for batch in options.batches:
        for sms in streams:
            if (found := per_step(shape, rows, batch, sms)) is not None:
                steps.append({"batch": batch, "sms": sms, "cublas_ms": found[0], "best_ms": found[1]})
    found_json = {
        "gpu": torch.cuda.get_device_name(),
        "commit": os.environ.get("SPACESERVE_COMMIT"),
        "torch": torch.__version__,
        "command": f"decode_products.py OUT.json --batches {' '.join(map(str, options.batches))}",
        "model": shape.fingerprint(),
        "steps": steps,
        "rows": rows,
    }
    options.out.write_text(json.dumps(found_json, indent=1) + "\n")
    print(f"{'batch':>5} {'SMs':>4} {'cuBLAS ms':>10} {'best ms':>8} {'ratio':>6}")
    for step in steps:
        ratio = step["cublas_ms"] / step["best_ms"]
        print(f"{step['batch']:>5} {step['sms']:>4} {step['cublas_ms']:>10.2f} {step['best_ms']:>8.2f} {ratio:>6.2f}")
    ours = [row for row in rows if row["kernel"] != "cuBLAS"]
    wrong, varying = [row for row in ours if row["wrong"]], [row for row in ours if row["bits"]]
    print(f"{len(wrong)} rows wrong, {len(varying)} with other bits in a second call, of {len(ours)}")
    return 1 if wrong or varying else 0


if __name__ == "__main__":
    sys.exit(main())
