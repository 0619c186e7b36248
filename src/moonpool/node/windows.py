"""Windows: runs of neighbouring free and evictable extents, and the cheapest of them around the coldest objects."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moonpool.node.extents import Extents
from moonpool.node.objects import IDLE_SHARES, Objects

Seconds = TypeVar("Seconds", float, NDArray[np.float64])

# Where windows are looked for: around the coldest objects of each size, and the longest free runs.
SEEDS_PER_RING: Final = 4
FREE_SEEDS: Final = 4
# The regions around seeds have at most so many extents, by samples of their granules, unless the first alone has more.
SEEDED_EXTENTS_MAX: Final = 1 << 14
SAMPLES: Final = 128
# Work is counted in extents surveyed, and a step ends after so many: 200 us.
SURVEY_EXTENTS: Final = 4096
# A region's first extents, up to so many, are walked over, each so much work; then granules are scanned by pieces.
WALK_MAX: Final = 512
WALK_WORK: Final = 4
SURVEY_GRANULES: Final = 1 << 15
PIECE_WORK: Final = 128
# Where a survey ends, whatever the request: some 16 ms of steps.
SURVEY_EXTENTS_MAX: Final = 1 << 18
# Where a window of more extents than this may begin is rounded to this part of its length, so that the last step,
# which compares all windows, stays short.
BEGINNINGS_PER_WINDOW: Final = 64
# More than this many times the request is overshooting.
MODEST: Final = 2
# An overshooting window must cost less than this part, per byte, of the best that doesn't overshoot.
OVERSHOOT_GAIN: Final = 0.5
# Idle times are told apart down to this part of the longest: sums of costs stay exact enough.
IDLE_RESOLUTION: Final = 1e-4


class Policy(Protocol):
    """What it costs to evict; any positive scale will do, as only ratios count."""

    def byte_cost(self, idle_s: Seconds) -> Seconds:
        """The cost of evicting one byte of an object unused for `idle_s` > 0; must fall as `idle_s` grows. Of an object
        with a priority less time counts: see `IDLE_SHARES`."""
        ...


class Survey(NamedTuple):
    """Extents, or neighbours taken together, in ascending order: columns of equal length."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    cost: NDArray[np.float64]
    evicted: NDArray[np.int64]
    """Granules of objects in it."""
    blocked: NDArray[np.bool_]


