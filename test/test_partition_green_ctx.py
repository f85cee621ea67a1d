"""Green contexts through the real cuda-bindings against a stand-in driver, and the probe kernels through NVRTC.

The stand-in (csrc/testing/fake_libcuda.c) is compiled with the CUDA headers and splits as an H200 does. What real
hardware does with the groups is in test_partition_gpu.py.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from spaceserve.partition import PartitionUnavailable
from spaceserve.partition.cuda_driver import CudaDriverError, check
from spaceserve.partition.probe import compile_cubin

pytestmark = pytest.mark.cpu

FAKE_SOURCE = Path(__file__).resolve().parents[1] / "csrc" / "testing" / "fake_libcuda.c"


def cuda_include() -> Path | None:
    """Directory of cuda.h: the wheels that torch depends on bring it."""
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else []:
        for header in sorted(Path(root).glob("*/include/cuda.h")):
            return header.parent
    system = Path("/usr/local/cuda/include")
    return system if (system / "cuda.h").is_file() else None


PREAMBLE = """
import ctypes
import logging
import torch
from spaceserve.partition.cuda_driver import CudaDriverError, load_driver
from spaceserve.partition.green_ctx import GreenCtxPartitioner

logging.disable()
fake = ctypes.CDLL("libcuda.so.1")
for name in ("fake_stream_first_sm", "fake_stream_num_sms"):
    getattr(fake, name).argtypes = [ctypes.c_void_p]

class Partitioner(GreenCtxPartitioner):
    def _open(self, device):
        return load_driver(), torch.device("cuda", 0)
    def _stream(self, address, device):
        return address
    def _synchronize(self):
        pass

def sms(stream):
    first = fake.fake_stream_first_sm(stream)
    return set(range(first, first + fake.fake_stream_num_sms(stream)))
"""


BODIES = {
    "rungs": """
p = Partitioner(min_units=16)
assert p.rungs == (*range(20, 117, 8), 132), p.rungs
for rung in p.rungs[:-1]:
    group = p.group(rung - 3)
    complement = p.complement(group)
    assert (group.requested, group.granted) == (rung - 3, rung)
    assert len(sms(group.stream)) == rung
    assert complement.granted == 132 - rung
    assert not sms(group.stream) & sms(complement.stream)
    assert sms(group.stream) | sms(complement.stream) == set(range(132))
    extra = group.new_stream(-1)
    assert extra != group.stream and sms(extra) == sms(group.stream)
    assert min(sms(complement.stream)) == 0             # the decoder's side is what the driver splits off
assert p.group(62).stream == p.group(68).stream         # one green context for a rung
assert (fake.fake_live_contexts(), fake.fake_live_streams()) == (26, 39)
p.close()
p.close()
assert (fake.fake_live_contexts(), fake.fake_live_streams()) == (0, 0)
""",
    "two partitioners": """
a, b = Partitioner(), Partitioner()
assert a.rungs == (*range(12, 125, 8), 132), a.rungs
assert sms(a.group(68).stream) == sms(b.group(68).stream)
assert not sms(a.group(68).stream) & sms(b.complement_of(68).stream)
a.close()
assert fake.fake_live_contexts() == 2    # the other partitioner's group and complement
b.close()
assert fake.fake_live_contexts() == 0
""",
    "sizes": """
for sizes, words in (({"step": 4}, "multiples of 8"), ({"step": 0}, "multiples of 8"), ({"min_units": 4}, "8 SMs or")):
    try:
        Partitioner(**sizes)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(sizes)
assert fake.fake_live_contexts() == 0
""",
}

RUN_ALL = """
import json, sys, traceback
results = {}
for name, body in json.loads(sys.argv[1]).items():
    try:
        exec(body, dict(globals()))
        results[name] = ""
    except BaseException:
        results[name] = traceback.format_exc()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of BODIES raised, "" for nothing: all in one process, which the stand-in driver is loaded into."""
    include = cuda_include()
    if include is None or shutil.which("cc") is None:
        pytest.skip("needs cuda.h and a C compiler")
    directory = tmp_path_factory.mktemp("driver")
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}", "-o", str(directory / "libcuda.so.1")]
    subprocess.run([*command, str(FAKE_SOURCE)], check=True)
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + RUN_ALL, json.dumps(BODIES)],
        env={**os.environ, "LD_LIBRARY_PATH": f"{directory}:{os.environ.get('LD_LIBRARY_PATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_rung_is_disjoint_from_its_complement_and_everything_is_destroyed(outcomes: dict[str, str]) -> None:
    assert outcomes["rungs"] == ""


def test_two_partitioners_pick_the_same_sms(outcomes: dict[str, str]) -> None:
    assert outcomes["two partitioners"] == ""


def test_sizes_that_the_hardware_cannot_split_are_refused(outcomes: dict[str, str]) -> None:
    assert outcomes["sizes"] == ""


def test_a_driver_error_is_named() -> None:
    class Refused:
        name = "CUDA_ERROR_INVALID_DEVICE"

        def __int__(self) -> int:
            return 101

    with pytest.raises(CudaDriverError, match=r"cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE \(101\)") as caught:
        check((Refused(), 7), "cuDeviceGet")
    assert caught.value.code == 101
    assert check((0,), "f") is None
    assert check((0, 5), "f") == 5
    assert check((0, 5, 6), "f") == (5, 6)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_probe_kernels_compile(arch: str) -> None:
    try:
        cubin = compile_cubin(arch)
    except PartitionUnavailable as error:
        pytest.skip(str(error))
    assert cubin[:4] == b"\x7fELF"
    for kernel in (b"occupy", b"stream_read"):
        assert kernel in cubin


def test_a_source_that_does_not_compile_shows_the_compilers_log(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text("__global__ void f() { undeclared(); }")
    try:
        with pytest.raises(RuntimeError, match="undeclared"):
            compile_cubin("sm_90", tmp_path / "bad.cu")
    except PartitionUnavailable as error:
        pytest.skip(str(error))
