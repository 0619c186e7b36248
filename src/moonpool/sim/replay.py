"""Replays a trace against a `Space`, and against an ideal LRU that never wastes or fragments a byte."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import asdict, dataclass

import numpy as np

from moonpool.node.space import GRANULE_BYTES, Space
from moonpool.sim.trace import PIN_OPERATIONS, Op, Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to."""

    operations: int
    gets: int
    hits: int
    hit_bytes: int
    evicting_reservations: int
    evicted_objects: int
    refused: int
    live_share_mean: float
    """Live bytes as a share of the pool, at moments of eviction."""
    evicted_per_needed_p50: float
    evicted_per_needed_p99: float
    """Bytes evicted for a reservation as a multiple of its size, of reservations that evicted anything."""

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.gets)

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "hit_rate": self.hit_rate}


def replay(trace: Trace, pool_bytes: int, slots: int) -> Outcome:
    """Run a trace through a `Space` of this size, whose clock counts operations."""
    now = [0.0]
    space = Space(pool_bytes, slots, clock=lambda: now[0])
    space.grow(pool_bytes)
    slot_of: dict[int, int] = {}
    key_of: dict[int, int] = {}
    unused = list(range(slots - 1, -1, -1))
    pinned: deque[tuple[int, int]] = deque()
    gets = hits = hit_bytes = refused = evicted_objects = 0
    live_shares: list[float] = []
    ratios: list[float] = []
    evicted_bytes = 0

    def evict(slot: int) -> None:
        nonlocal evicted_bytes, evicted_objects
        if not evicted_bytes:
            live_shares.append(space.live_bytes / pool_bytes)
        evicted_bytes += space.size(slot)
        evicted_objects += 1
        del slot_of[key_of.pop(slot)]
        unused.append(slot)

    for operation, (op, key) in enumerate(zip(trace.ops, trace.keys, strict=True)):
        now[0] = float(operation)
        while pinned and pinned[0][0] <= operation:
            space.pins[pinned.popleft()[1]] -= 1
        slot = slot_of.get(key, -1)
        if op == Op.REMOVE:
            if slot >= 0 and not space.pins[slot]:
                del slot_of[key], key_of[slot]
                space.free(slot)
                unused.append(slot)
            continue
        gets += 1
        size = trace.sizes[key]
        if slot >= 0:
            hits += 1
            hit_bytes += size
            space.touch(slot)
        else:
            if not unused:
                coldest = next(slot for slot in space.oldest() if not space.pins[slot])
                evict(coldest)
                space.free(coldest)
            slot = unused.pop()
            offset = space.allocate(slot, size)
            if offset < 0:
                evicted_bytes = 0
                steps = space.make_room(slot, size, evict)
                while True:
                    try:
                        next(steps)
                    except StopIteration as end:
                        offset = end.value
                        break
                if evicted_bytes:
                    ratios.append(evicted_bytes / (-(-size // GRANULE_BYTES) * GRANULE_BYTES))
            if offset < 0:
                refused += 1
                unused.append(slot)
                continue
            slot_of[key] = slot
            key_of[slot] = key
        if op == Op.PIN:
            space.pins[slot] += 1
            pinned.append((operation + PIN_OPERATIONS, slot))
    p50, p99 = np.percentile(ratios, [50, 99]) if ratios else (0.0, 0.0)
    return Outcome(
        operations=len(trace.keys),
        gets=gets,
        hits=hits,
        hit_bytes=hit_bytes,
        evicting_reservations=len(ratios),
        evicted_objects=evicted_objects,
        refused=refused,
        live_share_mean=float(np.mean(live_shares)) if live_shares else 0.0,
        evicted_per_needed_p50=float(p50),
        evicted_per_needed_p99=float(p99),
    )


def replay_ideal(trace: Trace, pool_bytes: int) -> tuple[int, int, int]:
    """The same through an LRU in bytes that evicts exactly the coldest objects: its gets, hits and hit bytes."""
    order: OrderedDict[int, int] = OrderedDict()
    live = gets = hits = hit_bytes = 0
    for op, key in zip(trace.ops, trace.keys, strict=True):
        if op == Op.REMOVE:
            live -= order.pop(key, 0)
            continue
        gets += 1
        size = trace.sizes[key]
        if key in order:
            hits += 1
            hit_bytes += size
            order.move_to_end(key)
            continue
        live += size
        while live > pool_bytes:
            live -= order.popitem(last=False)[1]
        order[key] = size
    return gets, hits, hit_bytes
