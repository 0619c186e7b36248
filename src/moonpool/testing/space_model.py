"""A plain model of `moonpool.node.space.Space`: one list entry per granule, no cleverness, nothing fast.

Its methods raise AssertionError where a space did what it must never do; `check` compares all that a space shows.
"""

from __future__ import annotations

from moonpool.node.space import GRANULE_BYTES, HARD, Space


class SpaceModel:
    """Who owns or holds each granule, what is pinned and protected, and the order of use."""

    def __init__(self, frontier: int) -> None:
        self.owner: list[int | None] = [None] * frontier
        self.order: list[int] = []
        self.pins: dict[int, int] = {}
        self.level: dict[int, int] = {}
        # Eviction may move what it can't take behind its turn, so then the order is no longer compared.
        self.passed_over = False

    def grow(self, frontier: int) -> None:
        self.owner.extend([None] * (frontier - len(self.owner)))

    def own(self, slot: int, offset: int, nbytes: int) -> None:
        """Record an extent that the space handed out: it was free, and below the frontier."""
        self._take(slot, offset, nbytes)
        self.order.append(slot)

    def hold(self, slot: int, offset: int, nbytes: int) -> None:
        """Record what a reservation under way has gathered so far; nothing if it has ended."""
        self.owner = [None if owner == slot else owner for owner in self.owner]
        if nbytes:
            self._take(slot, offset, nbytes)

    def disown(self, slot: int) -> None:
        """Forget a slot's extent, as `free` and eviction do."""
        self.owner = [None if owner == slot else owner for owner in self.owner]
        self.order.remove(slot)
        self.level.pop(slot, None)

    def evict(self, slot: int) -> None:
        """The same, for eviction: the slot was evictable."""
        assert slot in self.order, f"slot {slot} was evicted, and owns nothing"
        assert self.evictable(slot, HARD), f"slot {slot} was evicted although it is pinned or protected"
        self.disown(slot)

    def touch(self, slot: int) -> None:
        self.order.remove(slot)
        self.order.append(slot)

    def evictable(self, slot: int, limit: int) -> bool:
        """Whether eviction may take a slot, sparing those protected at `limit` or above."""
        return slot in self.order and self.pins.get(slot, 0) <= 0 and self.level.get(slot, 0) < limit

    def longest_run(self, limit: int | None = None) -> int:
        """The longest run of free granules, or of free and evictable ones (below `limit`) if that is given."""
        usable = {None} | ({slot for slot in self.order if self.evictable(slot, limit)} if limit else set())
        longest = run = 0
        for owner in self.owner:
            run = run + 1 if owner in usable else 0
            longest = max(longest, run)
        return longest

    def check(self, space: Space) -> None:
        """Compare everything that a space shows with this model."""
        for slot in self.order:
            first, length = self.owner.index(slot), self.owner.count(slot)
            assert space.offset(slot) == first * GRANULE_BYTES, f"the offset of slot {slot}"
            assert space.size(slot) == length * GRANULE_BYTES, f"the size of slot {slot}"
        free = self.owner.count(None)
        live = sum(owner in self.order for owner in self.owner if owner is not None)
        assert space.free_bytes == free * GRANULE_BYTES, "free bytes"
        assert space.live_bytes == live * GRANULE_BYTES, "live bytes"
        assert space.held_bytes == (len(self.owner) - free - live) * GRANULE_BYTES, "held bytes"
        assert space.largest_free() == self.longest_run() * GRANULE_BYTES, "the longest free run"
        assert space.largest_available() == self.longest_run(HARD) * GRANULE_BYTES, "the longest available run"
        oldest = list(space.oldest())
        assert sorted(oldest) == sorted(self.order), "objects in the order of use"
        times = [space.last_used(slot) for slot in oldest]
        assert self.passed_over or times == [space.last_used(slot) for slot in self.order], "the order of use"

    def _take(self, slot: int, offset: int, nbytes: int) -> None:
        assert offset >= 0, "an extent before the pool"
        assert offset % GRANULE_BYTES == nbytes % GRANULE_BYTES == 0, "an extent in parts of granules"
        first, last = offset // GRANULE_BYTES, (offset + nbytes) // GRANULE_BYTES
        assert last <= len(self.owner), "an extent beyond the frontier"
        assert set(self.owner[first:last]) == {None}, f"slot {slot} was given bytes of {set(self.owner[first:last])}"
        self.owner[first:last] = [slot] * (last - first)


def check_map(space: Space) -> None:
    """Walk a space's own map: extents tile the pool up to the frontier, no two free runs are neighbours, and the
    free runs that can be found are those that there are."""
    extents = space._extents
    granule, free, before_is_free = 0, 0, False
    runs: list[tuple[int, int]] = []
    while granule < extents.frontier:
        tag = extents.starts[granule]
        assert tag, f"nothing starts at granule {granule}"
        is_free = tag < 0
        assert not (is_free and before_is_free), f"two free runs meet at granule {granule}"
        length = -tag if is_free else space.size(tag - 1) // GRANULE_BYTES
        assert length > 0, f"an extent without length at granule {granule}"
        assert not any(extents.starts[granule + 1 : granule + length]), f"a start within the extent at {granule}"
        assert not any(extents.ends[granule + 1 : granule + length]), f"an end within the extent at {granule}"
        assert extents.ends[granule + length] == tag, f"start and end disagree for the extent at granule {granule}"
        if is_free:
            runs.append((granule, length))
            free += length
        granule += length
        before_is_free = is_free
    assert granule == extents.frontier, "the last extent crosses the frontier"
    assert free * GRANULE_BYTES == space.free_bytes, "free bytes"
    assert sorted(extents.long_runs(len(runs) + 1)) == runs, "free runs and their rings disagree"
