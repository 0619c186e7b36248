"""One direction of the device's mover: its streams, its staging slots, and what waits to be submitted.

Steps go to the device in order, each behind events and not behind this process: a slot's next copy waits on the
device for the kernel that empties it. Whoever calls the mover submits as many steps as may be in flight, which keeps
the wire busy for some 60 ms. What is left is submitted by later calls, or by the mover's helper thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moonpool.gpu.cudart import Cuda
from moonpool.gpu.kernels import Ids, Kernels, Launch, groups
from moonpool.gpu.mover import MoverFailed, Region, Transfer
from moonpool.gpu.plan import Part, Piece, Planner, Step
from moonpool.gpu.tickets import DeviceTicket

SLOTS = 4
"""One is filled and one emptied at any time; the others make up for what the two don't do at the same pace."""
WIRES = 2
"""Streams that steps' copies alternate between: behind one copy the other's is ready to go, so that the wire has no gap
of some 15 us between two, 3% of a slot's time."""
STEPS_MAX = 96
"""In flight: 3 GiB where a slot of 32 MiB is full, 58 ms of the wire. An engine's step takes 20 to 40 ms, for most of
which its thread holds the interpreter lock: the helper can't go on before it has ended."""
OPERATIONS_MAX = 1200
"""In flight, on three streams together: the driver queues some 1,000 on each, then a call blocks."""
OPERATIONS_PER_STEP = 8
"""Beside its copies: ids, events, kernels."""
SLOT_ALIGNMENT = 256


class Memory(Protocol):
    """Where a lane's staging and tables come from."""

    def device(self, size: int) -> Any:
        """`size` bytes of the device's memory, with a `data_ptr()`; freed with the last reference."""

    def pinned(self, count: int) -> Ids:
        """`count` 64-bit numbers of the host's memory that copies may be queued from."""


class Pool(Protocol):
    """What a lane needs of the pool's registration."""

    def split(self, offset: int, length: int) -> list[Piece]: ...


class Event(Protocol):
    """A mark, or an event of torch's."""

    @property
    def cuda_event(self) -> int: ...


@dataclass(slots=True)
class Slot:
    """One staging slot, and the device's table of the block ids of what is in it."""

    address: int
    ids_address: int
    filled: int
    emptied: int = 0
    """The event after which it may be filled anew; 0: it is fresh."""


@dataclass(slots=True)
class Staged:
    """What one step puts into a slot, and the kernels that move it."""

    slot: Slot
    ids: Ids
    launches: list[Launch]


@dataclass(slots=True)
class Batch:
    """What is left to submit of a call."""

    ticket: DeviceTicket
    steps: deque[Step]
    after: Event | None
    waited: set[int] = field(default_factory=set)
    """The streams that wait for `after` already."""
    direct: bool = False
    """Some of it goes without staging."""


Cuts = list[tuple[Piece, int]]
"""A step's copies, cut at the borders of chunks, each with the other side's offset or address."""


