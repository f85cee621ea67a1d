"""Attention over long images: FA4's kernel for Hopper where it is quicker than FA3, as measured at the start.

FA3 has kernels for heads of 64, 96, 128, 192 and 256: it pads Qwen2-VL's heads of 80 to 96. FA4's kernel (package
flash-attn-4, which SGLang requires) pads to multiples of 16, and a tile can be given to it. On an H200 it is 5 to 13 %
quicker for 21,316 patches, and slower for 5,476 and fewer (docs/benchmarking.md). From which length on it is quicker is
measured where the server starts, on the SMs that batches will have. Whatever goes wrong, FA3 is there.

FA4 compiles a kernel once for heads, data type and tile: number and length of sequences and the strides of q, k and v
are arguments of the kernel (test_encoder_long_attention.py). Its grid is one block for each tile and head, whatever
SMs there are. It is launched on torch's current stream, and nothing waits for the device.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from spaceserve.partition import Partitioner, UnitGroup

logger = logging.getLogger(__name__)

HOPPER = 9
DTYPES = (torch.bfloat16, torch.float16)
# Of which FA3 has kernels; others are padded to the next.
FA3_HEAD_DIMS = (64, 96, 128, 192, 256)
# Rows of queries and of keys, with probabilities in shared memory.
TILE = (192, 160)
SHARED_BYTES = 227 * 1024
# Parameters of FA4's function that are given.
FA4_PARAMETERS = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "tile_mn",
    "mma_pv_is_rs",
    "intra_wg_overlap",
)
# Patches of one sequence at which both are timed.
LENGTHS = (8_192, 12_288, 16_384, 21_316)
# Patches of sequences whose results are compared: long, and no multiples of a tile.
CHECKED_LENGTHS = (8_192, 1_000, 257, 16)
# FA4 must be this much quicker to be taken.
MIN_GAIN = 1.02
# Of a batch's attention (patches squared) that long sequences must have: short ones are up to 1.6 times as slow.
MIN_LONG_SHARE = 0.9
# After the budget no more lengths are begun, after the timeout nobody waits: FA3 then.
BUDGET_S = 12.0
TIMEOUT_S = 40.0

# q [patches, heads, head_dim], k and v [patches, kv_heads, head_dim], starts of the sequences and their end, longest
# sequence, scale of the scores (None: 1 / sqrt(head_dim)); [patches, heads, head_dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, "float | None"], torch.Tensor]
# Milliseconds of each of some calls on the current stream.
Timer = Callable[[Sequence[Callable[[], Any]]], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What attention computes with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def inputs(self, lengths: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Random q, k, v and starts of sequences, as `fused.py` has them: v where the projection wrote it."""
        generator = torch.Generator(device=device).manual_seed(0)
        random = partial(torch.randn, dtype=self.dtype, device=device, generator=generator)
        total, dim = sum(lengths), self.head_dim
        projected = random((total, (self.num_heads + 2 * self.num_kv_heads) * dim))
        q, k = (random((total, heads, dim)) for heads in (self.num_heads, self.num_kv_heads))
        v = projected[:, (self.num_heads + self.num_kv_heads) * dim :].unflatten(-1, (self.num_kv_heads, dim))
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return q, k, v, starts


@dataclass(frozen=True)
class Measured:
    """One sequence of `length` patches on a group of SMs."""

    length: int
    group: str
    fa3_ms: float
    fa4_ms: float

    @property
    def gain(self) -> float:
        return self.fa3_ms / self.fa4_ms


