"""Shadow mode: hits that are computed all the same are compared with what is stored."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool.engines.vllm import shadow
from moonpool.testing.node import eventually
from tests.vllm.engines import OBJECT, Engine, Prompt, assert_same, cached, prompt_of, replace, settled, stored

PROMPT = prompt_of(1, 5 * OBJECT + 7)
SHADOWED = {"shadow_rate": 1.0}


def compared(made: Engine, objects: int) -> dict[str, int]:
    """Run a few steps until so many objects have been compared, and return the results."""

    def all_reported() -> bool:
        made.generate([prompt_of(99, 8)], tokens=1)
        return sum(made.scheduler.tally.compared.values()) >= objects

    eventually(all_reported, "the check's report")
    return dict(made.scheduler.tally.compared)


def damage(client: moonpool.Client, prompt: Prompt, place: int, by: float) -> bytes:
    """Change one value of an object's KV, by so much of the object's largest; returns its key."""
    found = stored(client, prompt, place)
    value = client.get(found.key)
    assert value is not None
    values = np.frombuffer(value, np.float32).copy()
    values[len(values) // 2] += by * np.abs(values).max()
    replace(client, found, values.tobytes())
    return found.key


def test_what_is_right_passes_and_is_let_go(plain: Any, engine: Any, client: moonpool.Client) -> None:
    right = plain.generate([PROMPT])
    engine().generate([PROMPT])
    settled(client)
    made: Engine = engine(extra=SHADOWED)
    found = made.generate([PROMPT])
    assert_same(found, right)
    assert cached(found) == [0], "it is computed"
    assert compared(made, 5) == {"same": 5}
    assert made.scheduler.tally.recomputed == {"shadow": 5 * OBJECT}
    assert settled(client).objects == 5


def test_what_is_wrong_is_found_logged_and_removed_and_no_token_is(
    plain: Any, engine: Any, client: moonpool.Client, caplog: pytest.LogCaptureFixture
) -> None:
    right = plain.generate([PROMPT])
    engine().generate([PROMPT])
    settled(client)
    key = damage(client, PROMPT, 2, by=0.5)
    made: Engine = engine(extra=SHADOWED)
    with caplog.at_level(logging.ERROR, "moonpool.vllm"):
        found = made.generate([PROMPT])
        assert compared(made, 5) == {"same": 4, "different": 1}
    assert_same(found, right)
    (said,) = [record.getMessage() for record in caplog.records if "differs from what was computed" in record.message]
    assert key.hex() in said
    assert f"written by {client.name}" in said  # this test, which has damaged it
    eventually(lambda: not client.exists(key), "it is removed")
    assert settled(client).objects == 4
    # Nobody loads it: the next engine computes from there on, and puts it right.
    other: Engine = engine()
    found = other.generate([PROMPT])
    assert_same(found, right)
    assert cached(found) == [2 * OBJECT]


def test_differences_within_the_tolerance_are_none(engine: Any, client: moonpool.Client) -> None:
    engine().generate([PROMPT])
    settled(client)
    damage(client, PROMPT, 1, by=0.01)
    made: Engine = engine(extra={**SHADOWED, "shadow_tolerance": 0.05})
    made.generate([PROMPT])
    assert compared(made, 5) == {"same": 5}
    made = engine(extra={**SHADOWED, "shadow_tolerance": 0.001})
    made.generate([PROMPT])
    assert compared(made, 5) == {"same": 4, "different": 1}


def test_hits_that_are_not_drawn_are_loaded(engine: Any, client: moonpool.Client) -> None:
    engine().generate([PROMPT])
    settled(client)
    made: Engine = engine(extra={"shadow_rate": 1e-9})
    assert cached(made.generate([PROMPT])) == [5 * OBJECT]
    assert not made.scheduler.tally.compared


def test_a_long_hit_is_compared_in_part(engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    engine().generate([PROMPT])
    size = settled(client).live_bytes // 5
    monkeypatch.setattr(shadow, "CHECK_BYTES", 3 * size)
    made: Engine = engine(extra=SHADOWED)
    made.generate([PROMPT])
    assert compared(made, 3) == {"same": 3}
    settled(client)


def test_prompts_computed_in_chunks_and_with_vllms_own_prefix_cache_are_compared(
    plain: Any, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate([PROMPT])
    engine().generate([PROMPT])
    settled(client)
    made: Engine = engine(extra=SHADOWED, max_num_batched_tokens=96, enable_prefix_caching=True)
    assert_same(made.generate([PROMPT]), right)
    assert compared(made, 5) == {"same": 5}
    assert_same(made.generate([PROMPT]), right)  # now the engine has it itself, and nothing is looked up
    assert compared(made, 5) == {"same": 5}
    settled(client)


def test_a_request_that_ends_before_it_is_computed_is_dropped_and_its_hold_let_go(
    engine: Any, client: moonpool.Client
) -> None:
    engine().generate([PROMPT])
    settled(client)
    made: Engine = engine(extra=SHADOWED, max_num_batched_tokens=96)
    made.generate([prompt_of(98, 8)])
    name = made.add(PROMPT)
    eventually(lambda: made.step() is not None and client.stats().holds == 1, "its hold is made")
    made.abort(name)
    made.run()
    settled(client)
    assert not made.scheduler.tally.compared


def test_an_object_that_goes_meanwhile_is_no_mismatch(
    engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().generate([PROMPT])
    settled(client)
    made: Engine = engine(extra=SHADOWED)
    monkeypatch.setattr(made.worker.pool.client, "still_good", lambda extents: False)
    made.generate([PROMPT])
    assert compared(made, 5) == {"dropped": 5}
    assert settled(client).objects == 5


def test_a_worker_that_fails_lets_go_of_what_it_compares(
    engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().generate([PROMPT])
    settled(client)
    made: Engine = engine(extra=SHADOWED)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("a fault that a test has put there")

    monkeypatch.setattr(shadow.Comparer, "begin", fails)
    made.generate([PROMPT])
    assert compared(made, 5) == {"dropped": 5}
    settled(client)
