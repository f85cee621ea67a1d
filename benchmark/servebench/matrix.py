"""What is to be measured: named sets of slices, and the targets that the report checks them against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servebench.results import DONE, Results, SliceKey
from servebench.workload import Workload

BASELINES = ("stock", "stock-mixed")
ABLATIONS = (
    "spaceserve-nopart",
    "spaceserve-static64",
    "spaceserve-static96",
    "spaceserve-sis",
    "spaceserve-fcfs",
    "spaceserve-srf",
    "spaceserve-twsrft",
)


@dataclass(frozen=True)
class Group:
    """Workloads that share one set of server starts: every arm is started once for all of them."""

    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    repeats: int = 3


TWSRFT_CPU = "sizes@6x120"

SETS: dict[str, tuple[Group, ...]] = {
    # Comes first: the relative rates need S.
    "saturation": (
        Group(("sat:2048", "sat:1024", "sat:mix"), ("spaceserve", *BASELINES), 2),
        Group(("sat:448", "sat:224", "sat:1344"), ("spaceserve", *BASELINES), 1),
    ),
    "targets": (
        Group(("text@10", "fixed:1024@9.5"), ("spaceserve", *BASELINES), 2),
        Group(("mix@0.8S",), ("spaceserve", *BASELINES), 2),
        Group(("fixed:2048@0.9S",), ("spaceserve", *BASELINES), 2),
        Group(("fixed:2048@1.2S",), ("spaceserve", *BASELINES), 2),
        # At these rates 200 requests take so long that three arms do not fit into ten minutes.
        *(Group((f"fixed:2048@{s}S",), ("spaceserve", arm), 2) for s in ("0.7", "0.5") for arm in BASELINES),
    ),
    "resolutions": (
        Group(("fixed:224@0.7S", "fixed:448@0.7S", "fixed:1024@0.7S"), ("spaceserve", "stock"), 2),
        Group(("fixed:1344@0.7S",), ("spaceserve", "stock"), 2),
    ),
    "shapes": (
        Group(("mmmu@10", "burst:1024@4"), ("spaceserve", "stock"), 2),
        Group(("turns:1024@4",), ("spaceserve", "stock"), 2),
    ),
    "baselines": (
        Group(("mix@0.8S", "fixed:1024@9.5"), ("spaceserve", "stock-mps"), 1),
        Group(("mix@0.8S",), ("spaceserve", "stock-epd-mps"), 1),
    ),
    "ablation": (
        *(Group(("mix@0.8S", "fixed:1024@9.5"), (arm, "stock"), 1) for arm in ABLATIONS),
        Group(("turns:1024@4",), ("spaceserve-nostore", "stock"), 1),
    ),
    # For twsrft_serving.py's model on two cores: near saturation, where the order of encoding matters.
    "twsrft-cpu": (Group((TWSRFT_CPU,), ("spaceserve-twsrft", "spaceserve-fcfs", "spaceserve-srf", "stock"), 3),),
    "cpu": (Group(("sat:224x12", "text@2x20", "fixed:224@1x20", "burst:224@1x20"), ("spaceserve", "stock"), 1),),
}


def missing(results: Results, model: str, groups: Sequence[Group]) -> list[tuple[Group, int, list[str]]]:
    """(group, repeat, workloads whose slice is not done), in the order of the sets, first repeats of all first."""
    found = []
    for repeat in range(max(group.repeats for group in groups)):
        for group in groups:
            if repeat >= group.repeats:
                continue
            left = [
                workload
                for workload in group.workloads
                if results.status(SliceKey(model, Workload.parse(workload).name, tuple(sorted(group.arms)), repeat))
                != DONE
            ]
            if left:
                found.append((group, repeat, left))
    return found


@dataclass(frozen=True)
class Target:
    """Limits for SpaceServe's defaults on one workload; None where none is set.

    ``tpot_of_text`` is relative to the text-only TPOT of stock, the ``_of_stock`` ones to the better of stock's
    settings on the same trace.
    """

    workload: str
    tpot_ms: float | None = None
    tpot_of_text: float | None = None
    tpot_of_stock: float | None = None
    gap_ms: float | None = None
    ttft_of_stock: float | None = None
    goodput_of_stock: float | None = None
    saturation_of_stock: float | None = None


# For Qwen2-VL-7B on one H200.
TARGETS = (
    Target("text@10", tpot_of_stock=1.0, ttft_of_stock=1.0),
    Target("fixed:1024@9.5", tpot_ms=8.5, gap_ms=120, ttft_of_stock=1.0),
    Target("mix@0.8S", tpot_of_text=1.25, gap_ms=200, ttft_of_stock=1.0),
    Target("fixed:2048@0.5S", tpot_of_text=1.15, gap_ms=150, ttft_of_stock=1.0),
    Target("fixed:2048@0.7S", tpot_of_text=1.25, gap_ms=200, ttft_of_stock=1.0),
    Target("fixed:2048@0.9S", tpot_of_text=1.4, gap_ms=300, ttft_of_stock=1.2),
    Target("fixed:2048@1.2S", tpot_of_text=1.6, gap_ms=500, goodput_of_stock=2.0),
    Target("sat:2048", saturation_of_stock=1.15),
)
