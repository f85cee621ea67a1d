"""Shape of the demo model and the configuration files that transformers and SGLang read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from spaceserve.demo.tokenizer import save_tokenizer, special_id

HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 384
NUM_LAYERS = 3
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
VOCAB_SIZE = 512
# Sections of the 32 rotary frequencies for time, height and width. With the usual base of 1e6 the width's frequencies
# would turn by less than 1e-3 per column; pictures here are at most 40 columns wide, so the base is small.
MROPE_SECTION = (8, 12, 12)
ROPE_THETA = 100.0
RMS_NORM_EPS = 1e-6

VISION_DEPTH = 4
VISION_DIM = 128
VISION_HEADS = 4
VISION_MLP_RATIO = 4
PATCH_SIZE = 14
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
CELL_SIZE = PATCH_SIZE * MERGE_SIZE  # pixels that one token of the decoder stands for, along one side

MIN_PIXELS = 112 * 112
MAX_PIXELS = 448 * 448
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_POSITION_EMBEDDINGS = 4096


def processed_size(width: int, height: int) -> tuple[int, int]:
    """Return the size, (width, height), to which Qwen2-VL's image processor brings a picture (its `smart_resize`)."""
    new_width, new_height = round(width / CELL_SIZE) * CELL_SIZE, round(height / CELL_SIZE) * CELL_SIZE
    if new_width * new_height > MAX_PIXELS:
        shrink = math.sqrt(width * height / MAX_PIXELS)
        new_width = max(CELL_SIZE, math.floor(width / shrink / CELL_SIZE) * CELL_SIZE)
        new_height = max(CELL_SIZE, math.floor(height / shrink / CELL_SIZE) * CELL_SIZE)
    elif new_width * new_height < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (width * height))
        new_width = math.ceil(width * grow / CELL_SIZE) * CELL_SIZE
        new_height = math.ceil(height * grow / CELL_SIZE) * CELL_SIZE
    return new_width, new_height


def model_config() -> dict[str, Any]:
    """Return config.json of a Qwen2VLForConditionalGeneration."""
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": {"type": "mrope", "mrope_section": list(MROPE_SECTION)},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "sliding_window": MAX_POSITION_EMBEDDINGS,
        "max_window_layers": NUM_LAYERS,
        "bos_token_id": special_id("<|endoftext|>"),
        "eos_token_id": special_id("<|im_end|>"),
        "pad_token_id": special_id("<|endoftext|>"),
        "vision_start_token_id": special_id("<|vision_start|>"),
        "vision_end_token_id": special_id("<|vision_end|>"),
        "vision_token_id": special_id("<|vision_pad|>"),
        "image_token_id": special_id("<|image_pad|>"),
        "video_token_id": special_id("<|video_pad|>"),
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": VISION_DEPTH,
            "embed_dim": VISION_DIM,
            "mlp_ratio": VISION_MLP_RATIO,
            "num_heads": VISION_HEADS,
            "in_channels": 3,
            "in_chans": 3,
            "hidden_size": HIDDEN_SIZE,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "spatial_patch_size": PATCH_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "hidden_act": "quick_gelu",
        },
    }


def preprocessor_config() -> dict[str, Any]:
    """Return preprocessor_config.json; every picture becomes 16 to 256 tokens."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
    }


def save_configs(folder: Path) -> None:
    """Write every file of the checkpoint except the weights; the folder is made where it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": special_id("<|endoftext|>"),
        "eos_token_id": [special_id("<|im_end|>"), special_id("<|endoftext|>")],
        "pad_token_id": special_id("<|endoftext|>"),
        "do_sample": False,
    }
    for name, content in (
        ("config.json", model_config()),
        ("preprocessor_config.json", preprocessor_config()),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    save_tokenizer(folder)
