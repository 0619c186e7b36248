"""The cuts of a batch: every wanted byte moves once, to its place, within chunks and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.gpu.mover import SKIP, Plane, Region, Transfer
from moonpool.gpu.plan import (
    COPIES_PER_STEP_MAX,
    DIRECT_LOAD_BYTES_MIN,
    DIRECT_STORE_BYTES_MIN,
    OBJECTS_PER_STEP_MAX,
    Planner,
    check,
    is_direct,
    parts,
    split,
    wanted,
)


def test_every_range_is_cut_at_the_borders_and_nowhere_else() -> None:
    """All ranges of a pool of 23 bytes with chunks of 5, at every frontier that registration passes."""
    size, chunk = 23, 5
    frontiers = (0, 5, 10, 15, 20, 23)
    for frontier in frontiers:
        for start in range(size):
            for end in range(start + 1, size + 1):
                pieces = split(start, end - start, chunk, frontier)
                assert [piece.offset for piece in pieces] == [start, *range(start - start % chunk + chunk, end, chunk)]
                assert sum(piece.length for piece in pieces) == end - start
                for piece in pieces:
                    stop = piece.offset + piece.length
                    assert piece.offset // chunk == (stop - 1) // chunk
                    assert piece.registered == (min(size, (piece.offset // chunk + 1) * chunk) <= frontier)


def test_an_empty_range_is_no_piece() -> None:
    assert split(5, 0, 5, 10) == []


def region(*pieces: int, blocks: int) -> Region:
    return Region(tuple(Plane(number << 32, 1 << 20, piece) for number, piece in enumerate(pieces, 1)), blocks)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 7), st.integers(40, 400))
def test_parts_are_an_object_cut_to_fit_a_slot(pieces: list[int], blocks: int, slot_bytes: int) -> None:
    found = region(*pieces, blocks=blocks)
    cut = parts(found, slot_bytes)
    at = 0
    covered = []
    for part in cut:
        assert part.offset == at
        assert 0 < part.length <= slot_bytes
        at += part.length
        inside = range(part.first_plane, part.first_plane + part.planes)
        assert part.length == part.blocks * sum(pieces[plane] for plane in inside)
        numbers = range(part.first_block, part.first_block + part.blocks)
        covered += [(plane, block) for plane in inside for block in numbers]
    assert at == found.object_bytes
    assert covered == [(plane, block) for plane in range(len(pieces)) for block in range(blocks)]
    if found.object_bytes <= slot_bytes:
        assert len(cut) == 1


def test_a_piece_longer_than_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="a piece of 300 bytes doesn't fit a staging slot of 299"):
        parts(region(10, 300, blocks=2), 299)


@given(st.data())
def test_each_wanted_byte_moves_once_to_its_place(data: st.DataObject) -> None:
    """Steps are carried out in a model: bytes are pairs of their place in the pool and on the other side."""
    pieces = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    blocks = data.draw(st.integers(1, 5))
    found = region(*pieces, blocks=blocks)
    slot_bytes = data.draw(st.integers(9, 200))
    exact = data.draw(st.booleans())
    transfers = []
    offset = 0
    for _ in range(data.draw(st.integers(0, 12))):
        offset += data.draw(st.sampled_from((0, 0, 3)))
        ids = data.draw(st.lists(st.integers(-1, 9), min_size=blocks, max_size=blocks))
        transfers.append(Transfer(offset, 0, tuple(ids)))
        offset += found.object_bytes
    expected = set()
    for transfer in transfers:
        at = transfer.offset
        for number, piece in enumerate(pieces):
            for index, block in enumerate(transfer.blocks):
                if block != SKIP:
                    expected |= {(at + i, number, index, id(transfer), i) for i in range(piece)}
                at += piece
    seen = []
    for step in Planner([found], slot_bytes, exact=exact).steps(transfers):
        assert step.part is not None
        assert len(step.transfers) <= OBJECTS_PER_STEP_MAX
        assert len(step.copies) <= COPIES_PER_STEP_MAX or len(step.transfers) == 1
        assert len(step.transfers) * step.part.length <= slot_bytes
        slot = {}
        for copy in step.copies:
            for i in range(copy.length):
                assert copy.other + i not in slot
                slot[copy.other + i] = copy.pool + i
        at = 0
        for transfer in step.transfers:
            for number in range(step.part.first_plane, step.part.first_plane + step.part.planes):
                for index in range(step.part.first_block, step.part.first_block + step.part.blocks):
                    for i in range(pieces[number]):
                        if transfer.blocks[index] != SKIP:
                            seen.append((slot.pop(at), number, index, id(transfer), i))
                        at += 1
        assert not (exact and slot), "bytes of a skipped block would be overwritten in the pool"
    assert len(seen) == len(set(seen))
    assert set(seen) == expected


def test_long_blocks_are_copied_directly_and_neighbours_at_once() -> None:
    size = DIRECT_LOAD_BYTES_MIN
    found = Region((Plane(1 << 40, size, size),), 4)
    assert is_direct(found, load=True)
    assert not is_direct(region(size, size - 1, blocks=2), load=True)
    assert is_direct(region(DIRECT_STORE_BYTES_MIN, blocks=2), load=False)
    assert not is_direct(region(DIRECT_STORE_BYTES_MIN - 1, blocks=2), load=False)
    (step,) = Planner([found], 1 << 20, exact=False).steps([Transfer(4096, 0, (7, 8, SKIP, 3))])
    assert step.part is None
    assert [(copy.pool - 4096, copy.other - (1 << 40), copy.length) for copy in step.copies] == [
        (0, 7 * size, 2 * size),
        (3 * size, 3 * size, size),
    ]


def test_direct_steps_have_few_copies() -> None:
    size = DIRECT_STORE_BYTES_MIN
    found = Region((Plane(1 << 40, 2 * size, size),), 40)
    steps = Planner([found], 1 << 20, exact=True).steps([Transfer(0, 0, tuple(range(40)))])
    assert [len(step.copies) for step in steps] == [16, 16, 8]


def test_a_whole_objects_range_is_one_and_skips_cut_it() -> None:
    found = region(10, 20, blocks=4)
    (part,) = parts(found, 1000)
    assert list(wanted(found, part, (1, 2, 3, 4))) == [(0, 120)]
    assert list(wanted(found, part, (1, 2, SKIP, SKIP))) == [(0, 20), (40, 40)]
    assert list(wanted(found, part, (SKIP, 2, 3, 4))) == [(10, 30), (60, 60)]
    assert list(wanted(found, part, (SKIP,) * 4)) == []


def test_regions_of_one_batch_go_one_after_another() -> None:
    regions = [region(8, blocks=2), region(16, blocks=1)]
    batch = [Transfer(100 * i, i % 2, (i, i + 1)[: 2 - i % 2]) for i in range(6)]
    steps = Planner(regions, 1000, exact=False).steps(batch)
    assert [(step.region, len(step.transfers)) for step in steps] == [(0, 3), (1, 3)]


@pytest.mark.parametrize("blocks", [(1, 2, 3), (-2, 1)])
def test_ids_that_no_region_has_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="block id"):
        check([Transfer(0, 0, blocks)], [region(8, blocks=2)], 1000)


def test_an_object_at_the_very_end_of_the_pool_fits() -> None:
    check([Transfer(84, 0, (0, 1))], [region(8, blocks=2)], 100)
    with pytest.raises(ValueError, match="isn't inside the pool of 100"):
        check([Transfer(85, 0, (0, 1))], [region(8, blocks=2)], 100)
