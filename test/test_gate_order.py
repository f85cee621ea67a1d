"""Who is prefilled when: text at once behind any number of images, images in their place once they are ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spaceserve.scheduler.process import gate_hooks
from test_gate import Bench, FakeReq

pytestmark = pytest.mark.cpu


class QueueBench(Bench):
    """The waiting queue of a scheduler that admits up to `room` requests a pass, in order, through our hook."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        side: Any = SimpleNamespace(in_flight=False, num_tokens=0)  # no prefill runs beside decode
        hooks = gate_hooks(self.gate, self.view, side, None, on_gpu=False)
        (hook,) = (hook for hook in hooks if hook.target.endswith("._get_new_batch_prefill_raw"))
        self.hook = hook.function
        self.room = 1
        self.gate.wait_a_little = lambda timeout_ms: None  # type: ignore[method-assign]
        self.scheduler = SimpleNamespace(
            **vars(self.gate._scheduler),
            waiting_queue=self.waiting,
            chunked_req=None,
        )
        self.scheduler.grammar_manager.has_waiting_grammars = lambda: False
        self.gate.attach(self.scheduler)

    def text(self, rid: str) -> None:
        self.scheduler.waiting_queue.append(FakeReq(rid))

    def image(self, rid: str) -> None:
        self.waiting = self.scheduler.waiting_queue
        self.arrive(rid, f"image of {rid}")

    def admitted(self) -> list[str]:
        """One pass of SGLang's scheduler; who goes."""

        def original(scheduler: Any, delayer: Any, running_batch: Any) -> tuple[Any, Any]:
            taken, scheduler.waiting_queue = scheduler.waiting_queue[: self.room], scheduler.waiting_queue[self.room :]
            return SimpleNamespace(reqs=taken, extend_num_tokens=1) if taken else None, running_batch

        batch, _ = self.hook(original, self.scheduler, None, SimpleNamespace(is_empty=lambda: True))
        return [req.rid for req in batch.reqs] if batch is not None else []

    def queue(self) -> list[str]:
        return [req.rid for req in self.scheduler.waiting_queue]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> QueueBench:
    return QueueBench(monkeypatch)


def test_text_behind_a_hundred_images_goes_at_once(bench: QueueBench) -> None:
    for number in range(100):
        bench.image(f"i{number}")
    bench.text("text")
    assert bench.admitted() == ["text"]
    assert bench.queue() == [f"i{number}" for number in range(100)]


def test_images_behind_a_hundred_texts_are_asked_for_at_once(bench: QueueBench) -> None:
    for number in range(100):
        bench.text(f"t{number}")
    bench.image("image")
    assert bench.admitted() == ["t0"]
    assert bench.gate._tracked["image"].is_waiting_for_features


def test_endless_text_does_not_starve_an_image_that_is_ready(bench: QueueBench) -> None:
    """It kept its place: of all that waits, nothing that came later goes before it."""
    bench.image("image")
    for number in range(20):
        bench.text(f"t{number}")
        bench.text(f"u{number}")  # twice what a pass admits
        assert bench.admitted() == [f"{'tu'[number % 2]}{number // 2}"]
    bench.ready("image", "image of image", seq=1)
    assert bench.admitted() == ["image"]


def test_ready_images_do_not_starve_text(bench: QueueBench) -> None:
    bench.text("text")
    for number in range(8):
        bench.image(f"i{number}")
    bench.room = 0
    bench.admitted()
    for number in range(8):
        bench.ready(f"i{number}", f"image of i{number}", seq=1)
    bench.room = 1
    assert [bench.admitted() for _ in range(3)] == [["text"], ["i0"], ["i1"]]


def test_images_go_in_the_order_of_arrival_although_they_become_ready_in_another(bench: QueueBench) -> None:
    for number in range(4):
        bench.image(f"i{number}")
    assert bench.admitted() == []
    bench.ready("i3", "image of i3", seq=1)
    bench.ready("i1", "image of i1", seq=1)
    assert [bench.admitted() for _ in range(3)] == [["i1"], ["i3"], []]
    assert bench.queue() == ["i0", "i2"]
