"""What the connector works together with: something is stored, something is loaded, and the tokens are right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

import moonpool
from moonpool.testing.node import RunningNode
from tests.vllm.engines import FLOAT32, OBJECT, Engine, assert_same, cached, prompt_of, settled

PROMPTS = [prompt_of(1, 300), prompt_of(2, 500)]
HIT = [4 * OBJECT, 7 * OBJECT]
COARSE = 0.2
"""Tolerance for types of 8 and 16 bits: logprobs of another prompt are several apart."""


def stored_and_loaded(
    make: Callable[..., Engine], client: moonpool.Client, tolerance: float, folder: Path, **options: Any
) -> Engine:
    right = make(folder, url=None, **options).generate(PROMPTS)
    first, second = make(folder, **options), make(folder, **options)
    assert_same(first.generate(PROMPTS), right, tolerance)
    assert settled(client).objects == 11
    found = second.generate(PROMPTS)
    assert_same(found, right, tolerance)
    assert cached(found) == HIT
    settled(client)
    return second


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_kv_cache_of_eight_bits(engine: Any, client: moonpool.Client, model: Path, kind: str) -> None:
    made = stored_and_loaded(engine, client, COARSE, model, dtype="bfloat16", kv_cache_dtype=kind)
    assert made.worker.regions[0].object_bytes == OBJECT * 3 * 2 * 32 * 2, (
        "a byte a value: layers, heads, width, K and V"
    )


def test_bfloat16(engine: Any, client: moonpool.Client, model: Path) -> None:
    stored_and_loaded(engine, client, COARSE, model, dtype="bfloat16")


def test_a_draft_models_kv_cache_travels_along(
    engine: Any, client: moonpool.Client, model: Path, models: Callable[..., Path]
) -> None:
    draft = models(seed=5, num_hidden_layers=1)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    made = stored_and_loaded(engine, client, FLOAT32, model, speculative_config=speculative)
    assert len(made.worker.regions[0].planes) == 4, "three layers and the draft's"
    other = {**speculative, "model": str(models(seed=6, num_hidden_layers=1))}
    assert cached(engine(speculative_config=other).generate(PROMPTS)) == [0, 0], "of another draft"
    assert cached(engine().generate(PROMPTS)) == [0, 0], "nor without one"


def test_beside_another_connector(
    plain: Engine, engine: Any, shared_node: RunningNode, client: moonpool.Client, tmp_path: Path
) -> None:
    right = plain.generate(PROMPTS)
    ours = {
        "kv_connector": "MoonpoolConnector",
        "kv_connector_module_path": "moonpool.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": shared_node.url, "tokens_per_object": OBJECT, "load_min_tokens": OBJECT},
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [ours, other]}
    )
    made: Engine = engine(url=None, kv_transfer_config=transfer)
    assert_same(made.generate(PROMPTS), right)
    assert settled(client).objects == 11
    assert list(tmp_path.iterdir()), "the other has stored as well"
    found = made.generate(PROMPTS)
    assert_same(found, right)
    assert cached(found) == HIT, "the first one's hit is taken"
    settled(client)


@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head"])
def test_a_type_that_the_kernels_do_not_know_is_off_with_one_line(
    engine: Any, client: moonpool.Client, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    options = {"dtype": "bfloat16", "kv_cache_dtype": kind}
    right = engine(url=None, **options).generate(PROMPTS)
    with caplog.at_level(logging.WARNING, "moonpool"):
        made: Engine = engine(**options)
        for _ in range(2):
            assert_same(found := made.generate(PROMPTS), right, COARSE)
            assert cached(found) == [0, 0]
    assert {record.message for record in caplog.records} == {
        "moonpool is off, the engine goes on without it: "
        f"attention backend CPU_ATTN doesn't support KV cache of type {kind!r}"
    }
    assert settled(client).objects == 0
