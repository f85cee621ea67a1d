"""What SpaceServe must know about a family of vision-language models, behind one small interface.

A family says where SGLang keeps its encoder and its language model, so that each process can load one of them
without the other, and how many patches an image or a video has, from its size and number of frames alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spaceserve.messages import VideoFrames
from spaceserve.video_file import VideoHeader

QWEN_VL_PROCESSOR = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture that can be split into an encoder worker and a decoder.

    Attributes:
        architecture: name in the checkpoint's `architectures`.
        module: SGLang's module of the model.
        model_class: the model in that module.
        vision_class: its encoder, constructed in the module's namespace.
        language_class: its language model, likewise.
        head_class: its output head, likewise.
        decoder_layers: path of the language model's list of layers in the model.
        processor: SGLang's multimodal processor of the architecture.
        vision_weights: substring of the names of all encoder weights, and of no other, in a checkpoint.
        quick_gelu_block: the encoder's layer, where it is layer norm, attention, layer norm and a QuickGELU MLP.
        has_seconds_per_grid: a video's positions depend on the seconds between its temporal slices.
    """

    architecture: str
    module: str
    model_class: str
    vision_class: str
    language_class: str
    head_class: str = "ParallelLMHead"
    decoder_layers: str = "model.layers"
    processor: str = QWEN_VL_PROCESSOR
    vision_weights: str = "visual."
    quick_gelu_block: str | None = None
    has_seconds_per_grid: bool = False

    def target(self, name: str) -> str:
        """Dotted path of a name in the model's module."""
        return f"{self.module}.{name}"


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="Qwen2VLForConditionalGeneration",
            module="sglang.srt.models.qwen2_vl",
            model_class="Qwen2VLForConditionalGeneration",
            vision_class="Qwen2VisionTransformer",
            language_class="Qwen2Model",
            quick_gelu_block="Qwen2VisionBlock",
        ),
        Family(
            architecture="Qwen2_5_VLForConditionalGeneration",
            module="sglang.srt.models.qwen2_5_vl",
            model_class="Qwen2_5_VLForConditionalGeneration",
            vision_class="Qwen2_5_VisionTransformer",
            language_class="Qwen2Model",
            has_seconds_per_grid=True,
        ),
    )
}


def find_family(architectures: Sequence[str] | None) -> Family | None:
    """The first architecture that can be split, or None."""
    for name in architectures or ():
        if name in FAMILIES:
            return FAMILIES[name]
    return None


def image_grid(image_processor: Any, image_config: Mapping[str, Any], height: int, width: int) -> tuple[int, int, int]:
    """Patches of an image in time, height and width after the processor's resize rule.

    Args:
        image_processor: the Hugging Face image processor of a Qwen-VL checkpoint.
        image_config: what the user gave as `--mm-process-config '{"image": ...}'`; it overrides the processor.
        height: pixels, as in the file's header (not rotated by EXIF; neither does SGLang rotate).
        width: pixels.

    Returns:
        (1, rows, columns) of patches, each a multiple of the merge size.

    Raises:
        ValueError: the aspect ratio is beyond what the resize rule accepts (200).
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    size = image_processor.size
    shortest, longest = size["shortest_edge"], size["longest_edge"]
    if "size" in image_config:
        shortest, longest = image_config["size"]["shortest_edge"], image_config["size"]["longest_edge"]
    # The processor itself ignores one of the two without the other.
    if image_config.get("min_pixels") is not None and image_config.get("max_pixels") is not None:
        shortest, longest = image_config["min_pixels"], image_config["max_pixels"]
    patch = image_config.get("patch_size", image_processor.patch_size)
    merge = image_config.get("merge_size", image_processor.merge_size)
    rows, columns = smart_resize(height, width, factor=patch * merge, min_pixels=shortest, max_pixels=longest)
    return 1, rows // patch, columns // patch


# Settings of `--mm-process-config '{"video": ...}'` that SGLang applies itself, before the processor.
VIDEO_SAMPLING_SETTINGS = frozenset(
    {"fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"}
    | {"resized_height", "resized_width"}
)


def video_processor_settings(video_config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the user's settings that goes to the Hugging Face video processor."""
    return {name: value for name, value in video_config.items() if name not in VIDEO_SAMPLING_SETTINGS}


def video_layout(
    video_processor: Any, video_config: Mapping[str, Any], header: VideoHeader
) -> tuple[VideoFrames, tuple[int, int, int]]:
    """Which frames of a video stock SGLang would encode, at which size, and the patches that come of them.

    SGLang samples frames evenly (two a second, 4 to 768) and resizes them so that the whole video keeps within a
    number of pixels; then the processor applies its own rule for one frame.

    Args:
        video_processor: the Hugging Face video processor of a Qwen-VL checkpoint.
        video_config: what the user gave as `--mm-process-config '{"video": ...}'`.
        header: of the file.

    Returns:
        The frames, and their grid (slices, rows, columns) of patches.

    Raises:
        ValueError: fewer than two frames, or an aspect ratio beyond what the resize rule accepts (200).
    """
    import numpy as np
    from sglang.srt.multimodal.processors import qwen_vl
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    config = dict(video_config)
    num_frames = qwen_vl.smart_nframes(config, header.num_frames, header.frames_per_s)
    indices = np.unique(np.linspace(0, header.num_frames - 1, num=num_frames, dtype=np.int64)).tolist()
    if "resized_height" in config and "resized_width" in config:
        height, width = qwen_vl.smart_resize(config["resized_height"], config["resized_width"])
    else:
        least = config.get("min_pixels", qwen_vl.VIDEO_MIN_PIXELS)
        shared = config.get("total_pixels", qwen_vl.VIDEO_TOTAL_PIXELS) / len(indices) * qwen_vl.FRAME_FACTOR
        most = max(min(config.get("max_pixels", qwen_vl.VIDEO_MAX_PIXELS), shared), int(least * 1.05))
        most = min(config.get("max_pixels", most), most)
        height, width = qwen_vl.smart_resize(header.height, header.width, min_pixels=least, max_pixels=most)
    frames = VideoFrames(tuple(indices), height, width)

    settings = video_processor_settings(config)
    patch, merge, per_slice = (
        int(settings.get(name) or getattr(video_processor, name))
        for name in ("patch_size", "merge_size", "temporal_patch_size")
    )
    if settings.get("do_resize", video_processor.do_resize):
        size = settings.get("size") or video_processor.size
        height, width = smart_resize(
            height,
            width,
            factor=patch * merge,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
    return frames, (-(-len(indices) // per_slice), height // patch, width // patch)


def seconds_per_grid(video_processor: Any, num_frames: int) -> float:
    """Seconds between two temporal slices of a video, as stock SGLang has them for Qwen2.5-VL.

    SGLang samples the frames itself and gives the processor no rate, so the processor takes its default.
    """
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=num_frames, frames_indices=list(range(num_frames)))
    return float(video_processor.temporal_patch_size / metadata.sampled_fps)


def feature_dim(hf_config: Any) -> int:
    """Width of the features that the encoder hands to the language model, in elements."""
    text_config = getattr(hf_config, "text_config", hf_config)
    return int(text_config.hidden_size)
