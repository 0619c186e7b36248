"""How long a prefix is there: the rule that client (from shared memory) and node (for a hold) both apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

import numpy as np
import numpy.typing as npt

from moonpool.errors import InvalidRequest

Rule = Literal["all", "window", "exact"]
RULES: tuple[Rule, ...] = ("all", "window", "exact")
GROUPS_MAX = 64
"""Groups of one match: a model has as many as it has kinds of layers."""
STEP_MAX = 1 << 20
"""Units of one key: far more than any block has tokens, and small enough that what steps have in common is counted."""


@dataclass(frozen=True, slots=True)
class Group:
    """One list of keys that a prefix of n units needs, and which of them.

    Key i stands for units `i*step` up to `(i+1)*step` (a unit is whatever the caller counts in: blocks, tokens).
    rule "all": every key up to n (full attention). "window": the last `window` keys up to n (sliding window).
    "exact": the one key that ends at n (a state-space layer's state).
    """

    keys: Sequence[bytes | str]
    rule: Rule = "all"
    window: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InvalidRequest(f"rule {self.rule!r} is none of {', '.join(RULES)}")
        if not 1 <= self.step <= STEP_MAX:
            raise InvalidRequest(f"step is {self.step}; it counts the units of one key, from 1 to {STEP_MAX}")
        if self.rule == "window" and self.window < 1:
            raise InvalidRequest(f"window is {self.window}; a sliding window keeps at least 1 key")


@dataclass(frozen=True, slots=True)
class Extents:
    """Where held objects lie in the pool: one entry an object in each list, in the order of the groups' needed keys.

    Good for as long as the hold lasts, and checked once more after the bytes have been read: see `Client.still_good`.
    Plain data, for other processes of the host too.
    """

    pool_id: bytes
    epoch: int
    ids: list[int]
    offsets: list[int]
    sizes: list[int]
    words: list[int]
    checksums: list[int] = field(default_factory=list, compare=False)
    """xxh3-64 of each object's bytes; 0 where it isn't known yet."""


@dataclass(frozen=True, slots=True)
class Match:
    """The answer of `match`: the largest n, in units, that satisfies every group. `hold` names what now keeps the
    needed objects in place, or is None; the hold ends with `release_hold` or with the client that made it."""

    length: int
    hold: str | None = None
    extents: Extents | None = None
    """Where what is held lies, if that was asked for."""


def longest(rules: Sequence[tuple[str, int, int]], present: Sequence[npt.NDArray[np.bool_]]) -> int:
    """The largest n that satisfies every (rule, window, step) given which of its keys are present. Pure.

    0 always does. Linear in the number of keys.
    """
    if not rules:
        return 0
    unit = lcm(*(step for _, _, step in rules))
    limit = min(len(found) * step for (_, _, step), found in zip(rules, present, strict=True))
    candidates = limit // unit  # n = unit, 2*unit, …
    if candidates == 0:
        return 0
    good = np.ones(candidates, np.bool_)
    for (rule, window, step), found in zip(rules, present, strict=True):
        good &= _satisfied(rule, window, found)[unit // step - 1 :: unit // step][:candidates]
    return (candidates - int(good[::-1].argmax())) * unit if good.any() else 0


def needed(rule: str, window: int, step: int, length: int) -> range:
    """Which keys of a group a prefix of `length` units needs."""
    count = length // step
    if rule == "all":
        return range(count)
    if rule == "window":
        return range(max(0, count - window), count)
    return range(max(0, count - 1), count)


def _satisfied(rule: str, window: int, found: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """For m = 1, 2, …: whether the first m keys satisfy the rule."""
    if rule == "exact":
        return found
    if rule == "all":
        return np.logical_and.accumulate(found)
    places = np.arange(len(found), dtype=np.int32)
    last_missing = np.maximum.accumulate(np.where(found, np.int32(-1), places))
    return places - last_missing >= np.minimum(min(window, len(found)), places + 1)
