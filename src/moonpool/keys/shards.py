"""Which part of a model's KV cache a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.keys.space import KeySpace


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers a to b (exclusive) of L, and KV heads c to d of H; `heads` is None for replicated KV."""

    layers: tuple[int, int, int]
    heads: tuple[int, int, int] | None

    def of(self, space: KeySpace) -> KeySpace:
        """Return the key space of this shard of `space`."""
        return space.shard(layers=self.layers, heads=self.heads)


def shard_of_rank(
    *,
    layers: int,
    kv_heads: int | None,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    layers_per_stage: Sequence[int] | None = None,
) -> Shard:
    """Return what a rank of tensor and pipeline parallelism holds.

    `kv_heads` is None for KV that every tensor-parallel rank holds whole, as with MLA. With more ranks than
    KV heads each head lies on `tp_size / kv_heads` neighbouring ranks, and all of these get the same shard.
    Pipeline stages are equal; give `layers_per_stage` where they aren't, because engines split a remainder
    differently. Raises ValueError for sizes that don't divide and ranks out of range.
    """
    _check_rank("tensor-parallel", tp_rank, tp_size)
    _check_rank("pipeline-parallel", pp_rank, pp_size)
    return Shard(
        layers=_stage(layers, pp_rank, pp_size, layers_per_stage),
        heads=None if kv_heads is None else heads_of_rank(kv_heads, tp_rank, tp_size),
    )


def heads_of_rank(kv_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int, int]:
    """Return (first, end, total) of the KV heads that a tensor-parallel rank holds.

    Raises ValueError when neither of `kv_heads` and `tp_size` divides the other, or the rank is out of range.
    """
    _check_rank("tensor-parallel", tp_rank, tp_size)
    if kv_heads < 1:
        raise ValueError(f"there have to be KV heads, not {kv_heads}; give None for KV that every rank holds whole")
    if kv_heads % tp_size == 0:
        held = kv_heads // tp_size
        return tp_rank * held, (tp_rank + 1) * held, kv_heads
    if tp_size % kv_heads == 0:
        head = tp_rank // (tp_size // kv_heads)
        return head, head + 1, kv_heads
    raise ValueError(
        f"{kv_heads} KV heads don't spread over {tp_size} tensor-parallel ranks: one has to divide the other"
    )


def _stage(layers: int, rank: int, size: int, layers_per_stage: Sequence[int] | None) -> tuple[int, int, int]:
    if layers < 1:
        raise ValueError(f"there has to be a layer, not {layers}")
    if layers_per_stage is None:
        if layers % size:
            raise ValueError(
                f"{layers} layers don't divide into {size} equal pipeline stages: give layers_per_stage, "
                "as the engine splits them"
            )
        layers_per_stage = [layers // size] * size
    if len(layers_per_stage) != size or sum(layers_per_stage) != layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage {list(layers_per_stage)} has to name {size} stages of {layers} layers in all"
        )
    first = sum(layers_per_stage[:rank])
    return first, first + layers_per_stage[rank], layers


def _check_rank(noun: str, rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"{noun} rank {rank} of {size} doesn't exist: ranks run from 0 to size - 1")
