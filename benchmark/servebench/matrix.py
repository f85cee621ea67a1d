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
    "spaceserve-cublas",
    "spaceserve-fa3",
    "spaceserve-fcfs",
    "spaceserve-srf",
    "spaceserve-twsrft",
)


@dataclass(frozen=True)
class Entry:
    """A workload and the arms that it runs on, none for all of the call's; as text ``sat:2048=stock,stock-mixed``."""

    workload: Workload
    arms: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Raises ValueError where the part before ``=`` is not a workload, or nothing follows it."""
        workload, equals, names = text.partition("=")
        arms = tuple(name for name in names.split(",") if name)
        if equals and not arms:
            raise ValueError(f"{text!r} names no arm after '='")
        return cls(Workload.parse(workload), arms)

    @property
    def name(self) -> str:
        return self.workload.name + (f"={','.join(self.arms)}" if self.arms else "")

    def arms_of(self, arms: Sequence[str]) -> tuple[str, ...]:
        """The arms among ``arms`` that this entry runs on, in their order."""
        return tuple(name for name in arms if not self.arms or name in self.arms)


@dataclass(frozen=True)
class Group:
    """Workloads (texts of ``Entry``) that share one set of server starts: every arm is started once for all of them."""

    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    repeats: int = 3


TWSRFT_CPU = "sizes@6x120"

# Saturation rates (requests per second) to plan with before S is measured: Qwen2-VL-7B on one H200, 128 tokens out.
EXPECTED_S = {"text": 40.0, "224": 40.0, "448": 25.0, "672": 16.0, "1024": 10.0, "1344": 6.0, "2048": 2.6, "mix": 5.5}

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
    # All servers up at once (`run --together`), so that one start serves all; by importance, for what the time allows.
    # Where one arm takes minutes, the stronger baseline comes first and the other where time is left.
    "headline": (
        Group(
            (
                "sat:2048=stock-mixed,stock",
                "text@10",
                "fixed:2048@0.7S=spaceserve,stock-mixed",
                "fixed:1024@9",
                "fixed:2048@0.9S=spaceserve,stock-mixed",
                "sat:mix=stock-mixed,stock",
                "mix@0.8S=spaceserve,stock-mixed",
                "fixed:2048@1.2S=spaceserve,stock-mixed",
                "sat:2048=spaceserve",
                "fixed:2048@0.7S=stock",
                "mix@0.8S=stock",
                "fixed:2048@0.9S=stock",
                "fixed:2048@1.2S=stock",
                "fixed:2048@0.5S",
            ),
            ("spaceserve", "stock-mixed", "stock"),
            2,
        ),
    ),
    # For twsrft_serving.py's model on two cores: near saturation, where the order of encoding matters.
    "twsrft-cpu": (Group((TWSRFT_CPU,), ("spaceserve-twsrft", "spaceserve-fcfs", "spaceserve-srf", "stock"), 3),),
    "cpu": (Group(("sat:224x12", "text@2x20", "fixed:224@1x20", "burst:224@1x20"), ("spaceserve", "stock"), 1),),
}


def entry_key(model: str, entry: Entry, arms: Sequence[str], repeat: int) -> SliceKey:
    return SliceKey(model, entry.workload.name, tuple(sorted(entry.arms_of(arms))), repeat)


def missing(results: Results, model: str, groups: Sequence[Group]) -> list[tuple[Group, int, list[str]]]:
    """(group, repeat, workloads whose slice is not done), in the order of the sets, first repeats of all first."""
    found = []
    for repeat in range(max(group.repeats for group in groups)):
        for group in groups:
            if repeat >= group.repeats:
                continue
            left = [
                text
                for text in group.workloads
                if results.status(entry_key(model, Entry.parse(text), group.arms, repeat)) != DONE
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
    Target("fixed:1024@9", tpot_ms=8.5, gap_ms=120, ttft_of_stock=1.0),
    Target("fixed:1024@9.5", tpot_ms=8.5, gap_ms=120, ttft_of_stock=1.0),
    Target("mix@0.8S", tpot_of_text=1.25, gap_ms=200, ttft_of_stock=1.0),
    Target("fixed:2048@0.5S", tpot_of_text=1.15, gap_ms=150, ttft_of_stock=1.0),
    Target("fixed:2048@0.7S", tpot_of_text=1.25, gap_ms=200, ttft_of_stock=1.0),
    Target("fixed:2048@0.9S", tpot_of_text=1.4, gap_ms=300, ttft_of_stock=1.2),
    Target("fixed:2048@1.2S", tpot_of_text=1.6, gap_ms=500, goodput_of_stock=2.0),
    Target("sat:2048", saturation_of_stock=1.15),
)
