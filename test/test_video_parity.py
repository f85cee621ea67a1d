"""Videos as stock SGLang prepares them: the same placeholders, positions and pixels from our admission and worker.

Stock pins the memory of frames, which PyTorch refuses without an accelerator; here pinning does nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servers import encoded, picture
from spaceserve import shared_memory
from spaceserve.channels import Channels
from spaceserve.config import SpaceServeConfig
from spaceserve.demo import model_path
from spaceserve.encoder.pieces import Pieces
from spaceserve.encoder.preprocess import Preprocessor, decode, decode_video
from spaceserve.families import FAMILIES, Family
from spaceserve.frontend.admission import Admission
from spaceserve.messages import ImageSource
from spaceserve.scheduler.tracking import SOURCE_KEY
from videos import clip

pytestmark = pytest.mark.upstream

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *args, **kwargs: tensor)


def stock_processor(family: Family, config: dict[str, Any]) -> Any:
    """SGLang's processor of the architecture, with the demo model's tokenizer and settings."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.hf_transformers_utils import get_processor

    server_args = prepare_server_args(["--model-path", str(model_path()), "--device", "cpu"])
    server_args.override("test", mm_process_config=config)
    hf_config = ModelConfig.from_server_args(server_args).hf_config
    processor = get_processor(str(model_path()))
    if family.has_seconds_per_grid:
        from transformers import Qwen2_5_VLProcessor

        hf_config.model_type = "qwen2_5_vl"
        hf_config.vision_config.tokens_per_second = 4
        parts = processor.image_processor, processor.tokenizer, processor.video_processor
        processor = Qwen2_5_VLProcessor(*parts, chat_template=processor.chat_template)
    return QwenVLImageProcessor(hf_config, server_args, processor, "default")


def prepared(
    family: Family, config: dict[str, Any], text: str, images: list[Any], videos: list[Any], run_dir: Path
) -> tuple[Any, Any, list[ImageSource], Preprocessor]:
    """What stock's processor returns, what ours does, and with which sources and preprocessor."""
    processor = stock_processor(family, config)
    channels = Channels(run_dir=str(run_dir), shm_prefix=f"spaceserve-test-{run_dir.name}-", dp_size=1)
    admission = Admission(SpaceServeConfig(), channels)

    async def both() -> tuple[Any, Any]:
        def request() -> Any:
            return SimpleNamespace(
                rid="r", video_data=videos or None, audio_data=None, mm_hashes=None, extra_key=None, image_data=images
            )

        stock = await processor.process_mm_data_async(images, text, request())
        ours = await admission.process(family, processor, images, videos, text, request())
        return stock, ours

    stock, ours = asyncio.run(both())
    sources = [item.model_specific_data[SOURCE_KEY] for item in ours.mm_items]
    return stock, ours, sources, Preprocessor(processor._processor, config, torch.device("cpu"))


CASES: dict[str, tuple[dict[str, Any], list[bytes]]] = {
    "short": ({}, [clip(1, num_frames=10)]),
    "odd number of frames, twice enlarged": ({}, [clip(2, num_frames=9, width=70, height=130)]),
    "clamped by the processor too": ({}, [clip(3, num_frames=6, width=640, height=640, frames_per_s=2)]),
    "two videos": ({}, [clip(4, num_frames=4), clip(5, num_frames=12, frames_per_s=2)]),
    "settings": ({"video": {"fps": 1.0, "max_frames": 6, "max_pixels": 130_000}}, [clip(6, num_frames=40)]),
    "total pixels": ({"video": {"total_pixels": 400_000, "min_pixels": 20_000}}, [clip(7, num_frames=24)]),
    "number of frames and size": (
        {"video": {"nframes": 6, "resized_height": 100, "resized_width": 300}},
        [clip(8, num_frames=24)],
    ),
}


@pytest.mark.usefixtures("no_pinning")
@pytest.mark.parametrize("architecture", list(FAMILIES))
@pytest.mark.parametrize("case", list(CASES))
def test_placeholders_positions_and_pixels_are_stocks(architecture: str, case: str) -> None:
    config, videos = CASES[case]
    images = [encoded(picture(1, 224, 168))]
    text = f"<|im_start|>user\n{VIDEO}Look{IMAGE}and{VIDEO * (len(videos) - 1)}Describe.<|im_end|>\n"
    with tempfile.TemporaryDirectory(dir="/tmp") as run_dir:  # addresses of sockets must be short
        stock, ours, sources, preprocessor = prepared(
            FAMILIES[architecture], config, text, images, videos, Path(run_dir)
        )
    assert list(ours.input_ids) == list(stock.input_ids)
    assert torch.equal(ours.mrope_positions, stock.mrope_positions)
    assert torch.equal(ours.mrope_position_delta, stock.mrope_position_delta)
    found, expected = (
        [(item.modality, offset) for item in output.mm_items for offset in item.offsets] for output in (ours, stock)
    )
    assert found == expected
    assert any(source.grid_thw[0] > 1 for source in sources)
    stock_pixels = torch.cat([item.feature for item in stock.mm_items])
    wholes = [
        preprocessor.patches(decode(source) if source.video is None else decode_video(source), source)
        for source in sources
    ]
    assert torch.equal(torch.cat(wholes), stock_pixels)

    # The same in pieces of two slices at most.
    for source, whole in zip(sources, wholes, strict=True):
        if source.video is not None:
            book = Pieces(2 * source.num_patches // source.grid_thw[0])
            keys = [item.key for item in book.left(source)]
            assert len(keys) > 1 or source.grid_thw[0] <= 2
            pieces = [book.sources(key, [source])[0] for key in keys]
            parts = [preprocessor.patches(decode_video(piece), piece) for piece in pieces]
            assert torch.equal(torch.cat(parts), whole)
    for source in sources:
        shared_memory.unlink(source.segment)
