"""FA4's attention on a Hopper GPU gives what FA3 does, for batches of any number of images, on any stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spaceserve.encoder.long_attention import LENGTHS, Heads, LongAttention, fa3, fa4_kernel, measure, usual_groups
from spaceserve.partition import Partitioner, make_partitioner
from spaceserve.skinny_gemm.choice import agrees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an NVIDIA GPU of the Hopper generation",
    ),
]

BATCHES = [(21_316,), (9_000, 257), (16, 8_192, 1, 191, 193), (4_096,) * 4, (64,) * 100]


@pytest.fixture(scope="module")
def partitioner() -> Iterator[Partitioner]:
    with make_partitioner("green_ctx", device="cuda", min_units=16, prepare="nothing") as found:
        yield found


def heads(dtype: torch.dtype = torch.bfloat16, num_heads: int = 16) -> Heads:
    return Heads(num_heads=num_heads, num_kv_heads=num_heads, head_dim=80, dtype=dtype)


def cache_size() -> int:
    from flash_attn.cute.interface import _flash_attn_fwd

    return len(_flash_attn_fwd.compile_cache.cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_batches(dtype: torch.dtype) -> None:
    fa4 = fa4_kernel()
    compiled = None
    with torch.inference_mode():
        for lengths in BATCHES:
            for num_heads in (16, 12):
                q, k, v, starts = heads(dtype, num_heads).inputs(lengths, torch.device("cuda"))
                for values in (v, v.contiguous()):
                    for scale in (None, 0.2):
                        expected = fa3(q, k, values, starts, max(lengths), scale)
                        found = fa4(q, k, values, starts, max(lengths), scale)
                        assert found.shape == expected.shape
                        assert found.is_contiguous()
                        assert found.dtype == dtype
                        parts = zip(found.split(lengths), expected.split(lengths), strict=True)
                        for index, (part, right) in enumerate(parts):
                            assert agrees(part, right), f"image {index} of {lengths}, scale {scale}"
                        compiled = compiled or cache_size()
                        assert cache_size() == compiled, "a batch of another form was compiled anew"


def test_another_thread_on_groups_without_waiting_for_the_device(partitioner: Partitioner) -> None:
    fa4, errors = fa4_kernel(), []
    lengths = (12_000, 300)
    q, k, v, starts = heads().inputs(lengths, torch.device("cuda"))
    with torch.inference_mode():
        expected = fa3(q, k, v, starts, max(lengths), None)
        fa4(q, k, v, starts, max(lengths), None)
    torch.cuda.synchronize()

    def work() -> None:
        try:
            with torch.inference_mode():
                for group in [partitioner.group(24), *usual_groups(partitioner)]:
                    with group.activate():
                        fa4(q, k, v, starts, max(lengths), None)
                        torch.cuda._sleep(200_000_000)  # about 0.1 s
                        found = fa4(q, k, v, starts, max(lengths), None)
                        behind = torch.cuda.Event()
                        behind.record()
                        assert not behind.query(), "the host waited for the device, or the work went elsewhere"
                        behind.synchronize()
                        parts = zip(found.split(lengths), expected.split(lengths), strict=True)
                        assert all(agrees(part, right) for part, right in parts)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_the_choice_runs_and_hands_its_memory_back(partitioner: Partitioner, capsys: Any) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    chosen = LongAttention()
    chosen.choose(torch.device("cuda", 0), "fa3", heads(), 10**6, usual_groups(partitioner))
    assert chosen.rows, "FA4 did not run: see the warning"
    assert {row.length for row in chosen.rows} <= set(LENGTHS)
    assert chosen.takes([10**6]) == (chosen.min_length is not None)
    assert torch.cuda.memory_reserved() <= before + (32 << 20)
    with capsys.disabled():
        print("\n", chosen.choice, [(row.group, row.length, round(row.gain, 3)) for row in chosen.rows])


def test_a_wrong_kernel_is_found() -> None:
    right = fa4_kernel()

    def without_the_last_keys(*args: Any) -> torch.Tensor:
        q, k, v, starts, longest, scale = args
        return right(q, k, torch.cat((v[:-200], torch.zeros_like(v[-200:]))), starts, longest, scale)

    with torch.inference_mode(), pytest.raises(ValueError, match="wrong"):
        measure(heads(), LENGTHS, (), torch.device("cuda"), (fa3, without_the_last_keys))
