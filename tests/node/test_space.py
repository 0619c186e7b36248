"""What the node may expect of its space: room while there is room, the coldest first, pins kept, short steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import Any

import numpy as np
import pytest

from moonpool.node.space import GRANULE_BYTES, HARD, SOFT, STEP_VICTIMS_MAX, Space
from moonpool.node.windows import SURVEY_EXTENTS, Seconds, Survey, WindowSearch
from moonpool.testing.space_model import check_map

G = GRANULE_BYTES
MIB = 1 << 20


def counted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The same function, whose calls are recorded by their last argument."""

    def call(*arguments: Any) -> Any:
        calls.append(arguments[-1])
        return function(*arguments)

    return call


def space_of(granules: int, slots: int = 100, step_s: float = 0.001) -> Space:
    now = count(1)
    space = Space(granules * G, slots, clock=lambda: float(next(now)) * 1e-6, step_s=step_s)
    space.grow(granules * G)
    return space


def filled(lengths: list[int]) -> Space:
    """A full pool of objects of these lengths in granules, slots from 0, ascending, coldest first."""
    space = space_of(sum(lengths))
    first = 0
    for slot, length in enumerate(lengths):
        assert space.place(slot, first * G, length * G, last_used=slot * 1e-9)
        first += length
    return space


class Evicted(list[int]):
    """The victims, in order."""

    __call__ = list.append


def finish(steps: Generator[None, None, int]) -> int:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            offset: int = end.value
            return offset


def make_room(space: Space, slot: int, granules: int, soft: bool = True) -> tuple[int, list[int]]:
    evicted = Evicted()
    offset = finish(space.make_room(slot, granules * G, evicted, soft=soft))
    check_map(space)
    return offset // G if offset >= 0 else -1, sorted(evicted)


def test_one_extent_can_be_as_large_as_the_pool() -> None:
    space = space_of(1000)
    assert space.allocate(0, 1000 * G) == 0
    assert space.free_bytes == 0
    assert make_room(space, 1, 1000) == (0, [0])
    assert make_room(space, 2, 1001) == (-1, [])


def test_freed_memory_is_usable_again_at_any_size() -> None:
    space = space_of(64)
    for slot in range(64):
        assert space.allocate(slot, 1) >= 0
    assert space.largest_free() == 0
    for slot in [*range(0, 64, 2), *range(1, 64, 2)]:
        space.free(slot)
    assert space.largest_free() == 64 * G
    assert space.allocate(0, 64 * G) == 0


def test_sizes_count_in_whole_granules() -> None:
    space = space_of(10)
    space.allocate(3, G + 1)
    assert (space.size(3), space.live_bytes, space.free_bytes) == (2 * G, 2 * G, 8 * G)


def test_only_what_is_reserved_is_handed_out() -> None:
    space = Space(10 * G, 4)
    assert space.allocate(0, 1) == -1
    space.grow(3 * G)
    assert space.allocate(0, 4 * G) == -1
    assert space.allocate(0, 3 * G) == 0
    space.grow(2 * G)
    assert space.free_bytes == 0
    space.grow(10 * G)
    assert space.largest_free() == 7 * G


def test_small_and_durable_objects_are_placed_apart_from_large_ones() -> None:
    space = space_of(10_000)
    assert space.allocate(0, 1000 * G) == 9000 * G
    assert space.allocate(1, G) == 0
    assert space.allocate(2, 1000 * G, durable=True) == G
    assert space.allocate(3, 1000 * G) == 8000 * G


def test_windows_for_durable_objects_are_low_ones_unless_that_costs_much() -> None:
    for durable, victims in ((False, [8, 9]), (True, [0, 1])):
        space = space_of(3000)
        for slot in reversed(range(10)):
            space.place(slot, slot * 300 * G, 300 * G, last_used=(9 - slot) * 1e-9)
        evicted = Evicted()
        finish(space.make_room(20, 600 * G, evicted, durable=durable))
        assert evicted == victims


def test_misuse_is_refused_before_anything_changes() -> None:
    space = space_of(10)
    space.allocate(0, G)
    with pytest.raises(ValueError, match="owns an extent already"):
        space.allocate(0, G)
    with pytest.raises(ValueError, match="at least 1 byte"):
        space.allocate(1, 0)
    with pytest.raises(KeyError, match="owns no extent"):
        space.free(1)
    with pytest.raises(ValueError, match="fresh"):
        space.place_many(*(np.zeros(1, np.int64),) * 3, np.zeros(1))
    assert space.live_bytes == G
    check_map(space)


