"""The runtime's small parts: hooks, messages, segments, slab, image headers, settings, what can be split."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from spaceserve import messages, shared_memory
from spaceserve.config import SpaceServeConfig
from spaceserve.encoder.model import mask_cache_hook
from spaceserve.encoder.preprocess import BadImage, decode
from spaceserve.families import FAMILIES, find_family, image_grid
from spaceserve.feature_store.store import Ticket
from spaceserve.frontend.admission import check_in_vocabulary
from spaceserve.frontend.fetch import BadImageInput, fetch_bytes, read_header
from spaceserve.hooks import Hook, HookError, check_signature, install, verify
from spaceserve.launch_server import parse_args, resolve_server_args, split_obstacle
from spaceserve.messages import ImageSource
from spaceserve.processes import WithEnvironment
from spaceserve.slab import Slab, SlabHandle, _open_cuda_ipc
from spaceserve.start_checks import DEFAULT_HOST, DEFAULT_PORT, StartError, UsageError

pytestmark = pytest.mark.cpu


# ---- hooks


def hook(target: str, *parameters: str) -> Hook:
    return Hook(
        target=target,
        function=lambda original, *args, **kwargs: original(*args, **kwargs),
        kind="around",
        why="a test",
        parameters=parameters,
    )


@pytest.mark.parametrize("target", ["sglang.srt.plugins.no_such_function", "sglang.no_such_module.function"])
def test_a_hook_without_its_target_stops_the_start_and_is_named(target: str) -> None:
    with pytest.raises(HookError, match=target):
        install([hook(target)])


def test_a_hook_whose_target_changed_is_named() -> None:
    with pytest.raises(HookError, match="no_such_parameter"):
        install([hook("sglang.srt.plugins.load_plugins_by_group", "no_such_parameter")])


def test_a_hook_that_is_not_in_force_is_named() -> None:
    with pytest.raises(HookError, match="load_plugins_by_group"):
        verify([hook("sglang.srt.plugins.load_plugins_by_group")])


def test_stock_sglang_has_none_of_our_hooks() -> None:
    code = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
ours = [target for target, hooks in HookRegistry._hooks.items() for _, function, _ in hooks
        if function.__module__.startswith("spaceserve")]
import sys
print("OURS", ours, [name for name in sys.modules if name.startswith("spaceserve") and "platform" not in name])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    found = [line for line in result.stdout.splitlines() if line.startswith("OURS")]
    assert found == ["OURS [] ['spaceserve']"] or found == ["OURS [] []"], found


# ---- messages and memory

names = st.text(min_size=1, max_size=20)
keys = st.binary(min_size=16, max_size=16)
counts = st.integers(0, 2**40)
sources = st.builds(
    ImageSource, keys, names, counts, counts, counts, st.tuples(counts, counts, counts), num_tokens=counts
)
tickets = st.builds(Ticket, keys, counts, counts, counts)


@given(
    st.one_of(
        st.builds(messages.EncodeRequest, names, counts, st.lists(sources, max_size=3), names),
        st.builds(messages.ReleaseFeatures, names),
        st.builds(messages.FinishRequest, names),
        st.builds(messages.RadixHint, st.lists(keys), st.lists(keys)),
        st.builds(messages.DropCached),
    )
)
def test_messages_to_the_worker_survive_the_wire(message: messages.ToWorker) -> None:
    assert messages.decode_to_worker(messages.encode(message)) == message


@given(
    st.one_of(
        st.builds(messages.WorkerUp, counts, st.binary()),
        st.builds(messages.WorkerDown, counts, names),
        st.builds(messages.FeaturesReady, names, counts, counts, st.lists(tickets, max_size=3)),
        st.builds(messages.FeaturesFailed, names, st.integers(-1, 9), counts, st.integers(400, 599), names),
    )
)
def test_messages_to_the_scheduler_survive_the_wire(message: messages.ToScheduler) -> None:
    assert messages.decode_to_scheduler(messages.encode(message)) == message


def test_segments_hold_their_bytes_until_they_are_unlinked() -> None:
    writer = shared_memory.SegmentWriter("spaceserve-unit-test-")
    first, second = writer.write(b"abc" * 1000), writer.write(b"x")
    try:
        with shared_memory.read(first) as view:
            assert bytes(view) == b"abc" * 1000
        shared_memory.unlink(first)
        shared_memory.unlink(first)
        with pytest.raises(FileNotFoundError), shared_memory.read(first):
            pass
        assert first != second
    finally:
        for segment in (first, second):
            shared_memory.unlink(segment)


def test_a_slab_is_shared_and_views_copy_nothing() -> None:
    segment = "spaceserve-unit-test-slab"
    try:
        slab = Slab.create(32, 4, torch.float32, torch.device("cpu"), segment)
        other = Slab.attach(SlabHandle.load(slab.handle.dump()))
        slab.view(8, 2).copy_(torch.arange(8.0).view(2, 4))
        assert torch.equal(other.view(8, 2), torch.arange(8.0).view(2, 4))
        assert other.view(8, 2).data_ptr() == other.rows.data_ptr() + 8 * 4 * 4
        assert torch.equal(other.view(0, 8), torch.zeros(8, 4))
    finally:
        shared_memory.unlink(segment)


@pytest.mark.parametrize(("refusing", "opened_on"), [((), 1), ((1,), 0)])
def test_a_rank_maps_the_slab_on_its_own_device_where_it_can(
    refusing: tuple[int, ...], opened_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor's kernels run on its device: on the owner's, a rank would need a second context and copies."""

    def open_shared(device: int, *rest: Any) -> tuple[Any, ...]:
        if device in refusing:
            raise RuntimeError("peer access is not supported between these two devices")
        return device, *rest

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_shared)
    handle = (0, b"memory", 640, 128, b"counter", 0, b"event", True)
    index, storage = _open_cuda_ipc(handle, reader=1)
    assert index == opened_on
    assert storage == (opened_on, *handle[1:7], False)
    if refusing:
        with pytest.raises(RuntimeError, match="peer access"):
            _open_cuda_ipc((1, *handle[1:]), reader=1)


