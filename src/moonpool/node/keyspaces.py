"""The key spaces that a node knows: digests, descriptions, what lives in each, and where purges cut."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from moonpool.errors import FolderError, InvalidRequest, KeySpaceConflict, ReadOnly
from moonpool.keys.canonical import DESCRIPTION_BYTES_MAX, canonical_json, description_digest
from moonpool.keys.fingerprints import PAIRED_KEY_BYTES
from moonpool.wire.messages import SpaceInfo

DIGEST_BYTES = 16
Marks = tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]
SPACES_MAX = 4096
"""Key spaces a node keeps: each costs a line in memory; more of them than models × tenants is a mistake."""
SPACES_BYTES_MAX = 1 << 20
"""All their descriptions together: what one reply lists, and what is written anew at each change, in some 2 ms."""


class _Saved(msgspec.Struct):
    digest: bytes
    description: bytes
    epoch: int
    created_after: float


class _File(msgspec.Struct):
    epoch: int
    spaces: list[_Saved]
    mode: int | None = None


@dataclass(slots=True)
class KeySpace:
    """One space's account. Objects below `epoch` or created before `created_after` have been purged."""

    number: int
    digest: bytes
    description: bytes
    objects: int = 0
    live_bytes: int = 0
    epoch: int = 0
    created_after: float = 0.0


@dataclass(slots=True)
class KeySpaces:
    """All key spaces by number and digest; number 0 holds the keys of no declared space.

    Kept in a file beside the pool (`path`; None = in memory alone), replaced as a whole at each change.
    """

    path: Path | None = None
    epoch: int = 1
    """Counts purges. Each object carries the epoch in which it was reserved."""
    mode: int | None = None
    """The mode word, where the operator has set it; it outlives the node, as the rest does."""
    spaces: list[KeySpace] = field(default_factory=lambda: [KeySpace(0, b"", b"{}")])
    _by_digest: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> KeySpaces:
        """Read what an earlier node kept. A missing or unreadable file gives an empty registry."""
        found = cls(path)
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError):
            return found
        found.epoch, found.mode = saved.epoch, saved.mode
        for number, space in enumerate(saved.spaces):
            entry = KeySpace(number, space.digest, space.description, 0, 0, space.epoch, space.created_after)
            if number == 0:
                found.spaces[0] = entry
            else:
                found.spaces.append(entry)
                found._by_digest[space.digest] = number
        return found

    def number_of(self, key: bytes) -> int:
        """The number of the space that a key belongs to; 0 where none was declared for it."""
        if len(key) != PAIRED_KEY_BYTES:
            return 0
        return self._by_digest.get(key[:DIGEST_BYTES], 0)

    def declare(self, digest: bytes, description: bytes, *, read_only: bool = False) -> KeySpace:
        """Remember a space durably, or find it. Raises `KeySpaceConflict` where the description differs, and
        `ReadOnly` where nobody has declared it and the caller may not."""
        number = self._by_digest.get(digest)
        if number is not None:
            space = self.spaces[number]
            if space.description != description:
                raise KeySpaceConflict(
                    f"key space {digest.hex()} is declared as {space.description.decode(errors='replace')[:200]}; "
                    "what was declared now differs: the digest must cover all of the description"
                )
            return space
        if read_only:
            raise ReadOnly(f"key space {digest.hex()} is not declared yet, and a read-only session can't do it")
        _check_description(digest, description)
        taken = sum(len(space.description) for space in self.spaces)
        if taken + len(description) > SPACES_BYTES_MAX:
            raise InvalidRequest(
                f"the descriptions of key spaces take {taken} of {SPACES_BYTES_MAX} bytes, another {len(description)} "
                "don't fit: put a digest of long parts into a description instead"
            )
        if len(self.spaces) >= SPACES_MAX:
            raise InvalidRequest(f"the node keeps {SPACES_MAX} key spaces already; purge it and restart it empty")
        space = KeySpace(len(self.spaces), digest, description, epoch=0)
        self.spaces.append(space)
        try:
            self.save()
        except FolderError:
            self.spaces.pop()
            raise
        self._by_digest[digest] = space.number
        return space

    def select(self, digests: list[bytes], model: str, tenant: str) -> list[KeySpace]:
        """The spaces that a purge names: by digest, by model, by tenant (all that are given must fit)."""
        chosen = self.spaces
        if digests:
            missing = [digest for digest in digests if digest not in self._by_digest]
            if missing:
                raise InvalidRequest(f"no key space {missing[0].hex()} is declared; `moonpool spaces` lists them")
            chosen = [self.spaces[self._by_digest[digest]] for digest in digests]
        for name, value in (("model", model), ("tenant", tenant)):
            if value:
                chosen = [space for space in chosen if _describes(space.description, name, value)]
        return chosen

    def marks(self) -> Marks:
        """Where purges cut, by key space: the first epoch, and the earliest time, of what they leave."""
        epochs = np.array([space.epoch for space in self.spaces], np.uint64)
        return epochs, np.array([space.created_after for space in self.spaces])

    def covered(self, rows: npt.NDArray[Any], marks: Marks | None = None) -> npt.NDArray[np.bool_]:
        """Which of these records purges cover that cut where `marks` says, by default all up to now."""
        number = (rows["word_and_space"] & 0xFFFF_FFFF).astype(np.int64)
        epochs, cuts = marks or self.marks()
        known = np.minimum(number, len(epochs) - 1)  # spaces may have been declared since
        covered: npt.NDArray[np.bool_] = (rows["epoch"] >> 8 < epochs[known]) | (rows["created"] < cuts[known])
        covered &= known == number
        return covered

    def infos(self) -> list[SpaceInfo]:
        return [
            SpaceInfo(space.number, space.digest, space.description, space.objects, space.live_bytes)
            for space in self.spaces
        ]

    def save(self) -> None:
        """Write the file anew, whole or not at all."""
        if self.path is None:
            return
        body = msgspec.json.encode(
            _File(
                self.epoch,
                [_Saved(s.digest, s.description, s.epoch, s.created_after) for s in self.spaces],
                self.mode,
            )
        )
        part = self.path.with_suffix(".part")
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(body)
            os.replace(part, self.path)
        except OSError as error:
            raise FolderError(f"{self.path} can't be written: {error.strerror}") from error


def _check_description(digest: bytes, description: bytes) -> None:
    """Raises `InvalidRequest` unless `description` is the canonical JSON of an object, and `digest` its digest."""
    if len(description) > DESCRIPTION_BYTES_MAX:
        raise InvalidRequest(f"a description of {len(description)} bytes exceeds {DESCRIPTION_BYTES_MAX}")
    if description_digest(description) != digest:
        raise InvalidRequest(f"{digest.hex()} is not the digest of the description: the first 16 bytes of its SHA-256")
    try:
        canonical = canonical_json(msgspec.json.decode(description, type=dict[str, Any]))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"a description is a JSON object: {error}") from None
    if canonical != description:
        raise InvalidRequest("a description is canonical JSON: keys sorted, no white space, strings in normal form C")


def _describes(description: bytes, name: str, value: str) -> bool:
    told: dict[str, Any] = msgspec.json.decode(description)
    return told.get(name) == value
