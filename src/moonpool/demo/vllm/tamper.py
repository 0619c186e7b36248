"""Negative controls: what lies in the pool is exchanged for something wrong, for as long as a context lasts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from moonpool import Client, ObjectStat, Status
from moonpool.demo.settings import Settings
from moonpool.engines.vllm.notes import decode_note
from moonpool.errors import MoonpoolError

Change = Callable[[bytes, bytes, int], bytes]


def _exchange(own: bytes, other: bytes, layers: int) -> bytes:
    """Another prompt's blocks, from the same place in it."""
    return other


def _shift(own: bytes, other: bytes, layers: int) -> bytes:
    """Each layer's blocks given to the next layer."""
    return np.roll(np.frombuffer(own, np.uint8), len(own) // layers).tobytes()


CONTROLS: dict[str, Change] = {
    "another prompt's blocks in one object": _exchange,
    "one object's layers shifted": _shift,
}
"""What becomes of one object's bytes, given those of another prompt's and the number of layers. Two whole objects of
one prompt in each other's place aren't among it: cached keys carry their positions, and attention sums over a set, so
that prompt's own answers stay the same."""


@contextmanager
def tampered(
    client: Client, tenant: str, control: str, settings: Settings, prompt: Sequence[int], other: Sequence[int]
) -> Iterator[None]:
    """Have one object of `prompt` hold wrong bytes, and put the right ones back at the end.

    Raises `MoonpoolError` where the object, or the one of `other` at the same place, isn't stored.
    """
    place = len(prompt) // settings.tokens_per_object * 2 // 3  # behind what all prompts share
    stat, lent = (_find(client, tenant, tokens, place, settings.tokens_per_object) for tokens in (prompt, other))
    right, wrong = client.get(stat.key), client.get(lent.key)
    if right is None or wrong is None:
        raise MoonpoolError("an object of the demo's went away")
    _replace(client, stat, CONTROLS[control](right, wrong, settings.layers))
    try:
        yield
    finally:
        _replace(client, stat, right)


def _find(client: Client, tenant: str, prompt: Sequence[int], place: int, size: int) -> ObjectStat:
    """The object that holds the KV cache of the prompt's tokens at `place`, counted in objects of `size` tokens."""
    wanted = list(prompt[place * size : (place + 1) * size])
    digests = {space.digest for space in client.spaces() if json.loads(space.description).get("tenant") == tenant}
    for stat in client.list():
        if stat.key[:16] in digests and (note := decode_note(stat.metadata)) is not None and note.tokens == wanted:
            return stat
    raise MoonpoolError(f"the pool has no object of the demo's for tokens {place * size} to {(place + 1) * size}")


def _replace(client: Client, stat: ObjectStat, value: bytes) -> None:
    client.remove(stat.key, force=True)
    status = client.put(stat.key, value, metadata=stat.metadata)
    if status is not Status.OK:
        raise MoonpoolError(f"an object of the demo's can't be put back: {status.name}")
