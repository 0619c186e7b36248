"""A plain model of `moonpool.node.space.Space`: one list entry per granule, no cleverness, nothing fast."""

from __future__ import annotations

from moonpool.node.space import GRANULE_BYTES, HARD, Space


class SpaceModel:
    """Who owns each granule, what is pinned and protected, and the order of use."""

    def __init__(self, pool_granules: int, frontier: int) -> None:
        self.granules = pool_granules
        self.frontier = frontier
        self.owner: list[int | None] = [None] * pool_granules
        self.order: list[int] = []
        self.pins: dict[int, int] = {}
        self.level: dict[int, int] = {}

    def own(self, slot: int, first: int, granules: int) -> None:
        """Record an extent that the space handed out; it must have been free and below the frontier."""
        assert first >= 0, "an extent before the pool"
        assert first + granules <= self.frontier, "an extent beyond the frontier"
        assert set(self.owner[first : first + granules]) == {None}, "an extent with another's bytes"
        self.owner[first : first + granules] = [slot] * granules
        self.order.append(slot)

    def disown(self, slot: int) -> None:
        """Forget a slot's extent, as `free` and eviction do."""
        self.owner = [None if owner == slot else owner for owner in self.owner]
        self.order.remove(slot)
        self.level.pop(slot, None)

    def touch(self, slot: int) -> None:
        """Make a slot the most recently used."""
        self.order.remove(slot)
        self.order.append(slot)

    def evictable(self, slot: int, limit: int = HARD) -> bool:
        """Whether eviction may take a slot, sparing those protected at `limit` or above."""
        return self.pins.get(slot, 0) <= 0 and self.level.get(slot, 0) < limit

    def longest_run(self, limit: int | None = None) -> int:
        """The longest run of free granules, with evictable ones (below `limit`) if that is given."""
        longest = run = 0
        for owner in self.owner[: self.frontier]:
            usable = owner is None or (limit is not None and owner >= 0 and self.evictable(owner, limit))
            run = run + 1 if usable else 0
            longest = max(longest, run)
        return longest

    def extents(self) -> dict[int, tuple[int, int]]:
        """Each slot's first granule and length."""
        found: dict[int, tuple[int, int]] = {}
        for granule, owner in enumerate(self.owner):
            if owner is not None:
                first, length = found.get(owner, (granule, 0))
                found[owner] = first, length + 1
        return found

    def check(self, space: Space) -> None:
        """Compare everything that a space shows with this model; AssertionError names what differs."""
        extents = self.extents()
        live = sum(length for slot, (_, length) in extents.items() if slot in self.order)
        for slot in self.order:
            first, length = extents[slot]
            assert space.offset(slot) == first * GRANULE_BYTES, "offset"
            assert space.size(slot) == length * GRANULE_BYTES, "size"
        assert space.live_bytes == live * GRANULE_BYTES, "live bytes"
        assert space.live_bytes + space.held_bytes + space.free_bytes == self.frontier * GRANULE_BYTES, "sum of bytes"
        assert sorted(space.oldest()) == sorted(self.order), "order of use"


def check_tags(space: Space) -> None:
    """Walk a space's own map: extents tile the pool up to the frontier, and two free runs are never neighbours."""
    extents = space._extents
    granule, free_before, free, runs = 0, False, 0, 0
    while granule < extents.frontier:
        tag = extents.starts[granule]
        assert tag != 0, f"nothing starts at granule {granule}"
        is_free = tag < 0
        assert not (is_free and free_before), f"two free runs meet at granule {granule}"
        length = -tag if is_free else space.size(tag - 1) // GRANULE_BYTES
        assert length > 0, f"an empty extent at granule {granule}"
        assert not any(extents.starts[granule + 1 : granule + length]), f"a tag inside the extent at {granule}"
        assert extents.ends[granule + length] == tag, f"ends disagree for the extent at granule {granule}"
        free += length if is_free else 0
        runs += is_free
        granule += length
        free_before = is_free
    assert granule == extents.frontier, "the last extent crosses the frontier"
    assert free * GRANULE_BYTES == space.free_bytes, "free bytes"
    assert len(extents.long_runs(1 << 30)) == runs, "free runs and their rings disagree"
