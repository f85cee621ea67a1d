"""State boards: what one side does now, in a few bytes of shared memory for the other side.

The scheduler writes a `DecodeState`, which the encoder worker's SIS reads; the encoder worker writes an `EncoderState`,
which the scheduler reads before each decode step where both sides are masked.

One writer, many readers, one machine. A file in /dev/shm is mapped directly rather than through
`multiprocessing.shared_memory`, whose resource tracker (Python 3.10 to 3.12) also unlinks and warns for processes
that only attached. Here the creator unlinks, and nobody else.

Layout, little-endian, 128 bytes: magic u64, sequence u64, payload (of each kind), crc32 u32 of sequence and payload.
Seqlock: the writer makes the sequence odd, writes, makes it even; a reader takes a copy between two equal even
sequences. The sequence is stored and loaded as one aligned 8-byte word. Python gives no memory barriers, so the
checksum, which covers the sequence, turns any copy torn by reordering into a retry: torn reads are never returned.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

_SIZE = 128
_SEQUENCE_INDEX = 1  # in 8-byte words
_PAYLOAD_OFFSET = 16
_CRC = struct.Struct("<I")
_WORD = struct.Struct("<Q")


class StateBoardTornError(RuntimeError):
    """No consistent copy was read: the writer died inside a write, or writes without pause."""


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What a board holds: `timestamp_ns` is of its write, from the clock that readers pass to `is_stale`."""

    timestamp_ns: int

    def is_stale(self, now_ns: int, max_age_ns: int) -> bool:
        """Whether the last write is older than `max_age_ns`; both clocks must be the same system-wide one."""
        return now_ns - self.timestamp_ns > max_age_ns


@dataclass(frozen=True, kw_only=True)
class DecodeState(_Written):
    """Decode side as of one step."""

    step: int
    running_batch: int
    context_tokens_sum: int
    prefill_tokens_running: int = 0

    @property
    def mean_context_tokens(self) -> float:
        return self.context_tokens_sum / self.running_batch if self.running_batch else 0.0


@dataclass(frozen=True, kw_only=True)
class EncoderState(_Written):
    """What the encoder worker runs; an idle worker writes it again and again.

    Attributes:
        encoder_units: units (SMs, cores) on which a batch runs now; 0 where none does.
        decoder_masked: whether decode is to keep to the units that are left.
    """

    encoder_units: int
    decoder_masked: bool


@dataclass(frozen=True)
class _Layout:
    """Kind of board: its magic number, whose last two digits are the layout's version, and its payload."""

    magic: int
    payload: struct.Struct

    @property
    def end(self) -> int:
        """Offset behind the checksum."""
        return _PAYLOAD_OFFSET + self.payload.size + _CRC.size


# timestamp_ns, step, running batch, sum of context, prefill running
_DECODE = _Layout(0x5350_4143_4542_0003, struct.Struct("<qQQQQ"))
# timestamp_ns, encoder units, decoder masked
_ENCODER = _Layout(0x5350_4143_4543_0001, struct.Struct("<qQ?"))


def _path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name.startswith("."):
        raise ValueError(f"state board name must be letters, digits, dot, dash and underscore, not {name!r}")
    folder = Path("/dev/shm")
    return (folder if folder.is_dir() else Path(tempfile.gettempdir())) / name