def test_a_slab_without_room_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="--encoder-feature-cache-gb"):
        Slab.create(2**40, 4, torch.float32, torch.device("cpu"), "spaceserve-unit-test-huge")
    assert not (shared_memory.SHM_DIR / "spaceserve-unit-test-huge").exists()


@pytest.mark.parametrize("accelerator", ["cuda", "xpu"])
def test_the_cpu_platform_is_inactive_beside_an_accelerator(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spaceserve.platform import cpu

    for name in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    assert cpu.activate() == "spaceserve.platform.cpu.TorchCpuPlatform"
    monkeypatch.setattr(getattr(torch, accelerator), "is_available", lambda: True)
    assert cpu.activate() is None


# ---- images


def png(width: int, height: int, **more: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG", **more)
    return buffer.getvalue()


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_grid_from_the_header_is_the_processors(height: int, width: int) -> None:
    """transformers' own count of patches for the size, which it shares with its preprocessing."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(ValueError, match="aspect ratio"):
            image_grid(processor, {}, height, width)
        return
    frames, rows, columns = image_grid(processor, {}, height, width)
    assert frames == 1
    assert rows % 2 == columns % 2 == 0
    assert rows * columns == processor.get_number_of_image_patches(height, width, {})


def test_limits_that_the_user_sets_reach_the_grid() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor()
    limits = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    assert image_grid(processor, limits, 500, 500) == (1, 4, 4)
    assert image_grid(processor, {"max_pixels": 56 * 56}, 500, 500) == image_grid(processor, {}, 500, 500)


def test_headers_are_read_without_decoding() -> None:
    data = png(300, 200)
    header = read_header(data[:200], max_pixels=10**6)
    assert (header.width, header.height) == (300, 200)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"no image", "unknown format"), (png(2000, 2000), "more than"), (b"\x89PNG\r\n\x1a\n", "not an image")],
)
def test_what_is_no_image_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageInput, match=reason):
        read_header(data, max_pixels=10**6)


@pytest.mark.parametrize(
    ("given_image", "reason"),
    [
        (b"", "empty"),
        (b"x" * 2000, "larger than"),
        ("data:image/png;base64," + "A" * 4000, "larger than"),
        ("@@@", "neither a URL nor valid base64"),
        ("/nonexistent.png", "cannot be read"),
        ("/nonexistent.avi", "no such file"),
        ("file:///dev/zero", "not a regular file"),
        ("file:///dev", "cannot be read"),
        ("http://127.0.0.1:9/x.png", "cannot be fetched"),
        (17, "cannot be given as int"),
    ],
)
def test_images_that_cannot_be_had_are_refused(given_image: Any, reason: str) -> None:
    with pytest.raises(BadImageInput, match=reason):
        fetch_bytes(given_image, max_bytes=1000)


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_writes_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadImageInput, match="not a regular file"):
        fetch_bytes(f"file://{tmp_path}/pipe.png", max_bytes=1000)
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(BadImageInput, match="not a regular file"):
            fetch_bytes(f"file:///proc/self/fd/{read_end}", max_bytes=1000)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("form", ["bytes", "pil", "file url", "path", "data url", "base64", "object"])
def test_images_in_every_form_give_the_same_picture(form: str, tmp_path: Path) -> None:
    import base64

    data = png(30, 20)
    path = tmp_path / "with space.png"
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    forms: dict[str, Any] = {
        "bytes": data,
        "pil": Image.open(path),
        "file url": path.as_uri(),
        "path": str(path),
        "data url": f"data:image/png;base64,{encoded}",
        "base64": encoded,
        "object": SimpleNamespace(url=f"data:image/png;base64,{encoded}"),
    }
    header = read_header(fetch_bytes(forms[form], max_bytes=10**6), max_pixels=10**6)
    assert (header.width, header.height) == (30, 20)


def test_a_file_that_is_not_what_its_header_said_is_refused() -> None:
    writer = shared_memory.SegmentWriter("spaceserve-unit-test-")
    segment = writer.write(png(30, 20))
    try:
        good = ImageSource(b"k", segment, 1, 20, 30, (1, 2, 2), 1)
        assert decode(good).size == (30, 20)
        with pytest.raises(BadImage, match="its header said 31x20"):
            decode(ImageSource(b"k", segment, 1, 20, 31, (1, 2, 2), 1))
    finally:
        shared_memory.unlink(segment)


def test_token_ids_must_lie_in_the_vocabulary() -> None:
    check_in_vocabulary([0, 9], 10)
    check_in_vocabulary(None, 10)
    for token_ids in ([10], [-1], [0, 1_000_000]):
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            check_in_vocabulary(token_ids, 10)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sm_partition": "half"}, "--sm-partition"),
        ({"sm_partition": "static:0"}, "--sm-partition"),
        ({"encoder_worker": "maybe"}, "--encoder-worker"),
        ({"encoder_schedule_policy": "lifo"}, "--encoder-schedule-policy"),
        ({"encoder_feature_cache_gb": 0.0}, "--encoder-feature-cache-gb"),
        ({"tpot_target_ms": -1.0}, "--tpot-target-ms"),
        ({"encoder_window_ms": float("inf")}, "--encoder-window-ms"),
        ({"encoder_feature_host_gb": float("nan")}, "--encoder-feature-host-gb"),
        ({"encoder_batch_capacity_patches": 1}, "--encoder-batch-capacity-patches must be at least 4"),
        ({"encoder_batch_capacity_patches": -5}, "--encoder-batch-capacity-patches"),
        ({"encoder_preprocess_threads": 0}, "--encoder-preprocess-threads"),
        ({"encoder_preprocess_threads": 100_000}, "--encoder-preprocess-threads must be at most 256"),
        ({"encoder_heartbeat_timeout_s": 1.0}, "--encoder-heartbeat-timeout-s must be at least 2"),
        ({"encoder_timeout_s": float("inf")}, "--encoder-timeout-s"),
        ({"encoder_max_image_mb": 1e300}, "--encoder-max-image-mb"),
        ({"sm_reconsider_layers": -1}, "--sm-reconsider-layers"),
        ({"sm_partition": "static:²"}, "--sm-partition"),
        ({"sm_partition": "sis:1:" + "9" * 5000}, "--sm-partition"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpaceServeConfig(**settings)


def stock_settings(**changed: Any) -> Any:
    settings = {
        "disaggregation_mode": "null",
        "encoder_only": False,
        "language_only": False,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "tokenizer_worker_num": 1,
        "skip_tokenizer_init": False,
        "smg_grpc_mode": False,
        "use_ray": False,
        "enable_memory_saver": False,
        **changed,
    }
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlavaForConditionalGeneration"]))
    return SimpleNamespace(**settings, get_model_config=lambda: config)


def test_what_cannot_be_split_is_said() -> None:
    family = find_family(["Qwen2VLForConditionalGeneration"])
    assert family is FAMILIES["Qwen2VLForConditionalGeneration"]
    assert split_obstacle(stock_settings(), family) is None
    assert split_obstacle(stock_settings(dp_size=2), family) == "--dp-size is above 1"
    obstacle = split_obstacle(stock_settings(), find_family(["LlavaForConditionalGeneration"]))
    assert obstacle is not None
    assert "LlavaForConditionalGeneration" in obstacle


@pytest.mark.parametrize("argument", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_our_options_make_none_of_sglangs_ambiguous(argument: str) -> None:
    namespace = parse_args(["--model-path", "somewhere", argument, "2", "--tpot-target-ms", "20"])
    assert namespace.tp_size == 2
    assert namespace.tpot_target_ms == 20


def test_sglang_listens_by_default_where_it_is_looked_before() -> None:
    namespace = parse_args(["--model-path", "somewhere"])
    assert (namespace.host, namespace.port) == (DEFAULT_HOST, DEFAULT_PORT)


def test_our_options_are_not_abbreviated() -> None:
    """They are read once more before SGLang's are known, where an abbreviation means nothing."""
    with pytest.raises(UsageError, match=r"--encoder-work off \(did you mean --encoder-worker\?\)"):
        parse_args(["--model-path", "somewhere", "--encoder-work", "off"])


def test_options_of_a_config_file_that_sglang_refuses_are_one_line(tmp_path: Path) -> None:
    for name, text, reason in (
        ("a.txt", "", "--config: Config file must be YAML"),
        ("a.yaml", "mem-fraction-statik: 0.5\n", r"did you mean --mem-fraction-static\?"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=reason):
            parse_args(["--config", str(tmp_path / name)])


def test_what_sglang_makes_of_a_checkpoint_or_an_option_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from spaceserve.demo import model_path

    monkeypatch.setattr(logging, "basicConfig", lambda **settings: None)

    def resolve(path: Path, *arguments: str) -> None:
        resolve_server_args(parse_args(["--model-path", str(path), "--device", "cpu", *arguments]))

    with pytest.raises(UsageError, match=r"^--tp-size must be at least 1, got 0$"):
        resolve(model_path(), "--tp-size", "0")
    config = json.loads((model_path() / "config.json").read_text())
    for changed, reason in (({"hidden_size": "x"}, "hidden_size"), ({"model_type": "none-such"}, "none-such")):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(StartError, match=f"the model in {tmp_path} cannot be served: .*{reason}") as error:
            resolve(tmp_path)
        assert "\n" not in str(error.value)


def test_a_combination_that_sglang_asserts_is_not_blamed_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse
    import importlib
    import logging

    from sglang.srt.server_args import ServerArgs

    # In a file of its own: pytest gives the assertions of tests a message.
    (tmp_path / "refusing_options.py").write_text(
        "def refuse(given):\n    assert given.words is None, given.words\n    assert given.log_level is None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda **settings: None)
    monkeypatch.setattr(ServerArgs, "from_cli_args", importlib.import_module("refusing_options").refuse)
    for words, reason in (("not both\nat all", "not both"), (None, "it asks for `assert given.log_level is None`")):
        with pytest.raises(UsageError, match=f"^SGLang refuses these options: {reason}; --help lists all$"):
            resolve_server_args(argparse.Namespace(log_level="info", words=words))


def test_a_process_gets_its_parents_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import pickle

    monkeypatch.setenv("SPACESERVE_UNIT_TEST", "set by the parent")
    frozen = pickle.dumps(WithEnvironment(os.sync))
    monkeypatch.setenv("SPACESERVE_UNIT_TEST", "changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        thawed = pickle.loads(frozen)
        assert thawed._environment["SPACESERVE_UNIT_TEST"] == "set by the parent"


def test_the_heap_gives_freed_memory_back() -> None:
    """In a process of its own: small pieces, freed but for the last, which keeps glibc from giving back the top."""
    code = """
import ctypes, psutil
from spaceserve.heap import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
pieces = [libc.malloc(65536) for _ in range(2000)]
for piece in pieces:
    ctypes.memset(piece, 1, 65536)
for piece in pieces[:-1]:
    libc.free(piece)
before = psutil.Process().memory_info().rss
assert trim_heap()
print(before - psutil.Process().memory_info().rss)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) > 64 << 20


def test_large_pieces_go_back_to_the_system_when_they_are_freed() -> None:
    """In a process of its own. Once a piece of 16 MiB was freed, glibc takes 2 MiB from its heap unless told not to."""
    code = """
import ctypes, sys
from spaceserve.heap import fix_heap_thresholds
class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks a b c d e f".split()]
libc = ctypes.CDLL(None)
libc.mallinfo.restype = Mallinfo
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "fixed":
    assert fix_heap_thresholds()
libc.free(libc.malloc(16 << 20))
before = libc.mallinfo().hblks
assert libc.malloc(2 << 20)
print(libc.mallinfo().hblks - before)
"""
    pages_of_their_own = {}
    for mode in ("moving", "fixed"):
        command = [sys.executable, "-c", code, mode]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        pages_of_their_own[mode] = int(result.stdout)
    assert pages_of_their_own == {"moving": 0, "fixed": 1}


def test_only_the_last_attention_masks_are_kept() -> None:
    from sglang.srt.layers.attention.vision import VisionSdpaAttention

    hook = mask_cache_hook()
    check_signature(hook)
    original = VisionSdpaAttention._generate_mask_cache.__wrapped__
    kept = []
    for end in range(4, 24, 4):
        sizes = (24, True, (0, end, 24))
        mask = hook.function(*sizes)
        assert torch.equal(mask, original(*sizes))
        assert hook.function(*sizes) is mask, "the layers of one batch share it"
        kept.append(weakref.ref(mask))
        del mask
    assert [mask() is not None for mask in kept] == [False] * 3 + [True] * 2
