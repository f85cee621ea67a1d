"""Workloads and their traces.

A workload is a short string, ``KIND[:SIZE][@RATE][xN]``:

=================  =====================================================================================
``text@10``        text only, 10 requests per second
``fixed:2048@2.8`` one 2048 x 2048 image per request; ``@0.7S`` means 0.7 of stock's measured saturation
``mix@0.8S``       square images of 448 to 2048 pixels in equal shares
``mmmu@10``        photographs (JPEG) and charts (PNG) of many sizes and aspect ratios, one or two per request
``sizes@4``        square images of 224 to 2048 pixels, most of them small; half come alone, half in groups of ten
``burst:1024@4``   groups of ten requests that arrive at once, Poisson groups
``turns:1024@4``   conversations about the same two images, five turns, each turn resending the history
``sat:2048``       closed loop that measures the saturation rate S; ``sat:mix`` for the mix
=================  =====================================================================================

``xN`` sets the number of requests (200 unless given). A trace is the workload drawn with one seed and stored, so that
every arm gets the same requests at the same instants.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
DEFAULT_NUM_REQUESTS = 200
MIX_SIZES = (448, 672, 1024, 1344, 2048)
# Widths and heights of the kind that exam questions' pictures have, most below a megapixel, and how often each comes.
MMMU_SIZES = (
    *((448, 336), (512, 512), (640, 480), (800, 600), (896, 672), (672, 896)),
    *((1024, 768), (1120, 560), (1344, 896), (1680, 1120), (2016, 1344)),
)
MMMU_WEIGHTS = (4, 4, 6, 6, 5, 3, 4, 3, 2, 1, 1)
# Mostly small pictures with a tail of large ones, as chat and document traffic has; shares are an assumption.
SIDE_SHARES = {224: 0.25, 336: 0.20, 448: 0.20, 672: 0.12, 1024: 0.13, 1536: 0.06, 2048: 0.04}
BURST_SIZE = 10
TURNS_PER_CONVERSATION = 5
IMAGES_PER_CONVERSATION = 2
KINDS = ("text", "fixed", "mix", "mmmu", "sizes", "burst", "turns", "sat")
PATTERN = re.compile(
    r"(?P<kind>[a-z]+)(:(?P<size>\d+|mix|mmmu|sizes|text))?(@(?P<rate>\d+(\.\d+)?)(?P<relative>S)?)?(x(?P<count>\d+))?"
)


@dataclass(frozen=True)
class Workload:
    """A parsed workload string; ``rate`` is in requests per second, or in units of S where ``relative`` is set."""

    kind: str
    size: str = ""
    rate: float = 0.0
    relative: bool = False
    num_requests: int = DEFAULT_NUM_REQUESTS

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Raises ValueError where ``text`` is not a workload."""
        match = PATTERN.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(f"not a workload: {text!r} (expected KIND[:SIZE][@RATE][xN], KIND one of {KINDS})")
        kind, size = match["kind"], match["size"] or ""
        if kind in ("fixed", "burst", "turns") and not size.isdigit():
            raise ValueError(f"workload {text!r} needs an image size, as in {kind}:1024@4")
        if kind == "sat" and not size:
            raise ValueError(f"workload {text!r} needs a size, as in sat:1024 or sat:mix")
        if kind in ("text", "mix", "mmmu", "sizes") and size:
            raise ValueError(f"workload {text!r} takes no size")
        if (kind == "sat") != (match["rate"] is None):
            raise ValueError(f"workload {text!r}: every kind but sat has a rate, and sat has none")
        if match["rate"] is not None and float(match["rate"]) <= 0:
            raise ValueError(f"workload {text!r}: the rate must be positive")
        count = int(match["count"]) if match["count"] else DEFAULT_NUM_REQUESTS
        if kind == "sat" and match["count"] is None:
            count = 5 * saturation_concurrency(size)
        if count < 1:
            raise ValueError(f"workload {text!r}: at least one request")
        return cls(kind, size, float(match["rate"] or 0), bool(match["relative"]), count)

    @property
    def name(self) -> str:
        """The canonical string; ``parse`` reads it back."""
        size = f":{self.size}" if self.size else ""
        rate = f"@{self.rate:g}{'S' if self.relative else ''}" if self.kind != "sat" else ""
        count = f"x{self.num_requests}" if self.num_requests != self.default_count else ""
        return f"{self.kind}{size}{rate}{count}"

    @property
    def default_count(self) -> int:
        return 5 * saturation_concurrency(self.size) if self.kind == "sat" else DEFAULT_NUM_REQUESTS

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return self.name.replace(":", "").replace("@", "-")

    @property
    def saturation_name(self) -> str:
        """The workload that measures this one's S."""
        if self.kind in ("mix", "mmmu", "sizes", "text"):
            return f"sat:{self.kind}"
        return f"sat:{self.size}"


