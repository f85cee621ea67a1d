"""The scheduler's gate, driven with stand-ins for SGLang's scheduler and requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spaceserve.feature_store import FeatureStore, HostStore, Ticket
from spaceserve.messages import (
    DropCached,
    EncodeRequest,
    FeaturesFailed,
    FeaturesReady,
    FinishRequest,
    ImageSource,
    RadixHint,
    ReleaseFeatures,
    WorkerDown,
    WorkerUp,
)
from spaceserve.scheduler.feature_view import FeatureView, MissingFeatures
from spaceserve.scheduler.gate import EncoderGate
from spaceserve.scheduler.log_line import ImagesInLogLine
from spaceserve.scheduler.tracking import ASKED_KEY, OWNER_KEY, SOURCE_KEY, rid_of, worker_id
from spaceserve.slab import Slab, SlabHandle

pytestmark = pytest.mark.cpu

TOKENS = 4


@dataclass
class FakeReq:
    """What the gate uses of SGLang's request."""

    rid: str
    prefix_len: int = 0
    multimodal_inputs: Any = True
    output_ids: list[int] = field(default_factory=list)
    return_logprob: bool = False
    finished_reason: Any = None

    @property
    def prefix_indices(self) -> list[int]:
        return [0] * self.prefix_len

    def init_next_round_input(self, tree_cache: Any) -> None:
        pass

    def finished(self) -> bool:
        return self.finished_reason is not None


class FakeLink:
    """Records what is sent to the worker."""

    address = "scheduler"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox_messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def drain(self) -> list[Any]:
        messages, self.inbox_messages = self.inbox_messages, []
        return messages


