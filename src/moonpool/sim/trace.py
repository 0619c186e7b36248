"""Generated traces: chats over shared documents, whose KV cache comes in objects of very different sizes."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from types import MappingProxyType
from typing import Final

SIZES: Final = (4096, 2 << 20, 156 * (1 << 20) // 10, 32 << 20, 300 << 20)


class Op(IntEnum):
    """What happens to a key."""

    USE = 0
    """It is looked up, and put if that misses."""
    REMOVE = 1
    PIN = 2
    """It is used and stays pinned for `PIN_OPERATIONS` operations."""


PIN_OPERATIONS: Final = 200
"""For how long a pinned key stays so."""

REQUEST_BYTES: Final = 1200 << 20
REQUEST_OBJECTS_MAX: Final = 24
"""A request has about as much KV cache as 10,000 tokens of an 8B model, in objects of whatever size."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Operations on keys, which are indexes into `sizes`."""

    ops: array[int]
    keys: array[int]
    sizes: array[int]


@dataclass(frozen=True, slots=True)
class Mix:
    """How often objects of each size are used, and how chats over them behave."""

    shares: Mapping[int, float]
    documents: int = 200
    """Shared prefixes per size; the most popular are used far more (Zipf)."""
    zipf: float = 1.0
    chats: int = 6
    """Chats per size that go on side by side."""
    turns: float = 8.0
    """Mean turns of a chat; each reads all before it and adds up to two objects."""
    remove_share: float = 0.02
    pin_share: float = 0.005


def _shares(*weights: float) -> Mapping[int, float]:
    return MappingProxyType({size: weight / sum(weights) for size, weight in zip(SIZES, weights, strict=True)})


MIXES: Final[Mapping[str, Mix]] = MappingProxyType(
    {
        "even-counts": Mix(_shares(1, 1, 1, 1, 1), documents=40, chats=4),
        "mostly-small": Mix(_shares(60, 25, 10, 4, 1), documents=300, chats=16),
        "mostly-tiny": Mix(_shares(900, 80, 10, 8, 2), documents=1000, chats=64),
    }
)


@dataclass(slots=True)
class _Chat:
    keys: list[int]
    turns_left: int


@dataclass(slots=True)
class _Model:
    """One object size with its documents and chats."""

    documents: list[list[int]]
    popularity: list[float]
    longest: int
    chats: list[_Chat] = field(default_factory=list)


def generate(mix: Mix, operations: int, seed: int) -> Trace:
    """A trace of `operations`, the same for the same arguments."""
    rng = random.Random(seed)
    sizes, ops, keys = array("q"), array("b"), array("q")

    def new_keys(size: int, count: int) -> list[int]:
        sizes.extend([size] * count)
        return list(range(len(sizes) - count, len(sizes)))

    models = []
    popularity = list(accumulate((rank + 1) ** -mix.zipf for rank in range(mix.documents)))
    for size in mix.shares:
        longest = max(1, min(REQUEST_OBJECTS_MAX, REQUEST_BYTES // size))
        documents = [new_keys(size, rng.randint(1, max(1, longest // 2))) for _ in range(mix.documents)]
        rng.shuffle(documents)
        models.append(_Model(documents, popularity, longest))
    # A turn makes several operations, whatever the size: shares of turns are about shares of operations.
    cumulative = list(accumulate(mix.shares.values()))
    wanted = list(mix.shares)
    while len(keys) < operations:
        which = min(bisect_left(cumulative, rng.random() * cumulative[-1]), len(wanted) - 1)
        model, size = models[which], wanted[which]
        if len(model.chats) < mix.chats:
            drawn = bisect_left(model.popularity, rng.random() * model.popularity[-1])
            turns = 1 + int(rng.expovariate(1 / mix.turns))
            model.chats.append(_Chat(list(model.documents[min(drawn, mix.documents - 1)]), turns))
            chat = model.chats[-1]
        else:
            chat = rng.choice(model.chats)
        chat.keys.extend(new_keys(size, rng.randint(0, 2)))
        # Tail to head, so that tails are the first to go.
        keys.extend(reversed(chat.keys))
        ops.extend(Op.PIN if rng.random() < mix.pin_share else Op.USE for _ in chat.keys)
        if rng.random() < mix.remove_share * len(chat.keys):
            keys.append(rng.choice(chat.keys))
            ops.append(Op.REMOVE)
        chat.turns_left -= 1
        if chat.turns_left <= 0 or len(chat.keys) >= model.longest:
            model.chats.remove(chat)
    return Trace(ops[:operations], keys[:operations], sizes)


def bytes_used(trace: Trace) -> int:
    """The bytes of all keys that occur in a trace, each once."""
    return sum(trace.sizes[key] for key in set(trace.keys))
