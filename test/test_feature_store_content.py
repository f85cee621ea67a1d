"""Content addresses: equal only for equal bytes, modality and settings."""

from __future__ import annotations

import enum
import io
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spaceserve.feature_store.content import DIGEST_BYTES, canonical_bytes, content_digest, new_key

pytestmark = pytest.mark.cpu

KEY = bytes(range(32))


def digest(data: bytes, modality: str = "image", key: bytes = KEY, **processor: object) -> bytes:
    return content_digest(data, modality, processor, key=key)


def test_digest_is_repeatable_and_wide() -> None:
    assert digest(b"image", size=1) == digest(b"image", size=1)
    assert len(digest(b"image")) == DIGEST_BYTES == 16


def test_bytes_modality_settings_and_key_all_count() -> None:
    digests = [
        digest(b"image"),
        digest(b"imagf"),
        digest(b"image\x00"),
        digest(b""),
        digest(b"image", modality="video"),
        digest(b"image", max_pixels=1),
        digest(b"image", max_pixels=2),
        digest(b"image", key=bytes(32)),
    ]
    assert len(set(digests)) == len(digests)


def test_any_buffer_of_the_same_bytes_has_the_same_address() -> None:
    data = bytes(range(24))
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(data))  # type: ignore[arg-type]
    assert digest(memoryview(data).cast("B", (4, 6))) == digest(data)  # type: ignore[arg-type]


def test_rotations_and_reshapes_of_an_image_differ() -> None:
    """Equal byte counts, equal shapes, equal pixels in another order: hashing a bare feature tensor mixes some up."""
    image = Image.new("RGB", (6, 6))
    image.putdata([(i, i, i) for i in range(36)])
    variants = [image, image.rotate(90), image.rotate(180), image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    wide = Image.frombytes("RGB", (9, 4), image.tobytes())
    encoded = []
    for variant in [*variants, wide]:
        buffer = io.BytesIO()
        variant.save(buffer, format="BMP")
        encoded.append(buffer.getvalue())
    assert len({len(data) for data in encoded[:4]}) == 1
    assert len({digest(data) for data in encoded}) == len(encoded)


def test_settings_do_not_run_into_data_or_each_other() -> None:
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "bc", "d": ""}),
        ({"a": ["x", "y"]}, {"a": ["xy"]}),
        ({"a": [["x"], "y"]}, {"a": ["x", ["y"]]}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0}, {"a": None}),
        ({"a": b"x"}, {"a": "x"}),
        ({"a": {}}, {"a": []}),
        ({"a": 255}, {"a": -1}),
        ({"a": {1, 2}}, {"a": [1, 2]}),
    ]
    for left, right in pairs:
        assert digest(b"", **left) != digest(b"", **right), (left, right)
    encoded = canonical_bytes({"a": 1})
    assert content_digest(encoded, "image", {}, key=KEY) != content_digest(b"", "image", {"a": 1}, key=KEY)


def test_order_of_mappings_and_sets_does_not_count() -> None:
    assert digest(b"", a=1, b={"c": 2, "d": {3, 4, 5}}) == digest(b"", b={"d": {5, 4, 3}, "c": 2}, a=1)
    assert digest(b"", a=(1, 2)) == digest(b"", a=[1, 2])


def test_enums_of_image_libraries_are_taken_and_unknown_types_refused() -> None:
    class Resampling(enum.IntEnum):
        BICUBIC = 3

    assert digest(b"", resample=Resampling.BICUBIC) == digest(b"", resample=3)
    with pytest.raises(TypeError, match="canonical"):
        digest(b"", dtype=object())


def test_keys_have_a_length() -> None:
    for key in (b"", bytes(15), bytes(65)):
        with pytest.raises(ValueError, match="key"):
            digest(b"", key=key)
    assert new_key() != new_key()
    assert len(new_key()) == 32


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def typed(value: object) -> object:
    """The value with its types spelt out, so that == tells 1 from True and 0.0 from -0.0."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, typed(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(typed(item) for item in value))
    return (type(value).__name__, repr(value))


@settings(max_examples=300, deadline=None)
@given(st.lists(values, min_size=2, max_size=6))
def test_canonical_bytes_are_equal_exactly_for_equal_values(drawn: list[object]) -> None:
    for left, right in itertools.combinations(drawn, 2):
        assert (canonical_bytes(left) == canonical_bytes(right)) == (typed(left) == typed(right))
        # No encoding is the beginning of another: what follows cannot be taken for a part of it.
        if typed(left) != typed(right):
            assert not canonical_bytes(left).startswith(canonical_bytes(right))