def test_the_coldest_object_of_the_right_size_goes() -> None:
    space = filled([4, 4, 4, 4])
    space.touch(0)
    assert make_room(space, 9, 4) == (4, [1])


def test_the_coldest_neighbours_go_for_a_larger_one() -> None:
    space = filled([4] * 12)
    for slot in (0, 1, 2, 3, 5, 9, 10, 11):
        space.touch(slot)
    assert make_room(space, 20, 12) == (24, [6, 7, 8])


def test_a_free_run_beside_a_victim_counts() -> None:
    space = filled([8, 4, 8, 8])
    space.free(1)
    assert make_room(space, 9, 12) == (0, [0])


def test_a_hot_object_is_not_taken_for_its_cold_neighbours() -> None:
    space = filled([4, 4, 4, 4, 4, 4])
    for _ in range(1000):
        space.touch(1)
    assert make_room(space, 9, 8)[1] == [2, 3]


def test_what_is_pinned_or_protected_hard_is_never_evicted() -> None:
    space = filled([4, 4, 4, 4])
    space.pins[0] = 1
    space.protect(1, HARD)
    assert make_room(space, 9, 4) == (8, [2])
    space.pins[3] = space.pins[9] = 1
    assert make_room(space, 10, 1) == (-1, [])
    space.pins[0] = 0
    assert make_room(space, 10, 4) == (0, [0])


def test_soft_protected_objects_go_only_when_nothing_else_suffices() -> None:
    space = filled([4, 4, 4, 4])
    for slot in (0, 1):
        space.protect(slot, SOFT)
    assert make_room(space, 9, 8) == (8, [2, 3])
    space.pins[9] = 1
    assert make_room(space, 10, 8, soft=False) == (-1, [])
    assert make_room(space, 10, 8) == (0, [0, 1])


def test_protection_ends_with_the_extent() -> None:
    space = filled([4])
    space.protect(0, HARD)
    space.free(0)
    space.allocate(0, 4 * G)
    assert make_room(space, 1, 4) == (0, [0])


@pytest.mark.parametrize("pinned", [2_000, 100_000])
def test_a_run_between_pins_is_found_wherever_it_is(pinned: int) -> None:
    """Far from the coldest objects, each alone among pinned ones, and from the longest free runs; few pins are
    sorted to find it, many are walked over."""
    space = Space(pinned * G, pinned + 1)
    space.grow(pinned * G)
    slots = np.arange(pinned)
    assert space.place_many(slots, slots * G, np.full(pinned, G), slots.astype(np.float64) * 1e-6).all()
    pins = np.asarray(space.pins)
    pins[:pinned] = 1
    pins[0:900:100] = 0
    gap = pinned - 500
    pins[gap : gap + 3] = 0
    assert make_room(space, pinned, 4) == (-1, [])
    assert make_room(space, pinned, 3) == (gap, [gap, gap + 1, gap + 2])


def test_no_pin_hides_among_the_many_small_objects_of_a_window() -> None:
    space = space_of(3000, slots=3001)
    slots = np.arange(3000)
    assert space.place_many(slots, slots * G, np.full(3000, G), slots.astype(np.float64) * 1e-9).all()
    for slot in range(77, 2500, 150):
        space.pins[slot] = 1
    for slot in range(2500, 3000):
        space.touch(slot)
    first, evicted = make_room(space, 3000, 300)
    assert first >= 2428
    assert evicted == list(range(first, first + 300))


def test_what_was_cleared_is_held_until_the_reservation_ends() -> None:
    space = filled([1] * 40)
    space.pins[30] = 1
    evicted = Evicted()
    steps = space.make_room(50, 10 * G, evicted)
    space._clock_period, space._step_s = 1, 0.0
    next(steps)
    assert space.held_bytes == len(evicted) * G == G
    assert space.allocate(51, G) == -1
    assert make_room(space, 51, 1)[1] not in ([slot] for slot in range(10))
    steps.close()
    assert space.held_bytes == 0
    assert space.free_bytes == G
    assert space.pins[50] == 0
    check_map(space)


def test_a_pin_that_appears_in_the_window_makes_a_new_plan() -> None:
    space = filled([1] * 40)
    space._clock_period, space._step_s = 1, 0.0
    evicted = Evicted()
    steps = space.make_room(50, 10 * G, evicted)
    next(steps)
    space.pins[5] = 1
    offset = finish(steps)
    assert offset >= 6 * G
    assert 5 not in evicted
    assert space.offset(5) == 5 * G
    check_map(space)


