"""The map of the pool: best fit from either end, freed runs joined at once, and a map laid out as one built up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moonpool.node.extents import Extents, size_class, size_classes


def free_runs(extents: Extents) -> list[tuple[int, int]]:
    return sorted(extents.long_runs(extents.granules))


def extents_of(granules: int) -> Extents:
    extents = Extents(granules)
    extents.grow(granules)
    return extents


def test_classes_rise_with_length_one_at_a_time() -> None:
    classes = [size_class(granules) for granules in range(1, 1 << 17)]
    assert classes[:15] == list(range(1, 16))
    assert {after - before for before, after in pairwise(classes)} == {0, 1}


def test_runs_of_one_class_differ_by_less_than_an_eighth() -> None:
    shortest: dict[int, int] = {}
    for granules in range(1, 1 << 17):
        assert granules < shortest.setdefault(size_class(granules), granules) * 1.125 or granules == 1


def test_classes_of_many_lengths_are_those_of_each() -> None:
    lengths = np.concatenate((np.arange(1, 5000), 2 ** np.arange(31), 2 ** np.arange(1, 31) - 1))
    assert size_classes(lengths).tolist() == [size_class(length) for length in lengths.tolist()]


def test_nothing_is_handed_out_beyond_the_frontier() -> None:
    extents = Extents(10)
    assert extents.take(0, 1, low=True) == -1
    extents.grow(4)
    assert extents.take(0, 5, low=True) == -1
    assert extents.take(0, 3, low=True) == 0
    extents.grow(99)
    assert free_runs(extents) == [(3, 7)]


def test_a_run_is_cut_from_the_end_that_was_asked_for() -> None:
    extents = extents_of(100)
    assert extents.take(0, 10, low=True) == 0
    assert extents.take(1, 10, low=False) == 90
    assert free_runs(extents) == [(10, 80)]


def test_the_shortest_run_that_suffices_is_taken() -> None:
    extents = extents_of(300)
    for owner, length in enumerate((130, 1, 40, 1, 36, 1, 91)):
        assert extents.take(owner, length, low=True) >= 0
    for first, length in ((0, 130), (131, 40), (172, 36)):
        extents.release(first, length)
    assert extents.take(9, 35, low=True) == 172
    assert extents.take(9, 37, low=True) == 131


def test_a_freed_run_joins_both_neighbours() -> None:
    extents = extents_of(30)
    for owner in range(3):
        extents.take(owner, 10, low=True)
    extents.release(0, 10)
    extents.release(20, 10)
    assert free_runs(extents) == [(0, 10), (20, 10)]
    extents.release(10, 10)
    assert free_runs(extents) == [(0, 30)]


def test_a_claim_takes_exactly_its_granules_or_nothing() -> None:
    extents = extents_of(30)
    assert extents.claim(0, 10, 5)
    assert free_runs(extents) == [(0, 10), (15, 15)]
    assert not extents.claim(1, 14, 2)
    assert not extents.claim(1, 8, 10)
    assert not extents.claim(1, 29, 2)
    assert not extents.claim(1, -1, 2)
    assert free_runs(extents) == [(0, 10), (15, 15)]
    assert extents.claim(1, 15, 15)
    assert free_runs(extents) == [(0, 10)]


def test_nobody_is_given_a_run_in_a_claimed_range() -> None:
    extents = extents_of(64)
    for owner in range(4):
        extents.take(owner, 16, low=True)
    extents.release(0, 16)
    extents.release(32, 16)
    extents.claimed.append((30, 50))
    assert extents.take(7, 16, low=True) == 0
    assert extents.take(8, 1, low=True) == -1
    extents.claimed.clear()
    assert extents.take(8, 1, low=True) == 32


def test_a_map_laid_out_at_once_is_the_one_built_up_by_claims() -> None:
    rng = np.random.default_rng(7)
    granules = 20_000
    ends = np.sort(rng.choice(np.arange(1, granules), 3_000, replace=False))
    firsts = np.concatenate(([0], ends[:-1]))
    owned = rng.random(ends.size) < 0.6
    firsts, lengths = firsts[owned], (ends - firsts)[owned]
    owners = rng.permutation(firsts.size)
    at_once, built_up = extents_of(granules), extents_of(granules)
    at_once.lay_out(owners, firsts, lengths)
    for owner, first, length in zip(owners.tolist(), firsts.tolist(), lengths.tolist(), strict=True):
        assert built_up.claim(owner, first, length)
    assert at_once.starts.tolist() == built_up.starts.tolist()
    assert at_once.ends.tolist() == built_up.ends.tolist()
    assert free_runs(at_once) == free_runs(built_up)
