"""The slab between processes on a GPU, and between GPUs."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from spaceserve.slab import Slab, SlabHandle

pytestmark = pytest.mark.gpu


def read_slab(handle: bytes, device_index: int, answers: Connection, go_on: Connection) -> None:
    """Another rank: maps the slab on its own device, says what it reads before and after the owner writes."""
    torch.cuda.set_device(device_index)
    slab = Slab.attach(SlabHandle.load(handle))
    answers.send((slab.rows.device.index, slab.rows.sum().item()))
    go_on.recv()
    answers.send(slab.view(16, 8).to(torch.float32).mean().item())
    go_on.recv()


@pytest.mark.parametrize("device_index", [0, 1])
def test_a_rank_reads_what_the_worker_wrote(device_index: int) -> None:
    if torch.cuda.device_count() <= device_index:
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs")
    slab = Slab.create(64, 256, torch.bfloat16, torch.device("cuda", 0), None)
    context = multiprocessing.get_context("spawn")
    answers, answers_end = context.Pipe()
    go_on_end, go_on = context.Pipe()
    rank = context.Process(target=read_slab, args=(slab.handle.dump(), device_index, answers_end, go_on_end))
    rank.start()
    try:
        assert answers.poll(120)
        assert answers.recv() == (device_index, 0.0), "mapped on the reader's own device, and zeroed"
        slab.view(16, 8).fill_(3.0)
        torch.cuda.synchronize(0)  # as the worker does before it sends a ticket
        go_on.send(None)
        assert answers.poll(60)
        assert answers.recv() == 3.0
        go_on.send(None)
        rank.join(60)
        assert rank.exitcode == 0
    finally:
        rank.kill()
        rank.join()
