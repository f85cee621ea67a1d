"""What SpaceServe must know about a family of vision-language models, behind one small interface.

A family says where SGLang keeps its encoder and its language model, so that each process can load one of them
without the other, and how many patches an image has, from its height and width alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        processor: SGLang's multimodal processor of the architecture.
        vision_weights: substring of the names of all encoder weights, and of no other, in a checkpoint.
    """

    architecture: str
    module: str
    model_class: str
    vision_class: str
    language_class: str
    head_class: str = "ParallelLMHead"
    processor: str = QWEN_VL_PROCESSOR
    vision_weights: str = "visual."

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
        ),
        Family(
            architecture="Qwen2_5_VLForConditionalGeneration",
            module="sglang.srt.models.qwen2_5_vl",
            model_class="Qwen2_5_VLForConditionalGeneration",
            vision_class="Qwen2_5_VisionTransformer",
            language_class="Qwen2Model",
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


def feature_dim(hf_config: Any) -> int:
    """Width of the features that the encoder hands to the language model, in elements."""
    text_config = getattr(hf_config, "text_config", hf_config)
    return int(text_config.hidden_size)
