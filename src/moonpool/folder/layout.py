"""The layout of the two table files, as numbers: the one place that node and clients agree on.

Table file ("fingerprints"): a header of 512 words of 8 bytes, then `buckets * 8` words. A word is
`tag << 24 | generation`, written as one aligned store; 0 means empty. `tag` is the upper 40 bits of the key's
64-bit fingerprint (0 becomes 1). A key's word is in one of two buckets:

    first  = fingerprint & (buckets - 1)
    second = (fingerprint ^ (fingerprint >> 24)) & (buckets - 1)

so that a word is taken for another key's with a chance of 2**-40 / buckets, and then costs one wasted round trip.

Record file: the node's alone. A header of 512 words, then `RECORD_WORDS` words a slot, then the overflow area.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

LAYOUT_VERSION = 1
TABLE_MAGIC = int.from_bytes(b"MOONTBL1", "little")
RECORD_MAGIC = int.from_bytes(b"MOONREC1", "little")

WORD_BYTES = 8
HEADER_WORDS = 512
HEADER_BYTES = HEADER_WORDS * WORD_BYTES
BUCKET_WORDS = 8  # one cache line
GENERATION_BITS = 24
GENERATION_MASK = (1 << GENERATION_BITS) - 1
NO_WORD = 0xFFFF_FFFF  # both buckets were full: the object is served, but `exists` doesn't see it

KEY_BYTES_MAX = 256
METADATA_BYTES_MAX = 1024
INLINE_KEY_BYTES = 64
OVERFLOW_BYTES = KEY_BYTES_MAX + METADATA_BYTES_MAX
INLINE_VALUE_BYTES_MAX = 64 * 1024  # up to here a value may travel in the message

RECORD_WORDS = 20
RECORD_BYTES = RECORD_WORDS * WORD_BYTES


class Header(IntEnum):
    """Word numbers in the table file's header."""

    MAGIC = 0
    LAYOUT = 1
    POOL_ID_LOW = 2
    POOL_ID_HIGH = 3
    INCARNATION = 4
    CLOSED = 5
    MODE = 6
    PURGE_EPOCH = 7
    BUCKETS = 8
    SLOTS = 9
    POOL_BYTES = 10
    RESERVED_BYTES = 11


class Mode:
    """The operator's switch: bits of the header's mode word. Plain numbers, as are all that the fast path masks with:
    an `IntFlag` takes 2 us an operation."""

    OFF: Final = 0
    READ: Final = 1
    WRITE: Final = 2
    ON: Final = 3


MODE_NAMES: Final = ("off", "read", "write", "on")
"""The mode word as people write it."""


class State(IntEnum):
    """What a slot holds. In a record's state word: state | generation << 8 | session << 32."""

    FREE = 0
    RESERVED = 1
    """A writer has the extent; nothing is visible."""
    COMMITTED = 2
    """Visible, until it expires, is purged, removed or evicted."""
    DOOMED = 3
    """No longer visible, its extent still held by somebody's pin."""


class Field(IntEnum):
    """Word numbers in a record."""

    STATE = 0
    OFFSET = 1
    SIZE = 2
    FINGERPRINT = 3
    WORD_AND_SPACE = 4  # index of the table word << 32 | key space number
    CREATED = 5  # seconds since 1970, float64
    TOUCHED = 6
    EXPIRY = 7  # 0.0 = never
    CHECKSUM = 8
    FLAGS = 9  # Flag | key length << 8 | metadata length << 20 | overflow entry << 32
    PIN_EXPIRY = 10  # end of a soft pin; 0.0 = none
    EPOCH = 11  # purge epoch at reservation << 8 | priority
    KEY = 12  # 64 bytes, or the first 64 with the rest in the overflow area


class Flag:
    """Low bits of a record's FLAGS word."""

    CHECKSUM: Final = 1
    SOFT: Final = 2
    HARD: Final = 4
    OVERFLOW: Final = 8


def tag_of(fingerprint: int) -> int:
    """The 40-bit tag of a fingerprint; never 0, which marks an empty word."""
    return fingerprint >> GENERATION_BITS or 1


def buckets_for(slots: int) -> int:
    """Buckets of eight words for `slots` objects: a power of two that keeps the table at most half full."""
    buckets = 1
    while buckets * BUCKET_WORDS < 2 * slots:
        buckets *= 2
    return buckets