def fa3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """FA3 as SGLang's vision layers call it."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    found: torch.Tensor = flash_attn_varlen_func(
        q, k, v, starts, starts, max_seqlen_q=longest, max_seqlen_k=longest, softmax_scale=scale
    )
    return found


def fa4_kernel() -> Attend:
    """FA4's kernel with our tile. It compiles, for 3 s, at its first call for some heads and data type.

    Raises:
        ImportError: the package is not there.
        ValueError: its function has other parameters than those of 4.0.0b19.
    """
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    missing = set(FA4_PARAMETERS) - set(inspect.signature(forward).parameters)
    if missing:
        raise ValueError(f"FA4's function has no parameter {', '.join(sorted(missing))}")

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
    ) -> torch.Tensor:
        found: torch.Tensor = forward(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            tile_mn=TILE,
            mma_pv_is_rs=False,
            intra_wg_overlap=True,
        )[0]
        return found

    return attend


def fits_tile(head_dim: int) -> bool:
    """Whether the tile's queries, two stages of keys and values, and probabilities fit into shared memory."""
    rows, keys = TILE
    padded = -(-head_dim // 16) * 16
    return head_dim % 8 == 0 and 2 * (rows * padded + 4 * keys * padded + rows * keys) < SHARED_BYTES


def obstacle(device: torch.device, backend: str, heads: Heads, longest: int) -> str | None:
    """Why FA4 does not come into question, None where it does. `longest`: most patches of an image of this server."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return "FA4's kernel is tuned for NVIDIA GPUs of the Hopper generation"
    if backend != "fa3":
        return f"SGLang's attention of the encoder is {backend}"
    if heads.head_dim in FA3_HEAD_DIMS or not fits_tile(heads.head_dim):
        return f"not for heads of {heads.head_dim}"
    if heads.dtype not in DTYPES:
        return f"not for {heads.dtype}"
    if longest < LENGTHS[0]:
        return f"images have at most {longest} patches, for which FA3 is quicker"
    return None


def device_timer(calls: Sequence[Callable[[], Any]], launches: int = 3, repeats: int = 2) -> list[float]:
    """The least time of each call of `repeats` runs in turn; `launches` of them follow each other."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for index, call in enumerate(calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()  # keeps the device busy while the host launches what is timed
            begin.record()
            for _ in range(launches):
                call()
            end.record()
            end.synchronize()
            best[index] = min(best[index], begin.elapsed_time(end) / launches)
    return best


def measured_lengths(longest: int) -> list[int]:
    """Lengths at which both kernels are timed, the longest first."""
    most = min(longest, LENGTHS[-1])
    return sorted({*(length for length in LENGTHS if length <= most), most}, reverse=True)


def least_length(rows: Sequence[Measured]) -> int | None:
    """The least length from which on FA4 is quicker in every group; None where there is none."""
    found = None
    for length in sorted({row.length for row in rows}, reverse=True):
        if not all(row.gain >= MIN_GAIN for row in rows if row.length == length):
            break
        found = length
    return found


def usual_groups(partitioner: Partitioner, static_units: int | None = None) -> list[UnitGroup]:
    """Groups of SMs on which the encoder's batches run: `static_units` of them, or anything from half to all."""
    total = partitioner.total_units
    sizes = (max(1, total // 2), total) if static_units is None else (static_units,)
    return [partitioner.group(size) for size in sizes]


def _in_group(group: UnitGroup | None) -> AbstractContextManager[object]:
    return nullcontext() if group is None else group.activate()


def measure(
    heads: Heads,
    lengths: Sequence[int],
    groups: Sequence[UnitGroup],
    device: torch.device,
    kernels: tuple[Attend, Attend],
    time_ms: Timer = device_timer,
    budget_s: float = BUDGET_S,
) -> list[Measured]:
    """Time FA3 and FA4 (`kernels`) from the longest sequence down, for as long as FA4 is quicker.

    Args:
        groups: where to; none for the current stream.

    Raises:
        ValueError: FA4's result differs from FA3's by more than rounding.
    """
    from spaceserve.skinny_gemm.choice import agrees

    end_s = time.monotonic() + budget_s
    places: Sequence[UnitGroup | None] = groups or (None,)
    q, k, v, starts = heads.inputs(CHECKED_LENGTHS, device)
    for place in places:
        with _in_group(place):
            expected, found = (attend(q, k, v, starts, max(CHECKED_LENGTHS), None) for attend in kernels)
            # One sequence after another: results over many keys are small.
            parts = zip(found.split(CHECKED_LENGTHS), expected.split(CHECKED_LENGTHS), strict=True)
            if found.shape != expected.shape or not all(agrees(part, right) for part, right in parts):
                raise ValueError("FA4's results are wrong on this device")
    rows: list[Measured] = []
    for length in sorted(lengths, reverse=True):
        if time.monotonic() > end_s:
            break
        q, k, v, starts = heads.inputs((length,), device)
        for place in places:
            name = "the device" if place is None else f"{place.granted} SMs"
            with _in_group(place):
                fa3_ms, fa4_ms = time_ms([partial(attend, q, k, v, starts, length, None) for attend in kernels])
            rows.append(Measured(length, name, fa3_ms, fa4_ms))
        if least_length(rows) != length:
            break  # nor is it taken for shorter ones
    return rows


def describe(rows: Sequence[Measured]) -> str:
    """How many times as fast FA4 was, by group and length."""
    groups = dict.fromkeys(row.group for row in rows)
    return "; ".join(
        f"{group}: " + ", ".join(f"{row.gain:.2f} for {row.length}" for row in rows if row.group == group)
        for group in groups
    )


class LongAttention:
    """Which batches take FA4. None does before `choose`, which is called once. Then for one thread.

    Attributes:
        min_length: patches of an image from which on FA4 is taken; None for FA3 always.
        choice: the same in words, for records.
        rows: what was measured.
    """

    def __init__(self) -> None:
        self.min_length: int | None = None
        self.choice = "fa3"
        self.rows: list[Measured] = []
        self._fa4: Attend | None = None

    def choose(
        self,
        device: torch.device,
        backend: str,
        heads: Heads,
        longest: int,
        groups: Sequence[UnitGroup],
        *,
        kernels: Callable[[], tuple[Attend, Attend]] = lambda: (fa3, fa4_kernel()),
        time_ms: Timer = device_timer,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Compile, check and time FA4, and say in one line what is taken. Nothing is raised.

        Args:
            backend: SGLang's name of its attention in the encoder.
            longest: most patches of an image.
            groups: where batches will run; none for the current stream.
            kernels: makes FA3 and FA4.
            timeout_s: FA3 where it takes longer.
        """
        reason = obstacle(device, backend, heads, longest)
        if reason is not None:
            logger.info("Encoder attention: FA3 only; %s", reason)
            return
        began_s = time.monotonic()
        outcome: list[tuple[Attend, list[Measured]] | Exception] = []

        def work() -> None:
            try:
                on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
                # FA4's compiler warns of itself.
                with torch.inference_mode(), on_device, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = kernels()
                    outcome.append((made[1], measure(heads, measured_lengths(longest), groups, device, made, time_ms)))
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
            except Exception as error:
                outcome[:] = [error]

        # In a thread, so that a compiler that hangs does not keep the server from starting.
        thread = threading.Thread(target=work, name="choose-attention", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("Encoder attention: FA3 only; FA4 was not compiled and measured in %.0f s", timeout_s)
            return
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found = outcome[0] if outcome else RuntimeError("no result")
        if isinstance(found, Exception):
            logger.warning("Encoder attention: FA3 only; FA4 does not run here: %s", _line(found))
            return
        self._fa4, self.rows = found
        self.min_length = least_length(self.rows)
        if self.min_length is not None:
            self.choice = f"fa4 from {self.min_length} patches"
        taken = "FA3" if self.min_length is None else f"FA4 for images of {self.min_length} patches and more, else FA3"
        logger.info(
            "Encoder attention: %s; FA4 is times as fast as FA3 on %s patches (measured in %.1f s)",
            taken,
            describe(self.rows),
            time.monotonic() - began_s,
        )

    def takes(self, lengths: Sequence[int]) -> bool:
        """Whether FA4 is taken for a batch of sequences: nearly all of its attention is that of long ones."""
        if self.min_length is None:
            return False
        long = sum(length**2 for length in lengths if length >= self.min_length)
        return long > 0 and long >= MIN_LONG_SHARE * sum(length**2 for length in lengths)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
    ) -> torch.Tensor | None:
        """FA4's result, [patches, heads, head_dim]; None where it failed: then it is not tried again."""
        if self.min_length is None or self._fa4 is None:
            return None
        try:
            return self._fa4(q, k, v, starts, longest, scale)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.min_length, self.choice = None, "fa3"
            logger.warning("Encoder attention: FA3 only from now on; FA4 failed: %s", _line(error))
            return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def heads_of(blocks: Sequence[Any], dtype: torch.dtype) -> tuple[str, Heads] | None:
    """The attention back end and heads of an encoder's layers in SGLang; None where its layers are others."""
    attention: Any = getattr(blocks[0], "attn", None) if blocks else None
    try:
        return attention.qkv_backend_name, Heads(
            num_heads=attention.num_attention_heads_per_partition,
            num_kv_heads=attention.num_attention_kv_heads_per_partition,
            head_dim=attention.head_size,
            dtype=dtype,
        )
    except AttributeError:
        return None
