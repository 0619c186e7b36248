"""The key spaces that a node knows: digests, descriptions, what lives in each, and where purges cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from moonpool.errors import InvalidRequest, KeySpaceConflict, ReadOnly
from moonpool.folder.spaces import DIGEST_BYTES, SPACES_BYTES_MAX, SPACES_MAX, Marks, SpaceFile
from moonpool.keys.canonical import DESCRIPTION_BYTES_MAX, canonical_json, description_digest
from moonpool.keys.fingerprints import PAIRED_KEY_BYTES
from moonpool.wire.messages import SpaceInfo


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
    labels: dict[str, Any] = field(init=False)
    """What a purge may name it by: `model` and `tenant`, where its description has them."""

    def __post_init__(self) -> None:
        told: dict[str, Any] = msgspec.json.decode(self.description)
        self.labels = {name: told[name] for name in ("model", "tenant") if name in told}


class KeySpaces:
    """All key spaces by number and digest; number 0 holds the keys of no declared space."""

    def __init__(self, file: SpaceFile | None = None) -> None:
        """What an earlier node kept in `file`; None = an empty registry in memory alone."""
        self._file = SpaceFile.anonymous() if file is None else file
        self.spaces: list[KeySpace] = []
        self._by_digest: dict[bytes, int] = {}
        for number, kept in enumerate(self._file.read()):
            digest, description = (kept.digest, kept.description) if number else (b"", b"{}")
            self.spaces.append(KeySpace(number, digest, description, 0, 0, kept.epoch, kept.created_after))
            if number:
                self._by_digest[digest] = number
        self.epoch = self._file.epoch
        """Counts purges. Each object carries the epoch in which it was reserved."""

    @property
    def mode(self) -> int | None:
        """The mode word, where the operator has set it; it outlives the node, as the rest does."""
        return self._file.mode

    @mode.setter
    def mode(self, mode: int | None) -> None:
        self._file.mode = mode

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
        taken = self._file.texts_bytes
        if taken + len(description) > SPACES_BYTES_MAX:
            raise InvalidRequest(
                f"the descriptions of key spaces take {taken} of {SPACES_BYTES_MAX} bytes, another {len(description)} "
                "don't fit: put a digest of long parts into a description instead"
            )
        if len(self.spaces) >= SPACES_MAX:
            raise InvalidRequest(f"the node keeps {SPACES_MAX} key spaces already; purge it and restart it empty")
        space = KeySpace(len(self.spaces), digest, description)
        self._file.append(digest, description)
        self.spaces.append(space)
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
                chosen = [space for space in chosen if space.labels.get(name) == value]
        return chosen

    def cut(self, spaces: list[KeySpace], created_before: float | None) -> None:
        """Begin a purge: of all that these spaces hold, or of what was created before a time."""
        self.epoch = self._file.epoch = self.epoch + 1
        for space in spaces:
            if created_before is None:
                space.epoch = self.epoch
            else:
                space.created_after = max(space.created_after, created_before)
        self._file.mark(
            [space.number for space in spaces],
            [space.epoch for space in spaces],
            [space.created_after for space in spaces],
        )

    def marks(self) -> Marks:
        """Where purges cut, by key space: the first epoch, and the earliest time, of what they leave."""
        return self._file.marks()

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
