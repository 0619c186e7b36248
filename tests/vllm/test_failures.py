"""Whatever happens to the node or to what it holds: the same tokens, an engine that goes on, and nothing left held."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.engines.vllm import lookups
from moonpool.matching import Group
from moonpool.testing.node import RunningNode, eventually, running_node
from tests.vllm.engines import (
    FLOAT32,
    OBJECT,
    Engine,
    Prompt,
    assert_same,
    cached,
    differences,
    grown,
    on_copies,
    prompt_of,
    settled,
    stored,
)

PROMPTS = [prompt_of(1, 300), prompt_of(2, 500)]
HIT = [4 * OBJECT, 7 * OBJECT]
PATIENT = {"failures_max": 1000}
"""Extra config: goes on however often something fails."""


def usable(engine: Engine) -> bool:
    return engine.scheduler.pool.usable() and engine.worker.pool.usable()


# ---- the node --------------------------------------------------------------------------------------------------------


def test_an_engine_starts_without_a_node_and_attaches_when_there_is_one(plain: Engine, engine: Any) -> None:
    right = plain.generate(PROMPTS)
    with running_node("32MiB", start=False) as node:
        pooled: Engine = engine(url=node.url)
        assert_same(found := pooled.generate(PROMPTS), right)
        assert cached(found) == [0, 0]
        node.start()
        eventually(lambda: usable(pooled), "the engine has found the node", within_s=60)
        with node.connect() as client:
            grown(client)
            assert_same(pooled.generate(PROMPTS), right)
            settled(client)
            assert_same(found := pooled.generate(PROMPTS), right)
            assert cached(found) == HIT
            settled(client)


KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_killed_in_mid_load_or_mid_store_costs_no_token(plain: Engine, engine: Any) -> None:
    prompts = [prompt_of(100 + n, 500) for n in range(KILLS)]
    right = plain.generate(prompts)
    with running_node("64MiB") as node:
        pooled: Engine = engine(url=node.url, extra=PATIENT)
        killed: list[bool] = []
        killer = Killer(node, killed)
        for n, prompt in enumerate(prompts):
            # Seven objects are stored, then loaded: before one of them is copied, the node dies and comes back.
            for what in ("store", "load"):
                killer.at, killer.load = n % 7, what == "load"
                on_copies(pooled, killer)
                assert_same(pooled.generate([prompt]), right[n : n + 1])
                eventually(lambda: usable(pooled), "the engine has found the node again", within_s=60)
        assert killed.count(False) == KILLS, "in mid-store"
        assert killed.count(True) >= KILLS // 2, "in mid-load: as often as there was something to load"
        with node.connect() as client:
            settled(client)
            grown(client)
            again = pooled.generate(prompts)
            assert_same(again, right)
            settled(client)
            assert_same(again := pooled.generate(prompts), right)
            assert cached(again) == [7 * OBJECT] * KILLS
            settled(client)


class Killer:
    """For `on_copies`: kills the node once, before object `at` is loaded or stored, and starts it anew."""

    def __init__(self, node: RunningNode, killed: list[bool]) -> None:
        self.node, self.killed = node, killed
        self.at, self.load = -1, False

    def __call__(self, count: int, load: bool) -> None:
        if count == self.at and load == self.load:
            self.at = -1
            self.node.restart()
            self.killed.append(load)


def test_a_node_that_is_gone_for_good_costs_no_token(plain: Engine, engine: Any, node: RunningNode) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine(url=node.url)
    with node.connect() as client:
        grown(client)
        pooled.generate(PROMPTS)
        settled(client)
    on_copies(pooled, lambda count, load: node.kill() if count == 2 and load else None)
    assert_same(pooled.generate(PROMPTS), right)
    assert pooled.scheduler.tally.requests["failed"] == 2
    assert_same(pooled.generate(PROMPTS), right)
    assert not pooled.scheduler._tracked
    assert not pooled.scheduler._ending


def test_a_node_that_has_stopped_answering_costs_a_bounded_time(
    plain: Engine, engine: Any, node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_PATIENCE_S", 0.1)
    prompts = [*PROMPTS, prompt_of(3, 200)]
    right = plain.generate(prompts)
    pooled: Engine = engine(url=node.url)
    with node.connect() as client:
        grown(client)
        pooled.generate(PROMPTS)
        settled(client)
    node.signal(signal.SIGSTOP)
    names = [pooled.add(prompt) for prompt in prompts]
    assert names
    assert_same(pooled.run(), right)
    assert pooled.scheduler.tally.recomputed["lookup too slow"] == 0
    assert pooled.scheduler.tally.requests["skipped"] == 2, "looked up for 0.1 s, then computed"
    node.signal(signal.SIGCONT)
    eventually(lambda: usable(pooled), "the node answers again", within_s=30)
    assert_same(found := pooled.generate(prompts), right)
    assert cached(found)[:2] == HIT
    with node.connect() as client:
        settled(client)


# ---- what it holds ---------------------------------------------------------------------------------------------------


def test_a_full_pool_stores_no_more(plain: Engine, engine: Any) -> None:
    prompts = [prompt_of(seed, 1000) for seed in range(4)]
    right = plain.generate(prompts)
    with running_node("4MiB") as node, node.connect() as client:
        grown(client)
        pooled: Engine = engine(url=node.url)
        pooled.generate(prompts[:3])
        settled(client)
        keys = [stat.key for stat in client.list()]
        assert client.match([Group(keys)], hold="all that there is").length == len(keys) == 42
        assert_same(pooled.generate(prompts[3:]), right[3:])
        pooled.generate([prompt_of(9, 20)])  # steps, so that workers report
        assert pooled.scheduler.tally.unstored["no room"] >= 15 - 1
        assert sorted(keys) == sorted(stat.key for stat in client.list())
        client.release_hold("all that there is")
        assert_same(pooled.generate(prompts), right)
        settled(client)


def test_a_pool_that_evicts_all_the_time_answers_right(plain: Engine, engine: Any) -> None:
    prompts = [prompt_of(seed, 1000) for seed in range(6)]
    right = plain.generate(prompts)
    with running_node("4MiB") as node, node.connect() as client:
        grown(client)
        pooled: Engine = engine(url=node.url)
        for _ in range(3):
            assert_same(pooled.generate(prompts), right)
        assert client.stats().bytes_evicted > 0
        settled(client)


def test_objects_removed_between_lookup_and_load_are_computed(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine()
    pooled.generate(PROMPTS)
    objects = settled(client).objects

    def remove(count: int, load: bool) -> None:
        if load and count == 0:
            client.remove_many([stat.key for stat in client.list()], force=True)

    on_copies(pooled, remove)
    assert_same(pooled.generate(PROMPTS), right)
    assert pooled.scheduler.tally.recomputed["object gone"] == sum(HIT)
    assert settled(client).objects == objects, "and stored anew"
    assert cached(pooled.generate(PROMPTS)) == HIT


def test_a_purge_in_mid_load_is_a_miss(plain: Engine, engine: Any, client: moonpool.Client) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine()
    pooled.generate(PROMPTS)
    settled(client)

    def purge(count: int, load: bool) -> None:
        if load and count == 3:
            client.clear()

    on_copies(pooled, purge)
    assert_same(pooled.generate(PROMPTS), right)
    assert pooled.scheduler.tally.requests["failed"] > 0
    settled(client)


def test_a_copy_that_fails_is_computed_and_the_engine_goes_on(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine(extra=PATIENT)
    pooled.generate(PROMPTS)
    settled(client)

    def fail(count: int, load: bool) -> None:
        raise OSError("no such luck")

    on_copies(pooled, fail)
    more = prompt_of(3, 200)
    assert_same(pooled.generate([*PROMPTS, more]), [*right, *plain.generate([more])])
    assert pooled.scheduler.tally.requests["failed"] == 2
    settled(client)


def test_versions_that_are_told_of_failed_loads_by_block_compute_them_too(
    plain: Engine, engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moonpool.engines.vllm.connector import MoonpoolConnector

    monkeypatch.delattr(MoonpoolConnector, "get_transfer_results")  # as if there were none to call
    right = plain.generate(PROMPTS)
    pooled: Engine = engine()
    pooled.generate(PROMPTS)
    settled(client)

    def fail(count: int, load: bool) -> None:
        if load and count == 2:
            raise OSError("no such luck")

    on_copies(pooled, fail)
    assert_same(pooled.generate(PROMPTS), right)
    assert pooled.scheduler.tally.requests["failed"] > 0
    settled(client)


# ---- corruption ------------------------------------------------------------------------------------------------------


@pytest.fixture
def still() -> Iterator[RunningNode]:
    """A node that doesn't look for corruption by itself."""
    with running_node("32MiB", scrub_interval="0s") as node:
        yield node


