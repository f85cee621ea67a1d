"""Command line of the profiler."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

from spaceserve.partition import Partitioner, make_partitioner
from spaceserve.sis.curves import DeviceCurves
from spaceserve.sis.shapes import ModelShape, shape_from_model_path

from . import contention, sweep, validate
from .kernels import Kernels, choose_kernels
from .plot import plot_curves
from .timing import CpuTimer, CudaTimer, Timer
from .workloads import Workloads

logger = logging.getLogger("spaceserve.profile")

# cuBLAS failed on 12 SMs of an H200 (docs/sis.md); 16 is two steps of the ladder there.
GPU_MIN_UNITS = 16


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spaceserve.profile",
        description="Measure latency over SM count for a model's operators on this device, and write its curves.",
    )
    parser.add_argument("--model-path", required=True, help="local model folder; only its config.json is read")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N or cpu")
    parser.add_argument("--backend", default="auto", help="partition back end (see spaceserve.partition)")
    parser.add_argument("--total-units", type=int, help="cores to split (cpu) or units (simulated)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rungs: under a minute on an H200")
    parser.add_argument("--no-contention", action="store_true", help="do not measure one side beside the other")
    parser.add_argument("--no-graphs", action="store_true", help="launch from Python, not from CUDA graphs")
    parser.add_argument("--validate", action="store_true", help="measure whole forwards of sizes that were left out")
    parser.add_argument("--out", help="curve file to write (default: curves of the device in this folder)")
    parser.add_argument("--plot", help="PNG of the curves (needs matplotlib)")
    return parser


def library_versions(kernels: Kernels, backend: str) -> dict[str, str]:
    """Versions that curves depend on, for the curve file."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "partition_backend": backend}
    for package in ("sglang", "sgl_kernel", "sglang-kernel", "spaceserve"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        try:
            from cuda.bindings import driver

            found["driver_api"] = str(driver.cuDriverGetVersion()[1])
        except Exception as error:
            logger.debug("driver version unknown: %s", error)
    found["attention_kernel"], found["pointwise_kernel"] = kernels.attention, kernels.pointwise
    return found


def _driver_version() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return None
    words = file.read_text().split()
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


def profile(
    shape: ModelShape,
    partitioner: Partitioner,
    device: torch.device,
    *,
    quick: bool = False,
    with_contention: bool = True,
    with_validation: bool = False,
    use_graphs: bool = True,
    show_progress: bool = True,
) -> DeviceCurves:
    """Measured curves of `shape` on `device`. Raises ValueError where no group ran every operator."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # bf16 products are emulated on most CPUs
    grid = (sweep.QUICK if quick else sweep.FULL) if on_gpu else (sweep.CPU_QUICK if quick else sweep.CPU_FULL)
    kernels = choose_kernels(device, dtype)
    work = Workloads(shape, device, dtype, kernels)
    rungs = sweep.pick_rungs(partitioner, grid.num_encoder_rungs)
    groups = sweep.Groups.of(partitioner, rungs)
    operators = sweep.operators_of(shape, work, grid)
    timer: Timer = CudaTimer(use_graphs) if on_gpu else CpuTimer()
    graph_ratio: float | None = None
    if isinstance(timer, CudaTimer) and timer.use_graphs:
        smallest = next(iter(groups.encoder.values()))
        graph_ratio = timer.check_graphs(work.gemm(shape.encoder.gemms()[1], 4096), smallest)
    # Beside the other side every second rung will do in the quick mode: factors are smooth.
    pair_rungs = [n for n in rungs if n == rungs[-1] or partitioner.complement(partitioner.group(n)) is not None]
    if quick and len(pair_rungs) > 4:
        pair_rungs = [*pair_rungs[:-1:2], pair_rungs[-1]]
    held_out = validate.GPU_HELD_OUT if on_gpu else validate.CPU_HELD_OUT
    total = sweep.count_points(operators, groups)
    total += contention.count_pairs(partitioner, pair_rungs) if with_contention else 0
    total += validate.count_comparisons(groups, held_out) if with_validation else 0

    with tqdm(total=total, unit="point", disable=not show_progress) as bar:
        tables, failed = {}, set()
        for op in operators:
            bar.set_description(f"{op.phase} {op.name}")
            table, bad = sweep.measure_operator(op, groups, timer, grid.budget_ms, bar.update)
            tables[(op.phase, op.name)] = table
            failed |= bad if op.phase != "encoder" else set()
            if on_gpu:
                torch.cuda.empty_cache()
        summed = sweep.sum_curves(operators, tables)
        factors: dict[str, dict[int, float]] = {}
        if with_contention:
            bar.set_description("beside the other side")
            sizes = contention.GPU_LOAD if on_gpu else contention.CPU_LOAD
            pair: contention.PairTimer
            if isinstance(timer, CudaTimer):
                pair = contention.CudaPairTimer(contention.make_loads(shape, device, dtype, sizes), timer.use_graphs)
            else:
                pair = contention.CpuPairTimer(shape, sizes, partitioner)
            try:
                factors = contention.measure_contention(partitioner, pair_rungs, pair, bar.update)
            finally:
                pair.close()
        versions = library_versions(kernels, partitioner.backend)
        if (driver := _driver_version()) is not None:
            versions["driver"] = driver
        curves = DeviceCurves(
            device_name=torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}",
            total_units=partitioner.total_units,
            unit_kind="sm" if on_gpu else "core",
            min_decoder_units=max(min(c.units) for n, c in summed.items() if not n.startswith("encoder")),
            model_fingerprint=shape.fingerprint(),
            model=shape.to_json(),
            curves=summed,
            source="profiled",
            provenance=(
                f"python -m spaceserve.profile{' --quick' if quick else ''}: operators timed alone in each group with "
                f"{kernels.attention} attention, summed over layers; random weights"
                + (f"; graph/stream time in the smallest group {graph_ratio:.2f}" if graph_ratio is not None else "")
                + (f"; failed on {sorted(failed)} decoder units" if failed else "")
            ),
            versions=versions,
            operators=sweep.operators_json(operators, tables),
            contention=factors,
        )
        if with_validation:
            bar.set_description("validation")
            found = validate.validate(curves, shape, groups, timer, device, dtype, held_out, bar.update)
            curves = replace(curves, validation=validate.summary(found), _slices={})
            tqdm.write(validate.table(found))
    return curves


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        shape = shape_from_model_path(arguments.model_path)
        name = arguments.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        partitioner = make_partitioner(
            arguments.backend,
            device=name,
            total_units=arguments.total_units,
            min_units=GPU_MIN_UNITS if device.type == "cuda" else None,
            prepare="both",
        )
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                curves = profile(
                    shape,
                    partitioner,
                    device,
                    quick=arguments.quick,
                    with_contention=not arguments.no_contention,
                    with_validation=arguments.validate,
                    use_graphs=not arguments.no_graphs,
                )
        finally:
            partitioner.close()
        device_slug = "-".join(curves.device_name.lower().split())
        out = arguments.out or f"{device_slug}_{shape.fingerprint()}.json"
        curves.save(out)
        print(f"wrote {out} after {time.perf_counter() - started:.0f} s")
        if arguments.plot:
            plot_curves(curves, arguments.plot)
            print(f"wrote {arguments.plot}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
