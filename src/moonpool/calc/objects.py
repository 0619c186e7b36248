"""How many tokens an object should hold: large enough to hide its own cost, small enough to lose little of a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.sizes import format_bytes, format_duration

OBJECT_OVERHEAD_S = 5e-6
"""What an object costs besides its bytes in a batched get: key, index, pin, status, one copy started. Taken from
objects of 4 KiB, whose bytes hardly count, at the 200,000 a second to one client that `bench local` is held to."""

OBJECT_BYTES_MIN = 2_000_000
"""Copies of 2 MB one by one reach 51 of the 55 GB/s of a PCIe 5.0 x16 link, of 256 KB 33, of 64 KB 9."""

OBJECT_TOKENS_MAX = 256
"""A prefix that ends inside an object is computed from the object's start on: 120 tokens on average at 256, more than a
tenth of a prefix of 1,000 tokens."""


@dataclass(frozen=True, slots=True)
class ObjectSize:
    """One choice of tokens per object, and what it costs a request on one rank."""

    tokens: int
    bytes: int
    objects: int
    """Objects of a request; the tokens after the last full one aren't stored."""
    overhead_s: float
    overhead_share: float
    """Of the time to move the request over the fastest wire, were the cost not hidden behind the moving."""
    lost_tokens: float
    """Tokens of a prefix computed again, on average, beyond those that the engine's own blocks lose."""
    lost_s: float | None
    """The time to compute those; None where no prefill rate was given."""


def object_sizes(
    token_bytes: int,
    *,
    tokens: int,
    tokens_per_block: int,
    overhead_s: float,
    bytes_per_s: float,
    prefill_tokens_per_s: float | None,
) -> tuple[ObjectSize, ...]:
    """Return the choices: the engine's block doubled until `OBJECT_TOKENS_MAX` tokens.

    Doubled, so that any two of them divide each other and the engine's blocks divide both.
    """
    sizes = []
    size = tokens_per_block
    while size == tokens_per_block or size <= OBJECT_TOKENS_MAX:
        objects = tokens // size
        cost_s = objects * overhead_s
        move_s = objects * size * token_bytes / bytes_per_s
        lost = (size - tokens_per_block) / 2
        sizes.append(
            ObjectSize(
                tokens=size,
                bytes=size * token_bytes,
                objects=objects,
                overhead_s=cost_s,
                overhead_share=cost_s / (cost_s + move_s) if objects and cost_s else 0.0,
                lost_tokens=lost,
                lost_s=None if prefill_tokens_per_s is None else lost / prefill_tokens_per_s,
            )
        )
        size *= 2
    return tuple(sizes)


def recommend(sizes: Sequence[ObjectSize]) -> tuple[ObjectSize, str]:
    """Return the recommended one of `sizes` (rising), and why: the first of enough bytes, else the last."""
    chosen = next((size for size in sizes if size.bytes >= OBJECT_BYTES_MIN), sizes[-1])
    least = format_bytes(OBJECT_BYTES_MIN)
    if chosen.bytes < OBJECT_BYTES_MIN:
        why = (
            f"objects of {format_bytes(chosen.bytes)}, short of the {least} that hide their own cost; but more than "
            f"{OBJECT_TOKENS_MAX} tokens would lose too much of a prefix that ends inside an object"
        )
    elif chosen is sizes[0]:
        why = (
            f"the engine's own block has {format_bytes(chosen.bytes)}, at least the {least} that hide an object's cost"
        )
    else:
        why = f"the smallest objects to reach the {least} that hide their own cost: {format_bytes(chosen.bytes)} each"
    lost = (
        f"; a prefix loses {chosen.lost_tokens:g} tokens more than the engine's blocks do, on average"
        if chosen.lost_tokens
        else ""
    )
    overhead = f"; {chosen.objects:,} objects cost {format_duration(chosen.overhead_s)} a request"
    return chosen, why + overhead + lost
