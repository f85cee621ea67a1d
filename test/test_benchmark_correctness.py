"""benchmark/correctness.py: what counts as within noise, and what the records of features can say."""

from __future__ import annotations

from typing import Any

import pytest

import correctness
from answers import Answer

pytestmark = pytest.mark.cpu


def answer(*firsts: float, tokens: tuple[int, ...] = (1, 2)) -> Answer:
    """Tokens `tokens`; the first with log-probabilities `firsts` of the likeliest."""
    top = [[number + 1, value] for number, value in enumerate(firsts)]
    return [{"token": token, "logprob": firsts[0], "top": top} for token in tokens]


def test_first_tokens_are_compared_over_the_tokens_that_both_name() -> None:
    ours: list[Answer | str] = [answer(-1.0, -2.0, tokens=(1, 3)), "HTTP 500"]
    found = correctness.compare(ours, [answer(-1.5, -2.0, -9.0), answer(-1.0)])
    assert (found["compared"], found["num_errors"]) == (1, 1)
    assert (found["first_token_max"], found["first_token_mean"]) == (0.5, 0.25)
    assert found["common_of_top"] == pytest.approx(2 / 3)
    assert (found["same_first_token"], found["same_answer"]) == (1, 0)


@pytest.mark.parametrize(
    ("ours", "noise", "is_within"),
    [
        ((0.25, 0.05), (0.0, 0.0), True),  # two steps of a bfloat16 logit
        ((0.3, 0.05), (0.0, 0.0), False),
        ((0.25, 0.1), (0.0, 0.0), False),  # a shift of all of them
        ((0.9, 0.19), (0.5, 0.1), True),
        ((1.1, 0.19), (0.5, 0.1), False),
        ((0.9, 0.21), (0.5, 0.1), False),
    ],
)
def test_differences_are_measured_by_stocks_own(
    ours: tuple[float, float], noise: tuple[float, float], is_within: bool
) -> None:
    def row(values: tuple[float, float], num_errors: int = 0) -> dict[str, Any]:
        return {"first_token_max": values[0], "first_token_mean": values[1], "num_errors": num_errors}

    assert correctness.within(row(ours), [row(noise), row((0.0, 0.0))], 2.0) is is_within
    assert not correctness.within(row(ours, num_errors=1), [row(noise)], 2.0)


def line(side: str, key: str, sha: str, **more: Any) -> dict[str, Any]:
    return {"side": side, "key": key, "tokens": 4, "sha": sha, **more}


def test_a_read_must_be_of_what_was_written_for_its_image() -> None:
    good = [line("encoder", "c", "1"), line("encoder", "x", "2"), line("prefill", "c", "1"), line("prefill", "x", "2")]
    found = correctness.check_records(good, "c")
    assert (found["images_encoded"], found["reads"], found["reads_of_other_features"]) == (2, 2, 0)
    assert (found["canary_encodes"], found["canary_reads"], found["canary_distinct_reads"]) == (1, 1, 1)
    mixed_up = [*good, line("prefill", "c", "2")]
    assert correctness.check_records(mixed_up, "c")["reads_of_other_features"] == 1
    assert correctness.check_records(mixed_up, "c")["canary_distinct_reads"] == 2
    too_early = [line("prefill", "c", "1"), line("encoder", "c", "1")]
    assert correctness.check_records(too_early, "c")["reads_of_other_features"] == 1
    same_rows = [*good, line("encoder", "y", "2")]
    assert correctness.check_records(same_rows, "c")["features_shared_by_images"] == 1


def test_features_that_were_encoded_anew_may_have_other_bits_but_reads_follow() -> None:
    lines = [
        line("encoder", "c", "1", max_delta=None),
        line("prefill", "c", "1"),
        line("encoder", "c", "3", max_delta=0.5),
        line("prefill", "c", "3"),
    ]
    found = correctness.check_records(lines, "c")
    assert (found["reads_of_other_features"], found["canary_encoded_anew_max_delta"]) == (0, 0.5)


def test_requests_are_of_all_kinds_and_the_canarys_share_no_beginning() -> None:
    asked = correctness.mixed_requests(0, 0.1)
    counts = [len(request[0]["content"]) - 1 for request in asked]
    assert (len(asked), set(counts)) == (50, {0, 1, 2})
    urls = [part["image_url"]["url"] for r in asked for part in r[0]["content"] if part["type"] == "image_url"]
    assert len(set(urls)) == len(urls)
    others = correctness.mixed_requests(500_000, 0.1, 10)
    for request, other in zip(asked, others, strict=False):
        texts = [[part.get("text") for part in turn[0]["content"]] for turn in (request, other)]
        assert texts[0] == texts[1]
        assert request == other or len(request[0]["content"]) > 1
    one, two = (correctness.alone_of_its_kind(number, "data:") for number in (1, 2))
    assert one[0] != two[0]
