"""Eviction: what a byte costs, and which window of free and evictable bytes is the cheapest to clear."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moonpool.node.extents import Extents
from moonpool.node.objects import Objects

Seconds = TypeVar("Seconds", float, NDArray[np.float64])

# Evicting more than twice what was asked for is allowed once in this many evicting reservations: that is what lets
# a class of small objects displace larger cold ones, while the 99th percentile stays below two.
OVERSHOOT_PERIOD: Final = 128
OVERSHOOT_SAVED_MAX: Final = 8
# An overshooting window must cost less than half as much per byte as the best that doesn't overshoot.
OVERSHOOT_GAIN: Final = 0.5
# A victim of about the right size is taken without a search when it's at least half as idle as the coldest object.
QUICK_IDLE: Final = 0.5
QUICK_WALK_MAX: Final = 8
# Smaller requests are worth no search (some 200 us, the time to copy 2 MB), except when an overshoot is due.
SEARCH_GRANULES_MIN: Final = 256
# Where windows are looked for: around the coldest objects of each size, and the longest free runs.
SEEDS_PER_RING: Final = 4
SEED_WALK_MAX: Final = 32
FREE_SEEDS: Final = 4
# Extents and granules read at a time between two yields: some 300 us.
SURVEY_EXTENTS: Final = 4096
SURVEY_GRANULES: Final = 1 << 17
# A survey's end, whatever the request: 16 windows' worth of 4 KiB objects of 64 MiB.
SURVEY_EXTENTS_MAX: Final = 1 << 18
# Windows begin at one of this many boundaries per window length, at least.
BOUNDARIES_PER_WINDOW: Final = 64
# Idle times are told apart down to this part of the longest: sums of costs stay exact enough.
IDLE_RESOLUTION: Final = 1e-4
SLOTS_PER_STEP: Final = 1 << 18
# Up to this many unevictable objects the gaps between them are sorted in well under a step.
BARRIERS_MAX: Final = 1 << 15
COARSE_CELLS: Final = 1 << 16


class Policy(Protocol):
    """What it costs to evict; any positive scale will do, as only ratios count."""

    def byte_cost(self, idle_s: Seconds) -> Seconds:
        """The cost of evicting one byte of an object unused for `idle_s` > 0; must fall as `idle_s` grows."""
        ...


class Recency:
    """A byte costs what it is likely to be used: inversely to the time for which it has not been."""

    def byte_cost(self, idle_s: Seconds) -> Seconds:
        return 1.0 / idle_s


class Survey:
    """Extents in ascending order, with what it costs to evict each: columns of equal length."""

    __slots__ = ("blocked", "cost", "evicted", "first", "last")

    def __init__(
        self,
        first: NDArray[np.int64],
        last: NDArray[np.int64],
        cost: NDArray[np.float64],
        evicted: NDArray[np.int64],
        blocked: NDArray[np.bool_],
    ) -> None:
        self.first = first
        self.last = last
        self.cost = cost
        self.evicted = evicted
        self.blocked = blocked


class Evictor:
    """Finds windows. Changes nothing in extents and objects; a window is valid until either changes."""

    __slots__ = ("_extents", "_objects", "_policy", "_saved")

    def __init__(self, extents: Extents, objects: Objects, policy: Policy) -> None:
        self._extents = extents
        self._objects = objects
        self._policy = policy
        self._saved = 0

    def window(self, granules: int, limit: int, now: float) -> Generator[None, None, int]:
        """The first granule of the cheapest window found, or -1 when no run of free and evictable bytes suffices.

        Objects that are pinned, or protected at `limit` or above, are not evictable. Yields between steps.
        """
        self._saved = min(self._saved + 1, OVERSHOOT_PERIOD * OVERSHOOT_SAVED_MAX)
        overshoot = self._saved >= OVERSHOOT_PERIOD
        quick, idle_enough = self._quick(granules, limit, now)
        if quick >= 0 and (idle_enough or (granules < SEARCH_GRANULES_MIN and not overshoot)):
            return quick
        start = yield from self._search(self._regions(granules, limit), granules, limit, now)
        if start >= 0:
            return start
        if quick >= 0:
            return quick
        return (yield from self._exhaust(granules, limit, now))

    def largest(self, limit: int) -> int:
        """The longest run of free and evictable granules: exact with up to `BARRIERS_MAX` unevictable objects,
        else rounded down by cells of a `COARSE_CELLS`th of the pool. Reads all slots' pins (0.4 ms a million)."""
        steps = self._barriers(limit)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return self._longest_gap(end.value)

    def _evictable(self, slot: int, limit: int) -> bool:
        return self._objects.pins[slot] <= 0 and self._objects.level[slot] < limit

    def _quick(self, granules: int, limit: int, now: float) -> tuple[int, bool]:
        """A window of one victim, no longer than twice the request, and whether it's about as idle as any object."""
        objects, extents = self._objects, self._extents
        best, best_idle, coldest = -1, -1.0, 0.0
        fitting = granules.bit_length()
        for power in objects.rings():
            walk = QUICK_WALK_MAX
            for slot in objects.coldest(power):
                if self._evictable(slot, limit):
                    idle = now - objects.last_used[slot]
                    coldest = max(coldest, idle)
                    if not fitting <= power <= fitting + 1 or idle <= best_idle:
                        break
                    first, length = objects.first[slot], objects.length[slot]
                    if length > 2 * granules:
                        break
                    right = min(0, extents.starts[first + length])
                    if length - right >= granules:
                        best, best_idle = first, idle
                        break
                    left = min(0, extents.ends[first])
                    if length - right - left >= granules:
                        best, best_idle = first + left, idle
                        break
                walk -= 1
                if not walk:
                    break
        return best, best_idle >= coldest * QUICK_IDLE

    def _regions(self, granules: int, limit: int) -> list[tuple[int, int]]:
        """Where to look, as ascending ranges of granules, apart from each other."""
        objects = self._objects
        regions: list[tuple[int, int]] = []
        for power in objects.rings():
            seeds, walk = SEEDS_PER_RING, SEED_WALK_MAX
            for slot in objects.coldest(power):
                if self._evictable(slot, limit):
                    first = objects.first[slot]
                    beyond = granules if objects.length[slot] < granules else 1
                    regions.append((max(0, first - granules), min(first + beyond, self._extents.frontier)))
                    seeds -= 1
                walk -= 1
                if not seeds or not walk:
                    break
        for first, _ in self._extents.long_runs(FREE_SEEDS):
            regions.append((max(0, first - granules), min(first + granules, self._extents.frontier)))
        regions.sort()
        apart: list[tuple[int, int]] = []
        for low, high in regions:
            if apart and low <= apart[-1][1]:
                apart[-1] = (apart[-1][0], max(high, apart[-1][1]))
            else:
                apart.append((low, high))
        return apart

    def _search(
        self, regions: list[tuple[int, int]], granules: int, limit: int, now: float
    ) -> Generator[None, None, int]:
        """The start of the cheapest window in these regions, or -1."""
        surveys: list[Survey] = []
        batch: list[NDArray[np.int64]] = []
        extents = read = surveyed = 0
        for low, high in self._pieces(regions):
            found = np.flatnonzero(self._extents.starts_array[low:high]) + low
            batch.append(found)
            extents += found.size
            read += high - low
            if extents >= SURVEY_EXTENTS or read >= SURVEY_GRANULES:
                surveys.append(self._survey(np.concatenate(batch), granules, limit, now))
                batch.clear()
                surveyed += extents
                extents = read = 0
                yield
                if surveyed >= SURVEY_EXTENTS_MAX:
                    break
        if batch:
            surveys.append(self._survey(np.concatenate(batch), granules, limit, now))
        return self._cheapest(surveys, granules) if surveys else -1

    @staticmethod
    def _pieces(regions: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for low, high in regions:
            while low < high:
                yield low, min(high, low + SURVEY_GRANULES, low + SURVEY_EXTENTS)
                low += min(SURVEY_GRANULES, SURVEY_EXTENTS)

    def _survey(self, first: NDArray[np.int64], granules: int, limit: int, now: float) -> Survey:
        """What the extents that start at these granules would cost; many small ones are taken together."""
        objects = self._objects
        tag = self._extents.starts_array[first]
        owned = tag > 0
        slot = np.where(owned, tag - 1, 0)
        length = np.where(owned, objects.length_array[slot], -tag)
        evicted = np.where(owned, length, 0).astype(np.int64)
        blocked = owned & ((objects.pins_array[slot] > 0) | (objects.level_array[slot] >= limit))
        idle = now - objects.last_used_array[slot]
        cost = np.asarray(idle)
        last = first + length
        _ = granules
        return Survey(first, last, cost, evicted, blocked)

    def _cheapest(self, surveys: list[Survey], granules: int) -> int:
        """The start of the cheapest window of contiguous, unblocked extents, overshooting only when that is due."""
        first = np.concatenate([survey.first for survey in surveys])
        last = np.concatenate([survey.last for survey in surveys])
        idle = np.concatenate([survey.cost for survey in surveys])
        evicted = np.concatenate([survey.evicted for survey in surveys])
        blocked = np.concatenate([survey.blocked for survey in surveys])
        if not first.size:
            return -1
        idle = np.maximum(idle, max(float(idle.max()) * IDLE_RESOLUTION, 1e-9))
        cost = self._policy.byte_cost(idle) * evicted
        apart = np.concatenate(([0], first[1:] != last[:-1])).cumsum()
        stop = np.searchsorted(last, first + granules)
        inside = stop < first.size
        begin, stop = np.flatnonzero(inside), stop[inside]
        barred = np.concatenate(([0], blocked.cumsum()))
        possible = (barred[stop + 1] == barred[begin]) & (apart[stop] == apart[begin])
        begin, stop = begin[possible], stop[possible]
        if not begin.size:
            return -1
        costs = np.concatenate(([0.0], cost.cumsum()))
        bytes_ = np.concatenate(([0], evicted.cumsum()))
        cost = costs[stop + 1] - costs[begin]
        evicted = bytes_[stop + 1] - bytes_[begin]
        modest = evicted <= 2 * granules
        any_ = int(cost.argmin())
        if not modest.any():
            self._saved -= OVERSHOOT_PERIOD
            return int(first[begin[any_]])
        chosen = int(np.where(modest, cost, np.inf).argmin())
        if self._saved >= OVERSHOOT_PERIOD:
            density = cost / np.maximum(evicted, granules)
            any_ = int(density.argmin())
            if density[any_] < OVERSHOOT_GAIN * density[chosen]:
                self._saved -= OVERSHOOT_PERIOD
                chosen = any_
        return int(first[begin[chosen]])

    def _exhaust(self, granules: int, limit: int, now: float) -> Generator[None, None, int]:
        """A window in the gaps between unevictable objects, if there is one at all."""
        barriers: NDArray[np.int64] = yield from self._barriers(limit)
        if barriers.size <= BARRIERS_MAX:
            low, high = self._gaps(barriers)
            wide = np.flatnonzero(high - low >= granules)
            if not wide.size:
                return -1
            widest = wide[np.argsort((low - high)[wide], kind="stable")[:1]][0]
            region = (int(low[widest]), int(min(high[widest], low[widest] + 8 * granules)))
            start = yield from self._search([region], granules, limit, now)
            return start if start >= 0 else int(low[widest])
        return (yield from self._first_fit(granules, limit))

    def _first_fit(self, granules: int, limit: int) -> Generator[None, None, int]:
        """The first run of free and evictable extents that is long enough, by address."""
        objects = self._objects
        begin = 0
        for low, high in self._pieces([(0, self._extents.frontier)]):
            first = np.flatnonzero(self._extents.starts_array[low:high]) + low
            slot = self._extents.starts_array[first] - 1
            bars = (slot >= 0) & ((objects.pins_array[slot] > 0) | (objects.level_array[slot] >= limit))
            lows = np.concatenate(([begin], first[bars] + objects.length_array[slot[bars]]))
            highs = np.append(first[bars], min(high, self._extents.frontier))
            wide = np.flatnonzero(highs - lows >= granules)
            if wide.size:
                return int(lows[wide[0]])
            begin = int(lows[-1])
            yield
        return -1

    def _barriers(self, limit: int) -> Generator[None, None, NDArray[np.int64]]:
        """The slots that aren't evictable."""
        objects = self._objects
        parts = []
        for low in range(0, objects.slots, SLOTS_PER_STEP):
            part = slice(low, low + SLOTS_PER_STEP)
            barred = (objects.pins_array[part] > 0) | (objects.level_array[part] >= limit)
            found = np.flatnonzero(barred) + low
            parts.append(found[objects.length_array[found] > 0])
            if low + SLOTS_PER_STEP < objects.slots:
                yield
        return np.concatenate(parts)

    def _gaps(self, barriers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first = np.sort(self._objects.first_array[barriers]).astype(np.int64)
        slot = self._extents.starts_array[first] - 1
        last = first + self._objects.length_array[slot]
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
