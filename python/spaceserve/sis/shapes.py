"""Shapes of a vision-language model's operators, read from its Hugging Face configuration.

Pure Python: no torch, no transformers. Lengths are in patches (encoder) and tokens (decoder); weights and
activations count two bytes per element (bf16).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """One linear layer: rows x k times k x n, launched `count` times per forward.

    `rows_per_input` is the number of input rows (patches, tokens) that make one row of this product: 1 in the
    layers, spatial_merge_size**2 in the merger. `per_sequence` marks lm_head, which sees one row per sequence.
    """

    name: str
    n: int
    k: int
    count: int
    rows_per_input: int = 1
    per_sequence: bool = False

    def rows(self, num_inputs: float, num_sequences: float) -> float:
        return num_sequences if self.per_sequence else max(1.0, num_inputs / self.rows_per_input)


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """Vision transformer. `window_patches` is 0 where every layer attends over the whole image."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    gated: bool
    patch_dim: int
    merge_factor: int
    out_hidden_size: int
    window_patches: int = 0
    num_full_attention_layers: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def full_layers(self) -> int:
        return self.num_full_attention_layers if self.window_patches else self.num_layers

    def gemms(self) -> tuple[GemmSpec, ...]:
        h, m = self.hidden_size, self.merge_factor
        up = self.intermediate_size * (2 if self.gated else 1)
        return (
            GemmSpec(name="encoder_patch_embed", n=h, k=self.patch_dim, count=1),
            GemmSpec(name="encoder_qkv", n=3 * h, k=h, count=self.num_layers),
            GemmSpec(name="encoder_proj", n=h, k=h, count=self.num_layers),
            GemmSpec(name="encoder_up", n=up, k=h, count=self.num_layers),
            GemmSpec(name="encoder_down", n=h, k=self.intermediate_size, count=self.num_layers),
            GemmSpec(name="encoder_merger_in", n=h * m, k=h * m, count=1, rows_per_input=m),
            GemmSpec(name="encoder_merger_out", n=self.out_hidden_size, k=h * m, count=1, rows_per_input=m),
        )

    def pointwise_bytes_per_patch(self) -> int:
        """Bytes of one layer's norms, rotary embedding, activation and residual sums, for each patch."""
        activation = self.intermediate_size * (3 if self.gated else 2)
        return BYTES_PER_ELEMENT * (
            2 * 2 * self.hidden_size + 2 * 3 * self.hidden_size + 4 * self.hidden_size + activation
        )


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Dense decoder with grouped-query attention."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    def gemms(self) -> tuple[GemmSpec, ...]:
        h, heads, kv = self.hidden_size, self.num_heads, self.num_kv_heads
        return (
            GemmSpec(name="decoder_qkv", n=(heads + 2 * kv) * self.head_dim, k=h, count=self.num_layers),
            GemmSpec(name="decoder_o", n=h, k=heads * self.head_dim, count=self.num_layers),
            GemmSpec(name="decoder_gate_up", n=2 * self.intermediate_size, k=h, count=self.num_layers),
            GemmSpec(name="decoder_down", n=h, k=self.intermediate_size, count=self.num_layers),
            GemmSpec(name="decoder_lm_head", n=self.vocab_size, k=h, count=1, per_sequence=True),
        )

    def pointwise_bytes_per_token(self) -> int:
        """Bytes of one layer's norms, rotary embedding, SwiGLU product and residual sums, for each token."""
        h = self.hidden_size
        return BYTES_PER_ELEMENT * (2 * 2 * h + 2 * 3 * h + 4 * h + 3 * self.intermediate_size)

    def kv_bytes_per_token_per_layer(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Encoder and decoder of one model; equal shapes have equal fingerprints, whatever their weights."""

    encoder: EncoderShape
    decoder: DecoderShape

    def fingerprint(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelShape:
        return ModelShape(encoder=EncoderShape(**data["encoder"]), decoder=DecoderShape(**data["decoder"]))


def shape_from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """Shape of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL model from its `config.json`.

    Raises ValueError where the configuration has no `vision_config`, is a mixture of experts or lacks a field.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ValueError("the model has no vision_config: not a vision-language model that can be profiled")
    text = config.get("text_config") or config
    if text.get("num_experts") or text.get("num_local_experts"):
        raise ValueError(
            "mixture-of-experts decoders have no operator model yet: profile the device with a dense model"
        )
    model_type = str(config.get("model_type", ""))
    try:
        # Qwen2-VL calls the width embed_dim and the width after the merger hidden_size; later ones turn that round.
        old_names = "embed_dim" in vision and "out_hidden_size" not in vision
        hidden = int(vision["embed_dim"] if old_names else vision["hidden_size"])
        out_hidden = int(vision["hidden_size"] if old_names else vision["out_hidden_size"])
        intermediate = (
            int(vision["intermediate_size"])
            if "intermediate_size" in vision
            else int(hidden * vision.get("mlp_ratio", 4))
        )
        channels = int(vision.get("in_channels", vision.get("in_chans", 3)))
        patch_size = int(vision["patch_size"])
        windowed = "qwen2_5" in model_type and bool(vision.get("window_size"))
        encoder = EncoderShape(
            num_layers=int(vision["depth"]),
            hidden_size=hidden,
            num_heads=int(vision["num_heads"]),
            intermediate_size=intermediate,
            gated="qwen2_5" in model_type,
            patch_dim=channels * int(vision.get("temporal_patch_size", 2)) * patch_size**2,
            merge_factor=int(vision.get("spatial_merge_size", 2)) ** 2,
            out_hidden_size=out_hidden,
            window_patches=(int(vision["window_size"]) // patch_size) ** 2 if windowed else 0,
            num_full_attention_layers=len(vision.get("fullatt_block_indexes", ())) if windowed else 0,
        )
        heads = int(text["num_attention_heads"])
        decoder = DecoderShape(
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
            intermediate_size=int(text["intermediate_size"]),
            vocab_size=int(text.get("vocab_size") or config["vocab_size"]),
        )
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]!r}, which the operator shapes need") from error
    return ModelShape(encoder=encoder, decoder=decoder)


def shape_from_model_path(model_path: str | Path) -> ModelShape:
    """Shape from a folder with a `config.json`. Raises ValueError where there is none."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} not found: --model-path must be a local model folder with a config.json")
    return shape_from_hf_config(json.loads(file.read_text()))


# Public config.json of Qwen/Qwen2-VL-7B-Instruct.
QWEN2_VL_7B = ModelShape(
    encoder=EncoderShape(
        num_layers=32, hidden_size=1280, num_heads=16, intermediate_size=5120, gated=False,
        patch_dim=1176, merge_factor=4, out_hidden_size=3584,
    ),
    decoder=DecoderShape(
        num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, head_dim=128,
        intermediate_size=18944, vocab_size=152064,
    ),
)  # fmt: skip
