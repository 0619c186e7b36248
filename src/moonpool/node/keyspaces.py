"""The key spaces that a node knows: digests, descriptions, what lives in each, and where purges cut."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moonpool.errors import FolderError, InvalidRequest, KeySpaceConflict
from moonpool.keys.fingerprints import PAIRED_KEY_BYTES
from moonpool.wire.messages import SpaceInfo

DIGEST_BYTES = 16
SPACES_MAX = 4096
"""Key spaces a node keeps: each costs a line in memory; more of them than models × tenants is a mistake."""
DESCRIPTION_BYTES_MAX = 64 * 1024


class _Saved(msgspec.Struct):
    digest: bytes
    description: bytes
    epoch: int
    created_after: float


class _File(msgspec.Struct):
    epoch: int
    spaces: list[_Saved]


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
        found.epoch = saved.epoch
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

    def declare(self, digest: bytes, description: bytes) -> KeySpace:
        """Remember a space durably, or find it. Raises `KeySpaceConflict` where the description differs."""
        if len(digest) != DIGEST_BYTES:
            raise InvalidRequest(f"a key-space digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        if len(description) > DESCRIPTION_BYTES_MAX:
            raise InvalidRequest(f"a description of {len(description)} bytes exceeds {DESCRIPTION_BYTES_MAX}")
        number = self._by_digest.get(digest)
        if number is not None:
            space = self.spaces[number]
            if space.description != description:
                raise KeySpaceConflict(
                    f"key space {digest.hex()} is declared as {space.description.decode(errors='replace')[:200]}; "
                    "what was declared now differs: the digest must cover all of the description"
                )
            return space
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
            _File(self.epoch, [_Saved(s.digest, s.description, s.epoch, s.created_after) for s in self.spaces])
        )
        part = self.path.with_suffix(".part")
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(body)
            os.replace(part, self.path)
        except OSError as error:
            raise FolderError(f"{self.path} can't be written: {error.strerror}") from error


def _describes(description: bytes, name: str, value: str) -> bool:
    try:
        told = msgspec.json.decode(description)
    except msgspec.DecodeError:
        return False
    return isinstance(told, dict) and told.get(name) == value