class _Mapping:
    """Owns one shared mapping and its word view."""

    def __init__(self, fd: int, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.memory = mmap.mmap(fd, _SIZE, access=access)
        self.view = memoryview(self.memory)
        self.words = self.view.cast("Q")

    def close(self) -> None:
        self.words.release()
        self.view.release()
        self.memory.close()


class _BoardWriter:
    """Creates a board. `name` must be unique per server; FileExistsError where it is taken.

    Use as a context manager, or call `close`, which also unlinks: readers keep their mapping until they close it.
    Not safe for two threads.

    replace: take the place of a board of this name, whose writer has died.
    """

    _layout: ClassVar[_Layout]

    def __init__(self, name: str, *, replace: bool = False) -> None:
        self._file = _path(name)
        made = _path(f"{name}.{os.getpid()}") if replace else self._file
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, _SIZE)
            self._inode = os.fstat(fd).st_ino
            self._map: _Mapping | None = _Mapping(fd, writable=True)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        # Magic last: an attacher that sees it sees a whole, if empty, board (sequence 0 = never written).
        self._map.words[0] = self._layout.magic
        self._sequence = 0
        if replace:
            made.replace(self._file)

    def _write(self, *fields: Any) -> None:
        if self._map is None:
            raise ValueError("state board is closed")
        try:
            payload = self._layout.payload.pack(*fields)
        except struct.error as error:
            raise ValueError(f"state does not fit the board: {error}") from error
        done = self._sequence + 2
        crc = _CRC.pack(zlib.crc32(payload, zlib.crc32(_WORD.pack(done))))
        self._map.words[_SEQUENCE_INDEX] = done - 1
        self._map.view[_PAYLOAD_OFFSET : self._layout.end] = payload + crc
        self._map.words[_SEQUENCE_INDEX] = done
        self._sequence = done

    def close(self) -> None:
        """Unmap and unlink. May be called twice."""
        if self._map is None:
            return
        self._map.close()
        self._map = None
        try:
            if self._file.stat().st_ino == self._inode:  # and not a successor's
                self._file.unlink()
        except FileNotFoundError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BoardReader:
    """Attaches to a board read-only. Raises FileNotFoundError before it exists, ValueError if it is no such board."""

    _layout: ClassVar[_Layout]

    def __init__(self, name: str) -> None:
        file = _path(name)
        fd = os.open(file, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != _SIZE:
                raise ValueError(f"{file} is no state board of this version")
            self._map: _Mapping | None = _Mapping(fd, writable=False)
        finally:
            os.close(fd)
        if self._map.words[0] != self._layout.magic:
            self.close()
            raise ValueError(f"{file} is no state board of this version")

    def _read(self, max_tries: int) -> tuple[Any, ...] | None:
        if self._map is None:
            raise ValueError("state board is closed")
        words, view, layout = self._map.words, self._map.view, self._layout
        size = layout.payload.size
        for _ in range(max_tries):
            before = words[_SEQUENCE_INDEX]
            if before == 0:
                return None
            copy = bytes(view[_PAYLOAD_OFFSET : layout.end])
            if before & 1 or words[_SEQUENCE_INDEX] != before:
                continue
            payload = copy[:size]
            if _CRC.unpack_from(copy, size)[0] == zlib.crc32(payload, zlib.crc32(_WORD.pack(before))):
                return layout.payload.unpack(payload)
        raise StateBoardTornError(f"no consistent state in {max_tries} tries: the writer is gone or never pauses")

    def close(self) -> None:
        """Unmap; the board stays. May be called twice."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StateBoardWriter(_BoardWriter):
    """The decode side's board: see `_BoardWriter`."""

    _layout = _DECODE

    def publish(self, state: DecodeState) -> None:
        """Write `state`. Raises ValueError where a field does not fit its word."""
        self._write(
            state.timestamp_ns,
            state.step,
            state.running_batch,
            state.context_tokens_sum,
            state.prefill_tokens_running,
        )


class StateBoardReader(_BoardReader):
    """Reads the decode side's board: see `_BoardReader`."""

    _layout = _DECODE

    def read(self, max_tries: int = 1000) -> DecodeState | None:
        """A consistent copy of the last state; None before the first write. A few microseconds.

        Raises StateBoardTornError after `max_tries` torn copies.
        """
        fields = self._read(max_tries)
        if fields is None:
            return None
        timestamp_ns, step, batch, context, prefill = fields
        return DecodeState(
            timestamp_ns=timestamp_ns,
            step=step,
            running_batch=batch,
            context_tokens_sum=context,
            prefill_tokens_running=prefill,
        )


class EncoderBoardWriter(_BoardWriter):
    """The encoder worker's board: see `_BoardWriter`. A worker that is started again replaces its predecessor's."""

    _layout = _ENCODER

    def publish(self, state: EncoderState) -> None:
        """Write `state`. Raises ValueError where a field does not fit its word."""
        self._write(state.timestamp_ns, state.encoder_units, state.decoder_masked)


class EncoderBoardReader(_BoardReader):
    """Reads the encoder worker's board: see `_BoardReader`."""

    _layout = _ENCODER

    def read(self, max_tries: int = 1000) -> EncoderState | None:
        """As `StateBoardReader.read`."""
        fields = self._read(max_tries)
        if fields is None:
            return None
        return EncoderState(timestamp_ns=fields[0], encoder_units=fields[1], decoder_masked=fields[2])
