"""Space: the bytes of the pool, who owns which extent, how recently it was used, and what makes room for more."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.node.eviction import Evictor, Recency
from moonpool.node.extents import Extents
from moonpool.node.objects import Objects
from moonpool.node.windows import Policy

GRANULE_BYTES: Final = 4096
GRANULE_SHIFT: Final = 12
# Objects below 1 MiB go to the low end of the pool, where they don't part the large ones.
SMALL_GRANULES: Final = 256
# Victims between two yields, at some 3 us each, and how often the clock is read meanwhile. A step is planned to take
# half of what it may, as what the caller did before it counts too.
STEP_VICTIMS_MAX: Final = 256
CLOCK_PERIOD: Final = 16
# A window that a pin or another's allocation broke is planned anew this often.
PLANS_MAX: Final = 8

NORMAL: Final = 0
SOFT: Final = 1
HARD: Final = 2


class Space:
    """Extents and eviction of one pool, as a state machine without I/O; one thread at a time.

    An object is named by a slot that the caller chooses. Offsets and sizes are in bytes, in whole granules.
    Every call is O(1) but for `place`, `place_many`, `make_room` (in bounded steps) and `largest_available`.
    """

    __slots__ = ("_clock", "_clock_period", "_evictor", "_extents", "_held", "_live", "_objects", "_step_s", "pins")

    def __init__(
        self,
        pool_bytes: int,
        slots: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        step_s: float = 0.001,
        policy: Policy | None = None,
    ) -> None:
        self._clock = clock
        self._step_s = step_s / 2
        # Without time there is one victim a step: so tests see every state between two.
        self._clock_period = CLOCK_PERIOD if step_s > 0 else 1
        self._extents = Extents(pool_bytes >> GRANULE_SHIFT)
        self._objects = Objects(slots, self._extents.claimed)
        self._evictor = Evictor(self._extents, self._objects, policy or Recency())
        self._live = 0
        self._held = 0
        self.pins: Final = self._objects.pins

    @property
    def live_bytes(self) -> int:
        """Bytes of all objects, in whole granules."""
        return self._live << GRANULE_SHIFT

    @property
    def held_bytes(self) -> int:
        """Bytes that reservations still under way have gathered so far."""
        return self._held << GRANULE_SHIFT

    @property
    def free_bytes(self) -> int:
        """Bytes below the frontier that nobody owns or holds."""
        return (self._extents.frontier - self._live - self._held) << GRANULE_SHIFT

    def grow(self, nbytes: int) -> None:
        """Hand out the first `nbytes` of the pool, and no more, from now on. A smaller figure changes nothing."""
        self._extents.grow(nbytes >> GRANULE_SHIFT)

    def place(self, slot: int, offset: int, nbytes: int, last_used: float = 0.0) -> bool:
        """Own exactly this extent, below the frontier; False, and nothing changed, unless all of it is free."""
        granules = (nbytes + (GRANULE_BYTES - 1)) >> GRANULE_SHIFT
        if self._objects.length[slot]:
            raise _misuse(slot, nbytes)
        if offset % GRANULE_BYTES or not self._extents.claim(slot, offset >> GRANULE_SHIFT, granules):
            return False
        self._enter(slot, offset >> GRANULE_SHIFT, granules)
        self._objects.add_in_order(slot, granules, min(last_used, self._clock()))
        return True

    def place_many(
        self,
        slots: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        last_used: NDArray[np.float64],
        priorities: NDArray[np.int64] | None = None,
    ) -> NDArray[np.bool_]:
        """`place` for many slots of a space that owns nothing yet; says of each whether it was placed.

        Of two that overlap the one at the lower offset is placed. Raises ValueError if the space owns something.
        """
        if self._live or self._held:
            raise ValueError("place_many needs a fresh space; use place once objects are in it")
        firsts = offsets >> GRANULE_SHIFT
        lengths = (sizes + (GRANULE_BYTES - 1)) >> GRANULE_SHIFT
        good = (offsets % GRANULE_BYTES == 0) & (offsets >= 0) & (sizes > 0)
        good &= (slots >= 0) & (slots < self._objects.slots) & (firsts + lengths <= self._extents.frontier)
        order = np.flatnonzero(good)
        order = order[np.argsort(firsts[order], kind="stable")]
        lasts = firsts[order] + lengths[order]
        if np.any(firsts[order][1:] < lasts[:-1]):
            order = order[_apart(firsts[order].tolist(), lasts.tolist())]
        placed = np.zeros(len(slots), np.bool_)
        placed[order] = True
        slots, firsts, lengths = slots[order], firsts[order], lengths[order]
        self._objects.first_array[slots] = firsts
        self._objects.length_array[slots] = lengths
        self._extents.lay_out(slots, firsts, lengths)
        preferred = np.zeros(len(slots), np.int64) if priorities is None else priorities[order]
        self._objects.lay_out(slots, lengths, np.minimum(last_used[order], self._clock()), preferred)
        self._live = int(lengths.sum())
        return placed

    def allocate(self, slot: int, nbytes: int, *, durable: bool = False, priority: int = 0) -> int:
        """Own an extent of `nbytes` out of free bytes, most recently used now; its offset, or -1 if none is free.

        `durable` says that it will be pinned for long: it goes to the low end of the pool, as small ones do. With a
        `priority` of 1, 2, or 3 and more, it counts as idle for a half, a quarter, an eighth of the time. Raises
        ValueError if the slot owns an extent or `nbytes` isn't positive.
        """
        objects = self._objects
        granules = (nbytes + (GRANULE_BYTES - 1)) >> GRANULE_SHIFT
        if granules <= 0 or objects.length[slot]:
            raise _misuse(slot, nbytes)
        first = self._extents.take(slot, granules, durable or granules < SMALL_GRANULES)
        if first < 0:
            return -1
        objects.first[slot] = first
        objects.length[slot] = granules
        self._live += granules
        objects.add(slot, granules, self._clock(), priority)
        return first << GRANULE_SHIFT

    def make_room(
        self,
        slot: int,
        nbytes: int,
        evict: Callable[[int], None],
        *,
        durable: bool = False,
        soft: bool = True,
        priority: int = 0,
    ) -> Generator[None, None, int]:
        """Own an extent of `nbytes`, evicting the cheapest contiguous window of free and unpinned bytes.

        Yields between steps of at most `step_s`, in which others may call anything. `evict(slot)` is called once for
        each victim, which still owns its extent then; it must not change this space. What was cleared is held, and
        its slot pinned, until the generator ends or is closed, which gives it back; nobody else is given what lies
        in the window meanwhile. Returns the offset, or -1 when no run of free and evictable bytes suffices, or when
        pins broke `PLANS_MAX` windows. Soft-protected objects are taken only if nothing else suffices, and not at
        all unless `soft`. Raises what `allocate` raises.
        """
        granules = (nbytes + (GRANULE_BYTES - 1)) >> GRANULE_SHIFT
        if granules > self._extents.frontier:
            return -1
        for _ in range(PLANS_MAX):
            offset = self.allocate(slot, nbytes, durable=durable, priority=priority)
            if offset >= 0:
                return offset
            pause = False
            for limit in (SOFT, HARD) if soft else (SOFT,):
                start = self._evictor.quick(granules, limit, self._clock())
                if start < 0:
                    start, pause = yield from self._evictor.window(granules, limit, self._clock(), durable)
                if start >= 0:
                    break
            else:
                return -1
            victim = self._extents.starts[start] - 1
            if victim >= 0 and self._objects.length[victim] == granules and self._objects.evictable(victim, limit):
                self._replace(victim, slot, granules, evict, priority)
                return start << GRANULE_SHIFT
            stop = yield from self._clear(slot, start, granules, limit, evict, pause)
            if stop >= 0:
                return self._settle(slot, start, stop, granules, durable, priority) << GRANULE_SHIFT
        return -1

    def free(self, slot: int) -> None:
        """Give a slot's extent and protection back, whatever its pins say. Raises KeyError if it owns none."""
        granules = self._objects.length[slot]
        if not granules:
            raise KeyError(f"slot {slot} owns no extent")
        self._objects.drop(slot)
        self._objects.length[slot] = self._objects.level[slot] = 0
        self._live -= granules
        self._extents.release(self._objects.first[slot], granules)

    def touch(self, slot: int) -> None:
        """Make a slot that owns an extent the most recently used."""
        self._objects.touch(slot, self._clock())

    def touch_chain(self, slots: Sequence[int]) -> None:
        """Touch slots that own extents, the last one first: of a chain the tail is evicted before the head."""
        now, touch = self._clock(), self._objects.touch
        for slot in reversed(slots):
            touch(slot, now)

    def protect(self, slot: int, level: int) -> None:
        """Set how a slot is protected from eviction: 0 not at all, 1 evicted last (soft), 2 never (hard)."""
        self._objects.level[slot] = level

    def offset(self, slot: int) -> int:
        """Where a slot's extent begins in the pool, in bytes."""
        return self._objects.first[slot] << GRANULE_SHIFT

    def size(self, slot: int) -> int:
        """A slot's extent in bytes, in whole granules; 0 if it owns none."""
        return self._objects.length[slot] << GRANULE_SHIFT

    def last_used(self, slot: int) -> float:
        """When a slot was last used, by this space's clock."""
        return self._objects.last_used[slot]

    def oldest(self) -> Iterator[int]:
        """All slots that own an extent, coldest first; what eviction had to pass over comes late. Valid until the
        space changes."""
        return self._objects.oldest()

    def coldest(self) -> int:
        """The coldest evictable slot, or -1 if few looks show none. Constant time."""
        objects, now, found, found_used = self._objects, self._clock(), -1, 0.0
        for ring in objects.rings():
            for slot in objects.coldest(ring, HARD, 1):
                used = objects.seems_used(slot, now)
                if found < 0 or used < found_used:
                    found, found_used = slot, used
        return found

    def largest_free(self) -> int:
        """The longest run of free bytes."""
        return self._extents.largest() << GRANULE_SHIFT

    def largest_available(self) -> int:
        """The longest run of free and evictable bytes, soft-protected ones included.

        Rounded down to cells of a 65,536th of the pool while more than 16,384 objects are pinned or hard-protected.
        Reads the pins of all slots: 0.4 ms a million of them, and 10 ms a million of pinned ones.
        """
        return self._evictor.largest(HARD) << GRANULE_SHIFT

    def look_for_largest(self) -> Generator[None, None, int]:
        """`largest_available` in steps; while so many are pinned that it takes longer than one, `largest_free`."""
        granules = yield from self._evictor.look_for_largest(HARD)
        return self.largest_free() if granules < 0 else granules << GRANULE_SHIFT

    def _enter(self, slot: int, first: int, granules: int) -> None:
        self._objects.first[slot] = first
        self._objects.length[slot] = granules
        self._live += granules

    def _replace(self, victim: int, slot: int, granules: int, evict: Callable[[int], None], priority: int) -> None:
        """Hand a victim's extent over as it is."""
        evict(victim)
        extents, objects = self._extents, self._objects
        first = objects.first[victim]
        objects.drop(victim)
        objects.length[victim] = objects.level[victim] = 0
        extents.starts[first] = extents.ends[first + granules] = slot + 1
        objects.first[slot] = first
        objects.length[slot] = granules
        objects.add(slot, granules, self._clock(), priority)

    def _clear(
        self,
        slot: int,
        start: int,
        granules: int,
        limit: int,
        evict: Callable[[int], None],
        pause: bool,
    ) -> Generator[None, None, int]:
        """Gather a window from `start` on, extent by extent; where it ends, or -1 if it was broken."""
        extents, objects = self._extents, self._objects
        starts, ends = extents.starts, extents.ends
        stop, victims = start, 0
        deadline = self._clock() + self._step_s
        objects.first[slot] = start
        objects.pins[slot] += 1
        claim = (start, start + granules)
        claimed = complete = False
        try:
            if pause:
                extents.claimed.append(claim)
                claimed = True
                yield
                deadline = self._clock() + self._step_s
            while stop - start < granules:
                tag = starts[stop]
                if tag > 0:
                    victim = tag - 1
                    if objects.pins[victim] > 0 or objects.level[victim] >= limit:
                        return -1
                    evict(victim)
                    objects.drop(victim)
                    length = objects.length[victim]
                    objects.length[victim] = objects.level[victim] = 0
                    self._live -= length
                    starts[stop] = ends[stop + length] = 0
                elif tag < 0:
                    length = extents.absorb(stop)
                else:
                    return -1
                if stop > start:
                    ends[stop] = 0
                stop += length
                starts[start] = ends[stop] = slot + 1
                objects.length[slot] = stop - start
                self._held += length
                victims += 1
                if stop - start < granules and (
                    victims % STEP_VICTIMS_MAX == 0 or (victims % self._clock_period == 0 and self._clock() >= deadline)
                ):
                    if not claimed:
                        extents.claimed.append(claim)
                        claimed = True
                    yield
                    deadline = self._clock() + self._step_s
            complete = True
        finally:
            if claimed:
                extents.claimed.remove(claim)
            objects.pins[slot] -= 1
            self._held -= stop - start
            if not complete:
                objects.length[slot] = 0
                if stop > start:
                    extents.release(start, stop - start)
        return stop

    def _settle(self, slot: int, start: int, stop: int, granules: int, durable: bool, priority: int) -> int:
        """Keep `granules` of the window, at the end that joins the rest to a free neighbour if there is one."""
        extents = self._extents
        first = start
        if stop - start > granules:
            low = durable or granules < SMALL_GRANULES
            if extents.ends[start] < 0:
                low = False
            elif extents.starts[stop] < 0:
                low = True
            extents.starts[start] = extents.ends[stop] = 0
            first = start if low else stop - granules
            extents.starts[first] = extents.ends[first + granules] = slot + 1
            if low:
                extents.release(first + granules, stop - first - granules)
            else:
                extents.release(start, first - start)
        self._enter(slot, first, granules)
        self._objects.add(slot, granules, self._clock(), priority)
        return first


def _misuse(slot: int, nbytes: int) -> ValueError:
    if nbytes <= 0:
        return ValueError(f"an extent of {nbytes} bytes for slot {slot}: at least 1 byte is needed")
    return ValueError(f"slot {slot} owns an extent already; free it first")


def _apart(firsts: list[int], lasts: list[int]) -> list[int]:
    """Which of these extents, ascending, to keep so that none overlaps one kept before it."""
    kept, end = [], 0
    for index, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        if first >= end:
            kept.append(index)
            end = last
    return kept