class WindowSearch:
    """One search for a window of `granules`. Reads extents and objects in steps, and changes neither.

    Objects that are pinned, or protected at `limit` or above, block a window.
    """

    def __init__(
        self,
        extents: Extents,
        objects: Objects,
        policy: Policy,
        granules: int,
        limit: int,
        *,
        now: float,
        durable: bool,
        overshoot: bool,
    ) -> None:
        self._extents = extents
        self._objects = objects
        self._policy = policy
        self._granules = granules
        self._limit = limit
        self._now = now
        self._durable = durable
        self._overshoot = overshoot
        self._idle_min = 1e-9
        self._others: tuple[tuple[int, int], ...] = ()
        # For whoever asked: whether the window is an overshooting one, and how many extents were compared.
        self.overshot = False
        self.surveyed = 0

    def around_seeds(self) -> Generator[None, None, int]:
        """The start of the cheapest window around the coldest objects and the longest free runs, or -1."""
        return (yield from self.within(self._seeds()))

    def within(self, regions: list[tuple[int, int, int]]) -> Generator[None, None, int]:
        """The start of the cheapest window in regions (low, high, where an extent in between starts), or -1."""
        surveys: list[Survey] = []
        self.surveyed = 0
        claimed = self._extents.claimed
        self._others = tuple(claimed)
        own: list[tuple[int, int]] = []
        try:
            for step, batch in enumerate(self._batches(regions)):
                if step:
                    if not own:
                        # Else others would take what is coldest here meanwhile, and break the window by their pins.
                        own = [(low, high) for low, high, _ in regions]
                        claimed.extend(own)
                    yield
                if batch.size:
                    surveys.append(self._survey(batch))
                    self.surveyed += batch.size
                if self.surveyed >= SURVEY_EXTENTS_MAX:
                    break
        finally:
            for claim in own:
                claimed.remove(claim)
        if not self.surveyed:
            return -1
        return self._cheapest(Survey(*map(np.concatenate, zip(*surveys, strict=True))))

    def first_fit(self) -> Generator[None, None, int]:
        """The start of the first window by address, or -1 if there is none in the pool."""
        begin = work = 0
        for first, cost in self._scan(0, self._extents.frontier):
            if first.size:
                length, slot, owned = self._read(first)
                bars = owned & self._barred(slot)
                lows = np.concatenate(([begin], (first + length)[bars]))
                highs = np.append(first[bars], first[-1] + length[-1])
                wide = np.flatnonzero(highs - lows >= self._granules)
                if wide.size:
                    return int(lows[wide[0]])
                begin = int(lows[-1])
            work += cost
            if work >= SURVEY_EXTENTS:
                work = 0
                yield
        return -1

    def _seeds(self) -> list[tuple[int, int, int]]:
        """Where to look: ascending ranges of granules, apart from each other, each with one extent's start in it.

        All seeds where extents are few; among many small ones only around the coldest, as others can't be given
        what is being looked at.
        """
        granules, frontier = self._granules, self._extents.frontier
        regions: list[tuple[int, int, int]] = []
        expected = 0
        for _, first, length in sorted(self._ranked_seeds()):
            low = max(0, first - granules)
            high = min(first + (granules if length < granules else 1), frontier)
            # An odd stride, as many sizes are multiples of a power of two.
            stride = (high - low) // SAMPLES | 1
            expected += int(np.count_nonzero(self._extents.starts_array[low:high:stride])) * stride
            if regions and expected > SEEDED_EXTENTS_MAX:
                break
            regions.append((low, high, first))
        regions.sort()
        apart: list[tuple[int, int, int]] = []
        for low, high, inside in regions:
            if apart and low <= apart[-1][1]:
                apart[-1] = (apart[-1][0], max(high, apart[-1][1]), apart[-1][2])
            else:
                apart.append((low, high, inside))
        return apart

    def _ranked_seeds(self) -> Iterator[tuple[float, int, int]]:
        """(last used, first granule, length): a long free run comes before every object, a short one after."""
        objects = self._objects
        if self._durable:
            yield -np.inf, 0, 1
        for first, length in self._extents.long_runs(FREE_SEEDS):
            yield (-np.inf if length * FREE_SEEDS >= self._granules else np.inf), first, length
        for ring in objects.rings():
            for slot in objects.coldest(ring, self._limit, SEEDS_PER_RING):
                last_used = objects.seems_used(slot, self._now)
                self._idle_min = max(self._idle_min, (self._now - last_used) * IDLE_RESOLUTION)
                yield last_used, objects.first[slot], objects.length[slot]

    def _batches(self, regions: list[tuple[int, int, int]]) -> Iterator[NDArray[np.int64]]:
        """Where the extents in these regions start, as many at a time as one step allows."""
        batch: list[NDArray[np.int64]] = []
        work = 0
        for region in regions:
            for starts, cost in self._starts_in(*region):
                batch.append(starts)
                work += cost
                if work >= SURVEY_EXTENTS:
                    yield np.concatenate(batch)
                    batch, work = [], 0
        if batch:
            yield np.concatenate(batch)

    def _starts_in(self, low: int, high: int, inside: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Where extents start in a region, ascending, by walking over a few and scanning for many; and the work that
        each part was, counted in extents read."""
        starts, ends, lengths = self._extents.starts, self._extents.ends, self._objects.length
        begin, walked = inside, list[int]()
        if starts[inside]:
            for _ in range(WALK_MAX):
                if begin <= low:
                    break
                tag = ends[begin]
                begin += tag if tag < 0 else -lengths[tag - 1]
            stop = begin
            while stop < high and len(walked) < WALK_MAX:
                walked.append(stop)
                tag = starts[stop]
                stop += lengths[tag - 1] if tag > 0 else -tag
        else:
            # The extent went between two steps.
            begin = stop = low
        if begin > low:
            yield from self._scan(low, begin)
        yield np.array(walked, np.int64), len(walked) * WALK_WORK
        if stop < high:
            yield from self._scan(stop, high)

    def _scan(self, low: int, high: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        for piece in range(low, high, SURVEY_GRANULES):
            found = np.flatnonzero(self._extents.starts_array[piece : min(piece + SURVEY_GRANULES, high)]) + piece
            for part in range(0, max(1, found.size), SURVEY_EXTENTS):
                yield found[part : part + SURVEY_EXTENTS], PIECE_WORK + min(found.size - part, SURVEY_EXTENTS)

    def _read(self, first: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
        """The lengths and slots of the extents that start here, and which of them aren't free runs."""
        tag = self._extents.starts_array[first]
        owned = tag > 0
        slot = np.where(owned, tag - 1, 0)
        return np.where(owned, self._objects.length_array[slot], -tag).astype(np.int64), slot, owned

    def _barred(self, slot: NDArray[np.int32]) -> NDArray[np.bool_]:
        objects = self._objects
        return (objects.pins_array[slot] > 0) | (objects.level_array[slot] >= self._limit)

    def _survey(self, first: NDArray[np.int64]) -> Survey:
        """What evicting the extents that start here costs. Many in one window are taken together by some."""
        length, slot, owned = self._read(first)
        idle = self._now - self._objects.last_used_array[slot]
        if self._objects.preferring:
            idle *= IDLE_SHARES[self._objects.priority_array[slot]]
        idle = np.maximum(idle, self._idle_min)
        evicted = np.where(owned, length, 0)
        cost = self._policy.byte_cost(idle) * evicted
        blocked = owned & self._barred(slot)
        for low, high in self._others:
            blocked |= (first >= low) & (first < high)
        last = first + length
        together = self._granules * first.size // (max(1, int(length.sum())) * BEGINNINGS_PER_WINDOW)
        if together < 2:
            return Survey(first, last, cost, evicted, blocked)
        cut = np.arange(first.size) % together == 0
        cut[1:] |= (blocked[1:] != blocked[:-1]) | (first[1:] != last[:-1])
        begin = np.flatnonzero(cut)
        end = np.append(begin[1:], first.size) - 1
        return Survey(
            first[begin], last[end], np.add.reduceat(cost, begin), np.add.reduceat(evicted, begin), blocked[begin]
        )

    def _cheapest(self, survey: Survey) -> int:
        """The start of the cheapest window of neighbours, unblocked, overshooting only if that is due."""
        first, last, cost, evicted, blocked = survey
        granules = self._granules
        end = np.searchsorted(last, first + granules)
        begin = np.flatnonzero(end < first.size)
        end = end[begin]
        # A sum up to each extent of what may not be in a window: it must be the same at both ends.
        barriers = blocked.cumsum()
        barriers[1:] += (first[1:] != last[:-1]).cumsum()
        possible = (barriers[end] == barriers[begin]) & ~blocked[begin]
        begin, end = begin[possible], end[possible]
        if not begin.size:
            return -1
        cost = _sums(cost, begin, end)
        evicted = _sums(evicted, begin, end)
        if self._durable:
            # Long-pinned objects gather at the low end, where they part nothing.
            cost = cost * (1.0 + first[begin] / self._extents.granules)
        modest = evicted <= MODEST * granules
        chosen = int(np.where(modest, cost, np.inf).argmin())
        if not modest[chosen]:
            chosen = int(cost.argmin())
            self.overshot = True
        elif self._overshoot:
            density = cost / np.maximum(evicted, granules)
            thinnest = int(density.argmin())
            if density[thinnest] < OVERSHOOT_GAIN * density[chosen] and not modest[thinnest]:
                chosen = thinnest
                self.overshot = True
        return int(first[begin[chosen]])


Number = TypeVar("Number", np.int64, np.float64)


def _sums(values: NDArray[Number], begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[Number]:
    """The sum of each range of values, both ends included."""
    sums = values.cumsum()
    result: NDArray[Number] = sums[end] - sums[begin] + values[begin]
    return result
