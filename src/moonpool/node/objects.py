"""Objects as eviction sees them: each slot's extent, pins and protection, and the order in which they were used."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.folder.mapping import column

# Objects of one power of two in size share a ring; 32 powers of granules are far beyond any pool.
RINGS: Final = 33
# 0.4 us each.
PASSED_OVER_MAX: Final = 64
DRAWS: Final = 32
DRAW_STRIDE: Final = 1_000_003


class Objects:
    """Columns by slot, and one ring per power of two in size that runs from the coldest object to the hottest.

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
        self.last_used = column("d", slots)
        self.first_array: NDArray[np.int32] = np.frombuffer(self.first, np.int32)
        self.length_array: NDArray[np.int32] = np.frombuffer(self.length, np.int32)
        self.pins_array: NDArray[np.int32] = np.frombuffer(self.pins, np.int32)
        self.level_array: NDArray[np.int8] = np.frombuffer(self.level, np.int8)
        self.last_used_array: NDArray[np.float64] = np.asarray(self.last_used)
        self._sentinel: Final = slots
        self._rings = column("b", slots)
        self._next = column("i", slots + RINGS)
        self._previous = column("i", slots + RINGS)
        for ring in range(slots, slots + RINGS):
            self._next[ring] = self._previous[ring] = ring
        # One bit for each ring that ever held something: few sizes are in use in one pool.
        self.used = 0
        self._draw = 0

    def add(self, slot: int, granules: int, now: float) -> None:
        """Enter a slot as the most recently used of its size."""
        power = granules.bit_length()
        self._rings[slot] = power
        self.used |= 1 << power
        self.last_used[slot] = now
        ring, preceding, following = self._sentinel + power, self._previous, self._next
        hottest = preceding[ring]
        following[hottest] = preceding[ring] = slot
        preceding[slot] = hottest
        following[slot] = ring

    def add_in_order(self, slot: int, granules: int, last_used: float) -> None:
        """Enter a slot by the time of its last use. O(1) if slots come in that order, else linear: for restarts."""
        power = granules.bit_length()
        self._rings[slot] = power
        self.used |= 1 << power
        self.last_used[slot] = last_used
        ring = after = self._sentinel + power
        while (before := self._previous[after]) != ring and self.last_used[before] > last_used:
            after = before
        self._insert(slot, after)

    def lay_out(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], last_used: NDArray[np.float64]) -> None:
        """Enter many slots at once where there were none; order by `last_used`, coldest first in ties by position."""
        powers = np.frexp(lengths.astype(np.float64))[1].astype(np.int8)
        np.frombuffer(self._rings, np.int8)[slots] = powers
        self.last_used_array[slots] = last_used
        following, preceding = np.frombuffer(self._next, np.int32), np.frombuffer(self._previous, np.int32)
        order = np.argsort(last_used, kind="stable")
        slots, powers = slots[order], powers[order]
        for power in np.unique(powers).tolist():
            chain = slots[powers == power]
            ring = self._sentinel + power
            following[ring], following[chain[:-1]], following[chain[-1]] = chain[0], chain[1:], ring
            preceding[chain[0]], preceding[chain[1:]], preceding[ring] = ring, chain[:-1], chain[-1]
            self.used |= 1 << power

    def drop(self, slot: int) -> None:
        """Take a slot out of its ring."""
        after, before = self._next[slot], self._previous[slot]
        self._next[before] = after
        self._previous[after] = before

    def touch(self, slot: int, now: float) -> None:
        """Make a slot the most recently used of its size."""
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

    def powers(self) -> list[int]:
        """The rings that ever held something: sizes in bits of the granules, smallest first."""
        return [power for power in range(self.used.bit_length()) if self.used >> power & 1]

    def coldest(self, power: int, limit: int, count: int) -> list[int]:
        """Up to `count` evictable slots of a ring, coldest first, outside the ranges that others are clearing.

        Those passed over on the way go to the ring's hot end, at most `PASSED_OVER_MAX` at a time: what is pinned
        for long would else be looked at again by every reservation. If that didn't help while others are clearing,
        any that are found by a few draws will do.
        """
        following, preceding, pins, level = self._next, self._previous, self.pins, self.level
        ring = self._sentinel + power
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
            return self._drawn(power, limit, count)
        return found

    def _drawn(self, power: int, limit: int, count: int) -> list[int]:
        """The coldest of a few evictable slots of a ring drawn from all slots."""
        found = set()
        for _ in range(DRAWS):
            # Any sequence that visits slots all over the table will do.
            self._draw = (self._draw + DRAW_STRIDE) % self.slots
            slot = self._draw
            if (
                self.length[slot]
                and self._rings[slot] == power
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
        return heapq.merge(*map(self._ring, self.powers()), key=self.last_used.__getitem__)

    def _ring(self, power: int) -> Iterator[int]:
        ring = self._sentinel + power
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
