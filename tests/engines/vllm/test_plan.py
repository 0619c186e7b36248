from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engines.vllm.plan import NULL_BLOCK, GroupPlan, Plan, window_objects
from moonpool.gpu.mover import SKIP

GROUP = GroupPlan(0, block_tokens=32, tokens_per_object=64)


def test_an_object_fills_the_blocks_of_its_tokens() -> None:
    table = [11, 12, 13, 14, 15, 16]
    assert GROUP.blocks_per_object == 2
    assert GROUP.blocks_of(table, 0, computed=0, until=192) == (11, 12)
    assert GROUP.blocks_of(table, 2, computed=0, until=192) == (15, 16)


@pytest.mark.parametrize(
    ("computed", "until", "blocks"),
    [
        (64, 128, (13, 14)),
        (96, 128, (SKIP, 14)),  # the GPU has the first of them
        (95, 128, (13, 14)),  # but for one token of it
        (64, 96, (13, SKIP)),
        (64, 97, (13, 14)),
        (128, 192, (SKIP, SKIP)),
    ],
)
def test_blocks_that_are_not_needed_are_left_alone(computed: int, until: int, blocks: tuple[int, ...]) -> None:
    assert GROUP.blocks_of([11, 12, 13, 14, 15, 16], 1, computed, until) == blocks


def test_blocks_that_the_table_does_not_have_are_left_alone() -> None:
    assert GROUP.blocks_of([11, 12, 13], 1, 0, 128) == (13, SKIP)
    assert GROUP.blocks_of([NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 14], 1, 0, 128) == (SKIP, 14)


def test_only_whole_objects_are_stored() -> None:
    assert GROUP.whole_blocks_of([11, 12, 13], 0) == (11, 12)
    assert GROUP.whole_blocks_of([11, 12, 13], 1) is None
    assert GROUP.whole_blocks_of([NULL_BLOCK, 12, 13, 14], 0) is None
    assert GROUP.whole_blocks_of([NULL_BLOCK, 12, 13, 14], 1) == (13, 14)


@given(st.integers(1, 5000), st.sampled_from([16, 64, 256]), st.integers(1, 40))
def test_a_windows_objects_hold_all_that_a_token_behind_them_sees(window: int, size: int, objects: int) -> None:
    needed = window_objects(window, size)
    # The token at objects × size sees the window - 1 before it.
    first_seen = max(0, objects * size - (window - 1))
    first_held = max(0, objects - needed) * size
    assert first_held <= first_seen
    assert needed == 1 or first_held + size > first_seen or objects <= needed, "and no object more"


def test_an_object_is_so_many_hashes() -> None:
    assert Plan(256, 32, (GROUP,), ranks=1).hashes_per_object == 8
