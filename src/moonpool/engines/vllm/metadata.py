"""What the scheduler tells the workers each step, and what they tell back. Plain data: it crosses processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from moonpool.engines.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from moonpool.engines.vllm.identity import RankReport
from moonpool.matching import Extents


class Extent(NamedTuple):
    """One object in the pool, kept in place by the scheduler's hold: where it lies, and what it was known as then."""

    offset: int
    size: int
    id: int
    word: int
    """Of the shared table: it names the object's generation for as long as nobody has touched it."""
    checksum: int = 0
    """Of its bytes, where loads are verified."""


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

    @classmethod
    def of_nothing(cls, request_id: str, blocks: Sequence[int], tokens: int) -> Load:
        """A load that fails wherever it is tried: for a request that the engine has wait for one."""
        return cls(request_id, b"", 0, (Part(0, tuple(blocks), ()),), tokens)


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


class Check(NamedTuple):
    """What of a hit was computed all the same, to be compared with what is stored: shadow mode."""

    number: int
    load: Load
    """What would have been loaded, or a part of it: objects, and the blocks that hold what was computed."""
    adapter: str
    digests: tuple[bytes, ...]
    """Of each part's object."""


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's work."""

    loads: list[Load] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    """Of requests whose blocks are complete with this step's forward."""
    saves: list[Save] = field(default_factory=list)
    unread: frozenset[int] = frozenset()
    """Saves that must have been read before this step writes anything: some of their blocks are others' now."""
    space: str = ""
    """The engine's key space as JSON, told whenever it changes: workers store under this one, and what they were
    loading under the one before is no longer to be used."""


class Moved(NamedTuple):
    """Bytes, and how long they had the wire for themselves."""

    size: int
    time_s: float


NO_BYTES = Moved(0, 0.0)


class Checked(NamedTuple):
    """How a check went, on so many ranks; in objects."""

    ranks: int
    same: int = 0
    different: int = 0
    dropped: int = 0
    """They went away meanwhile, or couldn't be read."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What one step's workers have to tell; of several ranks' reports one is made."""

    read: dict[int, int] = field(default_factory=dict)
    """Per save: on how many ranks its blocks have been read."""
    loaded: dict[str, Moved] = field(default_factory=dict)
    """Per request whose load has ended well: bytes of all ranks, seconds of the slowest."""
    failed: dict[str, str] = field(default_factory=dict)
    """Requests whose load failed on a rank, and why."""
    stored_objects: int = 0
    """Of the first KV group."""
    stored: Moved = NO_BYTES
    """Of all KV groups, ranks and seconds added up."""
    unstored: dict[str, int] = field(default_factory=dict)
    """Objects that weren't stored, by reason."""
    checks: dict[int, Checked] = field(default_factory=dict)
    """Per check, by number."""
    errors: list[str] = field(default_factory=list)
    ranks: tuple[RankReport, ...] = ()
    """What a worker says of itself, once."""
    off: str = ""
    """Why a worker can't go on with the pool, for good."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """One report of both. Neither is changed."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            _joined(self.read, other.read, int.__add__),
            _joined(self.loaded, other.loaded, lambda a, b: Moved(a.size + b.size, max(a.time_s, b.time_s))),
            self.failed | other.failed,
            self.stored_objects + other.stored_objects,
            Moved(self.stored.size + other.stored.size, self.stored.time_s + other.stored.time_s),
            _joined(self.unstored, other.unstored, int.__add__),
            _joined(self.checks, other.checks, lambda a, b: Checked(*map(sum, zip(a, b, strict=True)))),
            self.errors + other.errors,
            self.ranks + other.ranks,
            self.off or other.off,
        )

    def __bool__(self) -> bool:
        return bool(
            self.read
            or self.loaded
            or self.failed
            or self.stored_objects
            or self.stored.size
            or self.unstored
            or self.checks
            or self.errors
            or self.ranks
            or self.off
        )


class Ended(NamedTuple):
    """What has ended on a worker since it was last asked; each request is named once in each set."""

    received: set[str]
    """Requests whose load has ended, well or not."""
    failed: set[str]
    """Those of them whose blocks don't hold what was to be loaded."""
    failed_blocks: set[int]


Key = TypeVar("Key")
Value = TypeVar("Value")


def _joined(one: dict[Key, Value], other: dict[Key, Value], add: Callable[[Value, Value], Value]) -> dict[Key, Value]:
    """Both, with what stands in both added up."""
    joined = dict(one)
    for key, value in other.items():
        joined[key] = add(joined[key], value) if key in joined else value
    return joined


def own_extents(load: Load, rank: int) -> Sequence[tuple[Part, Extent]]:
    """Each part of a load with the extent that is this rank's."""
    return [(part, part.extents[rank]) for part in load.parts]


def extents_of(load: Load, rank: int) -> Extents:
    """This rank's extents, to be asked whether they are still good."""
    own = [extent for _, extent in own_extents(load, rank)]
    return Extents(
        load.pool_id, load.epoch, [e.id for e in own], [e.offset for e in own], [e.size for e in own],
        [e.word for e in own],
    )  # fmt: skip
