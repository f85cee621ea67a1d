"""Ladders, rounding, masks and the choice of a back end: no device needed."""

import ctypes
import logging
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spaceserve.partition import BACKENDS, PartitionUnavailable, SimulatedPartitioner, make_partitioner
from spaceserve.partition import ladder as ld
from spaceserve.partition.green_ctx import hardware_granularity
from spaceserve.partition.libsmctrl import Libsmctrl
from spaceserve.partition.mps_percentage import MpsPercentagePartitioner, environ_for, percentage_in

pytestmark = pytest.mark.cpu

topologies = st.tuples(st.integers(1, 1024), st.integers(1, 64), st.integers(1, 32))


@given(topologies)
def test_rungs_ascend_in_steps_to_the_whole_device(topology: tuple[int, int, int]) -> None:
    total, min_units, step = topology
    rungs = ld.make_rungs(total, min_units=min_units, step=step)
    assert list(rungs) == sorted(set(rungs))
    assert rungs[-1] == total
    assert all(rung % step == 0 and min_units <= rung < total for rung in rungs[:-1])
    # Complete: no size that fits the rule is missing.
    assert len(rungs) == 1 + sum(1 for size in range(min_units, total) if size % step == 0)


@given(topologies, st.data())
def test_rounding_is_the_least_rung_that_suffices_and_monotone(
    topology: tuple[int, int, int], data: st.DataObject
) -> None:
    total, min_units, step = topology
    rungs = ld.make_rungs(total, min_units=min_units, step=step)
    low, high = sorted(data.draw(st.tuples(st.integers(1, total), st.integers(1, total))))
    granted = ld.round_to_rung(rungs, low)
    assert granted in rungs
    assert granted >= low
    assert not any(low <= rung < granted for rung in rungs)
    assert granted <= ld.round_to_rung(rungs, high)
    assert ld.round_to_rung(rungs, granted) == granted


@pytest.mark.parametrize(
    ("requested", "granted"),
    [(1, 8), (8, 8), (9, 16), (60, 64), (64, 64), (65, 72), (128, 128), (129, 132), (132, 132)],
)
def test_rounding_on_an_h200(requested: int, granted: int) -> None:
    assert ld.round_to_rung(ld.make_rungs(132, min_units=8, step=8), requested) == granted


@pytest.mark.parametrize("requested", [0, -1, 133])
def test_sizes_that_no_device_grants_are_refused(requested: int) -> None:
    with pytest.raises(ValueError, match="132"):
        ld.round_to_rung(ld.make_rungs(132, min_units=8, step=8), requested)


