"""KV events as vLLM publishes them: what comes into the pool and goes, whoever does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import vllm.envs
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

import moonpool
from moonpool.testing.node import RunningNode, eventually
from tests.vllm.engines import OBJECT, Engine, Prompt, prompt_of, settled

PROMPT = prompt_of(1, 3 * OBJECT + 1)
MORE = prompt_of(2, 2 * OBJECT)


class Router:
    """What a subscriber knows of one engine's part of the pool: it refuses whatever it is told twice."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[Any, BlockStored] = {}
        self.heard: list[Any] = []
        engine.core.scheduler.kv_event_publisher.publish = lambda batch: self.hear(batch.events)

    def listen(self) -> None:
        """As a step of the engine would, if there were one."""
        self.hear(self.engine.core.scheduler.connector.take_events())

    def hear(self, events: Iterable[Any]) -> None:
        for event in events:
            self.heard.append(event)
            assert not isinstance(event, AllBlocksCleared), "the engine's own blocks are still there"
            assert event.medium == "CPU"
            assert event.locality == "LOCAL"
            for digest in event.block_hashes:
                if isinstance(event, BlockStored):
                    assert digest not in self.known, "stored twice"
                    self.known[digest] = event
                else:
                    assert isinstance(event, BlockRemoved)
                    del self.known[digest]

    def chains(self) -> list[Prompt]:
        """The prompts that it knows of, each as far as it goes."""
        parents = {stored.parent_block_hash for stored in self.known.values()}
        found = []
        for digest, stored in self.known.items():
            if digest in parents:
                continue
            tokens: Prompt = []
            while True:
                assert len(stored.token_ids) == stored.block_size == OBJECT
                tokens = [*stored.token_ids, *tokens]
                if stored.parent_block_hash is None:
                    break
                stored = self.known[stored.parent_block_hash]
            found.append(tokens)
        return sorted(found)

    def knows(self, *prompts: Prompt) -> bool:
        self.listen()
        return self.chains() == sorted(prompts)


def made_router(engine: Any, **options: Any) -> Router:
    made: Engine = engine(extra={"events": True}, **options)
    router = Router(made)
    made.generate([prompt_of(100, 20)])  # workers tell what they are with their first step
    return router


def test_what_an_engine_stores_is_told_with_its_tokens_and_its_place_in_the_chain(engine: Any) -> None:
    router = made_router(engine)
    router.engine.generate([PROMPT, MORE])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT], MORE), "both prompts are told")
    (first,) = [event for event in router.heard if event.token_ids == PROMPT[:OBJECT]]
    assert first.parent_block_hash is None
    assert first.lora_name is None
    assert first.group_idx == 0
    assert first.kv_cache_spec_kind == "full_attention"


def test_what_goes_is_told_whoever_sends_it_away(engine: Any, client: moonpool.Client) -> None:
    router = made_router(engine)
    router.engine.generate([PROMPT, MORE])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT], MORE), "both prompts are told")
    settled(client)
    client.clear()
    eventually(lambda: router.knows(), "all is told as removed")


def test_eviction_is_told(engine: Any, client: moonpool.Client) -> None:
    router = made_router(engine)
    router.engine.generate([PROMPT])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "the prompt is told")
    settled(client)
    size = client.stats().pool_bytes // 8
    for i in range(16):  # twice what fits
        client.put(f"something else {i}", b"x" * (size - 4096))
    eventually(lambda: router.knows(), "evictions are told")


def test_what_was_there_before_and_what_another_engine_stores_is_told(engine: Any, client: moonpool.Client) -> None:
    other: Engine = engine()
    other.generate([PROMPT])
    settled(client)
    router = made_router(engine)
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "what was there is told")
    other.generate([MORE])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT], MORE), "what comes from elsewhere is told")


def test_objects_of_others_are_not_told(engine: Any, client: moonpool.Client) -> None:
    other: Engine = engine(extra={"tenant": "somebody else"})
    other.generate([MORE])
    client.put("a key of no engine's", b"x")
    settled(client)
    router = made_router(engine)
    router.engine.generate([PROMPT])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "only this is told")


def test_after_a_reset_what_was_told_is_taken_back(engine: Any, client: moonpool.Client) -> None:
    router = made_router(engine)
    router.engine.generate([PROMPT])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "the prompt is told")
    router.engine.reset()
    eventually(lambda: router.knows(), "it is no use to this engine any more")
    router.engine.generate([MORE])
    eventually(lambda: router.knows(MORE), "what it stores from now on is told")
    assert settled(client).objects == 5  # nobody else's objects were touched


def test_a_node_that_is_killed_takes_what_was_told_with_it(engine: Any, node: RunningNode) -> None:
    router = made_router(engine, url=node.url)
    router.engine.generate([PROMPT])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "the prompt is told")
    node.kill()
    eventually(lambda: router.knows(), "all is told as removed")
    node.restart()
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "what the pool still has is told again")
    eventually(lambda: router.engine.scheduler.pool.usable() and router.engine.worker.pool.usable(), "it is back")
    router.engine.generate([MORE])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT], MORE), "what is stored from now on is told")


def test_without_the_setting_nothing_is_told_and_nothing_runs(engine: Any) -> None:
    made: Engine = engine()
    made.generate([PROMPT])
    assert list(made.core.scheduler.connector.take_events()) == []
    assert made.scheduler._events is None


@pytest.mark.parametrize("integers", [False, True], ids=["bytes", "integers"])
def test_block_hashes_are_vllms_own(engine: Any, integers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", integers, raising=False)
    router = made_router(engine)
    router.engine.generate([PROMPT])
    eventually(lambda: router.knows(PROMPT[: 3 * OBJECT]), "the prompt is told")
    assert all(isinstance(digest, int) == integers for digest in router.known)
