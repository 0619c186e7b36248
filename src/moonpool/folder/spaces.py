"""The registry's file: key spaces, where purges cut, and the switch, kept for the node's restart. No client reads it.

A header of eight words, then `SPACES_MAX` entries, then the descriptions, one after the other. What changes is stored
in place, so that a change costs the same however much is kept. Of a declaration the count of entries comes last: a node
killed before that leaves none of it. Of a purge each key space's mark is one aligned word.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.errors import FolderError
from moonpool.folder.layout import LAYOUT_VERSION
from moonpool.folder.mapping import Mapping, create_file, reserve_file
from moonpool.keys.canonical import description_digest

SPACES_MAX = 4096
"""Key spaces a node keeps, the one of undeclared keys among them: more of them than models × tenants is a mistake."""
SPACES_BYTES_MAX = 1 << 20
"""All their descriptions together: what one reply lists."""

_MAGIC = int.from_bytes(b"MOONSPC1", "little")
_MAGIC_WORD, _LAYOUT, _COUNT, _EPOCH, _MODE = range(5)
_HEADER_BYTES = 64
DIGEST_BYTES = 16
_ENTRY = np.dtype(
    [("digest", f"V{DIGEST_BYTES}"), ("epoch", "<u8"), ("created_after", "<f8"), ("start", "<u8"), ("length", "<u8")]
)
FILE_BYTES = _HEADER_BYTES + SPACES_MAX * _ENTRY.itemsize + SPACES_BYTES_MAX

Marks = tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A key space as it was kept. Objects below `epoch`, or created before `created_after`, are purged."""

    digest: bytes
    description: bytes
    epoch: int
    created_after: float


class SpaceFile:
    """Key spaces by number, in memory that outlives the node. Single-threaded; number 0 is always there."""

    def __init__(self, mapping: Mapping) -> None:
        """Over memory of `FILE_BYTES`, which is made an empty registry unless it holds one."""
        self._words = mapping.view[:_HEADER_BYTES].cast("Q")
        self._entries = np.frombuffer(mapping.memory, _ENTRY, SPACES_MAX, _HEADER_BYTES)
        self._texts = mapping.view[_HEADER_BYTES + SPACES_MAX * _ENTRY.itemsize :]
        self.texts_bytes = 0
        """What the descriptions take so far."""
        if self._words[_MAGIC_WORD] != _MAGIC or self._words[_LAYOUT] != LAYOUT_VERSION:
            for word, value in ((_LAYOUT, LAYOUT_VERSION), (_COUNT, 1), (_EPOCH, 1), (_MODE, 0)):
                self._words[word] = value
            self._entries[0] = np.void(bytes(DIGEST_BYTES)), 0, 0.0, 0, 0
            self._words[_MAGIC_WORD] = _MAGIC

    @classmethod
    def open(cls, path: Path) -> SpaceFile:
        """Map the file that an earlier node left; one that is missing, or isn't whole, is made afresh.

        Raises `FolderError` where that fails.
        """
        try:
            mapping = Mapping.open(path, writable=True)
        except FolderError:
            mapping = None
        if mapping is None or mapping.size != FILE_BYTES:
            fd = create_file(path, FILE_BYTES, 0o600)
            try:
                reserve_file(fd, 0, FILE_BYTES, path)
            finally:
                os.close(fd)
            mapping = Mapping.open(path, writable=True)
        return cls(mapping)

    @classmethod
    def anonymous(cls) -> SpaceFile:
        """One in this process's memory, which no restart finds."""
        return cls(Mapping.anonymous(FILE_BYTES))

    @property
    def epoch(self) -> int:
        return self._words[_EPOCH]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._words[_EPOCH] = epoch

    @property
    def mode(self) -> int | None:
        """The mode word, where the operator has set it."""
        return self._words[_MODE] - 1 if self._words[_MODE] else None

    @mode.setter
    def mode(self, mode: int | None) -> None:
        self._words[_MODE] = 0 if mode is None else mode + 1

    def read(self) -> list[Entry]:
        """All that was kept, by number. The first that isn't sound, and those after it, are dropped."""
        found: list[Entry] = []
        for entry in self._entries[: min(self._words[_COUNT], SPACES_MAX)]:
            start, length = int(entry["start"]), int(entry["length"])
            text = bytes(self._texts[start : start + length])
            digest = entry["digest"].tobytes()
            if start != self.texts_bytes or len(text) != length or (found and description_digest(text) != digest):
                break
            found.append(Entry(digest, text, int(entry["epoch"]), float(entry["created_after"])))
            self.texts_bytes += length
        self._words[_COUNT] = max(1, len(found))
        return found

    def append(self, digest: bytes, description: bytes) -> None:
        """Keep one more; the caller has looked that there is room."""
        count, start = self._words[_COUNT], self.texts_bytes
        self.texts_bytes += len(description)
        self._texts[start : self.texts_bytes] = description
        self._entries[count] = np.void(digest), 0, 0.0, start, len(description)
        self._words[_COUNT] = count + 1

    def mark(self, numbers: list[int], epochs: list[int], created_after: list[float]) -> None:
        """Keep where purges cut these key spaces."""
        self._entries["created_after"][numbers] = created_after
        self._entries["epoch"][numbers] = epochs

    def marks(self) -> Marks:
        """Where purges cut, by number: epochs and times, as they are now."""
        entries = self._entries[: self._words[_COUNT]]
        return entries["epoch"].copy(), entries["created_after"].copy()
