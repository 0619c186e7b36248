"""How an engine's tokens, blocks and KV groups come together in objects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.gpu.mover import SKIP
from moonpool.matching import Rule

NULL_BLOCK = 0
"""The block that vLLM puts in a table where there is none (any more): the part of a prefix before a sliding window."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One KV group: layers that share a block table."""

    index: int
    block_tokens: int
    tokens_per_object: int
    rule: Rule = "all"
    window_objects: int = 0
    """With rule "window": how many objects before a token its layers may look at."""

    @property
    def blocks_per_object(self) -> int:
        return self.tokens_per_object // self.block_tokens

    def blocks_of(self, table: Sequence[int], place: int, computed: int, until: int) -> tuple[int, ...]:
        """The blocks that object `place` fills, `SKIP` for those that hold tokens before `computed` or from `until`
        on, and for those that the table doesn't have."""
        first = place * self.blocks_per_object
        found = []
        for at in range(first, first + self.blocks_per_object):
            wanted = computed < (at + 1) * self.block_tokens and at * self.block_tokens < until and at < len(table)
            found.append(table[at] if wanted and table[at] != NULL_BLOCK else SKIP)
        return tuple(found)

    def whole_blocks_of(self, table: Sequence[int], place: int) -> tuple[int, ...] | None:
        """The blocks that hold object `place`; None where the table no longer has all of them."""
        blocks = tuple(table[place * self.blocks_per_object : (place + 1) * self.blocks_per_object])
        return None if len(blocks) < self.blocks_per_object or NULL_BLOCK in blocks else blocks


@dataclass(frozen=True, slots=True)
class Plan:
    """What an object is in this engine."""

    tokens_per_object: int
    hash_tokens: int
    """Tokens of one of the engine's block hashes."""
    groups: tuple[GroupPlan, ...]
    ranks: int
    """Workers, each of which holds a part of every object's tokens."""

    @property
    def hashes_per_object(self) -> int:
        return self.tokens_per_object // self.hash_tokens


def window_objects(window_tokens: int, tokens_per_object: int) -> int:
    """How many objects up to a token cover all that a sliding window lets it look at: itself and `window_tokens - 1`
    tokens before it."""
    return max(1, -(-(window_tokens - 1) // tokens_per_object))