@pytest.mark.parametrize("bad", [{"min_units": 0, "step": 8}, {"min_units": 8, "step": 0}])
def test_ladders_need_positive_sizes(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ld.make_rungs(132, **bad)


@given(st.integers(1, 1024), st.data())
def test_group_and_complement_are_disjoint_and_complete(total: int, data: st.DataObject) -> None:
    granted = data.draw(st.integers(1, total))
    group = set(ld.unit_range(total, granted, is_complement=False))
    rest = set(ld.unit_range(total, total - granted, is_complement=True))
    assert len(group) == granted
    assert not group & rest
    assert group | rest == set(range(total))


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_a_complement_is_offered_exactly_when_it_is_large_enough(total: int, least: int, data: st.DataObject) -> None:
    granted = data.draw(st.integers(1, total))
    rest = ld.complement_units(total, granted, min_complement=least)
    assert rest == (total - granted if total - granted >= least else None)


@given(st.integers(1, 400), st.sampled_from([32, 64]), st.data())
def test_enabled_masks_name_each_unit_once(total: int, word_bits: int, data: st.DataObject) -> None:
    granted = data.draw(st.integers(0, total))

    def units(is_complement: bool) -> set[int]:
        size = total - granted if is_complement else granted
        words = ld.enabled_mask_words(
            ld.unit_range(total, size, is_complement=is_complement), total, word_bits=word_bits
        )
        assert len(words) == -(-total // word_bits)
        assert all(0 <= word < 1 << word_bits for word in words)
        return {i for i in range(len(words) * word_bits) if words[i // word_bits] >> (i % word_bits) & 1}

    assert units(False) == set(range(granted))
    assert units(True) == set(range(granted, total))


@given(st.integers(1, 128), st.data())
def test_disabled_tpc_masks_of_both_sides_share_no_tpc(num_tpcs: int, data: st.DataObject) -> None:
    total = 2 * num_tpcs
    granted = 2 * data.draw(st.integers(0, num_tpcs))
    everything = (1 << num_tpcs) - 1
    mine = ld.disabled_tpc_mask(ld.unit_range(total, granted, is_complement=False), total)
    theirs = ld.disabled_tpc_mask(ld.unit_range(total, total - granted, is_complement=True), total)
    assert (everything & ~mine).bit_count() == granted // 2
    assert mine & theirs == 0
    assert mine | theirs == everything


def test_half_a_tpc_cannot_be_masked() -> None:
    with pytest.raises(ValueError, match="whole TPCs"):
        ld.disabled_tpc_mask(range(7), 132)
    assert ld.disabled_tpc_mask(range(4), 12) == 0b111100


@given(st.integers(1, 1024), st.data())
def test_mps_percentage_covers_the_request(total: int, data: st.DataObject) -> None:
    requested = data.draw(st.integers(1, total))
    percentage = ld.mps_percentage_for(requested, total)
    assert 1 <= percentage <= 100
    assert percentage * total >= 100 * requested
    assert (percentage - 1) * total < 100 * requested


def test_mps_percentage_is_read_from_the_environment_only_if_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert percentage_in(environ_for(66, 132)) == 50
    for text in ("0", "101", "half", ""):
        with pytest.raises(ValueError, match="not a percentage"):
            percentage_in({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": text})
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    with pytest.raises(PartitionUnavailable, match="was not set"):
        MpsPercentagePartitioner()


@pytest.mark.parametrize(("major", "expected"), [(6, (1, 1)), (7, (2, 2)), (8, (4, 2)), (9, (8, 8)), (12, (8, 8))])
def test_hardware_granularity(major: int, expected: tuple[int, int]) -> None:
    assert hardware_granularity(major) == expected


@given(st.integers(8, 132), st.integers(1, 16), st.data())
def test_partitioner_logic_on_simulated_topologies(total: int, step: int, data: st.DataObject) -> None:
    with SimulatedPartitioner(total_units=total, min_units=step, step=step) as partitioner:
        requested = data.draw(st.integers(1, total))
        group = partitioner.group(requested)
        assert group.requested == requested
        assert group.granted == ld.round_to_rung(partitioner.rungs, requested)
        assert group.complement_units == total - group.granted
        assert partitioner.group(requested) is group
        complement = partitioner.complement(group)
        assert complement is partitioner.complement_of(requested)
        if complement is None:
            assert total - group.granted < step
        else:
            assert complement.is_complement
            assert complement.granted + group.granted == total
            with pytest.raises(ValueError, match="not a group"):
                partitioner.complement(complement)
        with group.activate():
            assert partitioner.active is group
            other = partitioner.group(total)
            other.make_current()
            assert partitioner.active is other
        assert partitioner.active is None
        assert partitioner.history == [group, other, None]


def test_a_group_of_another_device_has_no_complement_here() -> None:
    with pytest.raises(ValueError, match="not a group"):
        SimulatedPartitioner(total_units=64).complement(SimulatedPartitioner(total_units=132).group(8))


def test_a_closed_partitioner_grants_nothing() -> None:
    partitioner = SimulatedPartitioner(total_units=64)
    partitioner.close()
    partitioner.close()
    with pytest.raises(ValueError, match="closed"):
        partitioner.group(8)


def test_prepare_makes_the_side_that_was_asked_for() -> None:
    partitioner = make_partitioner("simulated", device="cpu", total_units=64, min_units=16, step=16, prepare="nothing")
    assert not partitioner._groups
    partitioner.prepare(groups=False, complements=True)
    assert sorted(key[1] for key in partitioner._groups) == [16, 32, 48]
    assert all(key[2] for key in partitioner._groups)
    partitioner.prepare()
    assert sorted(key[1] for key in partitioner._groups if not key[2]) == [16, 32, 48, 64]


def test_auto_says_once_which_back_end_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spaceserve.partition"):
        make_partitioner("auto", device="cpu").close()
    (record,) = caplog.records
    assert "Partition of cpu: " in record.message
    assert "the device is the CPU" in record.message or "cannot work" in record.message


def test_auto_on_one_core_falls_back_to_no_partition() -> None:
    partitioner = make_partitioner("auto", device="cpu", total_units=1)
    assert partitioner.backend == "none"
    assert partitioner.rungs == (1,)
    group = partitioner.group(1)
    assert group.is_whole_device
    assert partitioner.complement(group) is None
    with group.activate() as active:
        assert active is group


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("simulated", "cpu_affinity")])
def test_a_back_end_that_cannot_work_says_why(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    with pytest.raises(ValueError, match=r"GPU|ROCm"):
        make_partitioner(backend, device="cuda")


def test_bad_arguments_are_the_users_errors() -> None:
    with pytest.raises(ValueError, match="unknown partition back end 'mig'"):
        make_partitioner("mig", device="cpu")
    with pytest.raises(ValueError, match="splits cores"):
        make_partitioner("cpu_affinity", device="cuda")
    with pytest.raises(ValueError, match="needs total_units"):
        make_partitioner("simulated", device="cpu")
    with pytest.raises(ValueError, match="4096 units asked for"):
        make_partitioner("cpu_affinity", device="cpu", total_units=4096)
    with pytest.raises(ValueError, match="is odd"):
        make_partitioner("libsmctrl", device="cuda", step=3)


RECORDER = """
#include <stdint.h>
static void* last_stream;
static uint64_t last_low, last_high;
void libsmctrl_set_stream_mask(void* stream, uint64_t mask) { last_stream = stream; last_low = mask; last_high = 0; }
void libsmctrl_set_stream_mask_ext(void* stream, unsigned __int128 mask) {
  last_stream = stream; last_low = (uint64_t)mask; last_high = (uint64_t)(mask >> 64);
}
void* get_stream(void) { return last_stream; }
uint64_t get_low(void) { return last_low; }
uint64_t get_high(void) { return last_high; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("num_tpcs", [54, 64, 66, 128])
def test_libsmctrl_gets_the_mask_that_its_header_declares(num_tpcs: int, tmp_path: Path) -> None:
    """The 128-bit argument of libsmctrl_set_stream_mask_ext has no ctypes type: two words must do."""
    path = tmp_path / "librecorder.so"
    (tmp_path / "recorder.c").write_text(RECORDER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "recorder.c"], check=True)
    mask = ld.disabled_tpc_mask(range(2 * (num_tpcs - 3), 2 * num_tpcs), 2 * num_tpcs)
    Libsmctrl(str(path), num_tpcs=num_tpcs).set_stream_mask(0x7F12_3456_7890, mask)
    recorder = ctypes.CDLL(str(path))
    recorder.get_stream.restype = ctypes.c_void_p
    recorder.get_low.restype = recorder.get_high.restype = ctypes.c_uint64
    assert recorder.get_stream() == 0x7F12_3456_7890
    assert recorder.get_low() | recorder.get_high() << 64 == mask


def test_libsmctrl_refuses_what_it_cannot_mask() -> None:
    with pytest.raises(PartitionUnavailable, match="128 TPCs at most"):
        Libsmctrl("libsmctrl.so", num_tpcs=129)
    with pytest.raises(PartitionUnavailable, match="cannot be used"):
        Libsmctrl("no-such-library.so", num_tpcs=54)
