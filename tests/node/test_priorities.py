"""What an object's priority does: it counts as idle for less time, and goes all the same in the end."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.node.space import Space
from moonpool.testing.space_model import check_map
from tests.node.test_space import Evicted, G, finish


class Timed:
    """A full pool whose clock is set by hand: of each priority from 3 to 0 an object, of so many granules."""

    def __init__(self, granules: int) -> None:
        self.now = 1000.0
        self.space = Space(4 * granules * G, 100, clock=lambda: self.now)
        self.space.grow(4 * granules * G)
        for priority in (3, 2, 1, 0):
            assert self.space.allocate(priority, granules * G, priority=priority) >= 0

    def victims_of(self, slot: int, granules: int) -> list[int]:
        evicted = Evicted()
        finish(self.space.make_room(slot, granules * G, evicted))
        check_map(self.space)
        return evicted


@pytest.mark.parametrize("granules", [1, 8, 1000, 4000])
def test_an_object_counts_as_idle_for_less_time_the_higher_its_priority(granules: int) -> None:
    """Those of 4000 granules are too large to be taken without a search."""
    pool = Timed(granules)
    pool.now += 80
    assert pool.victims_of(10, granules) == [0]
    pool.now += 42  # by now the new one counts as idle for 42 s, the others for 61, 30.5 and 15.25
    assert pool.victims_of(11, granules) == [1]
    pool.now += 20  # 62, 20; 35.5, 17.75
    assert pool.victims_of(12, granules) == [10]
    pool.now += 20  # 40, 20; 40.5, 20.25
    assert pool.victims_of(13, granules) == [2]


@pytest.mark.parametrize("granules", [8, 4000])
def test_an_object_of_the_highest_priority_goes_once_it_was_idle_for_eight_times_as_long(granules: int) -> None:
    pool = Timed(granules)
    rounds = 0
    while pool.space.size(3):
        pool.now += 10
        rounds += 1
        for slot in (0, 1, 2):
            if pool.space.size(slot):
                pool.space.touch(slot)
        pool.now += 10
        pool.victims_of(10 + rounds, granules)
    assert rounds in (8, 9), "idle for 160 or 180 s, while the coldest of the others was for 20"


def test_a_window_is_cheap_where_no_priority_is() -> None:
    pool = Timed(8)
    pool.now += 60
    assert sorted(pool.victims_of(10, 16)) == [0, 1]


def test_priorities_are_found_again_where_many_objects_are_placed_at_once() -> None:
    now = 1000.0
    space = Space(300 * G, 400, clock=lambda: now)
    space.grow(300 * G)
    slots = np.arange(300)
    preferred = np.where(slots % 3 == 0, 200, 0)
    assert space.place_many(slots, slots * G, np.full(300, G), np.linspace(900.0, 899.0, 300), preferred).all()
    evicted = Evicted()
    for slot in range(300, 400):
        finish(space.make_room(slot, G, evicted))
    assert len(evicted) == 100
    assert not [slot for slot in evicted if slot % 3 == 0]
