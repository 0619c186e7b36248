"""The record file: what the node itself knows of each object, kept for its restart. No client reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt

from moonpool.folder.layout import (
    GENERATION_MASK,
    HEADER_BYTES,
    INLINE_KEY_BYTES,
    KEY_BYTES_MAX,
    LAYOUT_VERSION,
    METADATA_BYTES_MAX,
    OVERFLOW_BYTES,
    RECORD_BYTES,
    RECORD_MAGIC,
    RECORD_WORDS,
    Field,
    Flag,
    State,
)
from moonpool.folder.mapping import Mapping, reserve_file
from moonpool.keys.fingerprints import PAIRED_KEY_BYTES, fingerprint, fingerprints48
from moonpool.probes import ARMED, reach

_MAGIC, _LAYOUT, _ID_LOW, _ID_HIGH, _POOL_BYTES, _SLOTS, _INCARNATION = range(7)  # words of the header
OVERFLOW_STEP = 256  # overflow entries reserved at a time: 320 KiB, about 0.1 ms

# The FLAGS word: flags, key length, metadata length, number of the overflow entry.
KEY_LENGTH_SHIFT = 8
METADATA_LENGTH_SHIFT = 20
LENGTH_MASK = 0xFFF
OVERFLOW_SHIFT = 32

# All words of a record but the first (its state), with a key of up to 64 bytes.
_BODY = Struct(f"<QQQQdddQQdQ{INLINE_KEY_BYTES}s")
assert _BODY.size == RECORD_BYTES - 8

RECORD_DTYPE = np.dtype(
    [
        ("state", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("fingerprint", "<u8"),
        ("word_and_space", "<u8"),
        ("created", "<f8"),
        ("touched", "<f8"),
        ("expiry", "<f8"),
        ("checksum", "<u8"),
        ("flags", "<u8"),
        ("pin_expiry", "<f8"),
        ("epoch", "<u8"),
        ("key", "V64"),
    ]
)
assert RECORD_DTYPE.itemsize == RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """Which pool the records describe, from the record file's header."""

    pool_id: bytes
    pool_bytes: int
    slots: int
    incarnation: int


