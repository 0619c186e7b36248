"""Replays a trace against a `Space`, and against an ideal LRU that never fragments or wastes a byte."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moonpool.node.space import GRANULE_BYTES, Space
from moonpool.node.windows import Policy
from moonpool.sim.trace import PIN_OPERATIONS, Op, Trace


@dataclass(slots=True)
class Hits:
    """Lookups, and how many of them found their object."""

    gets: int = 0
    get_bytes: int = 0
    hits: int = 0
    hit_bytes: int = 0

    def count(self, hit: bool, nbytes: int) -> None:
        self.gets += 1
        self.get_bytes += nbytes
        if hit:
            self.hits += 1
            self.hit_bytes += nbytes

    @property
    def rate(self) -> float:
        return self.hits / max(1, self.gets)

    @property
    def byte_rate(self) -> float:
        return self.hit_bytes / max(1, self.get_bytes)


def replay_ideal(trace: Trace, pool_bytes: int) -> Hits:
    """What an LRU hits that evicts exactly the coldest objects, as many as it must, wherever they lie."""
    order: OrderedDict[int, int] = OrderedDict()
    found, live = Hits(), 0
    for op, key in zip(trace.ops, trace.keys, strict=True):
        if op == Op.REMOVE:
            live -= order.pop(key, 0)
            continue
        size = trace.sizes[key]
        found.count(key in order, size)
        if key in order:
            order.move_to_end(key)
            continue
        order[key] = size
        live += size
        while live > pool_bytes:
            live -= order.popitem(last=False)[1]
    return found


class Replay:
    """One run of a trace through a `Space`, whose clock counts operations. `run` does all of it; then read."""

    def __init__(self, trace: Trace, pool_bytes: int, *, slots: int = 1 << 20, policy: Policy | None = None) -> None:
        self.found = Hits()
        self.refused = 0
        self.evicted_objects = 0
        # Of each reservation that evicted something: live bytes before it by the pool's, bytes evicted by its own.
        self.live_shares: list[float] = []
        self.evicted_per_needed: list[float] = []
        self._trace = trace
        self._pool_bytes = pool_bytes
        self._now = 0.0
        self._space = Space(pool_bytes, slots, clock=lambda: self._now, policy=policy)
        self._space.grow(pool_bytes)
        self._slot_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._unused = list(range(slots - 1, -1, -1))
        self._pinned: deque[tuple[int, int]] = deque()
        self._evicted_bytes = 0

    def run(self) -> None:
        """Replay the whole trace."""
        for _ in self.steps(len(self._trace.ops) + 1):
            pass

    def steps(self, operations: int) -> Iterator[int]:
        """Replay it, yielding the number of operations done every so many."""
        pins, sizes = self._space.pins, self._trace.sizes
        for number, (op, key) in enumerate(zip(self._trace.ops, self._trace.keys, strict=True), 1):
            self._now = float(number)
            while self._pinned and self._pinned[0][0] < number:
                pins[self._pinned.popleft()[1]] -= 1
            slot = self._slot_of.get(key, -1)
            if op == Op.REMOVE:
                if slot >= 0 and not pins[slot]:
                    self._forget(slot)
                    self._space.free(slot)
            else:
                self.found.count(slot >= 0, sizes[key])
                if slot >= 0:
                    self._space.touch(slot)
                else:
                    slot = self._put(key, sizes[key])
                if op == Op.PIN and slot >= 0:
                    pins[slot] += 1
                    self._pinned.append((number + PIN_OPERATIONS, slot))
            if number % operations == 0:
                yield number

    def _put(self, key: int, size: int) -> int:
        if not self._unused:
            raise RuntimeError(f"all {len(self._key_of)} slots are in use; replay with more")
        slot = self._unused.pop()
        if self._space.allocate(slot, size) < 0 and self._make_room(slot, size) < 0:
            self.refused += 1
            self._unused.append(slot)
            return -1
        self._slot_of[key] = slot
        self._key_of[slot] = key
        return slot

    def _make_room(self, slot: int, size: int) -> int:
        live_share = self._space.live_bytes / self._pool_bytes
        self._evicted_bytes = 0
        steps = self._space.make_room(slot, size, self._evict)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                offset: int = end.value
                break
        if self._evicted_bytes:
            self.live_shares.append(live_share)
            self.evicted_per_needed.append(self._evicted_bytes / (-(-size // GRANULE_BYTES) * GRANULE_BYTES))
        return offset

    def _evict(self, slot: int) -> None:
        self._evicted_bytes += self._space.size(slot)
        self.evicted_objects += 1
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._key_of.pop(slot)]
        self._unused.append(slot)

    @property
    def live_share(self) -> float:
        """Live bytes as a share of the pool, the mean over the moments of eviction."""
        return float(np.mean(self.live_shares)) if self.live_shares else 0.0

    def evicted_percentile(self, percent: float) -> float:
        """Bytes evicted for a reservation by its own bytes, of those that evicted anything."""
        return float(np.percentile(self.evicted_per_needed, percent)) if self.evicted_per_needed else 0.0
