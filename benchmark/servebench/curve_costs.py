"""Costs of a request's parts from SIS's resource-utility curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spaceserve.sis.curves import DeviceCurves

SIZES = (224, 448, 672, 1024, 1344, 2048)
BATCHES = (1, 4, 8, 16, 32)
TEXT_TOKENS = 80
# Of a decoding request.
CONTEXT_TOKENS = 3000


def square_patches(side: int, patch_size: int, merge_size: int = 2) -> int:
    """Patches of a square image after the resize to whole merged patches."""
    return (max(1, round(side / (patch_size * merge_size))) * merge_size) ** 2


def from_curves(
    curves: DeviceCurves,
    model_name: str,
    sizes: Sequence[int] = SIZES,
    batches: Sequence[int] = BATCHES,
    text_tokens: int = TEXT_TOKENS,
    context: int = CONTEXT_TOKENS,
) -> dict[str, Any]:
    """Costs in the layout of ``bound.py measure`` from SIS's curves, with the costs of every partition beside them.

    ``partitions`` has, for each size, the encoder's time on n SMs and a decode step (largest of ``batches``) on the
    rest while it runs, the decoder masked to its part, both with the measured factor of contention.
    """
    whole, total = curves.at(curves.total_units), curves.total_units
    source = f"curves, {curves.source}"
    found: dict[str, Any] = {
        "text": {
            "prompt_tokens": text_tokens,
            "encode_ms": 0.0,
            "prefill_ms": round(whole.prefill_chunk_ms(text_tokens, 0), 3),
            "source": source,
        }
    }
    partitions: dict[str, Any] = {}
    widest = max(batches)
    for side in sizes:
        patches = square_patches(side, 14)
        tokens = patches // 4 + text_tokens
        found[str(side)] = {
            "prompt_tokens": tokens,
            "encode_ms": round(whole.encoder_batch_ms([patches]), 3),
            "prefill_ms": round(whole.prefill_chunk_ms(tokens, 0), 3),
            "source": source,
        }
        rungs = range(8, total - curves.min_decoder_units + 1, 8)
        factor = curves.contention_factor
        partitions[str(side)] = {
            "encode_ms": {
                n: round(curves.at(n).encoder_batch_ms([patches]) * factor("encoder_beside_decode_masked", n), 3)
                for n in rungs
            },
            "decode_beside_ms": {
                n: round(
                    curves.at(total - n).decode_step_ms(widest, context) * factor("decode_beside_encoder_masked", n), 3
                )
                for n in rungs
            },
            "decode_alone_ms": round(whole.decode_step_ms(widest, context), 3),
        }
    return {
        "model": model_name,
        "arm": "curves",
        "measured": curves.source == "profiled",
        "provenance": curves.provenance,
        "sizes": found,
        "decode_step_ms": {batch: round(whole.decode_step_ms(batch, context), 4) for batch in batches},
        "partitions": partitions,
    }