class Bench:
    """A gate between a recorded link and a waiting queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = FakeLink()
        self.view = FeatureView()
        self.gate = EncoderGate(self.view, self.link, timeout_s=60)  # type: ignore[arg-type]
        self.answered: list[FakeReq] = []
        self.waiting: list[FakeReq] = []
        self.gate.attach(
            SimpleNamespace(
                tree_cache=None,
                grammar_manager=SimpleNamespace(grammar_queue=[]),
                output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: self.answered.extend(reqs)),
                server_args=SimpleNamespace(disable_radix_cache=False),
            )
        )
        rows = torch.arange(64 * 2, dtype=torch.float32).view(64, 2)
        handle = SlabHandle(64, 2, "torch.float32", "segment", None)
        monkeypatch.setattr("spaceserve.scheduler.gate.Slab.attach", lambda handle: Slab(rows, handle))
        self.up_message = handle.dump()
        self.worker_up(0)

    def worker_up(self, epoch: int) -> None:
        self.gate.on_message(WorkerUp(epoch, self.up_message))

    def arrive(self, rid: str, *names: str, asked: bool = False, prefix_len: int = 0) -> FakeReq:
        items = []
        for position, name in enumerate(names):
            source = ImageSource(name.encode(), f"segment-{rid}-{name}", 10, 56, 56, (1, 4, 4), TOKENS)
            first = 10 * position + 1
            items.append(
                SimpleNamespace(
                    model_specific_data={SOURCE_KEY: source, OWNER_KEY: worker_id(rid, "m0"), ASKED_KEY: asked},
                    offsets=[(first, first + TOKENS - 1)],
                    hash=hash(name),
                )
            )
        self.gate.track(rid, items)
        req = FakeReq(rid, prefix_len)
        self.waiting.append(req)
        return req

    def scheduling_pass(self, admit: Sequence[FakeReq] | None = None) -> list[str]:
        """One pass; `admit` of the eligible (all by default) leave the queue. Returns the eligible ids."""
        eligible, held = self.gate.partition(self.waiting)
        admitted = list(eligible) if admit is None else [req for req in eligible if req in admit]
        self.waiting = [req for req in eligible if req not in admitted] + held
        self.gate.after_pass(eligible, self.waiting)
        return [req.rid for req in eligible]

    def ready(self, rid: str, *names: str, seq: int, epoch: int = 0) -> None:
        tickets = [Ticket(name.encode(), 8 * n, TOKENS, n) for n, name in enumerate(names)]
        self.gate.on_message(FeaturesReady(self.identity(rid), seq, epoch, tickets))

    def identity(self, rid: str) -> str:
        """The request's name for the worker; what the main process gives where the gate does not know it yet."""
        known = [tracked.worker_id for tracked in self.gate._tracked.values() if tracked.rid == rid]
        return known[0] if known else worker_id(rid, "m0")

    def sent(self, kind: type) -> list[Any]:
        return [message for message in self.link.sent if isinstance(message, kind)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_holds_a_request_until_its_features_are_ready(bench: Bench) -> None:
    bench.arrive("r", "a", "b")
    assert bench.scheduling_pass() == []
    (request,) = bench.sent(EncodeRequest)
    assert [source.key for source in request.sources] == [b"a", b"b"]
    assert bench.scheduling_pass() == []
    assert len(bench.sent(EncodeRequest)) == 1, "asked twice"
    bench.ready("r", "a", "b", seq=request.seq)
    assert bench.scheduling_pass() == ["r"]
    assert bench.view.get_single(hash("b")).embedding.tolist() == [[16 + 2 * n, 17 + 2 * n] for n in range(TOKENS)]


def test_text_passes_held_images(bench: Bench) -> None:
    bench.arrive("image", "a")
    bench.waiting.append(FakeReq("text"))
    assert bench.scheduling_pass() == ["text"]


def test_asked_by_the_main_process_is_not_asked_again(bench: Bench) -> None:
    bench.arrive("r", "a", asked=True)
    assert bench.scheduling_pass() == []
    assert not bench.sent(EncodeRequest)
    bench.ready("r", "a", seq=0)
    assert bench.scheduling_pass() == ["r"]


def test_an_answer_that_overtakes_its_request_is_kept(bench: Bench) -> None:
    bench.ready("r", "a", seq=0)
    bench.arrive("r", "a", asked=True)
    assert bench.scheduling_pass() == ["r"]


def test_an_answer_without_a_request_expires_on_all_ranks_alike(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    other = EncoderGate(FeatureView(), None, timeout_s=60)  # a rank without a link and without a clock
    answer = FeaturesReady(worker_id("gone", "m0"), 0, 0, [])
    for gate in (bench.gate, other):
        gate.on_message(answer)
    assert bench.gate.incoming() == other.incoming() == []
    monkeypatch.setattr("spaceserve.scheduler.gate.EARLY_ANSWER_S", -1.0)
    assert other.incoming() == []
    assert bench.link.sent == []
    (expired,) = bench.gate.incoming()
    assert [len(gate._early) for gate in (bench.gate, other)] == [1, 1]
    for gate in (bench.gate, other):
        gate.on_message(expired)
    assert [len(gate._early) for gate in (bench.gate, other)] == [0, 0]
    assert bench.link.sent == [FinishRequest(answer.rid)]


def test_images_in_the_radix_cache_are_not_asked_for(bench: Bench) -> None:
    bench.arrive("all", "a", "b", prefix_len=20)
    bench.arrive("first", "a", "b", prefix_len=10)
    assert bench.scheduling_pass() == ["all"]
    (request,) = bench.sent(EncodeRequest)
    assert rid_of(request.rid) == "first"
    assert [source.key for source in request.sources] == [b"b"]
    assert bench.gate.num_elided == 2


def test_a_prefix_that_vanished_gets_its_encode(bench: Bench) -> None:
    req = bench.arrive("r", "a", "b", prefix_len=20)
    assert bench.scheduling_pass(admit=[]) == ["r"]  # eligible, but no room for it in this pass
    req.prefix_len = 0
    assert bench.scheduling_pass() == []
    (request,) = bench.sent(EncodeRequest)
    assert len(request.sources) == 2


def test_a_prefix_that_shrank_asks_for_everything_it_needs_now(bench: Bench) -> None:
    req = bench.arrive("r", "a", "b", prefix_len=10)
    bench.scheduling_pass()
    bench.ready("r", "b", seq=1)
    req.prefix_len = 0
    assert bench.scheduling_pass() == []
    assert [source.key for source in bench.sent(EncodeRequest)[-1].sources] == [b"a", b"b"]
    bench.ready("r", "b", seq=1)  # a late answer to the question before
    assert bench.scheduling_pass() == []
    bench.ready("r", "a", "b", seq=2)
    assert bench.scheduling_pass() == ["r"]


def test_features_are_released_after_the_prefill_and_sources_at_the_end(bench: Bench) -> None:
    req = bench.arrive("r", "a")
    bench.scheduling_pass()
    bench.ready("r", "a", seq=1)
    bench.scheduling_pass()
    bench.gate.after_batch([req])
    assert not bench.sent(ReleaseFeatures)
    req.output_ids.append(7)
    bench.gate.after_batch([req])
    assert [rid_of(message.rid) for message in bench.sent(ReleaseFeatures)] == ["r"]
    assert len(bench.view) == 0
    assert bench.sent(RadixHint)[0].cached == [b"a"]
    req.finished_reason = "stop"
    bench.gate.after_batch([req])
    assert [rid_of(message.rid) for message in bench.sent(FinishRequest)] == ["r"]
    assert bench.gate.num_tracked == 0


def test_a_retracted_request_asks_again(bench: Bench) -> None:
    req = bench.arrive("r", "a")
    bench.scheduling_pass()
    bench.ready("r", "a", seq=1)
    bench.scheduling_pass()
    req.output_ids.append(7)
    bench.gate.after_batch([req])
    bench.waiting.append(req)  # retracted
    assert bench.scheduling_pass() == []
    assert bench.sent(EncodeRequest)[-1].seq == 2
    bench.ready("r", "a", seq=2)
    assert bench.scheduling_pass() == ["r"]
    bench.gate.after_batch([req])
    assert len(bench.sent(ReleaseFeatures)) == 1
    req.output_ids.append(8)
    bench.gate.after_batch([req])
    assert len(bench.sent(ReleaseFeatures)) == 2


def test_a_request_id_may_be_used_again(bench: Bench) -> None:
    """Each admission has its own name for the worker, which ignores names that have ended."""
    names = []
    for _ in range(2):
        bench.arrive("r", "a")
        bench.scheduling_pass()
        names.append(bench.sent(EncodeRequest)[-1].rid)
        bench.waiting.clear()
        bench.scheduling_pass()
    assert names[0] != names[1]
    assert [message.rid for message in bench.sent(FinishRequest)] == names


def test_an_aborted_request_is_finished(bench: Bench) -> None:
    bench.arrive("r", "a")
    bench.scheduling_pass()
    bench.waiting.clear()  # SGLang took it out of its queue and answered
    bench.scheduling_pass()
    assert [rid_of(message.rid) for message in bench.sent(FinishRequest)] == ["r"]
    assert bench.gate.num_tracked == 0


def test_a_request_aborted_between_two_chunks_releases_everything(bench: Bench) -> None:
    req = bench.arrive("r", "a")
    bench.scheduling_pass()
    bench.ready("r", "a", seq=1)
    bench.scheduling_pass()
    bench.gate.on_abort(req.rid)
    bench.gate.on_abort(req.rid)
    assert [rid_of(message.rid) for message in bench.sent(FinishRequest)] == ["r"]
    assert len(bench.view) == 0
    assert bench.gate.num_tracked == 0


def test_a_failed_encode_is_answered_with_its_status(bench: Bench) -> None:
    req = bench.arrive("r", "a")
    other = bench.arrive("other", "b")
    bench.scheduling_pass()
    bench.gate.on_message(FeaturesFailed(bench.identity("r"), 1, 0, 400, "the image cannot be decoded"))
    bench.scheduling_pass()
    assert bench.answered == [req]
    assert req.finished_reason.status_code is HTTPStatus.BAD_REQUEST
    assert req.finished_reason.message == "the image cannot be decoded"
    assert bench.waiting == [other]


def test_requests_are_retried_once_after_a_crash_and_then_fail_with_503(bench: Bench) -> None:
    req = bench.arrive("r", "a")
    bench.scheduling_pass()
    bench.worker_up(1)
    assert bench.scheduling_pass() == []
    assert [message.seq for message in bench.sent(EncodeRequest)] == [1, 2]
    bench.ready("r", "a", seq=2, epoch=0)  # from the worker that died
    assert bench.scheduling_pass() == []
    bench.worker_up(2)
    bench.scheduling_pass()
    assert bench.answered == [req]
    assert req.finished_reason.status_code is HTTPStatus.SERVICE_UNAVAILABLE


def test_without_a_worker_images_fail_and_text_goes_on(bench: Bench) -> None:
    waiting = bench.arrive("waiting", "a")
    bench.scheduling_pass()
    bench.gate.on_message(WorkerDown(0, "the encoder worker failed 6 times"))
    later = bench.arrive("later", "b")
    bench.waiting.append(FakeReq("text"))
    assert bench.scheduling_pass() == ["text"]
    bench.scheduling_pass()
    assert bench.answered == [waiting, later]
    assert bench.gate.num_tracked == 0


def test_an_overdue_request_fails(bench: Bench) -> None:
    bench.gate._timeout_s = 0.0
    bench.arrive("r", "a")
    bench.scheduling_pass()
    (failed,) = [message for message in bench.gate.incoming() if isinstance(message, FeaturesFailed)]
    assert failed.status == HTTPStatus.SERVICE_UNAVAILABLE


def test_radix_eviction_is_reported(bench: Bench) -> None:
    req = bench.arrive("r", "a")
    bench.scheduling_pass()
    bench.ready("r", "a", seq=1)
    bench.scheduling_pass()
    req.output_ids.append(1)
    bench.gate.after_batch([req])
    (pad_value,) = bench.gate._radix_keys
    bench.gate.on_radix_removed([1, 2, pad_value, pad_value, 3])
    assert bench.sent(RadixHint)[-1].evicted == [b"a"]
    bench.gate.on_radix_removed([pad_value])
    assert len(bench.sent(RadixHint)) == 2
    bench.gate.on_flush()
    assert bench.sent(DropCached)


def test_a_missing_feature_is_an_error_and_never_an_encode(bench: Bench) -> None:
    with pytest.raises(MissingFeatures):
        bench.view.get_single(1)
    with pytest.raises(MissingFeatures):
        bench.view.set(1, None)


def test_the_log_line_shows_gate_and_store(bench: Bench, tmp_path: Path) -> None:
    status_file = tmp_path / "status.json"
    log_line = ImagesInLogLine((bench.gate.summary, lambda: ""), status_file)

    def shown(message: str) -> str:
        record = logging.LogRecord("sglang", logging.INFO, "", 0, message, None, None)
        assert log_line.filter(record)
        return str(record.msg)

    bench.arrive("r", "a", asked=True)
    assert shown("Prefill batch, #new-seq: 1").startswith("Prefill batch, #new-seq: 1, #image-req: 1")
    assert shown("Decode batch") == "Decode batch"
    store = FeatureStore(4, 2, host=HostStore(4, 2))
    store.register("r", [(b"a", 4, 1)])
    assert store.try_reserve("r")
    stats = store.stats()
    status: dict[str, Any] = {
        "num_encoded": 7,
        "store": {name: getattr(stats, name) for name in stats.__dataclass_fields__ if name != "host"},
        "evictions": {"pressure": 2, "wanted": 1},
        "host": {"hits": 5},
    }
    status["store"]["evictions"] = {}
    status_file.write_text(json.dumps(status))
    assert "feature usage" not in shown("Prefill batch"), "the file is read once a second"
    log_line._read_s = float("-inf")
    line = shown("Prefill batch")
    assert "#feature-wait-req: 1" in line
    assert line.endswith(
        "feature usage: 0.50, #pinned-block: 0, #feature-hit: 0, #coalesced-encode: 0, #encode: 7, "
        "#evicted-feature: 3, #host-hit: 5"
    )
    status_file.write_text("{")
    log_line._read_s = float("-inf")
    assert "feature usage" not in shown("Prefill batch")
