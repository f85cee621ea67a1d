"""Fill a model folder of dummy_model.py with random weights that every server reads alike.

  random_checkpoint.py MODEL_DIR [--seed N] [--device cuda]

``--load-format dummy`` draws weights for each rank of each process anew: an encoder that one server splits over ranks
and another keeps whole then has other weights, and their answers cannot be compared. A checkpoint can. The scales are
chosen so that the answers depend on pictures and text and the logits keep a useful spread: every product keeps its
input's scale, residual branches are scaled down by their number, and the embeddings, which are also the output head
where both are tied, are small against what the layers add.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dummy_model

# Of the logits over the vocabulary: the head's rows times a final state of unit scale.
LOGIT_STD = 4.0


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen2-VL checkpoint with this ``config.json``.

    Raises ValueError for another family.
    """
    if config["model_type"] != "qwen2_vl":
        raise ValueError(f"random weights are written for qwen2_vl, not for {config['model_type']}")
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, size in (("q_proj", hidden), ("k_proj", key_value), ("v_proj", key_value)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (size, hidden)
            shapes[f"{layer}.self_attn.{name}.bias"] = (size,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)

    vision = config["vision_config"]
    width, patch = vision["embed_dim"], vision["patch_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    shapes["visual.patch_embed.proj.weight"] = (width, 3, vision["temporal_patch_size"], patch, patch)

    def linear(name: str, out: int, into: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, into), (out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}"
        norm(f"{block}.norm1")
        norm(f"{block}.norm2")
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        linear(f"{block}.mlp.fc1", int(vision["mlp_ratio"]) * width, width)
        linear(f"{block}.mlp.fc2", width, int(vision["mlp_ratio"]) * width)
    norm("visual.merger.ln_q")
    linear("visual.merger.mlp.0", merged, merged)
    linear("visual.merger.mlp.2", hidden, merged)
    return shapes


def _scale(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> float:
    """Standard deviation of a weight matrix."""
    fan_in = prod(shape[1:])
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return float(LOGIT_STD / fan_in**0.5)
    scale = 1.0 / fan_in**0.5
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        # Scores of a few units: attention that is not an average over all tokens, in which a picture would vanish.
        return float(1.7 * scale)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        # Attention averages and gating shrink what a branch returns: about as strong as its input, over all layers.
        return float(4.0 * scale / (2 * config["num_hidden_layers"]) ** 0.5)
    if name.endswith(("attn.proj.weight", "fc2.weight")):
        return float(2.0 * scale / (2 * config["vision_config"]["depth"]) ** 0.5)
    return float(scale)


def random_tensors(config: Mapping[str, Any], seed: int, device: str) -> dict[str, torch.Tensor]:
    """All tensors in bfloat16 on the CPU, drawn in the order of their names on ``device``."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        if len(shape) == 1:
            is_norm = "norm" in name or "ln_q" in name
            value = torch.ones(shape) if is_norm and name.endswith("weight") else torch.zeros(shape)
        else:
            value = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            value *= _scale(name, shape, config)
        tensors[name] = value.to(torch.bfloat16).cpu()
    return tensors


def write_weights(folder: Path, *, seed: int = 0, device: str = "cpu") -> int:
    """Write ``model.safetensors`` beside the folder's ``config.json``; returns its size in bytes.

    Raises ValueError for another family.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = random_tensors(config, seed, device)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def write_model_apart(shape: str, folder: Path, *, tokenizer: Path, device: str) -> None:
    """A model of dummy_model.py with random weights, drawn in a process that ends: no CUDA context stays in this one.

    Raises ValueError for a shape or tokenizer that cannot be used, CalledProcessError where the weights fail.
    """
    dummy_model.write(shape, folder, tokenizer)
    command = [sys.executable, __file__, str(folder), "--device", device]
    subprocess.run(command, check=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    try:
        num_bytes = write_weights(options.folder, seed=options.seed, device=options.device)
    except ValueError as error:
        parser.error(str(error))
    print(f"{num_bytes / 1e9:.2f} GB of random weights")


if __name__ == "__main__":
    main()