class Records:
    """Fixed-capacity records by slot. Single-threaded; owned by the node.

    `words` and `floats` are the same memory as unsigned words and as float64: field f of slot s is at
    `s * RECORD_WORDS + f`. A record's body is written first and its state word last, as one aligned store, so that
    a node killed between the two leaves a free slot or a whole record.
    """

    def __init__(self, mapping: Mapping, slots: int, fd: int | None = None, path: Path | None = None) -> None:
        self.mapping = mapping
        self.slots = slots
        self.header = mapping.view[:HEADER_BYTES].cast("Q")
        end = HEADER_BYTES + slots * RECORD_BYTES
        self.words: memoryview[int] = mapping.view[HEADER_BYTES:end].cast("Q")
        self.floats: memoryview[float] = mapping.view[HEADER_BYTES:end].cast("B").cast("d")
        self.table = np.frombuffer(mapping.memory, RECORD_DTYPE, slots, HEADER_BYTES)
        self._overflow_start = end
        self._fd, self._path = fd, path
        self._overflow_free: list[int] = []
        self._overflow_next = 0
        self._overflow_reserved = 0

    @staticmethod
    def file_bytes(slots: int) -> int:
        """Size of the file. The overflow area, its last part, is sparse: reserved as it is needed."""
        return HEADER_BYTES + slots * RECORD_BYTES + slots * OVERFLOW_BYTES

    @staticmethod
    def reserved_bytes(slots: int) -> int:
        """What of the file must be reserved before it is used."""
        return HEADER_BYTES + slots * RECORD_BYTES

    def close(self) -> None:
        """Let go of the file, which can't be extended any more; what is mapped stays valid."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def format(self, identity: Identity) -> None:
        """Write the header of a fresh file; the magic comes last."""
        number = int.from_bytes(identity.pool_id, "little")
        values = (
            number & (1 << 64) - 1,
            number >> 64,
            identity.pool_bytes,
            identity.slots,
            identity.incarnation,
        )
        for word, value in enumerate((LAYOUT_VERSION, *values), start=1):
            self.header[word] = value
        self.header[_MAGIC] = RECORD_MAGIC

    @staticmethod
    def identity(path: Path) -> Identity | None:
        """Read a record file's header; None where there is no file, or none of this layout. Changes nothing."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                head = np.frombuffer(file.read(64), "<u8").tolist()
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return None
        if len(head) < 8 or head[_MAGIC] != RECORD_MAGIC or head[_LAYOUT] != LAYOUT_VERSION:
            return None
        pool_id = int(head[_ID_LOW] | head[_ID_HIGH] << 64).to_bytes(16, "little")
        found = Identity(pool_id, head[_POOL_BYTES], head[_SLOTS], head[_INCARNATION])
        return found if size == Records.file_bytes(found.slots) else None

    def set_incarnation(self, incarnation: int) -> None:
        self.header[_INCARNATION] = incarnation

    def write(
        self,
        slot: int,
        *,
        state: int,
        generation: int,
        session: int,
        offset: int,
        size: int,
        print_: int,
        space: int,
        now: float,
        expiry: float,
        checksum: int,
        flags: int,
        pin_expiry: float,
        epoch_and_priority: int,
        key: bytes,
        metadata: bytes,
    ) -> None:
        """Write a whole record into a free slot, whose state word keeps the last generation until then; it counts from
        its last store on. `key` and `metadata` are within their limits.

        Raises `FolderError` when the overflow area (long keys, metadata) can't be extended.
        """
        lengths = len(key) << KEY_LENGTH_SHIFT | len(metadata) << METADATA_LENGTH_SHIFT
        if metadata or len(key) > INLINE_KEY_BYTES:
            lengths |= Flag.OVERFLOW | self._write_overflow(key, metadata) << OVERFLOW_SHIFT
        base = slot * RECORD_WORDS
        _BODY.pack_into(
            self.mapping.memory,
            HEADER_BYTES + slot * RECORD_BYTES + 8,
            offset,
            size,
            print_,
            0xFFFF_FFFF << 32 | space,
            now,
            now,
            expiry,
            checksum,
            flags | lengths,
            pin_expiry,
            epoch_and_priority,
            key,
        )
        if ARMED:
            reach("node-record-body")
        self.words[base] = state | generation << 8 | session << 32

    def erase(self, slot: int) -> None:
        """Make a slot free again; its generation stays, so that the next object in it gets the next one."""
        base = slot * RECORD_WORDS
        flags = self.words[base + Field.FLAGS]
        self.words[base] = self.words[base] & GENERATION_MASK << 8
        if flags & Flag.OVERFLOW:
            self._overflow_free.append(flags >> OVERFLOW_SHIFT)

    def key(self, slot: int) -> bytes:
        """The key of an occupied slot, as a copy."""
        flags = self.words[slot * RECORD_WORDS + Field.FLAGS]
        length = flags >> KEY_LENGTH_SHIFT & LENGTH_MASK
        if length > INLINE_KEY_BYTES:
            start = self._overflow_start + (flags >> OVERFLOW_SHIFT) * OVERFLOW_BYTES
        else:
            start = HEADER_BYTES + slot * RECORD_BYTES + Field.KEY * 8
        return bytes(self.mapping.view[start : start + length])

    def metadata(self, slot: int) -> bytes:
        """The opaque metadata of an occupied slot, as a copy."""
        flags = self.words[slot * RECORD_WORDS + Field.FLAGS]
        length = flags >> METADATA_LENGTH_SHIFT & LENGTH_MASK
        if not length:
            return b""
        start = self._overflow_start + (flags >> OVERFLOW_SHIFT) * OVERFLOW_BYTES + KEY_BYTES_MAX
        return bytes(self.mapping.view[start : start + length])

    def _write_overflow(self, key: bytes, metadata: bytes) -> int:
        """Copy key and metadata into an entry of the overflow area and return its number."""
        if self._overflow_free:
            entry = self._overflow_free.pop()
        else:
            entry = self._overflow_next
            if entry >= self._overflow_reserved:
                self._extend_overflow()
            self._overflow_next += 1
        start = self._overflow_start + entry * OVERFLOW_BYTES
        view = self.mapping.view
        view[start : start + len(key)] = key
        start += KEY_BYTES_MAX
        view[start : start + len(metadata)] = metadata
        return entry

    def _extend_overflow(self) -> None:
        if self._fd is not None and self._path is not None:
            step = min(OVERFLOW_STEP, self.slots - self._overflow_reserved)
            start = self._overflow_start + self._overflow_reserved * OVERFLOW_BYTES
            reserve_file(self._fd, start, step * OVERFLOW_BYTES, self._path)
            self._overflow_reserved += step
        else:
            self._overflow_reserved = self.slots

    def check(self, reserved_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Validate all records after a restart: (slots that hold something sound, slots that hold rubbish).

        Checks state, bounds against `reserved_bytes`, lengths, and the fingerprint against the key; overlaps are the
        allocator's to find. Also learns which overflow entries are in use. Changes no record.
        """
        table = self.table
        used = np.flatnonzero(table["state"] & 0xFF)
        rows = table[used]
        flags = rows["flags"]
        key_length = (flags >> KEY_LENGTH_SHIFT & LENGTH_MASK).astype(np.int64)
        metadata_length = (flags >> METADATA_LENGTH_SHIFT & LENGTH_MASK).astype(np.int64)
        entry = (flags >> OVERFLOW_SHIFT).astype(np.int64)
        overflowing = (flags & Flag.OVERFLOW).astype(bool)
        good = (rows["state"] & 0xFF) <= State.DOOMED
        good &= (rows["offset"] % 4096 == 0) & (rows["size"] > 0) & (rows["size"] <= reserved_bytes)
        good &= rows["offset"] <= reserved_bytes - np.minimum(rows["size"], reserved_bytes)
        good &= (key_length > 0) & (key_length <= KEY_BYTES_MAX) & (metadata_length <= METADATA_BYTES_MAX)
        good &= overflowing | ((key_length <= INLINE_KEY_BYTES) & (metadata_length == 0))
        good &= ~overflowing | (entry < self.slots)
        paired = key_length == PAIRED_KEY_BYTES
        if paired.any():
            keys = np.ascontiguousarray(rows["key"][paired]).view(np.uint8).reshape(-1, INLINE_KEY_BYTES)
            prints = fingerprints48(keys[:, :PAIRED_KEY_BYTES].tobytes(), len(keys))
            good[paired] &= prints == rows["fingerprint"][paired]
        for row in np.flatnonzero(good & ~paired).tolist():
            slot = int(used[row])
            good[row] = fingerprint(self.key(slot)) == self.words[slot * RECORD_WORDS + Field.FINGERPRINT]
        taken = entry[good & overflowing]
        if len(taken):
            self._overflow_next = int(taken.max()) + 1
            self._overflow_free = np.setdiff1d(np.arange(self._overflow_next), taken).tolist()
            self._overflow_reserved = self._overflow_next
        return used[good], used[~good]
