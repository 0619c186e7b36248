"""Which bytes go where, in which portions: no memory is touched here.

A batch is cut into *steps*. A staged step fills one staging slot with the same part of several objects of one region:
a few large copies between pool and slot, and one kernel between slot and blocks. A direct step is copies alone,
between pool and blocks that are long enough for the copy engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonpool.gpu.mover import SKIP, Region, Transfer

DIRECT_STORE_BYTES_MIN = 1 << 20
"""From here on a piece is stored without staging, which leaves the multiprocessors to a forward that may be running:
single copies of 2 MB reach 49.5 of the wire's 55 GB/s, of 256 KB 35."""
DIRECT_LOAD_BYTES_MIN = 8 << 20
"""From here on a piece is loaded without staging. Through staging pieces of 2 MB come at 53 GB/s, singly at 49."""
COPIES_PER_STEP_MAX = 16
"""A step's copies. With the steps in flight it bounds what is queued in the driver, whose queue takes about 1,000
operations before a call blocks."""
OBJECTS_PER_STEP_MAX = 256
"""Bounds the table of block ids that goes with a step; objects of 128 KiB still fill a slot of 32 MiB."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of the pool within one chunk of its registration."""

    offset: int
    length: int
    registered: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous range of an object that fits a staging slot: whole planes, or some blocks of one plane."""

    offset: int
    length: int
    first_plane: int
    planes: int
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`length` contiguous bytes between `pool` (offset in the pool) and `other`: an offset in the slot where the
    step is staged, else an address."""

    pool: int
    other: int
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """One portion of a batch: its copies, and where it is staged, the part of these `transfers` that fills the slot
    one after another. `bytes` count what moves."""

    region: int
    copies: tuple[Copy, ...]
    part: Part | None = None
    transfers: tuple[Transfer, ...] = ()


