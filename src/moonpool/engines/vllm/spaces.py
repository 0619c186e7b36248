"""The key spaces of one engine: its own, its adapters', and what each rank holds of them."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable

from moonpool.keys import KeySpace

Split = Callable[[KeySpace], list[list[KeySpace]]]
"""A whole model's key space to those of its shards, by KV group and rank."""


class Spaces:
    """What the scheduler computes once and hands to the workers as JSON (`told`), so that they can't disagree.

    For one thread. Adapters are named by the JSON of their key space; "" is the base model.
    """

    def __init__(self, split: Split, base: KeySpace | None = None) -> None:
        self._split = split
        self._base: KeySpace | None = base
        self._shards: dict[str, list[list[KeySpace]]] = {}

    @property
    def base(self) -> KeySpace:
        assert self._base is not None, "a worker stores only after the scheduler has told it under which key space"
        return self._base

    @property
    def told(self) -> str:
        """The base space as JSON; another after `new_epoch`."""
        return self.base.canonical.decode()

    def tell(self, told: str) -> None:
        """Take over the scheduler's. Raises `ValueError` for what this version can't read."""
        self._base = KeySpace.from_description(told)
        self._shards.clear()

    def new_epoch(self) -> None:
        """From now on this engine's keys are its own: what was stored before, by whomever, no longer matches."""
        self._base = dataclasses.replace(self.base, extra={**self.base.extra, "epoch": uuid.uuid4().hex})
        self._shards.clear()

    def of(self, adapter: str) -> list[list[KeySpace]]:
        """The shards' spaces, by KV group and rank."""
        found = self._shards.get(adapter)
        if found is None:
            found = self._split(KeySpace.from_description(adapter) if adapter else self.base)
            self._shards[adapter] = found
        return found

    def prefixes(self, adapter: str, group: int) -> list[bytes]:
        """What the keys of a KV group's shards begin with, one a shard: ranks that hold the same share it."""
        return list(dict.fromkeys(space.digest for space in self.of(adapter)[group]))

    def shard_of_rank(self, group: int) -> list[int]:
        """Per rank, the place of its shard in `prefixes`."""
        prefixes = self.prefixes("", group)
        return [prefixes.index(space.digest) for space in self.of("")[group]]

    def prefix_of_rank(self, adapter: str, group: int, rank: int) -> bytes:
        """What the keys of this rank's shard begin with."""
        return self.of(adapter)[group][rank].digest

    def of_rank(self, rank: int) -> list[KeySpace]:
        """All spaces that this rank stores under, to be declared to the node."""
        return [group[rank] for shards in self._shards.values() for group in shards]
