#!/usr/bin/env python3
"""What SM partitions do on a GPU: confinement, interference, cost of a switch, kernels inside a group.

    PYTHONPATH=python python3 benchmark/gpu_partition.py --out results/ [--budget-s 90]

Each section runs in processes of its own and is reported as failed where it fails; the others still run. Writes
gpu_partition.json to --out and prints a table last. Arms for which the budget is too short are named and left out.

    confine    one process: SMs seen by %smid for every rung and complement; cuBLAS and attention kernels run only on
               their group's SMs (they wait while it is full, and do not feel it when all others are)
    switch     cost of another group for the next layer; whether CUDA graphs keep the group of their capture
    kernels    time of GEMMs and attention over the number of SMs, with and without cuBLAS's SM target and FA3's margin
    interfere  two processes under a private MPS daemon: a bandwidth-bound kernel beside a saturating encoder, without
               masks, with the encoder masked, with both masked, in splits of 68/64, 84/48 and 100/32 SMs; what a
               prefill-like load does to the encoder; and the same without MPS. Times are given over those alone on
               the whole device, and over those alone on the complement that the split leaves to the decoder
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from partitionbench.gpu import SEED, Json, failures, guarded
from partitionbench.interfere import interference
from partitionbench.table import print_table
from partitionbench.workers import Worker
from servebench.environment import describe, scrub

SECTIONS = ("confine", "switch", "kernels", "interfere")
REPO = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_partition.json")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--arm-s", type=float, default=0.3, help="seconds measured per arm of the section interfere")
    parser.add_argument("--budget-s", type=float, default=90.0, help="begin nothing new after this")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    environment = describe(REPO)
    report: Json = {"command": scrub(shlex.join(sys.argv)), "seed": SEED, "commit": environment["commit"]}
    report["environment"] = environment
    workers = {section: Worker(section) for section in arguments.sections if section != "interfere"}
    for section in arguments.sections:
        begin = time.monotonic()
        deadline = started + arguments.budget_s
        if section == "interfere":
            result = guarded(interference, arguments.arm_s, deadline)
        else:
            result = workers[section].run(deadline - time.monotonic())
        result["section_s"] = round(time.monotonic() - begin, 1)
        report[section] = result
        report["wall_s"] = round(time.monotonic() - started, 1)
        (arguments.out / "gpu_partition.json").write_text(json.dumps(report, indent=1))
    print_table(report)
    failed = [section for section in arguments.sections if failures(report[section])]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
