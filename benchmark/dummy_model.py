"""Write the configuration of a real vision-language model without weights, to serve with ``--load-format dummy``.

Latency, memory and throughput depend on shapes, not on trained values, so such a model measures the runtime.

  dummy_model.py NAME OUT_DIR --tokenizer DIR

DIR holds ``tokenizer.json`` and ``tokenizer_config.json`` of the Qwen2 vocabulary. The shapes are those of the
published configurations of Qwen2-VL and Qwen2.5-VL.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A language model's and its vision encoder's dimensions."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    vocab: int
    vision_intermediate: int = 0


SHAPES = {
    "qwen2-vl-2b": Shape("qwen2_vl", 1536, 8960, 28, 12, 2, True, 151936),
    "qwen2-vl-7b": Shape("qwen2_vl", 3584, 18944, 28, 28, 4, False, 152064),
    "qwen2-vl-72b": Shape("qwen2_vl", 8192, 29568, 80, 64, 8, False, 152064),
    "qwen2.5-vl-3b": Shape("qwen2_5_vl", 2048, 11008, 36, 16, 2, True, 151936, 3420),
    "qwen2.5-vl-7b": Shape("qwen2_5_vl", 3584, 18944, 28, 28, 4, False, 152064, 3420),
    "qwen2.5-vl-32b": Shape("qwen2_5_vl", 5120, 27648, 64, 40, 8, False, 152064, 3456),
}
TOKEN_IDS = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}


def vision_config(shape: Shape) -> dict[str, Any]:
    """The encoder: 32 layers of width 1280 in both families; Qwen2.5-VL's attends in windows but for four layers."""
    common = {
        "model_type": shape.family,
        "depth": 32,
        "num_heads": 16,
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if shape.family == "qwen2_vl":
        extra = {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": shape.hidden, "hidden_act": "quick_gelu"}
        return {**common, **extra}
    return {
        **common,
        "hidden_size": 1280,
        "out_hidden_size": shape.hidden,
        "intermediate_size": shape.vision_intermediate,
        "hidden_act": "silu",
        "fullatt_block_indexes": [7, 15, 23, 31],
        "window_size": 112,
        "tokens_per_second": 2,
    }


def model_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` in the layout of the published checkpoints (language settings at the top level)."""
    return {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 32768 if shape.family == "qwen2_vl" else 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": shape.layers,
        **TOKEN_IDS,
        "vision_config": vision_config(shape),
    }


def preprocessor_config(shape: Shape) -> dict[str, Any]:
    """``preprocessor_config.json``; both families share resize rule and limits."""
    processor = "Qwen2VLProcessor" if shape.family == "qwen2_vl" else "Qwen2_5_VLProcessor"
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 16384,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def write(name: str, out: Path, tokenizer: Path) -> None:
    """Write the folder. Raises ValueError for an unknown name or a folder without the tokenizer's files."""
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r}, expected one of {sorted(SHAPES)}")
    files = [tokenizer / file for file in ("tokenizer.json", "tokenizer_config.json")]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(f"the tokenizer folder lacks {', '.join(absent)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model_config(SHAPES[name]), indent=1))
    (out / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(SHAPES[name]), indent=1))
    for file in (*files, tokenizer / "chat_template.jinja"):
        if file.exists():
            shutil.copy(file, out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    try:
        write(options.name, options.out, options.tokenizer)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
