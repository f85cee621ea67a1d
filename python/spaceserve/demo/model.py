"""The demo model in plain torch, for training on dense batches: same tensors and names as a Qwen2-VL checkpoint.

Shapes: B pictures or sequences, P patches of a picture in the order of Qwen2-VL's image processor (the four patches of
a merged cell are neighbours), M = P / 4 merged cells in row-major order, L tokens, D width. All pictures of a batch
have one grid, so that no attention mask is needed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spaceserve.demo import architecture as arch
from spaceserve.demo.tokenizer import vocabulary


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def vision_rope(rows: int, cols: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [P, head_dim], for a grid of rows x cols patches (two-dimensional rotary positions)."""
    dim = arch.VISION_DIM // arch.VISION_HEADS // 2
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float, device=device) / dim))
    merge = arch.MERGE_SIZE
    row = torch.arange(rows, device=device)[:, None].expand(rows, cols)
    col = torch.arange(cols, device=device)[None, :].expand(rows, cols)
    order = [
        x.reshape(rows // merge, merge, cols // merge, merge).permute(0, 2, 1, 3).reshape(-1, 1).float() * inv_freq
        for x in (row, col)
    ]
    angles = torch.cat(order, dim=-1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def text_rope(position_3BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [B, 1, L, head_dim], of multimodal rotary positions (time, height, width)."""
    dim = arch.HEAD_DIM
    inv_freq = 1.0 / (arch.ROPE_THETA ** (torch.arange(0, dim, 2, dtype=torch.float, device=position_3BL.device) / dim))
    sections = inv_freq.split(list(arch.MROPE_SECTION))
    angles = torch.cat([position_3BL[i].float()[..., None] * section for i, section in enumerate(sections)], dim=-1)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class VisionAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(arch.VISION_DIM, 3 * arch.VISION_DIM)
        self.proj = nn.Linear(arch.VISION_DIM, arch.VISION_DIM)

    def forward(self, x_BPD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, patches, dim = x_BPD.shape
        qkv = self.qkv(x_BPD).view(batch, patches, 3, arch.VISION_HEADS, dim // arch.VISION_HEADS)
        query_key = qkv[:, :, :2].permute(2, 0, 3, 1, 4)
        query_key = query_key * cos + rotate_half(query_key) * sin
        value = qkv[:, :, 2].transpose(1, 2)
        out = F.scaled_dot_product_attention(query_key[0], query_key[1], value)
        return self.proj(out.transpose(1, 2).reshape(batch, patches, dim))


class VisionMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.VISION_DIM, arch.VISION_DIM * arch.VISION_MLP_RATIO)
        self.fc2 = nn.Linear(arch.VISION_DIM * arch.VISION_MLP_RATIO, arch.VISION_DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden * torch.sigmoid(1.702 * hidden))


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(arch.VISION_DIM, eps=1e-6)
        self.norm2 = nn.LayerNorm(arch.VISION_DIM, eps=1e-6)
        self.attn = VisionAttention()
        self.mlp = VisionMlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kernel = (arch.TEMPORAL_PATCH_SIZE, arch.PATCH_SIZE, arch.PATCH_SIZE)
        self.proj = nn.Conv3d(3, arch.VISION_DIM, kernel_size=kernel, stride=kernel, bias=False)

    def forward(self, patches_BPC: Tensor) -> Tensor:
        # A still picture is repeated along time, so the sum of both time slices is the whole convolution.
        weight = self.proj.weight.sum(dim=2).reshape(arch.VISION_DIM, -1)
        return F.linear(patches_BPC, weight)


class PatchMerger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = arch.VISION_DIM * arch.MERGE_SIZE**2
        self.ln_q = nn.LayerNorm(arch.VISION_DIM, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, arch.HIDDEN_SIZE))

    def forward(self, x_BPD: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x_BPD).reshape(x_BPD.shape[0], -1, self.width))


class VisionEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.blocks = nn.ModuleList([VisionBlock() for _ in range(arch.VISION_DEPTH)])
        self.merger = PatchMerger()

    def forward(self, patches_BPC: Tensor, rows: int, cols: int) -> Tensor:
        """Encode patches [B, rows * cols, 588] (channel, y, x) to [B, rows * cols / 4, hidden]."""
        x = self.patch_embed(patches_BPC)
        cos, sin = vision_rope(rows, cols, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.merger(x)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(arch.HIDDEN_SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (arch.HIDDEN_SIZE,), self.weight, arch.RMS_NORM_EPS)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(arch.HIDDEN_SIZE, arch.NUM_HEADS * arch.HEAD_DIM)
        self.k_proj = nn.Linear(arch.HIDDEN_SIZE, arch.NUM_KV_HEADS * arch.HEAD_DIM)
        self.v_proj = nn.Linear(arch.HIDDEN_SIZE, arch.NUM_KV_HEADS * arch.HEAD_DIM)
        self.o_proj = nn.Linear(arch.NUM_HEADS * arch.HEAD_DIM, arch.HIDDEN_SIZE, bias=False)

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x_BLD.shape
        query = self.q_proj(x_BLD).view(batch, length, arch.NUM_HEADS, arch.HEAD_DIM).transpose(1, 2)
        key = self.k_proj(x_BLD).view(batch, length, arch.NUM_KV_HEADS, arch.HEAD_DIM).transpose(1, 2)
        value = self.v_proj(x_BLD).view(batch, length, arch.NUM_KV_HEADS, arch.HEAD_DIM).transpose(1, 2)
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin
        repeat = arch.NUM_HEADS // arch.NUM_KV_HEADS
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.HIDDEN_SIZE, arch.INTERMEDIATE_SIZE, bias=False)
        self.up_proj = nn.Linear(arch.HIDDEN_SIZE, arch.INTERMEDIATE_SIZE, bias=False)
        self.down_proj = nn.Linear(arch.INTERMEDIATE_SIZE, arch.HIDDEN_SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()
        self.input_layernorm = RMSNorm()
        self.post_attention_layernorm = RMSNorm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.VOCAB_SIZE, arch.HIDDEN_SIZE)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(arch.NUM_LAYERS)])
        self.norm = RMSNorm()


class DemoModel(nn.Module):
    """`visual.*` and `model.*` of a Qwen2-VL checkpoint with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = VisionEncoder()
        self.model = Decoder()

    def hidden(
        self,
        tokens_BL: Tensor,
        position_3BL: Tensor,
        features_ND: Tensor | None,
        image_id: int,
        segments_BL: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [B, L, D]; `features_ND` replace the `image_id` tokens in row-major order.

        With `segments_BL`, a token sees those before it that are of segment 0 or of its own one.
        """
        x = self.model.embed_tokens(tokens_BL)
        if features_ND is not None:
            # Counted order instead of a boolean index: no host synchronisation.
            is_image = tokens_BL == image_id
            order = (is_image.flatten().cumsum(0) - 1).clamp_(min=0).view_as(tokens_BL)
            x = torch.where(is_image[..., None], features_ND[order.clamp_(max=features_ND.shape[0] - 1)], x)
        cos, sin = text_rope(position_3BL, x.dtype)
        mask = None
        if segments_BL is not None:
            key = segments_BL[:, None, None, :]
            length = tokens_BL.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mask = causal & ((key == 0) | (key == segments_BL[:, None, :, None]))
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def initialise(model: DemoModel, seed: int, gain: float = 1.0) -> None:
    """Fill the weights in place: 1 / sqrt(fan-in) scaled by `gain`, residual branches smaller.

    Tied embeddings (rows of norm `gain`) set the scale of the residual stream and of the logits. RMS norms make the
    stream's scale free, so embeddings are small for the logits' sake, and the merger's last layer matches them.
    """
    generator = torch.Generator().manual_seed(seed)
    embed_std = gain / math.sqrt(arch.HIDDEN_SIZE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name or "ln_q" in name else 0.0)
                if name.endswith("bias"):
                    parameter.zero_()
                continue
            fan_in = parameter[0].numel()
            std = gain / math.sqrt(fan_in)
            if "embed_tokens" in name:
                std = embed_std
            elif name.endswith(("attn.proj.weight", "mlp.fc2.weight")) and "blocks" in name:
                std /= math.sqrt(2 * arch.VISION_DEPTH)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= embed_std / math.sqrt(2 * arch.NUM_LAYERS)
            elif "merger.mlp.2" in name:
                std *= 2 * embed_std
            values = torch.randn(parameter.shape, generator=generator) * std
            if "embed_tokens" in name:
                values[len(vocabulary()) + 256 :] = 0.0  # ids without a text are never the best ones
            parameter.copy_(values)


def checkpoint_tensors(model: DemoModel) -> dict[str, Any]:
    """Return the bfloat16 tensors under the names of a Qwen2-VL checkpoint (the output head is tied, so not stored)."""
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
