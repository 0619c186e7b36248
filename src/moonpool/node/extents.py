"""Extents: which granules of the pool are owned, by whom, and where the free runs are.

Boundary tags in two arrays say what starts and what ends at each granule boundary, so both neighbours of any
extent are one read away, and two free runs never stay neighbours. Free runs hang in rings by size class, and one
integer says which rings aren't empty. All state lies in fixed anonymous mappings that the kernel fills in as they
are touched: nothing here is resized, and nothing is seen by the garbage collector.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.folder.mapping import column

# Below this, each length has a class of its own; above, eight classes share a power of two (at most 12% too long).
EXACT_CLASSES: Final = 16
CLASSES: Final = 256
# How many runs of a request's own class are looked at, as some of them may be too short for it.
CLASS_WALK_MAX: Final = 64


def size_class(granules: int) -> int:
    """The class of free runs that a run of `granules` belongs to."""
    if granules < EXACT_CLASSES:
        return granules
    bits = granules.bit_length()
    return (bits << 3) + (granules >> (bits - 4)) - 32


def size_classes(granules: NDArray[np.int64]) -> NDArray[np.int64]:
    """`size_class` of each of an array of lengths."""
    bits = np.frexp(granules.astype(np.float64))[1].astype(np.int64)
    return np.where(granules < EXACT_CLASSES, granules, (bits << 3) + (granules >> np.maximum(bits - 4, 0)) - 32)


class Extents:
    """The map of the pool: owned extents and free runs, in granules.

    `starts[g]` describes what starts at boundary g, `ends[g]` what ends there: owner + 1 for an owned extent,
    minus its length for a free run, 0 for neither. A free run is named by the boundary at which it ends.
    """

    __slots__ = (
        "_bits",
        "_next",
        "_previous",
        "_sentinel",
        "claimed",
        "ends",
        "frontier",
        "granules",
        "starts",
        "starts_array",
    )

    def __init__(self, granules: int) -> None:
        self.granules: Final = granules
        self.frontier = 0
        self.starts = column("i", granules + 1)
        self.ends = column("i", granules + 1)
        self.starts_array: NDArray[np.int32] = np.frombuffer(self.starts, np.int32)
        self._sentinel = granules + 1
        self._next = column("i", granules + 1 + CLASSES)
        self._previous = column("i", granules + 1 + CLASSES)
        for ring in range(self._sentinel, self._sentinel + CLASSES):
            self._next[ring] = self._previous[ring] = ring
        self._bits = 0
        # Ranges that reservations are clearing: nobody else takes free runs in them.
        self.claimed: list[tuple[int, int]] = []

    def grow(self, frontier: int) -> None:
        """Hand out granules below `frontier` from now on; it never shrinks."""
        frontier = min(frontier, self.granules)
        if frontier > self.frontier:
            first, self.frontier = self.frontier, frontier
            self.release(first, frontier - first)

    def take(self, owner: int, granules: int, low: bool) -> int:
        """Give `owner` the run that fits best, from its low or its high end; the first granule, or -1.

        Of runs too long by less than an eighth, at most `CLASS_WALK_MAX` are looked at.
        """
        bits, following = self._bits, self._next
        run = 0
        if granules < EXACT_CLASSES:
            found = granules
        else:
            found = size_class(granules)
            if bits >> found & 1:
                run = self._fitting(self._sentinel + found, granules)
            if not run:
                found += 1
        if not run:
            above = bits >> found
            if not above:
                return -1
            if not above & 1:
                found += (above & -above).bit_length() - 1
            run = following[self._sentinel + found]
        if self.claimed and self._is_claimed(run):
            run, found = self._outside(granules)
            if not run:
                return -1
        starts, ends = self.starts, self.ends
        length = -ends[run]
        first = run - length
        rest = length - granules
        if rest == 0:
            self._unlink(run)
            starts[first] = ends[run] = owner + 1
            return first
        if low:
            middle = first + granules
            starts[first] = ends[middle] = owner + 1
            starts[middle] = ends[run] = -rest
            if size_class(rest) != found:
                self._unlink(run)
                self._link(run, rest)
            return first
        self._unlink(run)
        middle = first + rest
        starts[middle] = ends[run] = owner + 1
        starts[first] = ends[middle] = -rest
        self._link(middle, rest)
        return middle

    def claim(self, owner: int, first: int, granules: int) -> bool:
        """Give `owner` exactly these granules; False, and nothing changed, unless all of them are free."""
        last = first + granules
        if first < 0 or granules <= 0 or last > self.frontier:
            return False
        start = self._run_over(first)
        length = -self.starts[start]
        run = start + length
        if length <= 0 or run < last:
            return False
        self._unlink(run)
        self.starts[start] = self.ends[run] = 0
        self.starts[first] = self.ends[last] = owner + 1
        if start < first:
            self._free(start, first)
        if last < run:
            self._free(last, run)
        return True

    def lay_out(self, owners: NDArray[np.int64], firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Set all owned extents of a map that has none, ascending and without overlap; the rest becomes free."""
        while self._bits:
            self.absorb(int(self.long_runs(1)[0][0]))
        ends_array = np.frombuffer(self.ends, np.int32)
        lasts = firsts + lengths
        self.starts_array[firsts] = owners + 1
        ends_array[lasts] = owners + 1
        run_firsts = np.concatenate(([0], lasts))
        run_lasts = np.concatenate((firsts, [self.frontier]))
        gaps = run_lasts > run_firsts
        run_firsts, run_lasts = run_firsts[gaps], run_lasts[gaps]
        self.starts_array[run_firsts] = ends_array[run_lasts] = run_firsts - run_lasts
        classes = size_classes(run_lasts - run_firsts)
        following, preceding = np.frombuffer(self._next, np.int32), np.frombuffer(self._previous, np.int32)
        for found in np.unique(classes).tolist():
            runs = run_lasts[classes == found]
            ring = self._sentinel + found
            following[ring], following[runs[:-1]], following[runs[-1]] = runs[0], runs[1:], ring
            preceding[runs[0]], preceding[runs[1:]], preceding[ring] = ring, runs[:-1], runs[-1]
            self._bits |= 1 << found

    def absorb(self, start: int) -> int:
        """Take the free run that starts at `start` out of the free ones, without an owner yet; its length."""
        length = -self.starts[start]
        run = start + length
        self._unlink(run)
        self.starts[start] = self.ends[run] = 0
        return length

    def release(self, first: int, granules: int) -> None:
        """Make these granules, one owned extent or never used, a free run, joined with its free neighbours."""
        starts, ends = self.starts, self.ends
        last = first + granules
        left, right = ends[first], starts[last]
        starts[first] = ends[last] = 0
        if left < 0:
            self._unlink(first)
            ends[first] = 0
            first += left
        if right < 0:
            starts[last] = 0
            last -= right
            self._unlink(last)
        self._free(first, last)

    def largest(self) -> int:
        """The longest free run's length; of runs within 12% of it, at most `CLASS_WALK_MAX` are looked at."""
        if not self._bits:
            return 0
        ring = self._sentinel + self._bits.bit_length() - 1
        longest, run = 0, self._next[ring]
        for _ in range(CLASS_WALK_MAX):
            if run == ring:
                break
            longest = max(longest, -self.ends[run])
            run = self._next[run]
        return longest

    def long_runs(self, count: int) -> list[tuple[int, int]]:
        """Up to `count` of the longest free runs as (first granule, length), longest class first."""
        runs: list[tuple[int, int]] = []
        bits = self._bits
        while bits and len(runs) < count:
            found = bits.bit_length() - 1
            bits ^= 1 << found
            ring = self._sentinel + found
            run = self._next[ring]
            while run != ring and len(runs) < count:
                length = -self.ends[run]
                runs.append((run - length, length))
                run = self._next[run]
        return runs

    def _fitting(self, ring: int, granules: int) -> int:
        """The shortest run of a ring that is long enough, of the first `CLASS_WALK_MAX`; 0 if there is none."""
        best = best_length = 0
        run = self._next[ring]
        for _ in range(CLASS_WALK_MAX):
            if run == ring:
                break
            length = -self.ends[run]
            if length >= granules and (not best or length < best_length):
                best, best_length = run, length
                if length == granules:
                    break
            run = self._next[run]
        return best

    def _is_claimed(self, run: int) -> bool:
        first = run + self.ends[run]
        return any(low < run and first < high for low, high in self.claimed)

    def _outside(self, granules: int) -> tuple[int, int]:
        """A run, with its class, that is long enough and in no claimed range; (0, 0) if few looks show none."""
        looks, found = CLASS_WALK_MAX, size_class(granules)
        while looks and (bits := self._bits >> found):
            found += (bits & -bits).bit_length() - 1
            ring = self._sentinel + found
            run = self._next[ring]
            while looks and run != ring:
                if -self.ends[run] >= granules and not self._is_claimed(run):
                    return run, found
                run = self._next[run]
                looks -= 1
            found += 1
        return 0, 0

    def _run_over(self, granule: int) -> int:
        """Where the extent or free run over `granule` starts. Linear in its length: for a restart only."""
        high, width = granule + 1, 1024
        while True:
            low = max(0, high - width)
            found = np.flatnonzero(self.starts_array[low:high])
            if found.size or low == 0:
                return low + int(found[-1]) if found.size else 0
            high, width = low, width * 4

    def _free(self, first: int, last: int) -> None:
        self.starts[first] = self.ends[last] = first - last
        self._link(last, last - first)

    def _link(self, run: int, granules: int) -> None:
        found = size_class(granules)
        ring = self._sentinel + found
        following, preceding = self._next, self._previous
        head = following[ring]
        following[run] = head
        preceding[run] = ring
        preceding[head] = following[ring] = run
        self._bits |= 1 << found

    def _unlink(self, run: int) -> None:
        after, before = self._next[run], self._previous[run]
        self._next[before] = after
        self._previous[after] = before
        if after == before:
            self._bits ^= 1 << after - self._sentinel
