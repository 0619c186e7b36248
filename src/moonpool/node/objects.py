"""Objects as eviction sees them: each slot's extent, pins and protection, and the order in which they were used."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.folder.mapping import column

# Objects of one power of two in size and one priority share a ring; 32 powers of granules are far beyond any pool.
POWERS: Final = 33
# An object of priority p counts as idle for this part of the time since its last use; higher ones count as the highest.
IDLE_SHARES: Final = np.array([1.0, 0.5, 0.25, 0.125])
PRIORITIES: Final = IDLE_SHARES.size
RINGS: Final = POWERS * PRIORITIES
# 0.4 us each.
PASSED_OVER_MAX: Final = 64
DRAWS: Final = 32
DRAW_STRIDE: Final = 1_000_003


class Objects:
    """Columns by slot, and one ring per power of two in size and priority, from the coldest object to the hottest.

    Rings by size are what lets a reservation find the coldest object of about its own size at once. A slot is in
    a ring exactly while it owns an extent that isn't held by a reservation still under way.
    """

    __slots__ = (
        "_claimed",
        "_draw",
        "_next",
        "_previous",
        "_rings",
        "_sentinel",
        "first",
        "first_array",
        "last_used",
        "last_used_array",
        "length",
        "length_array",
        "level",
        "level_array",
        "pins",
        "pins_array",
        "preferring",
        "priority",
        "priority_array",
        "slots",
        "used",
    )

    def __init__(self, slots: int, claimed: list[tuple[int, int]]) -> None:
        self.slots: Final = slots
        self._claimed = claimed
        self.first = column("i", slots)
        self.length = column("i", slots)
        self.pins = column("i", slots)
        self.level = column("b", slots)
        self.priority = column("B", slots)
        # Whether any object ever had a priority: spares everybody else the look.
        self.preferring = False
        self.last_used = column("d", slots)
        self.first_array: NDArray[np.int32] = np.frombuffer(self.first, np.int32)
        self.length_array: NDArray[np.int32] = np.frombuffer(self.length, np.int32)
        self.pins_array: NDArray[np.int32] = np.frombuffer(self.pins, np.int32)
        self.priority_array: NDArray[np.uint8] = np.frombuffer(self.priority, np.uint8)
        self.level_array: NDArray[np.int8] = np.frombuffer(self.level, np.int8)
        self.last_used_array: NDArray[np.float64] = np.asarray(self.last_used)
        self._sentinel: Final = slots
        self._rings = column("B", slots)
        self._next = column("i", slots + RINGS)
        self._previous = column("i", slots + RINGS)
        for ring in range(slots, slots + RINGS):
            self._next[ring] = self._previous[ring] = ring
        # One bit for each ring that ever held something: few sizes, and priorities, are in use in one pool.
        self.used = 0
        self._draw = 0

    def add(self, slot: int, granules: int, now: float, priority: int) -> None:
        """Enter a slot as the most recently used of its size and priority."""
        self.last_used[slot] = now
        ring, preceding, following = self._ring_for(slot, granules, priority), self._previous, self._next
        hottest = preceding[ring]
        following[hottest] = preceding[ring] = slot
        preceding[slot] = hottest
        following[slot] = ring

    def add_in_order(self, slot: int, granules: int, last_used: float) -> None:
        """Enter a slot by the time of its last use. O(1) if slots come in that order, else linear: for restarts."""
        self.last_used[slot] = last_used
        ring = after = self._ring_for(slot, granules, 0)
        while (before := self._previous[after]) != ring and self.last_used[before] > last_used:
            after = before
        self._insert(slot, after)

    def lay_out(
        self,
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        last_used: NDArray[np.float64],
        priorities: NDArray[np.int64],
    ) -> None:
        """Enter many slots at once where there were none; order by `last_used`, coldest first in ties by position."""
        priorities = np.minimum(priorities, PRIORITIES - 1)
        rings = (np.frexp(lengths.astype(np.float64))[1] + POWERS * priorities).astype(np.uint8)
        np.frombuffer(self._rings, np.uint8)[slots] = rings
        self.priority_array[slots] = priorities
        self.preferring |= bool(priorities.any())
        self.last_used_array[slots] = last_used
        following, preceding = np.frombuffer(self._next, np.int32), np.frombuffer(self._previous, np.int32)
        order = np.argsort(last_used, kind="stable")
        slots, rings = slots[order], rings[order]
        for number in np.unique(rings).tolist():
            chain = slots[rings == number]
            ring = self._sentinel + number
            following[ring], following[chain[:-1]], following[chain[-1]] = chain[0], chain[1:], ring
            preceding[chain[0]], preceding[chain[1:]], preceding[ring] = ring, chain[:-1], chain[-1]
            self.used |= 1 << number

    def drop(self, slot: int) -> None:
        """Take a slot out of its ring."""
        after, before = self._next[slot], self._previous[slot]
        self._next[before] = after
        self._previous[after] = before

    def touch(self, slot: int, now: float) -> None:
        """Make a slot the most recently used of its size and priority."""
        following, preceding = self._next, self._previous
        after, before = following[slot], preceding[slot]
        following[before] = after
        preceding[after] = before
        ring = self._sentinel + self._rings[slot]
        hottest = preceding[ring]
        following[hottest] = preceding[ring] = slot
        preceding[slot] = hottest
        following[slot] = ring
        self.last_used[slot] = now

    def evictable(self, slot: int, limit: int) -> bool:
        """Whether eviction may take a slot, sparing what is pinned, or protected at `limit` or above."""
        return self.pins[slot] <= 0 and self.level[slot] < limit

    def seems_used(self, slot: int, now: float) -> float:
        """When a slot counts as last used: the later, the higher its priority."""
        last_used = self.last_used[slot]
        if not self.preferring:
            return last_used
        return now - (now - last_used) * float(IDLE_SHARES[self.priority[slot]])

    def rings(self) -> list[int]:
        """The rings that ever held something, small objects first."""
        return [ring for ring in range(self.used.bit_length()) if self.used >> ring & 1]

    @staticmethod
    def rings_of(*powers: int) -> list[int]:
        """The rings of these sizes, in bits of the granules, of all priorities."""
        return [power + POWERS * priority for priority in range(PRIORITIES) for power in powers]

    def coldest(self, ring: int, limit: int, count: int) -> list[int]:
        """Up to `count` evictable slots of a ring, coldest first, outside the ranges that others are clearing.

        Those passed over on the way go to the ring's hot end, at most `PASSED_OVER_MAX` at a time: what is pinned
        for long would else be looked at again by every reservation. If that didn't help while others are clearing,
        any that are found by a few draws will do.
        """
        following, preceding, pins, level = self._next, self._previous, self.pins, self.level
        number, ring = ring, self._sentinel + ring
        found: list[int] = []
        passed_over = 0
        slot = following[ring]
        while slot != ring and len(found) < count and passed_over < PASSED_OVER_MAX:
            after = following[slot]
            if pins[slot] <= 0 and level[slot] < limit and not (self._claimed and self._is_claimed(slot)):
                found.append(slot)
            else:
                passed_over += 1
                before = preceding[slot]
                following[before] = after
                preceding[after] = before
                self._insert(slot, ring)
            slot = after
        if not found and self._claimed and passed_over:
            return self._drawn(number, limit, count)
        return found

    def _drawn(self, ring: int, limit: int, count: int) -> list[int]:
        """The coldest of a few evictable slots of a ring drawn from all slots."""
        found = set()
        for _ in range(DRAWS):
            # Any sequence that visits slots all over the table will do.
            self._draw = (self._draw + DRAW_STRIDE) % self.slots
            slot = self._draw
            if (
                self.length[slot]
                and self._rings[slot] == ring
                and self.evictable(slot, limit)
                and not self._is_claimed(slot)
            ):
                found.add(slot)
        return sorted(found, key=self.last_used.__getitem__)[:count]

    def _is_claimed(self, slot: int) -> bool:
        first = self.first[slot]
        return any(low <= first < high for low, high in self._claimed)

    def oldest(self) -> Iterator[int]:
        """All slots, coldest first, in constant time each; what eviction passed over comes later than its turn.

        Valid until any ring changes.
        """
        return heapq.merge(*map(self._ring, self.rings()), key=self.last_used.__getitem__)

    def _ring_for(self, slot: int, granules: int, priority: int) -> int:
        """The ring that a slot of this size and priority enters; noted as its own."""
        ring = granules.bit_length()
        if priority:
            priority = min(priority, PRIORITIES - 1)
            ring += POWERS * priority
            self.preferring = True
        self.priority[slot] = priority
        self._rings[slot] = ring
        self.used |= 1 << ring
        return self._sentinel + ring

    def _ring(self, ring: int) -> Iterator[int]:
        ring = self._sentinel + ring
        slot = self._next[ring]
        while slot != ring:
            yield slot
            slot = self._next[slot]

    def _insert(self, slot: int, after: int) -> None:
        following, preceding = self._next, self._previous
        before = preceding[after]
        following[before] = preceding[after] = slot
        preceding[slot] = before
        following[slot] = after
