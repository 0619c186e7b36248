"""An exception injected at every call that the connector makes: same tokens, an engine that goes on, nothing held."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import moonpool
from moonpool.engines.vllm import connector, setup
from tests.vllm.engines import Engine, assert_same, on_copies, prompt_of, settled, slowly

CALLS = sorted(set(re.findall(r"self\._(scheduler|worker)\.(\w+)\(", inspect.getsource(connector.MoonpoolConnector))))
"""All methods of either side that the connector calls, as its source says."""
INSTEAD = ("load_nothing", "failed_step", "let_go_of", "forget", "give_up")
"""Called where another one has failed."""
OTHER = ("wait_ready",)
"""Not called by the engine."""
STORED = [prompt_of(1, 300), prompt_of(2, 500)]
NEW = prompt_of(3, 400)


class Injected(Exception):
    pass


def test_all_calls_are_known() -> None:
    assert {name for side, name in CALLS if side == "scheduler"} >= {
        "matched_tokens", "allocated", "step", "reported", "finished", "take_events", "reset", "take_figures",
    }  # fmt: skip
    assert {name for side, name in CALLS if side == "worker"} >= {
        "before_forward", "start_loads", "start_saves", "finished", "report",
    }  # fmt: skip


class Faulty:
    """A method that raises: always, or at its call number `at` alone, counted from 0."""

    def __init__(self, method: Callable[..., Any], at: int | None) -> None:
        self.method, self.at, self.count, self.raised = method, at, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.at is None or self.count - 1 == self.at:
            self.raised += 1
            raise Injected("on purpose")
        return self.method(*args, **kwargs)


@pytest.mark.parametrize("at", [None, 0, 2])
@pytest.mark.parametrize(("side", "name"), [call for call in CALLS if call[1] not in INSTEAD + OTHER])
def test_a_fault_of_ours_is_none_of_the_engine(
    plain: Engine, engine: Any, client: moonpool.Client, side: str, name: str, at: int | None
) -> None:
    right = plain.generate([*STORED, NEW])
    pooled: Engine = engine(extra={"failures_max": 1000, "events": name == "take_events"})
    pooled.generate(STORED)
    settled(client)
    free = pooled.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    owner: Any = pooled.scheduler if side == "scheduler" else pooled.worker
    faulty = Faulty(getattr(owner, name), at)
    setattr(owner, name, faulty)
    # Loads, stores, a request that is aborted while it may be loading, and one after all that.
    aborted = pooled.add(STORED[1])
    for prompt in [*STORED, NEW]:
        pooled.add(prompt)
    pooled.step()
    pooled.abort(aborted)
    assert_same(pooled.run(), right)
    if name == "reset":
        for _ in range(3):
            pooled.llm.reset_prefix_cache(reset_connector=True)
    assert_same(pooled.generate([*STORED, NEW]), right)
    assert faulty.raised, "it was called"
    delattr(owner, name)
    assert_same(pooled.generate([*STORED, NEW]), right)
    assert not pooled.scheduler._tracked
    assert not pooled.scheduler._ending
    if name != "reported":  # else it hasn't been told
        pooled.generate([prompt_of(9, 20)])  # steps, so that workers report
        assert not pooled.scheduler._unread
    assert pooled.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    settled(client)


def test_a_fault_before_a_step_has_no_store_read_what_others_write(
    plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    prompts = [prompt_of(seed, 400) for seed in range(4)]
    right = plain.generate(prompts, tokens=1)
    pooled: Engine = engine(max_model_len=512, kv_cache_memory_bytes=17 * 3 * 16384)  # one request at a time, just so
    pooled.generate([prompt_of(9, 20)])
    on_copies(pooled, slowly(0.01))
    owner: Any = pooled.worker
    owner.before_forward = Faulty(owner.before_forward, None)
    assert_same(pooled.generate(prompts, tokens=1), right)
    settled(client)
    assert_same(engine().generate(prompts, tokens=1), right)


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_a_side_that_cannot_start_leaves_the_engine_without_the_pool(
    plain: Engine, engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    def fails(*_: Any) -> Any:
        raise Injected("on purpose")

    monkeypatch.setattr(setup, side, fails)
    pooled = engine()
    assert [record.message for record in caplog.records if record.name.startswith("moonpool")] == [
        "moonpool is off, the engine goes on without it: on purpose"
    ]
    for _ in range(2):
        assert_same(pooled.generate(STORED), plain.generate(STORED))
