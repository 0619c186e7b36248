"""Whatever comes in whatever order, a space agrees with a plain model of one list entry per granule.

What would break it: an extent owned twice, a free run that isn't joined with its neighbour, a hold that others can
take from or that isn't given back, a pinned victim, room that exists and isn't found.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.node import eviction, windows
from moonpool.node.space import GRANULE_BYTES, HARD, SOFT, Space
from moonpool.testing.space_model import SpaceModel, check_map

SLOTS = 40
GRANULES = 64
sizes = st.one_of(st.integers(1, 4), st.integers(1, GRANULES))
priorities = st.sampled_from([0, 0, 1, 2, 3, 255])
draws = st.integers(0, SLOTS - 1)


@dataclass
class Making:
    """A reservation under way."""

    steps: Generator[None, None, int]
    nbytes: int
    should_succeed: bool
    disturbed: bool = False


class SpaceMachine(RuleBasedStateMachine):
    @initialize(frontier=st.integers(0, GRANULES))
    def start(self, frontier: int) -> None:
        now = count(1)
        # The shortest steps: a reservation yields after a few extents looked at and after every victim.
        self.patches = [
            mock.patch.object(windows, "SURVEY_EXTENTS", 4),
            mock.patch.object(windows, "PIECE_WORK", 1),
            mock.patch.object(windows, "WALK_MAX", 6),
            mock.patch.object(eviction, "SURVEY_EXTENTS", 4),
            mock.patch.object(eviction, "SLOTS_PER_STEP", 16),
        ]
        for patch in self.patches:
            patch.start()
        self.space = Space(GRANULES * GRANULE_BYTES, SLOTS, clock=lambda: float(next(now)), step_s=0.0)
        self.model = SpaceModel(frontier)
        self.unused = list(range(SLOTS))
        self.making: dict[int, Making] = {}
        self.space.grow(frontier * GRANULE_BYTES)

    def _live(self, draw: int) -> int:
        return self.model.order[draw % len(self.model.order)]

    def _disturb(self) -> None:
        for making in self.making.values():
            making.disturbed = True

    def _evict(self, slot: int) -> None:
        self.model.evict(slot)
        self.unused.append(slot)

    @rule(granules=sizes, durable=st.booleans(), part=st.integers(0, GRANULE_BYTES - 1), priority=priorities)
    @precondition(lambda self: self.unused)
    def allocate(self, granules: int, durable: bool, part: int, priority: int) -> None:
        self._disturb()
        slot = self.unused[-1]
        offset = self.space.allocate(slot, granules * GRANULE_BYTES - part, durable=durable, priority=priority)
        if offset >= 0:
            self.model.own(slot, offset, granules * GRANULE_BYTES)
            self.unused.pop()
        else:
            assert self.making or self.model.longest_run() < granules, "free bytes that suffice weren't found"

    @rule(granules=sizes, durable=st.booleans(), soft=st.booleans(), at_once=st.booleans(), priority=priorities)
    @precondition(lambda self: self.unused)
    def make_room(self, granules: int, durable: bool, soft: bool, at_once: bool, priority: int) -> None:
        self._disturb()
        slot = self.unused.pop()
        model = self.model
        model.passed_over |= bool(self.making) or not all(model.evictable(each, SOFT) for each in model.order)
        nbytes = granules * GRANULE_BYTES
        steps = self.space.make_room(slot, nbytes, self._evict, durable=durable, soft=soft, priority=priority)
        should_succeed = not self.making and model.longest_run(HARD if soft else SOFT) >= granules
        self.making[slot] = Making(steps, granules * GRANULE_BYTES, should_succeed)
        while at_once and slot in self.making:
            self._step(slot)

    @rule(draw=draws)
    @precondition(lambda self: self.making)
    def step(self, draw: int) -> None:
        slot = sorted(self.making)[draw % len(self.making)]
        for other, making in self.making.items():
            making.disturbed |= other != slot
        self._step(slot)

    def _step(self, slot: int) -> None:
        making = self.making[slot]
        self.model.passed_over |= making.disturbed
        try:
            next(making.steps)
        except StopIteration as end:
            del self.making[slot]
            self.model.hold(slot, 0, 0)
            assert self.making or not self.space._extents.claimed
            if end.value >= 0:
                self.model.own(slot, end.value, making.nbytes)
            else:
                assert making.disturbed or not making.should_succeed, "room that there was wasn't found"
                self.unused.append(slot)
        else:
            self.model.hold(slot, self.space.offset(slot), self.space.size(slot))

    @rule(draw=draws)
    @precondition(lambda self: self.making)
    def close(self, draw: int) -> None:
        self._disturb()
        slot = sorted(self.making)[draw % len(self.making)]
        self.making.pop(slot).steps.close()
        self.model.hold(slot, 0, 0)
        self.unused.append(slot)
        assert self.making or not self.space._extents.claimed
        assert self.space.size(slot) == 0
        assert self.space.pins[slot] == 0

    @rule(draw=draws)
    @precondition(lambda self: self.model.order)
    def free(self, draw: int) -> None:
        self._disturb()
        slot = self._live(draw)
        self.space.free(slot)
        self.model.disown(slot)
        self.space.pins[slot] = 0
        self.model.pins.pop(slot, None)
        self.unused.append(slot)

    @rule(draw=draws)
    @precondition(lambda self: self.model.order)
    def touch(self, draw: int) -> None:
        slot = self._live(draw)
        self.space.touch(slot)
        self.model.touch(slot)

    @rule(draw=draws, pins=st.sampled_from([0, 0, 1, 2]))
    @precondition(lambda self: self.model.order)
    def pin(self, draw: int, pins: int) -> None:
        self._disturb()
        slot = self._live(draw)
        self.space.pins[slot] = self.model.pins[slot] = pins

    @rule(draw=draws, level=st.integers(0, 2))
    @precondition(lambda self: self.model.order)
    def protect(self, draw: int, level: int) -> None:
        self._disturb()
        slot = self._live(draw)
        self.space.protect(slot, level)
        self.model.level[slot] = level

    @rule(frontier=st.integers(0, GRANULES))
    def grow(self, frontier: int) -> None:
        self._disturb()
        self.space.grow(frontier * GRANULE_BYTES)
        self.model.grow(frontier)

    @rule(first=st.integers(0, GRANULES), granules=sizes, last_used=st.floats(0, 1))
    @precondition(lambda self: self.unused)
    def place(self, first: int, granules: int, last_used: float) -> None:
        self._disturb()
        slot = self.unused[-1]
        wanted = self.model.owner[first : first + granules]
        placed = self.space.place(slot, first * GRANULE_BYTES, granules * GRANULE_BYTES, last_used)
        assert placed == (wanted == [None] * granules)
        if placed:
            self.unused.pop()
            self.model.own(slot, first * GRANULE_BYTES, granules * GRANULE_BYTES)
            self.model.order.sort(key=self.space.last_used)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "space"):
            self.model.check(self.space)
            check_map(self.space)

    def teardown(self) -> None:
        for making in getattr(self, "making", {}).values():
            making.steps.close()
        for patch in getattr(self, "patches", ()):
            patch.stop()


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None, derandomize=True)
