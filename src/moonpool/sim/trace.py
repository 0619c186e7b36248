"""Generated traces: chats over shared documents, whose KV cache comes in objects of very different sizes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
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
    """It is used, and pinned for the next `PIN_OPERATIONS` operations."""


PIN_OPERATIONS: Final = 500
UNORDERED_BYTES: Final = 3 * 32 * SIZES[-1]

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
    documents: int
    """Shared prefixes per size; some are used far more than others (Zipf)."""
    chats: int
    """Chats per size that go on side by side."""
    turns: float = 8.0
    """Mean turns of a chat; each reads all before it and adds up to two objects."""
    remove_share: float = 0.05
    """Removals per use."""
    pin_share: float = 0.01
    """Uses that pin."""
    zipf: float = 1.0


@dataclass(slots=True)
class _Chat:
    keys: list[int]
    turns_left: int


class _Model:
    """The chats with one model, whose KV cache comes in objects of one size."""

    def __init__(self, size: int, mix: Mix, sizes: array[int], rng: random.Random) -> None:
        self._size = size
        self._mix = mix
        self._sizes = sizes
        self._rng = rng
        self._longest = max(1, min(REQUEST_OBJECTS_MAX, REQUEST_BYTES // size))
        self._documents = [self._new_keys(rng.randint(1, max(1, self._longest // 2))) for _ in range(mix.documents)]
        self._popularity = list(accumulate((rank + 1) ** -mix.zipf for rank in range(mix.documents)))
        self._chats: list[_Chat] = []

    def turn(self) -> list[int]:
        """The next turn of some chat: the keys of all its KV cache, head to tail, with those that it adds."""
        rng = self._rng
        if len(self._chats) < self._mix.chats:
            (document,) = rng.choices(self._documents, cum_weights=self._popularity)
            self._chats.append(_Chat(list(document), 1 + int(rng.expovariate(1 / self._mix.turns))))
        chat = rng.choice(self._chats)
        chat.keys.extend(self._new_keys(rng.randint(0, 2)))
        chat.turns_left -= 1
        if chat.turns_left <= 0 or len(chat.keys) >= self._longest:
            self._chats.remove(chat)
        return chat.keys

    def _new_keys(self, count: int) -> list[int]:
        first = len(self._sizes)
        self._sizes.extend([self._size] * count)
        return list(range(first, first + count))


def generate(mix: Mix, operations: int, seed: int) -> Trace:
    """A trace of `operations`, the same for the same arguments."""
    rng = random.Random(seed)
    sizes, ops, keys = array("q"), array("b"), array("q")
    models = [_Model(size, mix, sizes, rng) for size in mix.shares]
    shares = list(accumulate(mix.shares.values()))
    while len(keys) < operations:
        (model,) = rng.choices(models, cum_weights=shares)
        chain = model.turn()
        # Tail to head, so that tails are the first to go.
        keys.extend(reversed(chain))
        ops.extend(Op.PIN if rng.random() < mix.pin_share else Op.USE for _ in chain)
        if rng.random() < mix.remove_share * len(chain):
            keys.append(rng.choice(chain))
            ops.append(Op.REMOVE)
    return Trace(ops[:operations], keys[:operations], sizes)


def generate_unordered(operations: int, seed: int) -> Trace:
    """Keys of all sizes, as many of each, drawn at random (Zipf) without any order in time: the hardest to keep."""
    rng = random.Random(seed)
    sizes = array("q")
    while sum(sizes) < UNORDERED_BYTES:
        sizes.extend(rng.sample(SIZES, len(SIZES)))
    popularity = list(accumulate((rank + 1) ** -0.8 for rank in range(len(sizes))))
    keys = array("q", rng.choices(range(len(sizes)), cum_weights=popularity, k=operations))
    ops = array("b", rng.choices((Op.USE, Op.REMOVE, Op.PIN), (0.88, 0.1, 0.02), k=operations))
    return Trace(ops, keys, sizes)


def _shares(*weights: float) -> Mapping[int, float]:
    return MappingProxyType(dict(zip(SIZES, weights, strict=True)))


# Each gives a trace of so many operations, the same for the same seed. Shares of chats are shares of their turns.
TRACES: Final[Mapping[str, Callable[[int, int], Trace]]] = MappingProxyType(
    {
        "unordered": generate_unordered,
        "even-counts": partial(generate, Mix(_shares(1, 1, 1, 1, 1), documents=40, chats=4)),
        "mostly-small": partial(generate, Mix(_shares(60, 25, 10, 4, 1), documents=300, chats=16)),
        "mostly-tiny": partial(generate, Mix(_shares(900, 80, 10, 8, 2), documents=1000, chats=64)),
    }
)
