"""Layers that see the last few tokens only: their blocks are given away while stores may still read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moonpool
from tests.vllm.engines import OBJECT, Engine, assert_same, cached, on_copies, prompt_of, settled, slowly
from tests.vllm.models import ALL_SLIDING, HYBRID

PROMPTS = [prompt_of(1, 300), prompt_of(1, 500), prompt_of(2, 5 * OBJECT), prompt_of(3, OBJECT)]
HIT = [4 * OBJECT, 7 * OBJECT, 5 * OBJECT, OBJECT]


@pytest.mark.parametrize("changes", [ALL_SLIDING, HYBRID])
def test_windows_and_what_has_none_are_loaded_together(
    models: Callable[..., Path], engine: Any, client: moonpool.Client, changes: dict[str, Any]
) -> None:
    folder = models(**changes)
    right = engine(folder, url=None).generate(PROMPTS)
    pooled: Engine = engine(folder)
    assert_same(pooled.generate(PROMPTS), right)
    settled(client)
    found = engine(folder).generate(PROMPTS)
    assert_same(found, right)
    assert cached(found) == HIT
    settled(client)


@pytest.mark.parametrize("changes", [ALL_SLIDING, HYBRID])
def test_blocks_that_the_window_leaves_behind_are_stored_before_others_write_to_them(
    models: Callable[..., Path], engine: Any, client: moonpool.Client, changes: dict[str, Any]
) -> None:
    folder = models(**changes)
    prompts = [prompt_of(seed, 600) for seed in range(4)]
    right = engine(folder, url=None).generate(prompts)
    # Chunks shorter than a prompt and a cache with room for little more than one: blocks change hands at every step.
    pooled: Engine = engine(folder, max_num_batched_tokens=160, kv_cache_memory_bytes=pages(folder, 40))
    on_copies(pooled, slowly(0.005))
    assert_same(pooled.generate(prompts), right)
    settled(client)
    found = engine(folder).generate(prompts)
    assert_same(found, right)
    assert cached(found) == [9 * OBJECT] * 4


def test_a_load_that_fails_is_computed_where_there_are_several_kv_groups(
    models: Callable[..., Path], engine: Any, client: moonpool.Client
) -> None:
    folder = models(**HYBRID)
    right = engine(folder, url=None).generate(PROMPTS)
    pooled: Engine = engine(folder)
    pooled.generate(PROMPTS)
    settled(client)

    def fails(count: int, load: bool) -> None:
        if load and count == 3:
            raise OSError("no such luck")

    on_copies(pooled, fails)
    assert_same(pooled.generate(PROMPTS), right)
    assert pooled.scheduler.tally.requests["failed"] > 0
    settled(client)


def pages(folder: Path, blocks: int) -> int:
    """Bytes of a KV cache of so many blocks of 16 KiB a layer."""
    return blocks * (4 if "full_attention" in (folder / "config.json").read_text() else 3) * 16384
