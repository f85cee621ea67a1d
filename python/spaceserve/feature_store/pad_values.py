"""Pad values: the token ids under which the RadixCache files an image.

SGLang replaces an image's placeholder tokens by `1_000_000 + hash % 2**30`, and the RadixCache compares nothing else.
Once a prefix match replaces the encode, two images with one pad value would mean one tenant's answer from another
tenant's image, and 30 bits of a hash collide by chance after tens of thousands of images. So the value is not taken
from the hash. Images are numbered as they come, and the number goes through a keyed permutation of [0, space):

- Two images of one *namespace* never share a value, because their numbers differ and a permutation has no collisions.
  This needs no memory of old images: an image that was forgotten and comes back gets a new number, hence a value that
  nothing in the tree has. It misses a prefix that it could have matched, and never matches another image's.
- When the numbers are used up, the next namespace begins and all entries are forgotten. A request's namespace has to be
  part of its RadixCache key (SGLang's `extra_key`), so that a value that is given again cannot meet the old tokens.
  2**30 images last for 12 days at 1,000 new images a second.
- The permutation's key is drawn at each start, so that a client cannot tell other values, or how many images were
  served, from its own.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PAD_VALUE_SPACE = 1 << 30  # SGLang 0.5.17: managers/schedule_batch.py, _compute_pad_value
# A KV pool of a million tokens holds fewer images than this many; each entry takes about 170 bytes (tracemalloc).
DEFAULT_CAPACITY = 1 << 18
_NUM_ROUNDS = 8


@dataclass(frozen=True)
class PadAssignment:
    """Pad values of the images of one request, in the order asked for.

    namespace: 0 at first; requests of different namespaces must not share RadixCache entries.
    item_hashes: for `MultimodalDataItem.set_hash`; `item_hash % 2**30` is the registered value, and the whole number
        is the digest followed by that value, so it is unique to the digest.
    """

    namespace: int
    item_hashes: tuple[int, ...]

    @property
    def radix_extra_key(self) -> str | None:
        """What to join to the request's `extra_key`; None in the first namespace, which thus is like stock."""
        return None if self.namespace == 0 else f"spaceserve-pad-{self.namespace}"


class PadValueRegistry:
    """Gives each content digest its own pad value. Thread-safe: one lock, held for microseconds.

    capacity: how many digests are remembered; the least recently used are forgotten first, which costs prefix matches
        and nothing else.
    space: values are in [0, space); smaller than 2**30 only in tests.
    key: secret of the permutation, random by default.
    """

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, space: int = PAD_VALUE_SPACE, key: bytes | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if not 1 <= space <= PAD_VALUE_SPACE:
            raise ValueError(f"space must be between 1 and 2**30, got {space}")
        self._capacity = capacity
        self._space = space
        self._permutation = KeyedPermutation(space, key if key is not None else secrets.token_bytes(32))
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._num_given = 0
        self._namespace = 0

    def __len__(self) -> int:
        return len(self._values)

    def knows(self, digest: bytes) -> bool:
        """Whether the digest has a value now: if not, no RadixCache can hold tokens that would match it."""
        with self._lock:
            return digest in self._values

    def assign(self, digests: Sequence[bytes]) -> PadAssignment:
        """Pad values of one request's images, all of one namespace; equal digests get equal values.

        Raises ValueError where the request has more distinct digests than the space has values.
        """
        distinct = dict.fromkeys(digests)
        if len(distinct) > self._space:
            raise ValueError(f"{len(distinct)} distinct images in one request, {self._space} pad values")
        with self._lock:
            num_new = sum(digest not in self._values for digest in distinct)
            if self._num_given + num_new > self._space:
                self._values.clear()
                self._num_given = 0
                self._namespace += 1
            values = {}
            for digest in distinct:
                value = self._values.get(digest)
                if value is None:
                    value = self._permutation(self._num_given)
                    self._num_given += 1
                    self._values[digest] = value
                else:
                    self._values.move_to_end(digest)
                values[digest] = value
            while len(self._values) > self._capacity:
                self._values.popitem(last=False)
            namespace = self._namespace
        return PadAssignment(namespace, tuple(_item_hash(digest, values[digest]) for digest in digests))


class KeyedPermutation:
    """A pseudo-random permutation of range(size), size at most 2**30, chosen by a secret key.

    A balanced Feistel network over the least even number of bits that covers the range, with keyed BLAKE2b as its
    round function; results outside of the range are permuted again until they fall inside (cycle walking: Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). On average that is fewer than four passes.
    """

    def __init__(self, size: int, key: bytes) -> None:
        if not 1 <= size <= PAD_VALUE_SPACE:
            raise ValueError(f"size must be between 1 and 2**30, got {size}")
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._key = key

    def __call__(self, index: int) -> int:
        """Image of `index`, 0 <= index < size."""
        assert 0 <= index < self._size, "index outside of the permutation's range"
        value = self._permute_once(index)
        while value >= self._size:
            value = self._permute_once(value)
        return value

    def _permute_once(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for round_index in range(_NUM_ROUNDS):
            message = bytes([round_index]) + right.to_bytes(4, "big")
            mixed = int.from_bytes(hashlib.blake2b(message, digest_size=4, key=self._key).digest(), "big") & mask
            left, right = right, left ^ mixed
        return (left << self._half_bits) | right


def _item_hash(digest: bytes, value: int) -> int:
    return int.from_bytes(digest, "big") * PAD_VALUE_SPACE + value