class Lane:
    """Submits batches in one direction, in order. Threads may call it at once."""

    def __init__(
        self,
        *,
        load: bool,
        cuda: Cuda,
        pool: Pool,
        pool_address: int,
        regions: Sequence[Region],
        staging_bytes: int,
        kernels: Kernels | None,
        memory: Memory,
        failed: Callable[[Exception], None],
        overflow: Callable[[], None],
    ) -> None:
        """`failed` is told what a submission met, `overflow` that the helper has to go on."""
        self.load = load
        self._cuda, self._pool, self._pool_address = cuda, pool, pool_address
        self._failed, self._overflow = failed, overflow
        slot_bytes = staging_bytes // SLOTS // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        self._planner = Planner(regions, slot_bytes, exact=not load)
        self._wires = [cuda.stream(urgent=False) for _ in range(WIRES)]
        """Copies to or from the pool, step by step in turn."""
        self._moving = cuda.stream(urgent=True)
        """Kernels."""
        self._ended = [cuda.event() for _ in range(STEPS_MAX)]
        self._joined = cuda.event()
        self._launches: dict[tuple[int, Part], list[Launch]] = {}
        self._slots: list[Slot] = []
        if any(self._planner.parts):
            assert kernels is not None
            self._prepare(kernels, memory, slot_bytes)
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()
        self._in_flight: deque[tuple[int, int]] = deque()
        """The event and the operations of each step that isn't known to have ended, in order."""
        self._operations = self._steps = self._staged = 0
        self._busy = False
        """The helper is at the first step, without the lock."""
        self._abandoned: str | None = None

    def _prepare(self, kernels: Kernels, memory: Memory, slot_bytes: int) -> None:
        ids_max = self._planner.ids_max
        self._staging = memory.device(slot_bytes * SLOTS)
        self._tables = memory.device(ids_max * 8 * SLOTS)
        self._ids = memory.pinned(ids_max * STEPS_MAX).reshape(STEPS_MAX, ids_max)
        self._ids_address = int(self._ids.ctypes.data)
        for number in range(SLOTS):
            address = self._staging.data_ptr() + number * slot_bytes
            self._slots.append(Slot(address, self._tables.data_ptr() + number * ids_max * 8, self._cuda.event()))
        for region, parts in enumerate(self._planner.parts):
            for part in parts:
                found = groups(self._planner.regions[region], part)
                self._launches[region, part] = [kernels.prepare(group, gather=not self.load) for group in found]

    @property
    def waiting(self) -> bool:
        """True while something is left to submit."""
        return bool(self._batches)

    def submit(self, ticket: DeviceTicket, transfers: Sequence[Transfer], after: Event | None) -> None:
        """Queue a batch; returns without waiting for the device. Raises `MoverFailed` where it is abandoned."""
        steps = deque(self._planner.steps(transfers))
        batch = Batch(ticket, steps, after, direct=any(step.part is None for step in steps))
        with self._lock:
            if self._abandoned is not None:
                raise MoverFailed(self._abandoned)
            self._batches.append(batch)
        self.advance()

    def advance(self) -> None:
        """Submit what may be in flight by now. Costs next to nothing where nothing waits."""
        if not self._batches:
            return
        try:
            with self._lock:
                more = self._advance()
        except Exception as error:
            self._failed(error)
        else:
            if more:
                self._overflow()

    def help(self) -> bool:
        """For the helper: the same, and then one step whose extents aren't registered, which takes as long as its
        copies. True where it has done such a step: there may be another at once."""
        try:
            with self._lock:
                if not self._advance() or self._full():
                    return False
                batch = self._batches[0]
                self._busy = True
            try:
                self._take(batch, self._cut(batch.steps[0]))
            finally:
                with self._lock:
                    self._busy = False
                    if self._abandoned is not None:
                        self._abandon(self._abandoned)
        except Exception as error:
            self._failed(error)
        return True

    def abandon(self, error: str) -> None:
        """Submit no more: what waits is done with `error` now, what is under way when it has ended."""
        with self._lock:
            self._abandoned = self._abandoned or error
            if not self._busy:
                self._abandon(error)

    def flush(self) -> list[int]:
        """Events that are reached when nothing of it is running any more. Raises `CudaError`."""
        with self._lock:
            streams = (*self._wires, self._moving)
            events = [self._cuda.event() for _ in streams]
            for event, stream in zip(events, streams, strict=True):
                self._cuda.record(event, stream)
        return events

    def close(self) -> None:
        """Give back streams, events and memory; nothing may be running. Raises `CudaError`."""
        for stream in (*self._wires, self._moving):
            self._cuda.destroy_stream(stream)
        for event in (self._joined, *self._ended, *(slot.filled for slot in self._slots)):
            self._cuda.destroy_event(event)
        self._slots.clear()
        self._launches.clear()
        self._staging = self._tables = None

    # ---- under the lock ------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """True where something is left, for want of room or since it takes the helper."""
        while self._batches and not self._busy:
            batch = self._batches[0]
            if batch.steps:
                if self._full():
                    return True
                cuts = self._cut(batch.steps[0])
                if not all(piece.registered for piece, _ in cuts):
                    return True
                self._take(batch, cuts)
            else:
                self._finish(batch)
                self._batches.popleft()
        return bool(self._batches)

    def _full(self) -> bool:
        while len(self._in_flight) >= STEPS_MAX or self._operations >= OPERATIONS_MAX:
            event, operations = self._in_flight[0]
            if not self._cuda.event_query(event):
                return True
            self._in_flight.popleft()
            self._operations -= operations
        return False

    def _finish(self, batch: Batch, error: str | None = None) -> None:
        wire = self._join()
        first, last = (wire, self._moving) if self.load else (self._moving, wire)
        # What goes directly is on the wire alone: there, a store's blocks are read until it is done.
        batch.ticket.submitted(first, last, read_early=self.load or not batch.direct, error=error)

    def _join(self) -> int:
        """A stream of the wire that comes after all copies so far."""
        wire, *others = self._wires
        for other in others:
            self._cuda.record(self._joined, other)
            self._cuda.stream_wait(wire, self._joined)
        return wire

    def _abandon(self, error: str) -> None:
        while self._batches:
            batch = self._batches.popleft()
            try:
                self._finish(batch, error)
            except Exception:  # a device that takes no events any more runs nothing either
                batch.ticket.end(error)

    # ---- one step: under the lock, or by the helper while it is busy ---------------------------------------------

    def _cut(self, step: Step) -> Cuts:
        cuts: Cuts = []
        for copy in step.copies:
            for piece in self._pool.split(copy.pool, copy.length):
                cuts.append((piece, copy.other + piece.offset - copy.pool))
        return cuts

    def _take(self, batch: Batch, cuts: Cuts) -> None:
        step, number = batch.steps[0], self._steps % STEPS_MAX
        # Steps in flight are fewer than these events and rows of ids, so this one's are free again.
        ended = self._ended[number]
        if step.part is None:
            wire = self._wires[self._steps % WIRES]
            self._await(batch, wire)
            self._copy(cuts, 0, wire)
            self._cuda.record(ended, wire)
        else:
            slot = self._slots[self._staged % SLOTS]
            staged = Staged(slot, self._stage_ids(step, step.part, number), self._launches[step.region, step.part])
            (self._load_step if self.load else self._store_step)(batch, cuts, staged, ended)
            slot.emptied = ended
            self._staged += 1
        batch.steps.popleft()
        self._steps += 1
        operations = len(cuts) + OPERATIONS_PER_STEP
        self._in_flight.append((ended, operations))
        self._operations += operations

    def _load_step(self, batch: Batch, cuts: Cuts, staged: Staged, ended: int) -> None:
        cuda, slot, wire = self._cuda, staged.slot, self._wires[self._steps % WIRES]
        if slot.emptied:
            cuda.stream_wait(wire, slot.emptied)
        self._copy_ids(staged, wire)
        self._copy(cuts, slot.address, wire)
        cuda.record(slot.filled, wire)
        self._await(batch, self._moving)
        cuda.stream_wait(self._moving, slot.filled)
        self._launch(staged)
        cuda.record(ended, self._moving)

    def _store_step(self, batch: Batch, cuts: Cuts, staged: Staged, ended: int) -> None:
        cuda, slot, wire = self._cuda, staged.slot, self._wires[self._steps % WIRES]
        self._await(batch, self._moving)
        if slot.emptied:
            cuda.stream_wait(self._moving, slot.emptied)
        self._copy_ids(staged, self._moving)
        self._launch(staged)
        cuda.record(slot.filled, self._moving)
        cuda.stream_wait(wire, slot.filled)
        self._copy(cuts, slot.address, wire)
        cuda.record(ended, wire)

    def _await(self, batch: Batch, stream: int) -> None:
        """Whatever comes next on `stream` comes after the batch's mark: it touches blocks."""
        if batch.after is not None and stream not in batch.waited:
            self._cuda.stream_wait(stream, batch.after.cuda_event)
            batch.waited.add(stream)

    def _copy(self, cuts: Cuts, base: int, wire: int) -> None:
        for piece, other in cuts:
            copy = self._cuda.copy if piece.registered else self._cuda.copy_pageable
            pool, there = self._pool_address + piece.offset, base + other
            target, source = (there, pool) if self.load else (pool, there)
            copy(target, source, piece.length, wire)

    def _stage_ids(self, step: Step, part: Part, number: int) -> Ids:
        """The step's block ids in pinned memory, in the row of its number: (objects, blocks)."""
        last = part.first_block + part.blocks
        table = self._ids[number, : len(step.transfers) * part.blocks].reshape(-1, part.blocks)
        table[:] = [transfer.blocks[part.first_block : last] for transfer in step.transfers]
        return table

    def _copy_ids(self, staged: Staged, stream: int) -> None:
        row = self._ids_address + self._steps % STEPS_MAX * self._ids.strides[0]
        self._cuda.copy(staged.slot.ids_address, row, staged.ids.nbytes, stream)

    def _launch(self, staged: Staged) -> None:
        slot = staged.slot
        for launch in staged.launches:
            launch(slot.address, staged.ids, slot.ids_address, self._moving)
