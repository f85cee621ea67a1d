"""A request whose client has gone is one line in the log."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from spaceserve.frontend import cancelled_log

pytestmark = pytest.mark.cpu


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger(cancelled_log.LOGGER)
    before = list(found.filters)
    cancelled_log.install()
    yield found
    found.filters[:] = before


def line(rid: str) -> str:
    return f"Received output for {rid=} but the state was deleted in TokenizerManager."


def test_a_cancelled_request_is_one_line(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        logger.error(line("a"))
        logger.error(line("b"))
        logger.error("something else")
    assert [record.getMessage() for record in caplog.records] == [line("a"), line("b")] + ["something else"] * 3


def test_what_is_remembered_is_bounded(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelled_log, "MAX_REMEMBERED", 2)
    for rid in ("old", "a", "old", "b", "old", "a"):  # the one that still gets tokens stays remembered
        logger.error(line(rid))
    assert [record.getMessage() for record in caplog.records] == [line(rid) for rid in ("old", "a", "b", "a")]


def test_the_line_is_the_one_that_sglang_writes() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "managers" / "tokenizer_manager.py").read_text()
    assert f'f"{cancelled_log.PREFIX[:-4]}{{rid=}}{cancelled_log.SUFFIX}"' in source
    assert "logger = logging.getLogger(__name__)" in source
