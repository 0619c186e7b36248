"""What a mover is: it copies objects between the pool and the blocks of an engine's KV cache, in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.errors import MoonpoolError

SKIP = -1
"""Instead of a block id: this block isn't copied. A load leaves the GPU's as they are, a store the pool's bytes."""


class MoverFailed(MoonpoolError):
    """The mover has met an error, or is closed, and copies no more. The engine goes on without the pool."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's blocks, or one contiguous half of them (K or V), in the memory of this process or its device.

    Block b is the `piece_bytes` contiguous bytes at `address + b × stride_bytes`.
    """

    address: int
    stride_bytes: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """One KV group of this worker: its planes, and how many blocks an object has.

    An object is laid out "plane, block, bytes": for each plane in order, the object's blocks one after another.
    """

    planes: tuple[Plane, ...]
    blocks_per_object: int

    @property
    def object_bytes(self) -> int:
        return self.blocks_per_object * sum(plane.piece_bytes for plane in self.planes)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One object on its way: its extent's `offset` in the pool in bytes, the index of its region, and the ids of the
    blocks that it is made of, `blocks_per_object` of them, each one a block of every plane, or `SKIP`."""

    offset: int
    region: int
    blocks: tuple[int, ...]


class Ticket(Protocol):
    """One submitted batch. Any thread may ask; no method but `wait` blocks."""

    @property
    def error(self) -> str | None:
        """Why the bytes are not to be trusted, once `done()`; None while there is no such reason."""

    def read(self) -> bool:
        """True once nothing is read any more: a store's blocks may be reused, a load's extents be let go."""

    def done(self) -> bool:
        """True once all bytes are where they belong, or `error` is set; nothing of the batch is running then."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `done()`, the interpreter lock not held; False when `timeout_s` has passed before."""


class Mover(Protocol):
    """Copies batches of objects in the background, each direction's in the order in which they were submitted."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The KV groups that transfers refer to."""

    def load(self, transfers: Sequence[Transfer], *, after: object | None = None) -> Ticket:
        """Pool → KV cache. Returns at once. The extents stay the caller's until `Ticket.read`; blocks are written only
        after what `after` marks, until `Ticket.done`. Raises `MoverFailed`; `ValueError` for what doesn't fit a
        region or the pool, and then has started nothing."""

    def store(self, transfers: Sequence[Transfer], *, after: object | None = None) -> Ticket:
        """KV cache → pool. Returns at once. Blocks are read only after what `after` marks, until `Ticket.read`; the
        extents are written until `Ticket.done`. Raises as `load` does."""

    def enter_thread(self) -> None:
        """To be called by a thread other than the one that made the mover before it submits anything. Idempotent."""

    def mark(self) -> object | None:
        """All that has been submitted to the engine's stream by now, to be passed as `after`; None on the host."""

    def close(self) -> None:
        """Copy no more, and wait until nothing is running; what had not been done by then is done with an error.
        Bounded: what a hung device never ends is logged and stays undone. Safe to call again."""