def corrupt(node: RunningNode, client: moonpool.Client, prompt: Prompt, place: int) -> None:
    """Turn a few bytes of an object over, behind the node's back."""
    found = client.match([Group([stored(client, prompt, place).key])], hold="to corrupt", extents=True)
    assert found.extents is not None
    client.release_hold("to corrupt")
    (offset,) = found.extents.offsets
    file = os.open(node.folder / "pool", os.O_RDWR)
    try:
        os.pwrite(file, bytes(255 - byte for byte in os.pread(file, 4096, offset + 8192)), offset + 8192)
    finally:
        os.close(file)


def test_verified_loads_are_those_that_were_stored(plain: Engine, engine: Any, still: RunningNode) -> None:
    right = plain.generate(PROMPTS)
    first: Engine = engine(url=still.url, extra={"verify": True})
    with still.connect() as client:
        grown(client)
        first.generate(PROMPTS)
        settled(client)
        second: Engine = engine(url=still.url, extra={"verify": True})
        assert_same(found := second.generate(PROMPTS), right)
        assert cached(found) == HIT
        assert second.scheduler.tally.requests["loaded"] == 2
        settled(client)


def test_a_corrupted_object_is_computed_and_the_pool_left_alone(
    plain: Engine, engine: Any, still: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine(url=still.url, extra={"verify": True})
    careless: Engine = engine(url=still.url)
    with still.connect() as client:
        grown(client)
        pooled.generate(PROMPTS)
        settled(client)
        corrupt(still, client, PROMPTS[0], 2)
        wrong = careless.generate(PROMPTS)
        assert differences(wrong, right, FLOAT32), "it matters"
        with caplog.at_level(logging.ERROR, "moonpool"):
            assert_same(pooled.generate(PROMPTS), right)
        assert [record.message for record in caplog.records if "moonpool is off" in record.message] == [
            "moonpool is off, the engine goes on without it: stored bytes differ from their checksum"
        ]
        assert_same(found := pooled.generate(PROMPTS), right)
        assert cached(found) == [0, 0], "no load any more"
        settled(client)


def test_what_has_no_checksum_yet_is_not_loaded_where_loads_are_verified(
    plain: Engine, engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plain.generate(PROMPTS)
    pooled: Engine = engine(extra={"verify": True})
    pooled.generate(PROMPTS)
    settled(client)
    begin = pooled.scheduler.pool.client._matched

    def unknown(*args: Any) -> moonpool.Match:
        found = begin(*args)
        assert found.extents is not None
        found.extents.checksums[1] = 0
        return found

    monkeypatch.setattr(pooled.scheduler.pool.client, "_matched", unknown)
    assert_same(found := pooled.generate(PROMPTS), right)
    assert cached(found) == [0, 0]
    assert pooled.scheduler.tally.recomputed["no checksum yet"] == sum(HIT)
    settled(client)


# ---- a worker that is somebody else ----------------------------------------------------------------------------------


def test_a_worker_that_derives_another_key_space_refuses_with_one_line(
    plain: Engine,
    engine: Any,
    client: moonpool.Client,
    models: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import dataclasses

    from moonpool.engines.vllm import identity

    report = identity.rank_report
    monkeypatch.setattr(
        identity,
        "rank_report",
        lambda rank, space, lies: report(rank, dataclasses.replace(space, weights="sha256:" + "0" * 64), lies),
    )
    pooled: Engine = engine()
    with caplog.at_level(logging.WARNING, "moonpool"):
        for _ in range(2):
            assert_same(found := pooled.generate(PROMPTS), plain.generate(PROMPTS))
            assert cached(found) == [0, 0]
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "worker 0 of pipeline stage 0 runs another model than the scheduler" in said[0]
    assert settled(client).objects == 0