def split(offset: int, length: int, chunk_bytes: int, frontier_bytes: int) -> list[Piece]:
    """Cut a range of the pool at the borders of its chunks, none of which one copy may cross; a piece is registered
    where all of its chunk lies below the frontier."""
    pieces = []
    end = offset + length
    while offset < end:
        border = (offset // chunk_bytes + 1) * chunk_bytes
        stop = min(end, border)
        pieces.append(Piece(offset, stop - offset, stop <= frontier_bytes))
        offset = stop
    return pieces


def check(transfers: Sequence[Transfer], regions: Sequence[Region], pool_bytes: int) -> None:
    """Raises `ValueError` for a transfer that doesn't fit its region or the pool."""
    for transfer in transfers:
        if not 0 <= transfer.region < len(regions):
            raise ValueError(f"region {transfer.region} is none of the mover's {len(regions)}")
        region = regions[transfer.region]
        if len(transfer.blocks) != region.blocks_per_object:
            raise ValueError(f"{len(transfer.blocks)} block ids, but an object has {region.blocks_per_object} blocks")
        if not 0 <= transfer.offset <= pool_bytes - region.object_bytes:
            raise ValueError(
                f"an object of {region.object_bytes} bytes at {transfer.offset} isn't inside the pool of {pool_bytes}"
            )
        if min(transfer.blocks, default=0) < SKIP:
            raise ValueError(f"block id {min(transfer.blocks)} is neither a block nor {SKIP}")


def is_direct(region: Region, *, load: bool) -> bool:
    """True where every piece is long enough to be copied without staging."""
    least_bytes = DIRECT_LOAD_BYTES_MIN if load else DIRECT_STORE_BYTES_MIN
    return all(plane.piece_bytes >= least_bytes for plane in region.planes)


def parts(region: Region, slot_bytes: int) -> tuple[Part, ...]:
    """Cut an object so that each part fits a slot: as many whole planes as fit, a plane that is longer by its blocks.

    Raises `ValueError` where not even one piece fits.
    """
    found: list[Part] = []
    offset, first, length = 0, 0, 0
    blocks = region.blocks_per_object
    for index, plane in enumerate(region.planes):
        plane_bytes = blocks * plane.piece_bytes
        if length + plane_bytes > slot_bytes and length:
            found.append(Part(offset, length, first, index - first, 0, blocks))
            offset, first, length = offset + length, index, 0
        if plane_bytes <= slot_bytes:
            length += plane_bytes
            continue
        at_once = slot_bytes // plane.piece_bytes
        if at_once == 0:
            raise ValueError(f"a piece of {plane.piece_bytes} bytes doesn't fit a staging slot of {slot_bytes}")
        for block in range(0, blocks, at_once):
            count = min(at_once, blocks - block)
            found.append(Part(offset, count * plane.piece_bytes, index, 1, block, count))
            offset += count * plane.piece_bytes
        first = index + 1
    if length:
        found.append(Part(offset, length, first, len(region.planes) - first, 0, blocks))
    return tuple(found)


def wanted(region: Region, part: Part, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges (offset in the part, length) of the part's blocks that aren't skipped, neighbours merged."""
    if SKIP not in blocks:
        yield 0, part.length
        return
    start = at = 0
    for plane in region.planes[part.first_plane : part.first_plane + part.planes]:
        for block in blocks[part.first_block : part.first_block + part.blocks]:
            if block == SKIP:
                if at > start:
                    yield start, at - start
                start = at + plane.piece_bytes
            at += plane.piece_bytes
    if at > start:
        yield start, at - start


class Planner:
    """Cuts batches into steps, for slots of `slot_bytes`. `exact`: what is skipped isn't copied on the pool's side
    either, as a store needs it; a load rather makes one long copy and scatters what is wanted."""

    def __init__(self, regions: Sequence[Region], slot_bytes: int, *, exact: bool) -> None:
        self.regions, self.slot_bytes, self.exact = tuple(regions), slot_bytes, exact
        self.parts = tuple(() if is_direct(region, load=not exact) else parts(region, slot_bytes) for region in regions)

    @property
    def ids_max(self) -> int:
        """The most block ids that a staged step has."""
        every = (part for cut in self.parts for part in cut)
        return max(
            (part.blocks * min(OBJECTS_PER_STEP_MAX, self.slot_bytes // part.length) for part in every), default=0
        )

    def steps(self, transfers: Sequence[Transfer]) -> list[Step]:
        """The steps of a batch, region by region; transfers that skip all blocks are in none."""
        by_region: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if any(block != SKIP for block in transfer.blocks):
                by_region.setdefault(transfer.region, []).append(transfer)
        found: list[Step] = []
        for region, members in by_region.items():
            if not self.parts[region]:
                found += self._direct(region, members)
            for part in self.parts[region]:
                found += self._staged(region, part, members)
        return found

    def _staged(self, region: int, part: Part, transfers: Sequence[Transfer]) -> Iterator[Step]:
        copies: list[Copy] = []
        taken: list[Transfer] = []
        at = 0
        for transfer in transfers:
            more = list(self._ranges(region, part, transfer))
            full = len(taken) == OBJECTS_PER_STEP_MAX or at + part.length > self.slot_bytes
            if taken and (full or len(copies) + len(more) > COPIES_PER_STEP_MAX):
                yield Step(region, tuple(copies), part, tuple(taken))
                copies, taken, at = [], [], 0
            for start, length in more:
                _append(copies, Copy(transfer.offset + part.offset + start, at + start, length))
            taken.append(transfer)
            at += part.length
        if taken:
            yield Step(region, tuple(copies), part, tuple(taken))

    def _ranges(self, region: int, part: Part, transfer: Transfer) -> Iterator[tuple[int, int]]:
        if self.exact:
            return wanted(self.regions[region], part, transfer.blocks)
        return iter(((0, part.length),))

    def _direct(self, number: int, transfers: Sequence[Transfer]) -> Iterator[Step]:
        region = self.regions[number]
        copies: list[Copy] = []
        for transfer in transfers:
            at = transfer.offset
            for plane in region.planes:
                size = plane.piece_bytes
                for block in transfer.blocks:
                    if block != SKIP:
                        if len(copies) == COPIES_PER_STEP_MAX:
                            yield Step(number, tuple(copies))
                            copies = []
                        _append(copies, Copy(at, plane.address + block * plane.stride_bytes, size))
                    at += size
        if copies:
            yield Step(number, tuple(copies))


def _append(copies: list[Copy], copy: Copy) -> None:
    """Add a copy, as part of the last one where it goes on from there on both sides."""
    if copies:
        last = copies[-1]
        if last.pool + last.length == copy.pool and last.other + last.length == copy.other:
            copies[-1] = Copy(last.pool, last.other, last.length + copy.length)
            return
    copies.append(copy)
