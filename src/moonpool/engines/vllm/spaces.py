"""The key spaces of one engine: its own, its adapters', and what each rank holds of them.

Adapters are named by the JSON of their key space; "" is the base model.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

from moonpool.engines.vllm.compat import KvGroup, Parallel
from moonpool.engines.vllm.identity import Adapters, RankReport, disagreement, image_ok, rank_spaces, shard_space
from moonpool.keys import KeySpace


class Spaces:
    """The scheduler's, computed once and told to the workers. For one thread."""

    def __init__(self, base: KeySpace, groups: tuple[KvGroup, ...], parallel: Parallel, lora_dtype: str = "") -> None:
        self.base = base
        self._groups, self._parallel = groups, parallel
        self._adapters = Adapters(lora_dtype)
        self._reports: dict[tuple[int, int], RankReport] = {}
        self._shards: dict[str, list[list[KeySpace]]] = {}

    def reported(self, reports: tuple[RankReport, ...]) -> str | None:
        """Take in what workers say of themselves. Returns why they can't be served together, once all have."""
        for report in reports:
            self._reports[report.rank] = report
        return disagreement(self.base, self._groups, self._parallel, self._reports) if self.complete else None

    @property
    def complete(self) -> bool:
        """Whether all workers have reported: nothing can be looked up before."""
        return len(self._reports) == len(self._parallel.ranks)

    @property
    def told(self) -> str:
        """The base space as JSON; another after `new_epoch`."""
        return self.base.canonical.decode()

    @property
    def object_bytes(self) -> int:
        """Bytes of the KV cache of one object's tokens, over all groups and ranks."""
        return sum(sum(report.object_bytes) for report in self._reports.values())

    def new_epoch(self) -> None:
        """From now on this engine's keys are its own: what was stored before, by whomever, no longer matches."""
        self.base = dataclasses.replace(self.base, extra={**self.base.extra, "epoch": uuid.uuid4().hex})
        self._shards.clear()

    def adapter_of(self, request: Any) -> str | None:
        """The adapter of a request; None where what conditions its KV can't be told by content."""
        if not image_ok(request):
            return None
        if request.lora_request is None:
            return ""
        space = self._adapters.space(self.base, request)
        return None if space is None else space.canonical.decode()

    def prefixes(self, adapter: str, group: int) -> list[bytes]:
        """What the keys of a KV group's shards begin with, one a shard: ranks that hold the same share it."""
        return list(dict.fromkeys(space.digest for space in self._of(adapter)[group]))

    def shard_of_rank(self, group: int) -> list[int]:
        """Per rank, the place of its shard in `prefixes`."""
        prefixes = self.prefixes("", group)
        return [prefixes.index(space.digest) for space in self._of("")[group]]

    @property
    def known(self) -> Mapping[str, list[list[KeySpace]]]:
        """Per adapter that has been asked for, the base model first, what is held of it: by KV group, then by rank."""
        self._of("")
        return self._shards

    def _of(self, adapter: str) -> list[list[KeySpace]]:
        found = self._shards.get(adapter)
        if found is None:
            space = KeySpace.from_description(adapter) if adapter else self.base
            found = self._shards[adapter] = rank_spaces(space, self._parallel, self._reports)
        return found


class RankSpaces:
    """One worker's: of what the scheduler tells, the shards that this rank holds. For one thread."""

    def __init__(self, parallel: Parallel, report: RankReport) -> None:
        self.report = report
        self._parallel = parallel
        self._base: KeySpace | None = None
        self._shards: dict[str, list[KeySpace]] = {}

    def tell(self, told: str) -> None:
        """Store under this space from now on. Raises `ValueError` for what this version can't read."""
        self._base = KeySpace.from_description(told)
        self._shards.clear()

    def of(self, adapter: str) -> list[KeySpace]:
        """The shards' spaces, by KV group."""
        found = self._shards.get(adapter)
        if found is None:
            assert self._base is not None, "nothing is stored before the scheduler has told under which key space"
            space = KeySpace.from_description(adapter) if adapter else self._base
            groups = range(len(self.report.texts))
            found = self._shards[adapter] = [shard_space(space, self._parallel, self.report, g) for g in groups]
        return found

    def all(self) -> list[KeySpace]:
        """All that have been asked for, to be declared to the node."""
        return [space for shards in self._shards.values() for space in shards]