def test_small_puts_between_its_steps_dont_break_large_reservations() -> None:
    """Each takes a cold object and pins it, and the coldest are all over what the large ones are to replace."""
    space = space_of(60_000, slots=80_000)
    for slot in range(60_000):
        space.allocate(slot, G)
    for slot in np.random.default_rng(9).permutation(60_000).tolist():
        space.touch(slot)
    evicted = Evicted()
    large = {slot: space.make_room(slot, 10_000 * G, evicted) for slot in (79_998, 79_999)}
    puts = 0
    while large:
        for slot in list(large):
            try:
                next(large[slot])
            except StopIteration:
                del large[slot]
        for _ in range(10):
            slot = 60_000 + puts
            assert finish(space.make_room(slot, G, lambda victim: None)) >= 0
            space.pins[slot] = 1
            puts += 1
    assert space.size(79_998) == space.size(79_999) == 10_000 * G
    assert puts > 300
    assert len(evicted) <= 20_100
    check_map(space)


def test_small_puts_need_no_search_while_the_coldest_are_being_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []
    monkeypatch.setattr(WindowSearch, "around_seeds", counted(WindowSearch.around_seeds, searches))
    space = space_of(60_000, slots=70_000)
    for slot in range(60_000):
        space.allocate(slot, G)
    puts = 0
    for _ in space.make_room(69_999, 20_000 * G, lambda victim: None):
        for _ in range(10):
            slot = 60_000 + puts
            assert finish(space.make_room(slot, G, lambda victim: None)) >= 0
            puts += 1
    assert puts > 500
    assert len(searches) <= puts / 50


def test_a_failing_callback_gives_back_what_was_held() -> None:
    space = filled([1] * 4)

    def evict(slot: int) -> None:
        if slot == 2:
            raise RuntimeError("index")

    with pytest.raises(RuntimeError):
        finish(space.make_room(9, 4 * G, evict))
    assert (space.held_bytes, space.free_bytes, space.live_bytes) == (0, 2 * G, 2 * G)
    check_map(space)


