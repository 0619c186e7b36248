"""Requests that don't go straight through: aborted, preempted, computed in chunks, waiting for room."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

import moonpool
from moonpool.client.channel import Channel
from moonpool.gpu.mover import SKIP, Transfer
from moonpool.testing.node import eventually
from tests.vllm.engines import (
    BLOCK,
    OBJECT,
    Engine,
    assert_same,
    cached,
    free_blocks,
    on_copies,
    prompt_of,
    settled,
    slowly,
)

PAGE = 3 * 16384
"""Bytes of one block of all layers."""
PROMPTS = [prompt_of(1, 300), prompt_of(2, 500)]
HIT = [4 * OBJECT, 7 * OBJECT]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that this process has sent to nodes since it was last cleared."""
    sent: list[Any] = []
    send = Channel.send

    def counted(self: Channel, *messages: Any) -> None:
        sent.extend(messages)
        send(self, *messages)

    monkeypatch.setattr(Channel, "send", counted)
    return sent


class Gate:
    """For `on_copies`: loads wait at it until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, count: int, load: bool) -> None:
        if load:
            self.reached.set()
            assert self.open.wait(60)


# ---- aborts ----------------------------------------------------------------------------------------------------------


def test_a_thousand_requests_aborted_between_lookup_and_allocation_leave_nothing_held(
    engine: Any, client: moonpool.Client, messages: list[Any]
) -> None:
    pooled: Engine = engine(max_model_len=1024, kv_cache_memory_bytes=34 * PAGE)
    pooled.generate([PROMPTS[0]])
    settled(client)
    running = pooled.add(prompt_of(5, 800), tokens=200)  # leaves room for less than the prompt
    held = 0
    for _ in range(1000):
        name = pooled.add(PROMPTS[0])
        for _ in range(100):
            pooled.step()
            tracked = pooled.scheduler._tracked[name]
            if tracked.match is not None and tracked.match.hold is not None:
                break
        held += tracked.match is not None and not tracked.loading
        pooled.abort(name)
        if running not in pooled.core.scheduler.requests:
            running = pooled.add(prompt_of(5, 800), tokens=200)
    assert held == 1000
    pooled.abort(running)
    pooled.run()
    assert not pooled.scheduler._tracked
    settled(client)


def test_a_request_that_waits_for_room_asks_the_node_once(
    engine: Any, client: moonpool.Client, messages: list[Any]
) -> None:
    pooled: Engine = engine(max_model_len=1024, kv_cache_memory_bytes=34 * PAGE)
    pooled.generate([PROMPTS[0]])
    settled(client)
    running = pooled.add(prompt_of(5, 800), tokens=150)
    waiting = pooled.add(PROMPTS[0])
    while (tracked := pooled.scheduler._tracked.get(waiting)) is None or tracked.match is None:
        pooled.step()
    eventually(lambda: client.stats().reservations == 0, "the running one is stored")
    messages.clear()
    for _ in range(50):
        pooled.step()
        assert running in pooled.core.scheduler.requests
    assert messages == []
    assert len(pooled.run()) == 2
    settled(client)


def test_a_request_aborted_in_mid_load_keeps_its_blocks_until_the_load_has_ended(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine()
    pooled.generate(PROMPTS)
    settled(client)
    free, gate = free_blocks(pooled), Gate()
    on_copies(pooled, gate)
    name = pooled.add(PROMPTS[0])
    while not gate.reached.is_set():
        pooled.step()
    pooled.abort(name)
    for _ in range(20):
        pooled.step()
    assert free_blocks(pooled) == free - 8, "those of the 256 tokens that are loaded"
    assert client.stats().holds == 1
    gate.open.set()
    pooled.run()
    assert free_blocks(pooled) == free
    settled(client)
    assert_same(found := pooled.generate(PROMPTS), right)
    assert cached(found) == HIT


def test_a_load_under_way_costs_no_messages(engine: Any, client: moonpool.Client, messages: list[Any]) -> None:
    pooled: Engine = engine()
    pooled.generate(PROMPTS)
    settled(client)
    gate = Gate()
    on_copies(pooled, gate)
    pooled.add(PROMPTS[0])
    while not gate.reached.is_set():
        pooled.step()
    messages.clear()
    for _ in range(500):
        pooled.step()
    assert messages == []
    gate.open.set()
    (answer,) = pooled.run()
    assert answer.cached == HIT[0]
    settled(client)


def test_a_load_that_takes_too_long_is_computed(plain: Engine, engine: Any, client: moonpool.Client) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine(extra={"load_timeout_s": 0.2})
    pooled.generate(PROMPTS)
    settled(client)
    on_copies(pooled, slowly(0.1))
    assert_same(pooled.generate(PROMPTS), right)
    assert pooled.scheduler.tally.requests["failed"] > 0
    settled(client)
    assert_same(found := pooled.generate(PROMPTS), right)
    assert cached(found) == HIT, "by another mover"
    settled(client)


# ---- preemption, blocks that change hands ----------------------------------------------------------------------------


def test_preempted_requests_are_answered_right_and_stored_right(
    plain: Engine, engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(seed, 150 + 40 * seed) for seed in range(6)]
    right = plain.generate(prompts, tokens=100)
    pooled: Engine = engine(
        max_model_len=512, kv_cache_memory_bytes=20 * PAGE, max_num_batched_tokens=512, extra={"save": "all"}
    )
    preempted: list[str] = []
    preempt = pooled.core.scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(pooled.core.scheduler, "_preempt_request", counted)
    on_copies(pooled, slowly(0.03))
    assert_same(pooled.generate(prompts, tokens=100), right)
    assert preempted
    settled(client)
    assert_same(found := engine().generate(prompts, tokens=100), right)
    assert all(cached(found))
    settled(client)


def test_blocks_of_finished_requests_wait_for_the_stores_that_read_them(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    prompts = [prompt_of(seed, 400) for seed in range(6)]
    right = plain.generate(prompts, tokens=1)
    pooled: Engine = engine(max_model_len=512, kv_cache_memory_bytes=17 * PAGE)  # one request at a time, just so
    on_copies(pooled, slowly(0.01))
    assert_same(pooled.generate(prompts, tokens=1), right)
    settled(client)
    assert_same(found := engine().generate(prompts, tokens=1), right)
    assert cached(found) == [6 * OBJECT] * 6
    settled(client)


# ---- vLLM's own prefix cache, chunks ---------------------------------------------------------------------------------


def test_only_what_the_gpu_lacks_is_loaded(
    plain: Engine, engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1, 500)
    (right,) = plain.generate([prompt])
    engine().generate([prompt])
    settled(client)
    pooled: Engine = engine(enable_prefix_caching=True, max_num_batched_tokens=64)
    on_gpu = prompt[: 2 * OBJECT + BLOCK + 3]  # two objects and half of the third
    pooled.generate([on_gpu])
    loaded: list[Transfer] = []
    mover: Any = pooled.worker._mover
    load = mover.load

    def noted(transfers: Sequence[Transfer], **more: Any) -> Any:
        loaded.extend(transfers)
        return load(transfers, **more)

    monkeypatch.setattr(mover, "load", noted)
    (found,) = pooled.generate([prompt])
    assert_same([found], [right])
    assert found.cached == 7 * OBJECT
    blocks = [[block != SKIP for block in transfer.blocks] for transfer in loaded]
    assert blocks == [[False, True], *[[True, True]] * 4]
    loaded.clear()
    (found,) = pooled.generate([prompt])
    assert_same([found], [right])
    assert loaded == [], "all of it was on the GPU"
    settled(client)


def test_prompts_computed_in_chunks_are_stored_chunk_by_chunk(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    prompts = [prompt_of(seed, 500) for seed in range(3)]
    right = plain.generate(prompts)
    pooled: Engine = engine(max_num_batched_tokens=96, enable_prefix_caching=True)
    assert_same(pooled.generate(prompts), right)
    assert settled(client).objects == 21
    assert_same(found := engine(max_num_batched_tokens=96).generate(prompts), right)
    assert cached(found) == [7 * OBJECT] * 3
    settled(client)


# ---- roles, resets ---------------------------------------------------------------------------------------------------


def test_a_producer_only_stores_and_a_consumer_only_loads(plain: Engine, engine: Any, client: moonpool.Client) -> None:
    right = plain.generate(PROMPTS)
    producer, consumer = engine(role="kv_producer"), engine(role="kv_consumer")
    assert_same(consumer.generate(PROMPTS), right)
    assert settled(client).objects == 0
    for _ in range(2):
        assert_same(found := producer.generate(PROMPTS), right)
        assert cached(found) == [0, 0]
    objects = settled(client).objects
    assert objects == 11
    assert_same(found := consumer.generate([*PROMPTS, prompt_of(3, 200)])[:2], right)
    assert cached(found) == HIT
    assert settled(client).objects == objects


def test_after_a_reset_an_engine_shares_with_nobody_and_others_go_on(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    one, other = engine(), engine()
    one.generate(PROMPTS)
    objects = settled(client).objects
    one.reset()
    assert_same(found := one.generate(PROMPTS), right)
    assert cached(found) == [0, 0]
    assert settled(client).objects == 2 * objects, "what was there has stayed"
    assert cached(other.generate(PROMPTS)) == HIT
    assert cached(one.generate(PROMPTS)) == HIT, "its own of since then"
    other.reset()
    assert cached(other.generate(PROMPTS)) == [0, 0]
    settled(client)


def test_what_is_being_loaded_or_was_computed_at_a_reset_is_not_used_after_it(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine()
    pooled.generate(PROMPTS)
    objects = settled(client).objects
    gate = Gate()
    on_copies(pooled, gate)
    pooled.add(prompt_of(3, 200), tokens=100)
    pooled.add(PROMPTS[0])
    while not gate.reached.is_set():
        pooled.step()
    pooled.scheduler.reset()
    pooled.step()
    gate.open.set()
    found = pooled.run()
    assert_same(found[1:], right[:1])
    assert pooled.scheduler.tally.requests["failed"] == 1
    pooled.await_copies()
    keys = {stat.key[:16] for stat in client.list()}
    assert len(keys) == 2, "of before and of after"
    # Computed anew after the reset: the four objects whose load was under way. Of the other one nothing more.
    assert settled(client).objects == objects + 3 + 4
