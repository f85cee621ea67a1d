"""Arrivals, the cost of a forward, and the replay of a trace through the real queue."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servebench.workload import SIDE_SHARES
from spaceserve.encoder_schedule import EncodeItem, EncodeQueue, SchedulePolicy

STAND_IN_CURVE = [(5_329, 26.5), (21_316, 251.0)]
CLASSES = {"small (to 448 px)": 1_024, "medium (672, 1024 px)": 5_476, "large (1536, 2048 px)": 10**9}


def patches_of(side_px: int) -> int:
    """Patches of a square image at 14 px a patch."""
    return round(side_px / 14) ** 2


def class_of(num_patches: int) -> str:
    """Size class of a request by the patches of all its images."""
    return next(name for name, most in CLASSES.items() if num_patches <= most)


@dataclass(frozen=True)
class CostCurve:
    overhead_ms: float
    linear_ms: float  # per patch
    quadratic_ms: float  # per patch squared

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]], overhead_ms: float | None) -> CostCurve:
        """Least squares of the relative error; the overhead is fitted where None. Raises ValueError if too few."""
        patches, latency_ms = np.array(points, dtype=float).T
        powers = [1, 2] if overhead_ms is not None else [0, 1, 2]
        if len(points) < len(powers):
            raise ValueError(f"{len(powers)} points at least are needed to fit {len(powers)} coefficients")
        target = latency_ms - (overhead_ms or 0.0)
        design = np.stack([patches**power for power in powers], axis=1) / latency_ms[:, None]
        coefficients, *_ = np.linalg.lstsq(design, target / latency_ms, rcond=None)
        if overhead_ms is not None:
            coefficients = np.array([overhead_ms, *coefficients])
        return cls(*(max(0.0, float(c)) for c in coefficients))

    def alone_ms(self, num_patches: int) -> float:
        """Time that an image adds to a forward."""
        return self.linear_ms * num_patches + self.quadratic_ms * num_patches**2

    def forward_ms(self, items: Iterable[EncodeItem]) -> float:
        return self.overhead_ms + sum(self.alone_ms(item.num_patches) for item in items)


@dataclass(frozen=True)
class Arrival:
    rid: str
    arrival_s: float
    items: tuple[EncodeItem, ...]

    @property
    def num_patches(self) -> int:
        return sum(item.num_patches for item in self.items)


def read_trace(path: Path) -> list[Arrival]:
    arrivals = []
    for number, line in enumerate(path.read_text().splitlines()):
        if not line.strip():
            continue
        record = json.loads(line)
        items = tuple(
            EncodeItem(
                str(image.get("key", f"{number}/{i}")).encode(),
                image["num_patches"] if "num_patches" in image else patches_of(image["side_px"]),
            )
            for i, image in enumerate(record["images"])
        )
        arrivals.append(Arrival(f"{number:06d}", float(record["arrival_s"]), items))
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def make_trace(
    kind: str,
    load: float,
    num_requests: int,
    seed: int,
    curve: CostCurve,
    multi_share: float = 0.0,
    hot_share: float = 0.0,
    side_shares: dict[int, float] | None = None,
) -> list[Arrival]:
    """Poisson arrivals, or bursts: half a second at three times the mean rate, then a second of silence (means).

    load is the share of the encoder's time that the images need if their fixed cost were free, so that 1.0 and more
    is too much for every policy. multi_share of the requests have two to four images; hot_share of the images come
    from a pool of twenty (and are the same features for everyone who has them).
    """
    rng = np.random.default_rng(seed)
    shares = side_shares or SIDE_SHARES
    sides, weights = list(shares), np.array(list(shares.values()))
    weights = weights / weights.sum()
    counts = np.where(rng.random(num_requests) < multi_share, rng.integers(2, 5, num_requests), 1)
    hot_sides = rng.choice(sides, size=20, p=weights)
    images = []
    for index, count in enumerate(counts):
        own: dict[bytes, EncodeItem] = {}
        for i in range(count):
            if rng.random() < hot_share:
                hot = int(rng.integers(20))
                item = EncodeItem(f"hot{hot}".encode(), patches_of(int(hot_sides[hot])))
            else:
                item = EncodeItem(f"{index}/{i}".encode(), patches_of(int(rng.choice(sides, p=weights))))
            own[item.key] = item
        images.append(tuple(own.values()))
    work_s = sum(curve.alone_ms(item.num_patches) for items in images for item in items) / 1e3
    rate = load * num_requests / work_s
    if kind == "poisson":
        arrivals_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    elif kind == "bursty":
        busy_s = np.cumsum(rng.exponential(1 / (3 * rate), num_requests))  # time that counts bursts only
        ends_s = np.cumsum(rng.exponential(0.5, 10 + int(8 * busy_s[-1])))
        silences_s = np.concatenate([[0.0], np.cumsum(rng.exponential(1.0, len(ends_s)))])
        arrivals_s = busy_s + silences_s[np.searchsorted(ends_s, busy_s)]
    else:
        raise ValueError(f"unknown kind of trace: {kind}")
    return [Arrival(f"{i:06d}", float(t), items) for i, (t, items) in enumerate(zip(arrivals_s, images, strict=True))]


def simulate(
    arrivals: Sequence[Arrival], policy: SchedulePolicy, window_s: float, capacity_patches: int, curve: CostCurve
) -> dict[str, float]:
    """Seconds from arrival until the last image of each request is encoded. The feature store always has room."""
    queue = EncodeQueue(policy, window_s, capacity_patches)
    arrived_at = {arrival.rid: arrival.arrival_s for arrival in arrivals}
    latency_s: dict[str, float] = {}
    now_s, upcoming = 0.0, 0
    while upcoming < len(arrivals) or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[upcoming].arrival_s)
        while upcoming < len(arrivals) and arrivals[upcoming].arrival_s <= now_s:
            arrival = arrivals[upcoming]
            queue.add(arrival.rid, arrival.items, arrival.arrival_s)
            upcoming += 1
        batch = queue.next_batch(now_s, lambda rid: True)
        end_s = now_s + curve.forward_ms(batch) / 1e3
        # Whoever arrives during the forward and wants an image of it shares it.
        while upcoming < len(arrivals) and arrivals[upcoming].arrival_s <= end_s:
            arrival = arrivals[upcoming]
            queue.add(arrival.rid, arrival.items, arrival.arrival_s)
            upcoming += 1
        concerned = dict.fromkeys(rid for item in batch for rid in queue.wanted(item.key))
        queue.items_done(item.key for item in batch)
        now_s = end_s
        for rid in concerned:
            if not queue.remaining_patches(rid):
                latency_s[rid] = end_s - arrived_at[rid]
    assert len(latency_s) == len(arrivals), "every request completes once"
    return latency_s


def summarise(arrivals: Sequence[Arrival], latency_s: dict[str, float]) -> dict[str, dict[str, float]]:
    """Mean, p99 and maximum in milliseconds, by class and over all."""
    by_class: dict[str, list[float]] = defaultdict(list)
    for arrival in arrivals:
        by_class[class_of(arrival.num_patches)].append(latency_s[arrival.rid] * 1e3)
        by_class["all"].append(latency_s[arrival.rid] * 1e3)
    return {
        name: {
            "num": len(values),
            "mean_ms": float(np.mean(values)),
            "p99_ms": float(np.percentile(values, 99)),
            "max_ms": float(np.max(values)),
        }
        for name, values in by_class.items()
    }
