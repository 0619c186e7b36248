"""Ranks that hold the same bytes name the same shard; ranks that don't, don't; all together hold everything once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.keys import KeySpace, Shard, heads_of_rank, shard_of_rank

SPACE = KeySpace(
    weights="files1:" + "0" * 64, tokens_per_block=16, kv_dtype="bfloat16", layout="layer,kv,token,head,dim"
)


def test_heads_are_split_when_there_are_enough() -> None:
    assert [heads_of_rank(8, rank, 4) for rank in range(4)] == [(0, 2, 8), (2, 4, 8), (4, 6, 8), (6, 8, 8)]


def test_more_ranks_than_heads_share_them_with_their_neighbours() -> None:
    assert [heads_of_rank(2, rank, 8)[0] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    spaces = [shard_of_rank(layers=32, kv_heads=2, tp_rank=rank, tp_size=8).of(SPACE) for rank in range(8)]
    assert len({space.digest for space in spaces}) == 2
    assert spaces[0] == spaces[3] != spaces[4] == spaces[7]


def test_replicated_kv_is_one_shard_whatever_the_rank() -> None:
    spaces = {shard_of_rank(layers=61, kv_heads=None, tp_rank=rank, tp_size=8).of(SPACE) for rank in range(8)}
    assert spaces == {SPACE}


def test_one_rank_alone_holds_the_whole_space() -> None:
    assert shard_of_rank(layers=32, kv_heads=8).of(SPACE) == SPACE


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_the_ranks_together_hold_every_layer_and_head_equally_often(kv_heads: int, tp_size: int, pp_size: int) -> None:
    held: dict[tuple[int, int], int] = {}
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            shard = shard_of_rank(
                layers=8, kv_heads=kv_heads, tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size
            )
            assert shard.heads is not None
            for layer in range(*shard.layers[:2]):
                for head in range(*shard.heads[:2]):
                    held[layer, head] = held.get((layer, head), 0) + 1
    assert set(held) == {(layer, head) for layer in range(8) for head in range(kv_heads)}
    assert set(held.values()) == {max(1, tp_size // kv_heads)}


def test_unequal_stages_are_taken_as_given() -> None:
    shards = [
        shard_of_rank(layers=61, kv_heads=None, pp_rank=r, pp_size=2, layers_per_stage=[31, 30]) for r in range(2)
    ]
    assert shards == [Shard((0, 31, 61), None), Shard((31, 61, 61), None)]


def test_a_split_that_engines_do_differently_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="give layers_per_stage"):
        shard_of_rank(layers=61, kv_heads=8, pp_rank=0, pp_size=2)


@pytest.mark.parametrize("stages", [[30, 30], [61], [61, 0], [20, 20, 21]])
def test_stages_that_do_not_add_up_are_refused(stages: list[int]) -> None:
    with pytest.raises(ValueError, match="2 stages of 61 layers"):
        shard_of_rank(layers=61, kv_heads=8, pp_rank=0, pp_size=2, layers_per_stage=stages)


@pytest.mark.parametrize(("kv_heads", "tp_size"), [(8, 3), (6, 4), (3, 8)])
def test_heads_that_do_not_divide_are_refused(kv_heads: int, tp_size: int) -> None:
    with pytest.raises(ValueError, match="one has to divide the other"):
        heads_of_rank(kv_heads, 0, tp_size)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_out_of_range_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        shard_of_rank(layers=4, kv_heads=4, tp_rank=rank, tp_size=size)
    with pytest.raises(ValueError, match="rank"):
        shard_of_rank(layers=4, kv_heads=4, pp_rank=rank, pp_size=size)
