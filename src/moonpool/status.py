"""What became of one key of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Status(IntEnum):
    """The outcome for one key. `OK` is 0; nothing here is an exception: a miss is a value."""

    OK = 0
    MISS = 1
    """Not there (never stored, evicted, expired, purged, or changed under the reader)."""
    EXISTS = 2
    """A put or reserve of a key that is stored already; nothing was written."""
    IN_PROGRESS = 3
    """Another writer has reserved this key and not yet committed it."""
    NO_SPACE = 4
    """No contiguous run of free and evictable bytes came free within the bounded wait."""
    STALE = 5
    """The id is of an earlier node incarnation, was purged meanwhile, or is not held by this session."""
    DISABLED = 6
    """The operator's mode word (`moonpool mode`) forbids this kind of call now."""
    TOO_LARGE = 7
    """Larger than the pool, or a pin beyond the share of the pool that pins may take."""
    EMPTY = 8
    """A key or a value of zero bytes."""
    KEY_TOO_LONG = 9
    """A key over 256 bytes, or metadata over 1 KiB."""
    DUPLICATE = 10
    """The same key stands earlier in the same batch."""
    PINNED = 11
    """Hard-pinned: removed only with `force=True`."""
    CORRUPT = 12
    """The bytes differ from their checksum."""
    BUFFER_TOO_SMALL = 13
    """The target holds fewer bytes than the object; nothing was written to it."""
    UNAVAILABLE = 14
    """No answer that this release understands."""
    INVALID = 15
    """The value or target can't be used: not contiguous, read-only, or not a buffer."""

    @classmethod
    def _missing_(cls, value: object) -> Status:
        """A code of a newer node's: whatever it is, the call didn't do what was asked."""
        return cls.UNAVAILABLE

    @property
    def stored(self) -> bool:
        """True where the key is in the store after the call (`OK` or `EXISTS`)."""
        return self in (Status.OK, Status.EXISTS)


class Statuses(list[Status]):
    """One `Status` per key of a batch, in the batch's order.

    `details[i]` explains key i where there is more to say (which limit was hit). `sizes[i]` is the
    object's size in bytes after `get_many_into`, where it is known.
    """

    __slots__ = ("details", "sizes")

    def __init__(
        self,
        statuses: Iterable[Status] = (),
        details: dict[int, str] | None = None,
        sizes: list[int] | None = None,
    ) -> None:
        super().__init__(statuses)
        self.details: dict[int, str] = details if details is not None else {}
        self.sizes: list[int] = sizes if sizes is not None else []

    @property
    def all_ok(self) -> bool:
        return all(status is Status.OK for status in self)