def test_small_objects_displace_cold_large_ones_by_rare_overshooting() -> None:
    space = space_of(64 * 512 + 32, slots=7000)
    for slot in range(64):
        space.allocate(slot, 512 * G)
    large = set(range(64))
    ratios = []
    for slot in range(64, 7000):
        if space.allocate(slot, G) < 0:
            evicted = Evicted()
            needed = space.live_bytes
            assert finish(space.make_room(slot, G, evicted)) >= 0
            ratios.append((needed - space.live_bytes) // G + 1)
            large.difference_update(evicted)
    assert 1 <= 64 - len(large) <= 10
    assert 0 < np.mean(np.array(ratios) > 2) <= 0.01


def test_a_new_size_displaces_what_is_colder_and_not_itself() -> None:
    space = space_of(20_000, slots=20_200)
    for slot in range(20_000):
        space.allocate(slot, G)
    for slot in range(20_000, 20_100):
        assert len(make_room(space, slot, 1)[1]) == 1
    for slot in range(20_100, 20_130):
        assert all(victim < 20_100 for victim in make_room(space, slot, 500)[1])


def test_a_cold_large_object_is_spared_while_small_hot_ones_suffice() -> None:
    space = filled([512, 1, 1, 1, 1, 4])
    space.pins[5] = 1
    for _ in range(10_000):
        space.touch(4)
    for slot in (1, 2, 3):
        space.touch(slot)
    assert make_room(space, 9, 2) == (512, [1, 2])


@pytest.mark.parametrize("length", [8, 800])
@pytest.mark.parametrize("free", [0, 2])
def test_what_remains_of_a_window_joins_a_free_neighbour(length: int, free: int) -> None:
    space = filled([length // 2, length, length // 2])
    space.free(free)
    assert make_room(space, 9, length - 2)[1] == [1]
    assert space.largest_free() == (length // 2 + 2) * G


def test_a_policy_can_be_put_in_the_place_of_recency() -> None:
    class Bytes:
        """All bytes cost the same, however cold."""

        def byte_cost(self, idle_s: Seconds) -> Seconds:
            return idle_s * 0.0 + 1.0

    now = count(1)
    victims = {}
    for policy in (None, Bytes()):
        space = Space(5000 * G, 9, clock=lambda: float(next(now)), policy=policy)
        space.grow(5000 * G)
        # The cold pair has a granule more than the hot one.
        for slot, (first, length) in enumerate(((0, 1201), (1201, 1200), (2401, 199), (2600, 1200), (3800, 1200))):
            space.place(slot, first * G, length * G, float(slot) * 0.001)
        space.pins[2] = 1
        victims[policy] = make_room(space, 8, 2400)[1]
    assert list(victims.values()) == [[0, 1], [3, 4]]


@pytest.fixture(scope="module")
def million() -> Space:
    """A pool filled with a million objects of one granule."""
    granules = 1_000_000
    space = Space(granules * G, granules + 100)
    space.grow(granules * G)
    rng = np.random.default_rng(3)
    slots = np.arange(granules)
    assert space.place_many(slots, rng.permutation(granules) * G, np.full(granules, 100), rng.random(granules)).all()
    return space


def test_no_step_touches_more_than_a_bounded_number_of_objects(million: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 MB out of 4 KiB objects: 76,800 victims, and a survey of several times as many before."""
    evicted = Evicted()
    surveyed: list[np.ndarray] = []
    compared: list[Survey] = []
    monkeypatch.setattr(WindowSearch, "_survey", counted(WindowSearch._survey, surveyed))
    monkeypatch.setattr(WindowSearch, "_cheapest", counted(WindowSearch._cheapest, compared))
    touched = [0]
    for _ in million.make_room(1_000_000, 300 * MIB, evicted):
        touched.append(len(evicted) + sum(first.size for first in surveyed))
    assert len(evicted) == 300 * MIB // G
    assert touched[-1] > 2 * len(evicted)
    assert max(np.diff(touched)) <= 2 * SURVEY_EXTENTS + STEP_VICTIMS_MAX
    assert len(touched) >= len(evicted) // STEP_VICTIMS_MAX
    assert sum(survey.first.size for survey in compared) < 2 * SURVEY_EXTENTS
    million.free(1_000_000)


def test_a_million_objects_are_placed_at_a_restart() -> None:
    granules, objects = 3_000_000, 1_000_000
    rng = np.random.default_rng(5)
    firsts = np.sort(rng.choice(granules // 2, objects, replace=False)) * 2
    sizes = rng.integers(1, 2 * G + 1, objects)
    last_used = rng.random(objects)
    slots = rng.permutation(objects)
    space = Space(granules * G, objects)
    space.grow(granules * G)
    assert space.place_many(slots, firsts * G, sizes, last_used).all()
    lengths = -(-sizes // G)
    assert space.live_bytes == int(lengths.sum()) * G
    assert space.free_bytes == granules * G - space.live_bytes
    for index in rng.integers(0, objects, 1000).tolist():
        slot = int(slots[index])
        assert space.offset(slot) == firsts[index] * G
        assert space.size(slot) == lengths[index] * G
        assert space.last_used(slot) == last_used[index]
    oldest = [slot for slot, _ in zip(space.oldest(), range(1000), strict=False)]
    assert oldest == slots[np.argsort(last_used)][:1000].tolist()
    for slot in oldest:
        space.free(slot)
    assert space.largest_available() == granules * G


def test_a_restart_drops_what_cant_be_right() -> None:
    space = space_of(100)
    rows = [(0, 10, 5), (1, 12, 5), (2, 15, 5), (3, 98, 3), (4, -1, 2), (5, 40, 0), (6, 50, 1), (700, 60, 1)]
    slots, firsts, lengths = (np.array(column) for column in zip(*rows, strict=True))
    placed = space.place_many(slots, firsts * G, lengths * G, np.zeros(len(rows)))
    assert placed.tolist() == [True, False, True, False, False, False, True, False]
    assert space.live_bytes == 11 * G
    assert not space.place(7, G + 1, G)
    check_map(space)


def test_the_longest_available_run_is_rounded_down_among_very_many_pins() -> None:
    granules = 1 << 20
    space = Space(granules * G, granules)
    space.grow(granules * G)
    slots = np.arange(granules)
    space.place_many(slots, slots * G, np.full(granules, G), np.zeros(granules))
    pins = np.asarray(space.pins)
    pins[:] = 1
    assert space.largest_available() == 0
    pins[1001:2001] = 0
    cell = granules // 65_536 * 2
    assert (1000 - 2 * cell) * G < space.largest_available() <= 1000 * G


def test_the_coldest_evictable_object_is_known_at_once() -> None:
    space = filled([1, 4, 1, 4])
    assert space.coldest() == 0
    space.pins[0] = 1
    space.protect(1, HARD)
    assert space.coldest() == 2
    assert sorted(space.oldest()) == [0, 1, 2, 3]
    space.pins[2] = space.pins[3] = 1
    assert space.coldest() == -1
