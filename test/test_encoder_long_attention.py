"""Which attention the encoder takes for long images: the choice, what stands in its way, and where it is applied."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spaceserve.config import SpaceServeConfig
from spaceserve.encoder import long_attention, process
from spaceserve.encoder.fused import fused_hooks
from spaceserve.encoder.long_attention import (
    LENGTHS,
    Heads,
    LongAttention,
    Measured,
    fits_tile,
    heads_of,
    least_length,
    measured_lengths,
    obstacle,
    usual_groups,
)
from spaceserve.encoder.split import EncoderSplit
from spaceserve.families import FAMILIES
from spaceserve.hooks import Hook, check_signature
from spaceserve.partition import SimulatedPartitioner
from spaceserve.profile.kernels import choose_kernels

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
HEADS = Heads(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)
SHORT, SECOND, THIRD, LONG = LENGTHS


def values_of_key_zero(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Stands for attention: what it depends on, in its layout."""
    assert scale is None
    assert longest == int(starts.diff().max())
    return q + v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def timer(gains: dict[int, float], seen: list[int]) -> Callable[[Sequence[Callable[[], Any]]], list[float]]:
    """FA3 takes 1 ms, FA4 as much less as `gains` says for a length."""

    def time_ms(calls: Sequence[Callable[[], Any]]) -> list[float]:
        old, new = (call() for call in calls)
        assert old.shape == new.shape
        seen.append(old.shape[0])
        return [1.0, 1.0 / gains[old.shape[0]]]

    return time_ms


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_attention, "obstacle", lambda *args: None)


def choose(gains: dict[int, float], groups: Sequence[Any] = (), **kwargs: Any) -> tuple[LongAttention, list[int]]:
    chosen = LongAttention()
    seen: list[int] = []
    kernels = kwargs.pop("kernels", lambda: (values_of_key_zero, values_of_key_zero))
    chosen.choose(
        CPU, "fa3", HEADS, kwargs.pop("longest", 10**6), groups, kernels=kernels, time_ms=timer(gains, seen), **kwargs
    )
    return chosen, seen


@pytest.mark.usefixtures("hopper")
def test_fa4_is_taken_from_the_length_on_from_which_it_is_quicker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen, seen = choose({LONG: 1.06, THIRD: 1.04, SECOND: 1.01, SHORT: 1.5})
    assert chosen.min_length == THIRD
    assert chosen.choice == f"fa4 from {THIRD} patches"
    assert seen == [LONG, THIRD, SECOND]  # the shortest cannot be taken any more
    (line,) = [record.message for record in caplog.records]
    assert f"FA4 for images of {THIRD} patches and more" in line
    assert f"1.06 for {LONG}, 1.04 for {THIRD}, 1.01 for {SECOND}" in line
    q, _, v, starts = HEADS.inputs((5, 3), CPU)
    expected = values_of_key_zero(q, q, v, starts, 5, None)
    torch.testing.assert_close(chosen.attend(q, q, v, starts, 5, None), expected)


@pytest.mark.usefixtures("hopper")
def test_it_must_be_quicker_in_every_group() -> None:
    partitioner = SimulatedPartitioner(total_units=132)
    groups = usual_groups(partitioner)
    assert [group.granted for group in groups] == [72, 132]
    assert [group.granted for group in usual_groups(partitioner, 40)] == [40]
    gains = iter([1.1, 1.05, 1.1, 1.01])

    def time_ms(calls: Sequence[Callable[[], Any]]) -> list[float]:
        assert partitioner.active is not None
        return [1.0, 1.0 / next(gains)]

    chosen = LongAttention()
    chosen.choose(
        CPU, "fa3", HEADS, LONG, groups, kernels=lambda: (values_of_key_zero, values_of_key_zero), time_ms=time_ms
    )
    assert chosen.min_length == LONG
    assert [(row.group, row.length) for row in chosen.rows] == [
        ("72 SMs", LONG),
        ("132 SMs", LONG),
        ("72 SMs", THIRD),
        ("132 SMs", THIRD),
    ]


def test_lengths() -> None:
    assert measured_lengths(10**6) == [LONG, THIRD, SECOND, SHORT]
    assert measured_lengths(13_000) == [13_000, SECOND, SHORT]
    assert measured_lengths(SHORT) == [SHORT]
    assert least_length([]) is None
    assert least_length([Measured(LONG, "a", 1.0, 1.0)]) is None
    assert least_length([Measured(LONG, "a", 1.1, 1.0), Measured(LONG, "b", 1.0, 1.0)]) is None


