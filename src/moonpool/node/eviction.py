"""Eviction: which window to clear for a reservation, as quickly as its size is worth."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.node.extents import Extents
from moonpool.node.objects import Objects
from moonpool.node.windows import SURVEY_EXTENTS, Policy, Seconds, WindowSearch

# Evicting more than twice what was asked for is allowed once in this many evicting reservations: that is what lets
# a class of small objects displace larger cold ones, while the 99th percentile stays below two.
OVERSHOOT_PERIOD: Final = 128
OVERSHOOT_SAVED_MAX: Final = 8
# A victim of about the right size is taken without a search if it's at least this part as idle as the coldest object
# of any size, which is looked at after every so many granules evicted that way.
QUICK_IDLE: Final = 0.5
CHECK_GRANULES: Final = 64
# Otherwise there is a search, as long as copying 2 MB; one that ends at the same victim puts the next one off.
PUT_OFF_GRANULES: Final = (1024, 1 << 16)
QUICK_BELOW: Final = 2048
QUICK_SEEDS: Final = 4
# Slots whose pins are read in one step: 0.02 ms if few are pinned, 0.2 ms if all are.
SLOTS_PER_STEP: Final = 1 << 15
# Up to this many unevictable objects the gaps between them are sorted within a step.
BARRIERS_MAX: Final = 1 << 14
COARSE_CELLS: Final = 1 << 16


class Recency:
    """A byte costs inversely to the square of the time since its last use.

    The chance of a use falls inversely to that time; the square gives, besides, bytes of cold objects up sooner
    than their number warrants, which is what LRU does. Of the exponents 0.5, 1, 2 and 4, 2 gave the most hits, in
    objects and in bytes together, over the mixes of `moonpool.sim`.
    """

    def byte_cost(self, idle_s: Seconds) -> Seconds:
        return 1.0 / (idle_s * idle_s)


class Evictor:
    """Finds windows. Of extents and objects it changes only which unevictable objects it looks at next."""

    __slots__ = ("_check_after", "_doubted", "_extents", "_objects", "_policy", "_saved", "_unchecked")

    def __init__(self, extents: Extents, objects: Objects, policy: Policy) -> None:
        self._extents = extents
        self._objects = objects
        self._policy = policy
        # Evicting reservations since an overshoot.
        self._saved = 0
        # Granules evicted since the last comparison with the coldest object, and when the next one is due.
        self._unchecked = 0
        self._check_after = 0
        # The victim that wasn't idle enough, until a search has found it a better one.
        self._doubted = -1

    def quick(self, granules: int, limit: int, now: float) -> int:
        """The first granule of a window around one victim that is worth no search, or -1 if there is none.

        The victim is at most twice as long as the request. Constant time.
        """
        objects, starts, ends = self._objects, self._extents.starts, self._extents.ends
        self._saved += 1
        if granules >= QUICK_BELOW:
            return -1
        best, best_used = -1, now
        fitting, used, preferring = granules.bit_length(), objects.used, objects.preferring
        for ring in objects.rings_of(fitting, fitting + 1) if preferring else (fitting, fitting + 1):
            if not used >> ring & 1:
                continue
            for slot in objects.coldest(ring, limit, QUICK_SEEDS if granules > 1 else 1):
                last_used = objects.seems_used(slot, now) if preferring else objects.last_used[slot]
                length = objects.length[slot]
                if last_used > best_used or length > 2 * granules:
                    break
                first = objects.first[slot]
                if length < granules:
                    length -= min(0, starts[first + length])
                    if length < granules:
                        left = min(0, ends[first])
                        length -= left
                        first += left
                if length >= granules:
                    best, best_used = first, last_used
                    break
        if best < 0:
            return -1
        self._unchecked += granules
        if self._unchecked >= self._check_after:
            self._unchecked = 0
            idle_enough = now - (now - best_used) / QUICK_IDLE
            for ring in objects.rings():
                for slot in objects.coldest(ring, limit, 1):
                    if objects.seems_used(slot, now) < idle_enough:
                        self._doubted = best
                        return -1
            self._check_after = CHECK_GRANULES
        return best

    def window(self, granules: int, limit: int, now: float, durable: bool) -> Generator[None, None, tuple[int, bool]]:
        """The first granule of the cheapest window found, or -1 when no run of free and evictable bytes suffices; and
        whether this step has done so much that it should end.

        Objects that are pinned, or protected at `limit` or above, are not evictable. Prefers low windows for a
        `durable` object. Yields between steps; valid until extents, pins or protection change.
        """
        overshoot = self._saved >= OVERSHOOT_PERIOD
        search = WindowSearch(
            self._extents, self._objects, self._policy, granules, limit, now=now, durable=durable, overshoot=overshoot
        )
        start = yield from search.around_seeds()
        if start < 0:
            start = yield from self._anywhere(search, granules, limit)
        if self._doubted >= 0:
            shortest, longest = PUT_OFF_GRANULES
            in_vain = start == self._doubted
            self._check_after = min(max(shortest, 2 * self._check_after), longest) if in_vain else 0
            self._doubted = -1
        if search.overshot:
            self._saved = min(self._saved, OVERSHOOT_PERIOD * OVERSHOOT_SAVED_MAX) - OVERSHOOT_PERIOD
        return start, search.surveyed >= SURVEY_EXTENTS // 4

    def largest(self, limit: int) -> int:
        """The longest run of free and evictable granules: exact with up to `BARRIERS_MAX` unevictable objects,
        else rounded down by cells of a `COARSE_CELLS`th of the pool. Reads all slots' pins: 0.4 ms a million of
        them, and 10 ms a million of unevictable objects."""
        steps = self._barriers(limit, self._objects.slots)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return self._longest_gap(end.value)

    def look_for_largest(self, limit: int) -> Generator[None, None, int]:
        """`largest` in steps, or -1 where there are more than `BARRIERS_MAX` unevictable objects."""
        barriers = yield from self._barriers(limit, BARRIERS_MAX)
        yield
        return -1 if barriers.size > BARRIERS_MAX else self._longest_gap(barriers)

    def _anywhere(self, search: WindowSearch, granules: int, limit: int) -> Generator[None, None, int]:
        """A window in the longest gap between unevictable objects, or in any if they are too many to sort."""
        barriers = yield from self._barriers(limit, BARRIERS_MAX)
        yield
        if barriers.size > BARRIERS_MAX:
            return (yield from search.first_fit())
        low, high = self._gaps(barriers)
        yield
        longest = int((high - low).argmax())
        begin, end = int(low[longest]), int(high[longest])
        if end - begin < granules:
            return -1
        start = yield from search.within([(begin, min(end, begin + 8 * granules), begin)])
        return start if start >= 0 else begin

    def _barriers(self, limit: int, most: int) -> Generator[None, None, NDArray[np.int64]]:
        """The slots that aren't evictable; the search for them ends once it has found more than `most`."""
        objects = self._objects
        parts, found_count = [], 0
        for low in range(0, objects.slots, SLOTS_PER_STEP):
            if low:
                yield
            part = slice(low, low + SLOTS_PER_STEP)
            barred = (objects.pins_array[part] > 0) | (objects.level_array[part] >= limit)
            found = np.flatnonzero(barred) + low
            parts.append(found[objects.length_array[found] > 0])
            found_count += parts[-1].size
            if found_count > most:
                break
        return np.concatenate(parts)

    def _gaps(self, barriers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the gaps between these slots' extents begin and end, ascending."""
        first = self._objects.first_array[barriers]
        # One that was read in an earlier step may have given its extent back since.
        first = np.sort(first[self._extents.starts_array[first] == barriers + 1]).astype(np.int64)
        last = first + self._objects.length_array[self._extents.starts_array[first] - 1]
        return np.concatenate(([0], last)), np.append(first, self._extents.frontier)

    def _longest_gap(self, barriers: NDArray[np.int64]) -> int:
        if barriers.size <= BARRIERS_MAX:
            low, high = self._gaps(barriers)
            return int((high - low).max())
        shift = max(0, (self._extents.granules // COARSE_CELLS).bit_length())
        cells = (self._extents.frontier >> shift) + 2
        first = self._objects.first_array[barriers]
        last = first + self._objects.length_array[barriers] - 1
        depth = np.bincount(first >> shift, minlength=cells) - np.bincount((last >> shift) + 1, minlength=cells)
        taken = np.flatnonzero(np.append(depth.cumsum()[: self._extents.frontier >> shift] > 0, True))
        return int(np.diff(taken, prepend=-1).max() - 1) << shift