def saturation_concurrency(size: str) -> int:
    """Requests kept in flight to saturate: enough that decode of some always runs beside prefill of others."""
    if not size.isdigit():
        return 64 if size == "text" else 32
    return 16 if int(size) >= 1536 else 32 if int(size) >= 640 else 64


@dataclass(frozen=True)
class ImageSpec:
    """An image that ``images.render`` draws: ``kind`` is photo, chart or noise, ``format`` jpeg or png."""

    seed: int
    width: int
    height: int
    kind: str = "photo"
    format: str = "jpeg"


@dataclass(frozen=True)
class TraceRequest:
    """One request. ``arrival_s`` counts from the start; ``text_seeds`` has one seed per user turn, the last one asked
    now; the answers between them are fixed texts drawn from the same seeds, so that all arms get equal prompts."""

    id: int
    arrival_s: float
    images: tuple[ImageSpec, ...]
    text_seeds: tuple[int, ...]
    num_words: int
    output_len: int


@dataclass(frozen=True)
class Trace:
    """A workload drawn with a seed. ``concurrency`` is set for closed loops, whose arrivals are all zero."""

    workload: str
    seed: int
    rate: float
    requests: tuple[TraceRequest, ...]
    concurrency: int | None = None

    @property
    def duration_s(self) -> float:
        """Time of the last arrival."""
        return max(request.arrival_s for request in self.requests)

    @property
    def resolutions(self) -> list[tuple[int, int]]:
        """Distinct (width, height) in the trace, largest first."""
        sizes = {(image.width, image.height) for request in self.requests for image in request.images}
        return sorted(sizes, key=lambda size: (-size[0] * size[1], size))

    def to_json(self) -> str:
        head = {
            "schema": SCHEMA,
            "workload": self.workload,
            "seed": self.seed,
            "rate": self.rate,
            "concurrency": self.concurrency,
        }
        rows = ",\n".join(json.dumps(asdict(request), separators=(",", ":")) for request in self.requests)
        return json.dumps(head)[:-1] + ', "requests": [\n' + rows + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Raises ValueError where the text was written by another version of this format."""
        data: dict[str, Any] = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"trace has schema {data.get('schema')}, expected {SCHEMA}")
        requests = tuple(
            TraceRequest(
                **{
                    **row,
                    "images": tuple(ImageSpec(**image) for image in row["images"]),
                    "text_seeds": tuple(row["text_seeds"]),
                }
            )
            for row in data["requests"]
        )
        return cls(data["workload"], data["seed"], data["rate"], requests, data["concurrency"])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def poisson_arrivals(rng: random.Random, count: int, rate: float) -> list[float]:
    """Arrival times (s) of a Poisson process given that ``count`` arrivals fall in ``count / rate`` seconds.

    Given the count, the arrivals of a Poisson process are independent and uniform. Drawing them so makes the offered
    rate of a short trace exactly ``rate``, which it is not (7 % off at 200 requests) with exponential gaps.
    """
    return sorted(round(rng.uniform(0.0, count / rate), 4) for _ in range(count))


def burst_arrivals(rng: random.Random, count: int, rate: float) -> list[float]:
    """Arrival times (s) in groups of ``BURST_SIZE`` at once; ``rate`` counts requests."""
    groups = -(-count // BURST_SIZE)
    starts = poisson_arrivals(rng, groups, rate / BURST_SIZE)
    return [start for start in starts for _ in range(BURST_SIZE)][:count]


def _shared_sides(count: int) -> list[int]:
    """``count`` sides in the shares of ``SIDE_SHARES``, smallest first; what rounding leaves over is smallest."""
    sides = [side for side, share in SIDE_SHARES.items() for _ in range(int(share * count))]
    return [min(SIDE_SHARES)] * (count - len(sides)) + sides


def _mmmu_image(rng: random.Random, seed: int, scale: float) -> ImageSpec:
    """A chart or a photograph of one of ``MMMU_SIZES``: few enough sizes to warm each of them."""
    (width, height), *_ = rng.choices(MMMU_SIZES, MMMU_WEIGHTS)
    kind, file_format = ("chart", "png") if rng.random() < 0.5 else ("photo", "jpeg")
    return ImageSpec(seed, max(56, int(width * scale)), max(56, int(height * scale)), kind, file_format)


def make_trace(
    workload: Workload,
    seed: int,
    *,
    rate: float | None = None,
    output_len: int = 128,
    num_words: int = 64,
    scale: float = 1.0,
) -> Trace:
    """Draw ``workload`` with ``seed``.

    ``rate`` (requests/s) is needed where the workload's own is relative to S. ``scale`` multiplies every image side,
    for machines that cannot serve the real ones. Raises ValueError for a relative workload without a rate.
    """
    if workload.relative and rate is None:
        raise ValueError(f"{workload.name}: S is not known yet, run {workload.saturation_name} first")
    rate = workload.rate if rate is None else rate
    rng = random.Random(f"{workload.name} {seed}")
    base = rng.getrandbits(40)
    count, kind = workload.num_requests, workload.kind
    if kind == "sat":
        kind, arrivals = (workload.size if not workload.size.isdigit() else "fixed"), [0.0] * count
    elif kind == "burst":
        arrivals = burst_arrivals(rng, count, rate)
    elif kind == "sizes":
        alone = count // 2
        arrivals = poisson_arrivals(rng, alone, rate / 2) if alone else []
        arrivals = sorted(arrivals + burst_arrivals(rng, count - alone, rate / 2))
    else:
        arrivals = poisson_arrivals(rng, count, rate)

    def square(seed: int, size: int) -> ImageSpec:
        side = max(28, int(size * scale))
        return ImageSpec(seed, side, side)

    requests: list[TraceRequest] = []
    if kind == "turns":
        requests = _conversations(workload, rng, base, rate, output_len, num_words, scale)
    sides = _shared_sides(count)
    for index in range(count if kind != "turns" else 0):
        images: tuple[ImageSpec, ...] = ()
        if kind in ("fixed", "burst"):
            images = (square(base + 2 * index, int(workload.size)),)
        elif kind == "mix":
            images = (square(base + 2 * index, MIX_SIZES[index % len(MIX_SIZES)]),)
        elif kind == "sizes":
            images = (square(base + 2 * index, sides[index]),)
        elif kind == "mmmu":
            pair = 2 if rng.random() < 0.1 else 1
            images = tuple(_mmmu_image(rng, base + 2 * index + k, scale) for k in range(pair))
        requests.append(TraceRequest(index, arrivals[index], images, (base + 2 * index,), num_words, output_len))
    if kind in ("mix", "sizes"):
        # Given shares, in random order.
        shuffled = [request.images for request in requests]
        rng.shuffle(shuffled)
        requests = [
            TraceRequest(r.id, r.arrival_s, images, r.text_seeds, r.num_words, r.output_len)
            for r, images in zip(requests, shuffled, strict=True)
        ]
    concurrency = max(1, min(saturation_concurrency(workload.size), count // 5)) if workload.kind == "sat" else None
    return Trace(workload.name, seed, rate, tuple(requests), concurrency)


def _conversations(
    workload: Workload, rng: random.Random, base: int, rate: float, output_len: int, num_words: int, scale: float
) -> list[TraceRequest]:
    """Turns of conversations in order of arrival. The pause between turns (6 to 10 s) is part of the trace, not of the
    answer's speed, so that a slow arm is not offered less."""
    side = max(28, int(int(workload.size) * scale))
    conversations = -(-workload.num_requests // TURNS_PER_CONVERSATION)
    drafts: list[tuple[float, tuple[ImageSpec, ...], tuple[int, ...]]] = []
    for number, start in enumerate(poisson_arrivals(rng, conversations, rate / TURNS_PER_CONVERSATION)):
        first = base + number * 64
        images = tuple(ImageSpec(first + k, side, side) for k in range(IMAGES_PER_CONVERSATION))
        arrival = start
        for turn in range(TURNS_PER_CONVERSATION):
            drafts.append((round(arrival, 4), images, tuple(first + 16 + k for k in range(turn + 1))))
            arrival += rng.uniform(6.0, 10.0)
    drafts.sort(key=lambda draft: draft[0])
    kept = drafts[: workload.num_requests]
    return [TraceRequest(i, a, images, seeds, num_words, output_len) for i, (a, images, seeds) in enumerate(kept)]


def load_trace(path: Path) -> Trace:
    return Trace.from_json(path.read_text())
