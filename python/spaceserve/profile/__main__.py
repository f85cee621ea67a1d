"""Command line of the profiler."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spaceserve.encoder.long_attention import LENGTHS, Heads, usual_groups
from spaceserve.partition import Partitioner, make_partitioner
from spaceserve.partition.mps import gpu_is_present
from spaceserve.sis.curves import DeviceCurves
from spaceserve.sis.shapes import ModelShape, shape_from_model_path

from . import contention, sweep, validate
from .decode_products import DecodeProducts, Tiles, measure_tiles
from .kernels import Kernels, choose_kernels
from .mps_pair import MpsPairTimer, mps_if_possible, process_starter
from .plot import plot_curves
from .timing import CpuTimer, CudaTimer, Timer, first_line
from .workloads import Workloads

logger = logging.getLogger("spaceserve.profile")

# cuBLAS failed on 12 SMs of an H200 (docs/sis.md); 16 is two steps of the ladder there.
GPU_MIN_UNITS = 16
# Of --quick, from the first measurement on; imports and the start of both processes come before.
QUICK_BUDGET_S = 40.0


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
    parser.add_argument(
        "--budget-s",
        type=float,
        help="after so many seconds begin no more measurements of one side beside the other, and say which are missing "
        f"(default: none; with --quick {QUICK_BUDGET_S:g})",
    )
    parser.add_argument("--rungs", type=int, help="profile at most so many sizes of the encoder's group (9, quick 7)")
    parser.add_argument(
        "--skinny-gemm", choices=("auto", "off"), default="auto", help="kernels of decode's products, as of the server"
    )
    parser.add_argument(
        "--encoder-attention",
        choices=("auto", "fa3"),
        default="auto",
        help="attention of the encoder, as of the server",
    )
    parser.add_argument("--no-contention", action="store_true", help="do not measure one side beside the other")
    parser.add_argument("--no-graphs", action="store_true", help="launch from Python, not from CUDA graphs")
    parser.add_argument("--validate", action="store_true", help="measure whole forwards of sizes that were left out")
    parser.add_argument("--under-mps", action="store_true", help=argparse.SUPPRESS)
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
    found["encoder_attention"] = kernels.attention if kernels.attention != "fa3" else kernels.long_attention.choice
    return found


def _driver_version() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return None
    words = file.read_text().split()
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


class Parts:
    """Runs the parts of a profile: says how long each took, and goes on where one after the first fails."""

    def __init__(self, budget_s: float | None = None) -> None:
        self.failures: dict[str, str] = {}
        self._started = time.perf_counter()
        self._budget_s = budget_s

    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._budget_s is not None and time.perf_counter() - self._started > self._budget_s

    @contextlib.contextmanager
    def part(self, name: str, *, may_fail: bool = True) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not may_fail:
                raise
            logger.exception("%s failed", name)
            self.failures[name] = f"{type(error).__name__}: {first_line(error)}"
        now = time.perf_counter()
        outcome = f"FAILED ({self.failures[name]})" if name in self.failures else "done"
        tqdm.write(f"[{now - self._started:6.1f} s] {name}: {outcome} in {now - started:.1f} s", file=sys.stdout)
        sys.stdout.flush()


def _pair_rungs(partitioner: Partitioner, rungs: Sequence[int]) -> list[int]:
    """The rungs on which one side is measured beside the other: factors are smooth, five will do."""
    usable = [n for n in rungs if n == rungs[-1] or partitioner.complement(partitioner.group(n)) is not None]
    if len(usable) <= 5:
        return usable
    return sorted({usable[round(i * (len(usable) - 1) / 4)] for i in range(5)})


def _pair_timer(
    shape: ModelShape,
    partitioner: Partitioner,
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer,
    under_mps: bool,
    products: DecodeProducts,
) -> tuple[contention.PairTimer, str]:
    """What times both sides beside each other, and in words how: as they are served, where MPS runs."""
    if not isinstance(timer, CudaTimer):
        return contention.CpuPairTimer(shape, contention.CPU_LOAD, partitioner), "two processes"
    loads = contention.make_loads(shape, device, dtype, contention.GPU_LOAD, products.linear)
    if under_mps:
        start = process_starter(
            shape, contention.GPU_LOAD, device, partitioner.min_complement, timer.use_graphs, products.tiles
        )
        try:
            return MpsPairTimer(loads, timer.use_graphs, start), "two processes under MPS"
        except RuntimeError as error:
            logger.warning("%s: contention is measured in one process", error)
    return contention.CudaPairTimer(loads, timer.use_graphs), "one process"


def profile(
    shape: ModelShape,
    partitioner: Partitioner,
    device: torch.device,
    *,
    quick: bool = False,
    num_rungs: int | None = None,
    with_contention: bool = True,
    with_validation: bool = False,
    use_graphs: bool = True,
    under_mps: bool = False,
    budget_s: float | None = None,
    use_skinny_gemm: bool = False,
    use_long_attention: bool = True,
    show_progress: bool = True,
    save: Callable[[DeviceCurves], None] | None = None,
    save_operators: Callable[[list[dict[str, Any]]], None] | None = None,
) -> DeviceCurves:
    """Measured curves of `shape` on `device`; ValueError where no group ran every operator.

    What fails after the operators (contention, sharing, validation) is logged, named in `validation["failed_parts"]`
    and left out. `save` is called with what there is after every part, so that an interrupted profile leaves it, and
    `save_operators` with the raw times where no curves can be made of them. `under_mps`: this process is a client of
    MPS, so that another can run beside it. `use_skinny_gemm`: products of decode take the kernels of a server with
    `--skinny-gemm auto`, and `use_long_attention`: the encoder's attention is that of one with
    `--encoder-attention auto`. `budget_s`: after it contention and sharing begin nothing more; what is
    missing for that is among the failed parts.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # bf16 products are emulated on most CPUs
    grid = (sweep.QUICK if quick else sweep.FULL) if on_gpu else (sweep.CPU_QUICK if quick else sweep.CPU_FULL)
    rungs = sweep.pick_rungs(partitioner, num_rungs or grid.num_encoder_rungs)
    small_units = sweep.small_decode_units(partitioner) if on_gpu else []
    groups = sweep.Groups.of(partitioner, rungs, small_units)
    held_out = validate.GPU_HELD_OUT if on_gpu else validate.CPU_HELD_OUT
    held_out_groups = validate.pick_groups(partitioner, rungs, held_out.num_units, partitioner.min_complement)
    decode_groups = {**held_out_groups.decoder, **groups.decode}
    tiles: Tiles = {}
    if use_skinny_gemm and on_gpu:
        groups_of_decode, total = decode_groups.values(), partitioner.total_units
        tiles = measure_tiles(shape, groups_of_decode, total, grid.batches, device, dtype)
    products = DecodeProducts(tiles, partitioner.total_units, device)
    for group in decode_groups.values():
        products.register(group)
    kernels = choose_kernels(
        device, dtype, products.linear if tiles else torch.nn.functional.linear, products.idle_units
    )
    if use_long_attention and on_gpu:
        e = shape.encoder
        heads = Heads(num_heads=e.num_heads, num_kv_heads=e.num_heads, head_dim=e.head_dim, dtype=dtype)
        # As a server that uses SIS and takes images of any size.
        kernels.long_attention.choose(device, kernels.attention, heads, LENGTHS[-1], usual_groups(partitioner))
    work = Workloads(shape, device, dtype, kernels)
    operators = sweep.operators_of(shape, work, grid)
    timer: Timer = CudaTimer(use_graphs) if on_gpu else CpuTimer()
    graph_ratio: float | None = None
    if isinstance(timer, CudaTimer) and timer.use_graphs:
        smallest = next(iter(groups.encoder.values()))
        graph_ratio = timer.check_graphs(work.gemm(shape.encoder.gemms()[1], 4096), smallest)
    pair_rungs = _pair_rungs(partitioner, rungs)
    total = sweep.count_points(operators, groups)
    if with_contention:
        total += contention.count_pairs(partitioner, pair_rungs)
        total += contention.count_sharing(small_units) if small_units else 0
    total += validate.count_comparisons(held_out_groups, held_out) if with_validation else 0

    parts = Parts(budget_s)
    with tqdm(total=total, unit="point", disable=not show_progress) as bar:
        tables, failed = {}, set()
        with parts.part("operators", may_fail=False):
            for op in operators:
                bar.set_description(f"{op.phase} {op.name}")
                table, bad = sweep.measure_operator(op, groups, timer, grid.budget_ms, bar.update)
                tables[(op.phase, op.name)] = table
                failed |= bad if op.phase != "encoder" else set()
                if on_gpu:
                    torch.cuda.empty_cache()
        try:
            summed = sweep.sum_curves(operators, tables)
        except ValueError:
            if save_operators is not None:
                save_operators(sweep.operators_json(operators, tables))
            raise
        versions = library_versions(kernels, partitioner.backend)
        if (driver := _driver_version()) is not None:
            versions["driver"] = driver
        versions["decode_products"] = "skinny where quicker" if tiles else "cuBLAS"
        curves = DeviceCurves(
            device_name=torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}",
            total_units=partitioner.total_units,
            unit_kind="sm" if on_gpu else "core",
            # Prefill is measured on larger groups only: that is not what decode needs.
            min_decoder_units=max(min(c.units) for n, c in summed.items() if n.startswith("decode")),
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
        )

        def keep(found: DeviceCurves) -> DeviceCurves:
            if parts.failures:
                found = replace(found, validation={**found.validation, "failed_parts": dict(parts.failures)})
            if save is not None:
                save(found)
            return found

        curves = keep(curves)
        if with_contention:
            bar.set_description("beside the other side")
            with parts.part("contention"):
                pair, setting = _pair_timer(shape, partitioner, device, dtype, timer, under_mps, products)
                with contextlib.closing(pair):
                    factors = contention.measure_contention(partitioner, pair_rungs, pair, bar.update, parts.is_over)
                curves = replace(
                    curves, contention=factors, versions={**curves.versions, "contention": setting}, _slices={}
                )
                missing = set(pair_rungs) - {units for table in factors.values() for units in table}
                if parts.is_over() and missing:
                    parts.failures["contention"] = f"no time was left for {sorted(missing)} {partitioner.unit_name}"
            curves = keep(curves)
            if small_units and isinstance(timer, CudaTimer):
                with parts.part("decode beside prefill"):
                    loads = contention.make_loads(shape, device, dtype, contention.GPU_LOAD, products.linear)
                    with contextlib.closing(contention.CudaPairTimer(loads, timer.use_graphs)) as inside:
                        rows = contention.measure_sharing(partitioner, small_units, inside, bar.update, parts.is_over)
                    curves = replace(curves, sharing=rows, _slices={})
                    num_missing = contention.count_sharing(small_units) - len(rows)
                    if parts.is_over() and num_missing:
                        parts.failures["decode beside prefill"] = f"no time was left for {num_missing} rows"
                curves = keep(curves)
        if with_validation:
            bar.set_description("validation")
            with parts.part("validation"):
                if on_gpu:
                    torch.cuda.empty_cache()
                found = validate.validate(
                    curves, shape, held_out_groups, timer, kernels, device, dtype, held_out, bar.update
                )
                curves = replace(curves, validation=validate.summary(found), _slices={})
                tqdm.write(validate.table(found), file=sys.stdout)
            curves = keep(curves)
    return curves


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    wants_mps = arguments.device != "cpu" and not arguments.no_contention and gpu_is_present()
    if wants_mps and not arguments.under_mps:
        # In a process of its own: the daemon can only end when its clients have.
        with mps_if_possible() as runs:
            if runs:
                given = sys.argv[1:] if argv is None else argv
                command = [sys.executable, "-m", "spaceserve.profile", *given, "--under-mps"]
                return subprocess.run(command, check=False).returncode
    try:
        _run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    """Profile as the command line says. Raises ValueError for what the user can mend."""
    shape = shape_from_model_path(arguments.model_path)
    name = arguments.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
    partitioner = make_partitioner(
        arguments.backend,
        device=str(device),
        total_units=arguments.total_units,
        min_units=GPU_MIN_UNITS if device.type == "cuda" else None,
        prepare="both",
    )
    started = time.perf_counter()

    def out_file(device_name: str) -> Path:
        slug = "-".join(device_name.lower().split())
        return Path(arguments.out or f"{slug}_{shape.fingerprint()}.json")

    def save(curves: DeviceCurves) -> None:
        curves.save(out_file(curves.device_name))

    def save_operators(rows: list[dict[str, Any]]) -> None:
        file = out_file(device.type).with_suffix(".operators.json")
        file.write_text(json.dumps(rows) + "\n")
        print(f"wrote {file}: raw times, of which no curves could be made")

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
                num_rungs=arguments.rungs,
                under_mps=arguments.under_mps,
                use_skinny_gemm=arguments.skinny_gemm == "auto",
                use_long_attention=arguments.encoder_attention == "auto",
                budget_s=QUICK_BUDGET_S if arguments.quick and arguments.budget_s is None else arguments.budget_s,
                save=save,
                save_operators=save_operators,
            )
    finally:
        partitioner.close()
    print(f"wrote {out_file(curves.device_name)} after {time.perf_counter() - started:.0f} s")
    if arguments.plot:
        plot_curves(curves, arguments.plot)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    sys.exit(main())
