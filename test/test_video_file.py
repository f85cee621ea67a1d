"""Video files: what is known before decoding, which frames come out, and what becomes of damaged ones."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servers import data_url
from spaceserve import shared_memory
from spaceserve.encoder.pieces import Pieces
from spaceserve.encoder.preprocess import BadImage, decode_video
from spaceserve.families import seconds_per_grid, video_layout, video_processor_settings
from spaceserve.frontend.fetch import BadImageInput, fetch_bytes
from spaceserve.messages import ImageSource, VideoFrames
from spaceserve.video_file import BadVideo, NoVideoDecoder, VideoHeader, read_frames, read_video_header
from videos import MOVING, clip, damaged

pytestmark = pytest.mark.cpu


@pytest.fixture
def segment(request: pytest.FixtureRequest) -> Any:
    """Puts bytes where the main process puts those of a request."""
    writer = shared_memory.SegmentWriter(f"spaceserve-test-{request.node.name[:40].replace('/', '_')}-")
    names: list[str] = []

    def write(data: bytes) -> str:
        names.append(writer.write(data))
        return names[-1]

    yield write
    for name in names:
        shared_memory.unlink(name)


def test_header_of_files_with_and_without_frames_between_key_frames(tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(clip(1, num_frames=9, width=160, height=90, frames_per_s=3))
    assert read_video_header(str(path)) == VideoHeader(9, 3.0, 90, 160)
    assert read_video_header(str(MOVING)) == VideoHeader(30, 10.0, 96, 128)


def test_frames_are_those_asked_for_however_they_are_reached() -> None:
    every = read_frames(str(MOVING), range(30))
    assert every.shape == (30, 3, 96, 128)
    assert every.dtype == torch.uint8
    assert all(not torch.equal(every[n], every[n + 1]) for n in range(29))
    for indices in ([0, 4, 8], [7], [13, 14, 29], [0, 29]):
        assert torch.equal(read_frames(str(MOVING), indices), every[indices])


def test_pieces_decode_to_the_frames_of_the_whole(segment: Any) -> None:
    frames = VideoFrames(tuple(range(0, 30, 3)), 84, 112)
    name = segment(MOVING.read_bytes())
    source = ImageSource(b"k" * 16, name, 1, 96, 128, (5, 6, 8), 60, video=frames)
    pieces = Pieces(2 * 48)
    keys = [item.key for item in pieces.left(source)]
    assert len(keys) == 3
    parts = [decode_video(pieces.sources(key, [source])[0]) for key in keys]
    assert torch.equal(torch.cat(parts), decode_video(source))


def test_damage_is_found_when_frames_are_decoded_and_a_missing_file_is_told_apart(segment: Any) -> None:
    source = ImageSource(
        b"k" * 16, segment(damaged()), 1, 96, 128, (5, 6, 8), 60, video=VideoFrames(tuple(range(0, 30, 3)), 84, 112)
    )
    with pytest.raises(BadImage, match="the video cannot be decoded"):
        decode_video(source)
    shared_memory.unlink(source.segment)
    with pytest.raises(FileNotFoundError):
        decode_video(source)


def test_frames_of_another_size_than_admitted_are_refused(segment: Any) -> None:
    source = ImageSource(
        b"k" * 16, segment(MOVING.read_bytes()), 1, 90, 128, (1, 6, 8), 12, video=VideoFrames((0, 1), 84, 112)
    )
    with pytest.raises(BadImage, match="128x96"):
        decode_video(source)


@pytest.mark.parametrize("data", [b"", b"no video" * 99, MOVING.read_bytes()[:1500], clip(1)[:150]])
def test_what_is_no_video_is_refused_without_a_path(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(BadVideo) as error:
        read_video_header(str(path))
    assert str(tmp_path) not in str(error.value)


def test_without_a_decoder_the_reason_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils import video_decoder

    monkeypatch.setattr(video_decoder, "_BACKEND", "decord")
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(NoVideoDecoder, match="FFmpeg"):
        read_video_header(str(MOVING))


@pytest.mark.parametrize("form", ["bytes", "data URL", "base64", "path", "file URL", "object"])
def test_forms_in_which_a_video_may_be_given(form: str) -> None:
    data = MOVING.read_bytes()
    forms: dict[str, Any] = {
        "bytes": data,
        "data URL": data_url(data, "mp4", kind="video"),
        "base64": base64.b64encode(data).decode(),
        "path": str(MOVING),
        "file URL": f"file://{MOVING}",
        "object": SimpleNamespace(url=data_url(data, "mp4", kind="video")),
    }
    assert fetch_bytes(forms[form], 10_000, "video") == data
    with pytest.raises(BadImageInput, match=r"the video is larger than 0\.001 MB"):
        fetch_bytes(forms[form], 1_000, "video")


PROCESSOR = SimpleNamespace(
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    do_resize=True,
    size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
)


@pytest.mark.parametrize(
    ("config", "header", "num_frames", "first", "last"),
    [
        ({}, VideoHeader(100, 25.0, 480, 640), 8, 0, 99),  # two a second
        ({}, VideoHeader(5, 25.0, 480, 640), 4, 0, 4),  # no fewer than four
        ({}, VideoHeader(3, 25.0, 480, 640), 2, 0, 2),  # a multiple of two
        ({}, VideoHeader(100_000, 25.0, 480, 640), 768, 0, 99_999),  # no more than 768
        ({"fps": 0.5}, VideoHeader(1000, 10.0, 480, 640), 50, 0, 999),
        ({"nframes": 11}, VideoHeader(100, 25.0, 480, 640), 12, 0, 99),
    ],
)
def test_sampled_frames(config: dict[str, Any], header: VideoHeader, num_frames: int, first: int, last: int) -> None:
    frames, (slices, rows, columns) = video_layout(PROCESSOR, config, header)
    assert len(frames.indices) == num_frames
    assert (frames.indices[0], frames.indices[-1]) == (first, last)
    assert slices == num_frames // 2
    assert rows % 2 == columns % 2 == 0


def test_long_videos_have_smaller_frames() -> None:
    areas = [
        rows * columns
        for count in (100, 5_000, 10_000)
        for _, (_, rows, columns) in [video_layout(PROCESSOR, {}, VideoHeader(count, 25.0, 1080, 1920))]
    ]
    assert areas[0] > areas[1] > areas[2]


def test_a_video_of_one_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="nframes"):
        video_layout(PROCESSOR, {}, VideoHeader(1, 25.0, 480, 640))


def test_settings_that_sglang_applies_do_not_reach_the_processor() -> None:
    assert video_processor_settings({"fps": 1, "max_pixels": 5, "size": {"shortest_edge": 1}}) == {
        "size": {"shortest_edge": 1}
    }


def test_seconds_per_grid_is_stocks_default_rate() -> None:
    assert seconds_per_grid(PROCESSOR, 8) == 2 / 24