@pytest.mark.usefixtures("hopper")
def test_never_quicker_is_fa3(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen, seen = choose({LONG: 1.01})
    assert (chosen.min_length, chosen.choice, seen) == (None, "fa3", [LONG])
    assert "Encoder attention: FA3; FA4 is times as fast" in caplog.text
    assert not chosen.takes([10**6])


def missing() -> Any:
    raise ImportError("no module named flash_attn")


def raising(*args: Any) -> Any:
    raise RuntimeError("CUDA error: invalid argument\nand a page of hints")


def without_the_last_key(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    right = values_of_key_zero(q, *rest)
    right[-1] += 1
    return right


def not_a_number(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    right = values_of_key_zero(q, *rest)
    right[0, 0, 0] = float("nan")
    return right


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (missing, "ImportError: no module named flash_attn"),
        (lambda: (values_of_key_zero, raising), "RuntimeError: CUDA error: invalid argument"),
        (lambda: (values_of_key_zero, without_the_last_key), "results are wrong"),
        (lambda: (values_of_key_zero, not_a_number), "results are wrong"),
    ],
    ids=["missing", "raises", "wrong", "nan"],
)
def test_what_fails_is_left_out_with_one_warning(kernels: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    chosen, seen = choose({}, kernels=kernels)
    assert (chosen.min_length, chosen.choice, seen) == (None, "fa3", [])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message
    assert "hints" not in record.message


@pytest.mark.usefixtures("hopper")
def test_a_compiler_that_hangs_does_not_keep_the_server(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hanging() -> Any:
        release.wait(30)
        return values_of_key_zero, values_of_key_zero

    chosen, _ = choose(dict.fromkeys(LENGTHS, 2.0), kernels=hanging, timeout_s=0.05)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "choose-attention":
            thread.join()
    assert chosen.min_length is None
    assert "was not compiled and measured" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_no_length_is_begun_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def time_ms(calls: Any) -> list[float]:
        now[0] += 8.0
        return [1.0, 0.5]

    monkeypatch.setattr(long_attention.time, "monotonic", lambda: now[0])
    kernels = (values_of_key_zero, values_of_key_zero)
    rows = long_attention.measure(HEADS, LENGTHS, (), CPU, kernels, time_ms, budget_s=12.0)
    assert [row.length for row in rows] == [LONG, THIRD]


def test_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    qwen = Heads(num_heads=16, num_kv_heads=16, head_dim=80, dtype=torch.bfloat16)
    cuda = torch.device("cuda", 0)
    assert "Hopper" in str(obstacle(CPU, "sdpa", qwen, LONG))
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert obstacle(cuda, "fa3", qwen, LONG) is None
    assert obstacle(cuda, "fa3", Heads(**{**vars(qwen), "dtype": torch.float16}), LONG) is None
    assert "triton_attn" in str(obstacle(cuda, "triton_attn", qwen, LONG))
    assert "heads of 64" in str(obstacle(cuda, "fa3", Heads(**{**vars(qwen), "head_dim": 64}), LONG))
    assert "float32" in str(obstacle(cuda, "fa3", Heads(**{**vars(qwen), "dtype": torch.float32}), LONG))
    assert "at most 8191" in str(obstacle(cuda, "fa3", qwen, 8191))
    capability[0] = (10, 0)
    assert "Hopper" in str(obstacle(cuda, "fa3", qwen, LONG))
    assert [dim for dim in (64, 72, 80, 84, 88, 112) if fits_tile(dim)] == [64, 72, 80, 88]


def long_from(length: int, kernel: Any = values_of_key_zero) -> LongAttention:
    chosen = LongAttention()
    chosen.min_length, chosen._fa4 = length, kernel
    return chosen


def test_a_batch_takes_fa4_where_nearly_all_of_its_work_is_long() -> None:
    chosen = long_from(1_000)
    assert chosen.takes([1_000])
    assert chosen.takes([4_000, 2_000, 500, 500])
    assert chosen.takes([3_000, 999])
    assert not chosen.takes([2_000, 999])
    assert not chosen.takes([999])
    assert not chosen.takes([64] * 500)  # windows
    assert not chosen.takes([])
    assert not LongAttention().takes([10**6])


def test_what_fails_while_serving_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    chosen = long_from(1_000, raising)
    q, k, v, starts = HEADS.inputs((4,), CPU)
    assert chosen.attend(q, k, v, starts, 4, None) is None
    assert chosen.attend(q, k, v, starts, 4, None) is None
    assert (chosen.choice, chosen.takes([2_000]), len(caplog.records)) == ("fa3", False, 1)


def test_memory_that_is_short_is_no_fault_of_the_kernel() -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    chosen = long_from(1_000, full)
    q, k, v, starts = HEADS.inputs((4,), CPU)
    with pytest.raises(torch.OutOfMemoryError):
        chosen.attend(q, k, v, starts, 4, None)
    assert chosen.takes([2_000])


# ---- in SGLang's layers


def hooks_of(chosen: LongAttention | None, architecture: str = "Qwen2VLForConditionalGeneration") -> dict[str, Hook]:
    hooks = fused_hooks(FAMILIES[architecture], compile_with=lambda function: function, long_attention=chosen)
    return {hook.target.rsplit(".", 2)[-2 if hook.target.endswith("forward") else -1]: hook for hook in hooks}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_hooks_fit_sglang(architecture: str) -> None:
    hooks = hooks_of(LongAttention(), architecture)
    check_signature(hooks["VisionFlash3Attention"])
    check_signature(hooks["prepare_vision_attention_metadata"])
    assert "VisionFlash3Attention" not in hooks_of(None, architecture)


def prepared(chosen: LongAttention, lengths: Sequence[int]) -> Any:
    from sglang.srt.layers.attention.vision import prepare_vision_attention_metadata

    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    hook = hooks_of(chosen)["prepare_vision_attention_metadata"]
    return hook.function(prepare_vision_attention_metadata, starts, device=CPU)


def test_long_batches_go_to_fa4_with_what_fa3_would_get() -> None:
    seen: list[Any] = []

    def kernel(*args: Any) -> str:
        seen.append(args)
        return "fa4"

    chosen = long_from(100, kernel)
    forward = hooks_of(chosen)["VisionFlash3Attention"].function

    def original(self: Any, q: Any, k: Any, v: Any, **rest: Any) -> str:
        assert (q, k, v) == ("q", "k", "v")
        return "fa3"

    def attend(metadata: Any, **rest: Any) -> Any:
        return forward(original, None, q="q", k="k", v="v", bsz=1, seq_len=1, forward_metadata=metadata, **rest)

    long = prepared(chosen, [120, 30])
    assert attend(long, softmax_scale=0.5, cu_seqlens=None) == "fa4"
    assert [*seen[0][:3], seen[0][3].tolist(), *seen[0][4:]] == ["q", "k", "v", [0, 120, 150], 120, 0.5]
    # As SGLang's own layer calls it.
    assert attend(long, window_size=(-1, -1), s_aux=None, max_seqlen=None, output_ws=None) == "fa4"
    assert attend(long, window_size=(8, 8)) == "fa3"
    assert attend(long, s_aux=torch.zeros(1)) == "fa3"
    assert attend(None) == "fa3"
    assert attend(prepared(chosen, [90, 90])) == "fa3"
    chosen.min_length = None  # it has failed in a layer before
    assert attend(long) == "fa3"
    assert not hasattr(prepared(chosen, [120]), "takes_fa4")


def test_heads_are_those_of_sglangs_layers() -> None:
    attention = SimpleNamespace(
        qkv_backend_name="fa3",
        num_attention_heads_per_partition=16,
        num_attention_kv_heads_per_partition=16,
        head_size=80,
    )
    wanted = Heads(num_heads=16, num_kv_heads=16, head_dim=80, dtype=torch.float16)
    assert heads_of([SimpleNamespace(attn=attention)], torch.float16) == ("fa3", wanted)
    assert heads_of([SimpleNamespace()], torch.float16) is None
    assert heads_of([], torch.float16) is None


def test_the_profile_takes_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from spaceserve.profile import kernels as profile_kernels
    from spaceserve.profile.__main__ import library_versions

    monkeypatch.setattr(profile_kernels, "fa3", lambda *args: "fa3")
    kernels = replace(
        choose_kernels(CPU, torch.float32), attention="fa3", long_attention=long_from(100, lambda *args: "fa4")
    )
    tensors = (torch.zeros(1),) * 4
    assert kernels.encoder_attention(*tensors, 100) == "fa4"
    assert kernels.encoder_attention(*tensors, 99) == "fa3"
    assert kernels.encoder_attention(*tensors, 100, [100, 10]) == "fa4"
    assert kernels.encoder_attention(*tensors, 100, [100] + [60] * 10) == "fa3"
    kernels.long_attention.choice = "fa4 from 100 patches"
    assert library_versions(kernels, "none")["encoder_attention"] == "fa4 from 100 patches"


def test_the_option() -> None:
    parser = argparse.ArgumentParser()
    SpaceServeConfig.add_cli_args(parser)
    for given, wanted in (([], "auto"), (["--encoder-attention", "fa3"], "fa3")):
        assert SpaceServeConfig.from_cli_args(parser.parse_args(given)).encoder_attention == wanted
    with pytest.raises(SystemExit):
        parser.parse_args(["--encoder-attention", "fa4"])


def test_the_worker_asks_for_its_longest_image_on_its_groups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked: list[Any] = []
    monkeypatch.setattr(LongAttention, "choose", lambda self, *args: asked.append(args))
    layer = SimpleNamespace(
        qkv_backend_name="fa3", num_attention_heads_per_partition=2, num_attention_kv_heads_per_partition=1, head_size=8
    )
    encoder: Any = SimpleNamespace(
        device=CPU, dtype=torch.bfloat16, blocks=lambda: [SimpleNamespace(attn=layer)] if layer else []
    )
    processor = SimpleNamespace(size={"shortest_edge": 3136, "longest_edge": 12_845_056}, patch_size=14, merge_size=2)
    split = EncoderSplit(CPU, "static:8", partitioner_factory=lambda: SimulatedPartitioner(total_units=32))
    assert EncoderSplit(CPU).usual_groups() == []

    def start(epoch: int = 0, image: dict[str, int] | None = None, **config: Any) -> None:
        server_args = SimpleNamespace(mm_process_config={"image": image or {}})
        spec: Any = SimpleNamespace(epoch=epoch, config=SpaceServeConfig(**config), server_args=server_args)
        process._choose_attention(LongAttention(), encoder, processor, spec, split)

    start()
    start(image={"min_pixels": 3136, "max_pixels": 1024 * 1024})
    start(encoder_max_image_pixels=1_000_000)
    assert [args[:3] for args in asked] == [(CPU, "fa3", HEADS)] * 3
    assert [args[3] for args in asked] == [256 * 256, 72 * 72, 72 * 72]
    assert all([group.granted for group in args[4]] == [8] for args in asked)
    asked.clear()
    start(epoch=1)
    processor.size = {}
    start()
    layer = None  # type: ignore[assignment]
    start()
    assert not asked
    assert [record.levelname for record in caplog.records if "Encoder attention" in record.message] == [
        "INFO",
        "WARNING",
        "INFO",
    ]


# ---- FA4 itself: it compiles for Hopper where there is no GPU


COMPILE = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from spaceserve.encoder.long_attention import fa4_kernel

attend = fa4_kernel()
cache = __import__("flash_attn.cute.interface", fromlist=["_"])._flash_attn_fwd.compile_cache.cache
found = []
with FakeTensorMode(), torch.inference_mode():
    for lengths, heads in (((300, 212), 16), ((21316,), 16), ((5000, 16, 7, 900), 12)):
        total, size = sum(lengths), heads * 80
        q, k = (torch.empty(total, heads, 80, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        v = torch.empty(total, 3 * size, dtype=torch.bfloat16, device="cuda")[:, 2 * size :].unflatten(-1, (heads, 80))
        starts = torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
        for values, scale in ((v, None), (k, 0.1)):
            out = attend(q, k, values, starts, max(lengths), scale)
            found.append((list(out.shape), out.is_contiguous(), str(out.dtype), len(cache)))
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not there")
def test_fa4_compiles_once_for_all_batches() -> None:
    environment = {**os.environ, "FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    shapes = [[512, 16, 80]] * 2 + [[21316, 16, 80]] * 2 + [[5923, 12, 80]] * 2
    assert found == [[shape, True, "torch.bfloat16", 1] for shape in shapes]


def test_a_function_of_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: Any, k: Any, v: Any, **rest: Any) -> None: ...

    module = SimpleNamespace(_flash_attn_fwd=forward)
    monkeypatch.setattr(long_attention.importlib, "import_module", lambda name: module)
    with pytest.raises(ValueError, match="no parameter cu_seqlens_k, cu_seqlens_q, intra_wg_overlap"):
        long_attention.fa4_kernel()
