"""The pool changes no token and no logprob, and what would change one is noticed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import moonpool
from tests.vllm.engines import (
    FLOAT32,
    OBJECT,
    Answer,
    Engine,
    Prompt,
    assert_same,
    cached,
    differences,
    prompt_of,
    replace,
    settled,
    stored,
)
from tests.vllm.models import ALL_SLIDING

PROMPTS = [
    prompt_of(1, 300),
    prompt_of(1, 500),  # begins with the one before
    [*prompt_of(1, 4 * OBJECT)[:-1], 7],  # differs from the first in the last token of its fourth object
    prompt_of(2, 5 * OBJECT),  # whole objects, nothing left over
    prompt_of(3, OBJECT),
    prompt_of(4, OBJECT - 1),  # no whole object
    prompt_of(5, 1000),
]
HIT = [4 * OBJECT, 7 * OBJECT, 4 * OBJECT, 5 * OBJECT, OBJECT, 0, 15 * OBJECT]
"""As the engine counts. Of a prompt that is stored whole it computes one token all the same: there has to be an answer.
"""


def test_loaded_prompts_are_answered_as_computed_ones(plain: Any, engine: Any, client: moonpool.Client) -> None:
    right = plain.generate(PROMPTS)
    pooled = engine()
    assert_same(pooled.generate(PROMPTS), right)
    stats = settled(client)
    assert stats.objects == 7 + 1 + 5 + 1 + 15
    found = pooled.generate(PROMPTS)
    assert_same(found, right)
    assert cached(found) == HIT
    settled(client)


def test_an_engine_that_was_just_started_is_answered_from_what_another_has_stored(
    plain: Any, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    first, second = engine(), engine()
    first.generate(PROMPTS)
    settled(client)
    found = second.generate(PROMPTS)
    assert_same(found, right)
    assert cached(found) == HIT
    assert settled(client).objects == 29, "the second one stored nothing anew"


def test_a_conversation_goes_on_from_its_own_answers(plain: Any, engine: Any, client: moonpool.Client) -> None:
    pooled = engine(extra={"save": "all"})
    prompt = prompt_of(6, 200)
    (answer,) = pooled.generate([prompt], tokens=100)
    settled(client)
    turn = prompt + answer.tokens + prompt_of(7, 30)
    (found,) = pooled.generate([turn])
    assert_same([found], plain.generate([turn]))
    assert found.cached == 4 * OBJECT, "256 of the 300 tokens that were computed"


# ---- what the comparison notices -------------------------------------------------------------------------------------

Bytes = npt.NDArray[np.uint8]


def shifted(own: Bytes, other: Bytes) -> Bytes:
    return np.roll(own, 1, axis=0)


def anothers(own: Bytes, other: Bytes) -> Bytes:
    return other


def stale(own: Bytes, other: Bytes) -> Bytes:
    changed = own.copy()
    changed[:, 0] = other[:, 0]
    return changed


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("wrong", [shifted, anothers, stale])
def test_wrong_bytes_would_be_noticed(
    plain: Any, engine: Any, client: moonpool.Client, wrong: Callable[[Bytes, Bytes], Bytes], place: int
) -> None:
    found = answered_with(engine(), client, place, wrong)
    assert differences(found, plain.generate([PROMPTS[0]]), FLOAT32)


def test_swapped_blocks_would_be_noticed(models: Callable[..., Path], engine: Any, client: moonpool.Client) -> None:
    # To full attention the order of what it sees is nothing, since keys know their positions. A window sees the
    # second block of the object at 128, and not the first.
    sliding = models(**ALL_SLIDING)
    found = answered_with(engine(sliding), client, 2, lambda own, other: own[:, ::-1])
    assert differences(found, engine(sliding, url=None).generate([PROMPTS[0]]), FLOAT32)


def answered_with(
    pooled: Engine, client: moonpool.Client, place: int, wrong: Callable[[Bytes, Bytes], Bytes]
) -> list[Answer]:
    """What a prompt is answered with where the object at `place` has wrong bytes."""
    prompt, other = PROMPTS[0], PROMPTS[3]
    right = pooled.generate([prompt, other])[:1]
    settled(client)
    assert_same(again := pooled.generate([prompt]), right)
    assert cached(again) == [4 * OBJECT]
    region = pooled.worker.regions[0]
    shape = len(region.planes), region.blocks_per_object, region.planes[0].piece_bytes

    def blocks_of(asked: Prompt) -> Bytes:
        value = client.get(stored(client, asked, place).key)
        assert value is not None
        return np.frombuffer(value, np.uint8).reshape(shape)

    replace(client, stored(client, prompt, place), wrong(blocks_of(prompt), blocks_of(other)).tobytes())
    found = pooled.generate([prompt])
    assert cached(found) == [4 * OBJECT], "it was loaded"
    return found
