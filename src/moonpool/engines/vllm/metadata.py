"""What the scheduler tells the workers each step, and what they tell back. Plain data: it crosses processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from moonpool.engines.vllm.identity import RankReport


class Extent(NamedTuple):
    """One object in the pool, kept in place by the scheduler's hold: where it lies, and what it was known as then."""

    offset: int
    size: int
    id: int
    word: int
    """Of the shared table: it names the object's generation for as long as nobody has touched it."""


class Part(NamedTuple):
    """One object of one KV group, and the group's blocks that it fills (-1 where the GPU has that block already)."""

    group: int
    blocks: tuple[int, ...]
    extents: tuple[Extent, ...]
    """One a rank: each worker takes its own."""


@dataclass(frozen=True, slots=True)
class Load:
    """A request's KV cache, from the pool into its blocks."""

    request_id: str
    pool_id: bytes
    epoch: int
    """The pool's purge epoch when the hold was made: a later one makes the bytes a miss."""
    parts: tuple[Part, ...]
    tokens: int
    """How many tokens the load spares."""

    @property
    def blocks(self) -> set[int]:
        """All blocks that the load writes."""
        return {block for part in self.parts for block in part.blocks if block >= 0}


class Piece(NamedTuple):
    """One object to be stored: the digest of what it holds, and per KV group the blocks that hold it."""

    digest: bytes
    blocks: tuple[tuple[int, ...] | None, ...]
    """None for a group that has let go of these blocks already (a sliding window)."""
    note: bytes
    """What is kept beside the object: for events and for whoever asks where it came from."""


@dataclass(frozen=True, slots=True)
class Save:
    """What a request's step completes, to be stored."""

    number: int
    """Names this save when workers tell that its blocks have been read."""
    request_id: str
    adapter: str
    """Key space of the request's LoRA adapter as JSON, "" for the base model."""
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """One step's work."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    """Their blocks may be written to from this step on."""
    finishing: frozenset[str] = frozenset()
    """Finished requests whose blocks wait for our word that they have been read."""
    space: str = ""
    """The engine's key space as JSON, told whenever it changes: workers store under this one."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What one step's workers have to tell; of several ranks' reports one is made."""

    read: dict[int, int] = field(default_factory=dict)
    """Per save: on how many ranks its blocks have been read."""
    loaded_bytes: int = 0
    load_s: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    """Requests whose load failed on a rank, and why."""
    errors: list[str] = field(default_factory=list)
    ranks: tuple[RankReport, ...] = ()
    """What a worker says of itself, once."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """One report of both. Neither is changed."""
        assert isinstance(other, WorkerReport)
        read = dict(self.read)
        for number, ranks in other.read.items():
            read[number] = read.get(number, 0) + ranks
        return WorkerReport(
            read,
            self.loaded_bytes + other.loaded_bytes,
            max(self.load_s, other.load_s),
            self.failed | other.failed,
            self.errors + other.errors,
            self.ranks + other.ranks,
        )

    def __bool__(self) -> bool:
        return bool(self.read or self.loaded_bytes or self.failed or self.errors or self.ranks)


def own_extents(load: Load, rank: int) -> Sequence[tuple[Part, Extent]]:
    """Each part of a load with the extent that is this rank's."""
    return [(part, part.extents[rank]) for part in load.parts]
