"""The shared table: what clients read without asking the node, and how the node writes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonpool.errors import FolderError
from moonpool.folder.layout import (
    BUCKET_WORDS,
    GENERATION_BITS,
    GENERATION_MASK,
    HEADER_BYTES,
    HEADER_WORDS,
    LAYOUT_VERSION,
    NO_WORD,
    TABLE_MAGIC,
    WORD_BYTES,
    Header,
    buckets_for,
    tag_of,
)
from moonpool.folder.mapping import Mapping, column
from moonpool.keys.fingerprints import fingerprint, fingerprints

_TAG_SHIFT = np.uint64(GENERATION_BITS)
_GENERATIONS = np.uint64(1 << GENERATION_BITS)
_SEVERAL = 4  # from this many keys on, numpy beats a loop


def table_bytes(slots: int) -> int:
    """Size of the table file for a capacity of `slots` objects."""
    return HEADER_BYTES + buckets_for(slots) * BUCKET_WORDS * WORD_BYTES


class TableReader:
    """A client's eyes: answers `exists` from shared memory, in microseconds, without a lock or a message.

    What it says is advisory (an object may go or come at any moment after). Valid for as long as it is referenced.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.header = mapping.view[:HEADER_BYTES].cast("Q")
        if mapping.size < HEADER_BYTES or self.header[Header.MAGIC] != TABLE_MAGIC:
            raise FolderError("the table file isn't one of Moonpool's; stop the node and remove the folder")
        if self.header[Header.LAYOUT] != LAYOUT_VERSION:
            raise FolderError(
                f"the table has layout version {self.header[Header.LAYOUT]}, this client reads {LAYOUT_VERSION}; "
                "use the same release of moonpool on both sides"
            )
        buckets = self.header[Header.BUCKETS]
        self.words = mapping.view[HEADER_BYTES:].cast("Q")
        if len(self.words) < buckets * BUCKET_WORDS:
            raise FolderError("the table file was truncated; restart the node")
        self._mask = buckets - 1
        self._table = np.frombuffer(mapping.memory, "<u8", buckets * BUCKET_WORDS, HEADER_BYTES).reshape(buckets, 8)
        self._mask64 = np.uint64(self._mask)

    @property
    def incarnation(self) -> int:
        return int(self.header[Header.INCARNATION])

    @property
    def closed(self) -> bool:
        """True once the node has stopped cleanly."""
        return bool(self.header[Header.CLOSED])

    @property
    def mode(self) -> int:
        return int(self.header[Header.MODE])

    @property
    def purge_epoch(self) -> int:
        return int(self.header[Header.PURGE_EPOCH])

    @property
    def pool_id(self) -> bytes:
        low, high = self.header[Header.POOL_ID_LOW], self.header[Header.POOL_ID_HIGH]
        return int(low | high << 64).to_bytes(16, "little")

    def unchanged(self, word: int, generation: int) -> bool:
        """Whether table word `word` still is of `generation`: asked once more after a copy."""
        return self.all_unchanged((word,), (generation << 32,))

    def all_unchanged(self, places: Sequence[int], ids: Sequence[int]) -> bool:
        """`unchanged` for a batch: table words `places` against the generations in `ids` (0 = none, passed over)."""
        words = self.words
        for place, number in zip(places, ids, strict=True):
            if number and place != NO_WORD and words[place] & GENERATION_MASK != number >> 32:
                return False
        return True

    def contains(self, key: bytes) -> bool:
        """Whether `key` seems to be stored."""
        print_ = fingerprint(key)
        tag = print_ >> GENERATION_BITS or 1
        mask = self._mask
        base = (print_ & mask) * BUCKET_WORDS
        words = self.words
        for word in words[base : base + BUCKET_WORDS].tolist():
            if word >> GENERATION_BITS == tag:
                return True
        base = ((print_ ^ print_ >> GENERATION_BITS) & mask) * BUCKET_WORDS
        return any(word >> GENERATION_BITS == tag for word in words[base : base + BUCKET_WORDS].tolist())

    def contains_many(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Whether each key seems to be stored, as one boolean array."""
        if len(keys) < _SEVERAL:
            return np.array([self.contains(key) for key in keys], np.bool_)
        prints = fingerprints(keys)
        tags = np.maximum(prints >> _TAG_SHIFT, np.uint64(1)) << _TAG_SHIFT
        tags = tags[:, None]
        # A word of this tag differs from `tag << 24` by its generation alone, so the difference is below 2**24.
        first = self._table.take((prints & self._mask64).view(np.int64), axis=0)
        found: npt.NDArray[np.bool_] = ((first ^ tags) < _GENERATIONS).any(axis=1)
        if not found.all():
            second = self._table.take(((prints ^ (prints >> _TAG_SHIFT)) & self._mask64).view(np.int64), axis=0)
            found |= ((second ^ tags) < _GENERATIONS).any(axis=1)
        return found


class TableWriter:
    """The node's hand: the one writer of the table. Single-threaded.

    A word is written and cleared as one aligned store, so that a reader sees the old one or the new one.
    """

    def __init__(self, mapping: Mapping, slots: int) -> None:
        self.mapping = mapping
        self.header = mapping.view[:HEADER_BYTES].cast("Q")
        self.words = mapping.view[HEADER_BYTES:].cast("Q")
        self.buckets = buckets_for(slots)
        self._mask = self.buckets - 1
        self._used = column("B", self.buckets)  # words in use per bucket, so that the emptier one is known at once

    def format(self, *, pool_id: bytes, incarnation: int, slots: int, pool_bytes: int, mode: int) -> None:
        """Write the header of a new incarnation and clear all words; the magic comes last."""
        number = int.from_bytes(pool_id, "little")
        self.header[Header.MAGIC] = 0
        self.mapping.bytes[HEADER_BYTES:] = 0
        for word, value in (
            (Header.LAYOUT, LAYOUT_VERSION),
            (Header.POOL_ID_LOW, number & (1 << 64) - 1),
            (Header.POOL_ID_HIGH, number >> 64),
            (Header.INCARNATION, incarnation),
            (Header.CLOSED, 0),
            (Header.MODE, mode),
            (Header.BUCKETS, self.buckets),
            (Header.SLOTS, slots),
            (Header.POOL_BYTES, pool_bytes),
            (Header.RESERVED_BYTES, 0),
            (Header.MAGIC, TABLE_MAGIC),
        ):
            self.header[word] = value

    def insert(self, print_: int, generation: int) -> int:
        """Make a key visible; returns its word's index, or `NO_WORD` where both buckets are full."""
        mask = self._mask
        first = print_ & mask
        second = (print_ ^ print_ >> GENERATION_BITS) & mask
        used = self._used
        bucket = second if used[second] < used[first] else first
        if used[bucket] == BUCKET_WORDS:
            return NO_WORD
        words = self.words
        index = bucket * BUCKET_WORDS
        while words[index]:
            index += 1
        words[index] = tag_of(print_) << GENERATION_BITS | generation
        used[bucket] += 1
        return index

    def clear(self, index: int) -> None:
        """Make a key invisible again. `NO_WORD` is allowed and does nothing."""
        if index != NO_WORD and self.words[index]:
            self.words[index] = 0
            self._used[index // BUCKET_WORDS] -= 1

    def insert_many(
        self, prints: npt.NDArray[np.uint64], generations: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """`insert` for a whole restart at once: vectorised over rounds, a word's index (or `NO_WORD`) each."""
        table = np.frombuffer(self.mapping.memory, "<u8", self.buckets * BUCKET_WORDS, HEADER_BYTES)
        used = np.frombuffer(self._used, np.uint8)
        values = np.maximum(prints >> _TAG_SHIFT, np.uint64(1)) << _TAG_SHIFT | generations
        mask = np.uint64(self._mask)
        choices = (
            (prints & mask).astype(np.int64),
            ((prints ^ (prints >> _TAG_SHIFT)) & mask).astype(np.int64),
        )
        indexes = np.full(len(prints), NO_WORD, np.uint64)
        pending = np.arange(len(prints))
        for _ in range(4 * BUCKET_WORDS):
            if not len(pending):
                break
            # Each round, one key a bucket takes the bucket's next word: the first of those that want it.
            first, second = choices[0][pending], choices[1][pending]
            bucket = np.where(used[second] < used[first], second, first)
            open_ = used[bucket] < BUCKET_WORDS
            _, chosen = np.unique(bucket, return_index=True)
            chosen = chosen[open_[chosen]]
            if not len(chosen):
                break
            where = bucket[chosen]
            index = where * BUCKET_WORDS + used[where]
            table[index] = values[pending[chosen]]
            used[where] += 1
            indexes[pending[chosen]] = index
            keep = np.ones(len(pending), bool)
            keep[chosen] = False
            pending = pending[keep]
        return indexes


assert len(Header) <= HEADER_WORDS
