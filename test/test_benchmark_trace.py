"""Workloads, traces, images, request bodies of the serving benchmark."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

from servebench import images
from servebench.bodies import build_body, qwen_prompt, write_bodies
from servebench.session import warmup_trace
from servebench.workload import BURST_SIZE, MIX_SIZES, ImageSpec, Trace, TraceRequest, Workload, make_trace

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "text",
    [
        "text@10",
        "fixed:2048@2.8",
        "fixed:2048@0.7S",
        "mix@0.8S",
        "mmmu@10",
        "burst:1024@4x50",
        "turns:1024@4",
        "sat:2048",
        "sat:mixx40",
    ],
)
def test_a_workload_reads_back_as_it_was_written(text: str) -> None:
    assert Workload.parse(text).name == text
    assert Workload.parse(Workload.parse(text).name) == Workload.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "fixed@3", "fixed:2048", "mix:448@3", "sat", "sat:2048@3", "video@1", "text@0", "fixed:a@1", "text@1x0"],
)
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="workload"):
        Workload.parse(text)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["text@9", "fixed:224@3", "mix@5", "mmmu@7", "sizes@4", "burst:448@4", "turns:448@2"]),
    st.integers(1, 60),
    st.integers(0, 5),
)
def test_a_trace_has_its_count_in_order_and_survives_storage(text: str, count: int, seed: int) -> None:
    workload = Workload.parse(f"{text}x{count}")
    trace = make_trace(workload, seed)
    assert len(trace.requests) == count
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert [request.id for request in trace.requests] == list(range(count))
    assert Trace.from_json(trace.to_json()) == trace
    assert make_trace(workload, seed).digest == trace.digest
    assert make_trace(workload, seed + 1).digest != trace.digest


def test_every_request_but_a_turn_has_images_of_its_own() -> None:
    for text in ("fixed:448@5", "mix@5", "mmmu@5", "sizes@5", "burst:448@5"):
        trace = make_trace(Workload.parse(text), 1)
        specs = [image for request in trace.requests for image in request.images]
        assert len(set(specs)) == len(specs)
        assert len({image.seed for image in specs}) == len(specs)
    warm = warmup_trace(make_trace(Workload.parse("mix@5"), 1), 2)
    measured = {image.seed for request in make_trace(Workload.parse("mix@5"), 1).requests for image in request.images}
    assert measured.isdisjoint({image.seed for request in warm.requests for image in request.images})
    assert set(warm.resolutions) == {(size, size) for size in MIX_SIZES}


def test_the_offered_rate_is_the_rate_asked_for() -> None:
    trace = make_trace(Workload.parse("text@10"), 1)
    assert all(0 <= request.arrival_s <= 200 / 10 for request in trace.requests)
    # Gaps of a Poisson process: the coefficient of variation is near 1, far from a clock's 0.
    arrivals = [request.arrival_s for request in make_trace(Workload.parse("text@10x2000"), 1).requests]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert 0.9 < deviation / mean < 1.1


def test_a_mix_holds_every_size_in_equal_shares() -> None:
    trace = make_trace(Workload.parse("mix@5"), 3)
    sides = [request.images[0].width for request in trace.requests]
    assert {side: sides.count(side) for side in MIX_SIZES} == dict.fromkeys(MIX_SIZES, 40)
    assert sides[: len(MIX_SIZES)] != list(MIX_SIZES) or sides[5:10] != list(MIX_SIZES)


def test_bursts_arrive_together_and_turns_share_images() -> None:
    burst = make_trace(Workload.parse("burst:448@4x30"), 1)
    for group in range(3):
        together = burst.requests[group * BURST_SIZE : (group + 1) * BURST_SIZE]
        assert len({request.arrival_s for request in together}) == 1
    turns = make_trace(Workload.parse("turns:448@4x50"), 1)
    conversations: dict[tuple[ImageSpec, ...], list[TraceRequest]] = {}
    for request in turns.requests:
        conversations.setdefault(request.images, []).append(request)
    assert len(conversations) == 10
    for members in conversations.values():
        for before, after in itertools.pairwise(members):
            assert after.text_seeds[:-1] == before.text_seeds
            assert after.arrival_s > before.arrival_s


def test_a_closed_loop_has_a_width_and_no_arrivals() -> None:
    trace = make_trace(Workload.parse("sat:2048"), 1)
    assert trace.concurrency == 16
    assert {request.arrival_s for request in trace.requests} == {0.0}
    assert len(trace.requests) >= 3 * trace.concurrency


def test_a_relative_rate_needs_the_saturation() -> None:
    workload = Workload.parse("fixed:448@0.5Sx10")
    with pytest.raises(ValueError, match="sat:448"):
        make_trace(workload, 1)
    assert make_trace(workload, 1, rate=2.0).rate == 2.0


@pytest.mark.parametrize("kind", ["photo", "chart", "noise"])
@pytest.mark.parametrize("file_format", ["jpeg", "png"])
def test_images_have_their_size_and_depend_on_the_seed_alone(kind: str, file_format: str) -> None:
    spec = ImageSpec(5, 120, 72, kind, file_format)
    data = images.render(spec)
    assert data == images.render(spec)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (120, 72)
        assert image.format == file_format.upper()
        assert len(set(image.convert("L").tobytes())) > 8
    assert data != images.render(ImageSpec(6, 120, 72, kind, file_format))


def test_unknown_kinds_and_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        images.render(ImageSpec(1, 28, 28, "video"))
    with pytest.raises(ValueError, match="format"):
        images.render(ImageSpec(1, 28, 28, "noise", "gif"))


def test_both_apis_get_the_same_prompt_and_images() -> None:
    request = TraceRequest(0, 0.0, (ImageSpec(1, 56, 56), ImageSpec(2, 56, 56)), (7, 8), 5, 16)
    chat = json.loads(build_body(request, api="chat", model="m"))
    native = json.loads(build_body(request, api="generate", model="m"))
    assert native["text"] == qwen_prompt(chat["messages"])
    assert native["text"].count("<|image_pad|>") == 2
    urls = [part["image_url"]["url"] for part in chat["messages"][0]["content"] if part["type"] == "image_url"]
    assert urls == native["image_data"]
    assert base64.b64decode(urls[1].partition(",")[2]) == images.render(ImageSpec(2, 56, 56))
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "user"]
    assert chat["max_tokens"] == native["sampling_params"]["max_new_tokens"] == 16
    assert chat["ignore_eos"] is native["sampling_params"]["ignore_eos"] is True
    with pytest.raises(ValueError, match="API"):
        build_body(request, api="grpc", model="m")


def test_body_files_give_back_every_body(tmp_path: Path) -> None:
    trace = make_trace(Workload.parse("fixed:56@3x5"), 1)
    stored = write_bodies(trace, tmp_path / "bodies", api="generate", model="m", workers=2)
    expected = [build_body(request, api="generate", model="m") for request in trace.requests]
    assert list(stored.read()) == expected
    assert len(set(expected)) == 5
