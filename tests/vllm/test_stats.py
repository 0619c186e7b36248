"""What the engine's own metrics show of the pool."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

import moonpool
from moonpool.engines.vllm.metrics import PREFIX, MoonpoolStats
from moonpool.engines.vllm.stats import METRICS, REASONS
from tests.vllm.engines import OBJECT, Engine, prompt_of, settled


def shown(name: str, **labels: str) -> float | None:
    """A counter as Prometheus scrapes it."""
    found: dict[str, float] = {}
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name == f"{PREFIX}{name}_total" and labels.items() <= sample.labels.items():
                assert {"model_name", "engine"} <= set(sample.labels)
                found[str(sample.labels)] = sample.value
    return sum(found.values()) if found else None


def after(made: Engine, prompts: list[list[int]]) -> Engine:
    made.generate(prompts)
    return made


def test_counters_of_what_was_asked_found_loaded_and_stored(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    for metric in METRICS:
        if not metric.label:
            assert shown(metric.name) == 0, "is shown from the start"
    prompts = [prompt_of(1, 5 * OBJECT + 1), prompt_of(2, 3 * OBJECT + 1)]
    made.generate(prompts)
    stats = settled(client)
    made.generate([prompt_of(3, 20)])  # another step, with which the workers' reports come
    assert shown("asked_tokens") == 8 * OBJECT
    assert shown("hit_tokens") == 0
    assert shown("stored_tokens") == 8 * OBJECT
    assert shown("store_bytes") == stats.live_bytes
    assert (shown("store_seconds") or 0) > 0
    made.generate(prompts)
    assert shown("asked_tokens") == 16 * OBJECT
    assert shown("hit_tokens") == 8 * OBJECT
    assert shown("loaded_tokens") == 8 * OBJECT
    assert shown("load_bytes") == stats.live_bytes
    assert (shown("load_seconds") or 0) > 0
    assert shown("requests", outcome="asked") == 4
    assert shown("requests", outcome="loaded") == 2
    assert shown("requests", outcome="failed") is None


def test_an_engine_restarted_over_a_full_pool_counts_from_zero(engine: Any, client: moonpool.Client) -> None:
    after(engine(), [prompt_of(1, 5 * OBJECT)])
    settled(client)
    engine().generate([prompt_of(1, 5 * OBJECT)])
    assert shown("loaded_tokens") == 5 * OBJECT
    assert shown("stored_tokens") == 0


def test_what_was_not_loaded_is_counted_with_its_reason(
    engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1, 5 * OBJECT + 1)
    after(engine(), [prompt])
    settled(client)
    made: Engine = engine(extra={"load_min_tokens": 10 * OBJECT})
    made.generate([prompt])
    assert shown("recomputed_tokens") is None  # it was never looked up: too short a prompt for a load
    made = engine(extra={"load_min_tokens": 5 * OBJECT + 1})
    made.generate([[*prompt, *prompt_of(9, OBJECT)]])
    assert shown("recomputed_tokens", reason="too short") == 5 * OBJECT
    made = engine(extra={"admission": "auto"})
    monkeypatch.setattr(made.scheduler.admission, "admits", lambda tokens: False)
    made.generate([prompt])
    assert shown("recomputed_tokens", reason="prefill is faster") == 5 * OBJECT
    made = engine()
    monkeypatch.setattr(made.worker.pool.client, "still_good", lambda extents: False)
    made.generate([prompt])
    assert shown("recomputed_tokens", reason="object gone") == 5 * OBJECT
    assert shown("requests", outcome="failed") == 1
    assert shown("requests", outcome="loaded") is None


def test_what_was_not_stored_is_counted_with_its_reason(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine(extra={"store_inflight_bytes": 0})
    made.generate([prompt_of(1, 5 * OBJECT)])
    assert shown("unstored_objects", reason="too much under way") == 5
    assert shown("stored_tokens") == 0
    assert settled(client).objects == 0


def test_prefill_that_loads_spare_is_counted_by_the_measured_rate(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    prompts = [prompt_of(seed, 1500) for seed in range(4)]
    for prompt in prompts:  # one a step; the first one is warm-up
        made.generate([prompt])
    settled(client)
    rate = made.scheduler.admission.prefill_tokens_per_s
    assert rate > 0
    made.generate(prompts)
    loaded = shown("loaded_tokens")
    assert loaded is not None
    assert loaded > 0
    saved, lost, load_s = (shown(name) or 0.0 for name in ("saved_seconds", "lost_seconds", "load_seconds"))
    # What would have been computed, less what the loads took or more where that was longer; never more than prefill.
    assert saved <= loaded / rate * 1.01
    assert saved - lost >= loaded / rate - load_s - 1e-6


def test_an_engine_that_has_nothing_to_tell_tells_nothing(engine: Any) -> None:
    made: Engine = engine()
    made.generate([prompt_of(1, 20)])
    connector = made.core.scheduler.connector
    assert connector.get_kv_connector_stats() is None
    assert made.agent.get_kv_connector_stats() is None


def test_stats_add_up_and_can_be_logged() -> None:
    one = MoonpoolStats({"loaded_tokens": {"": 2}, "recomputed_tokens": {REASONS[0]: 1}})
    one = one.aggregate(MoonpoolStats({"loaded_tokens": {"": 3}, "recomputed_tokens": {REASONS[1]: 4}}))
    assert one.data == {"loaded_tokens": {"": 5}, "recomputed_tokens": {REASONS[0]: 1, REASONS[1]: 4}}
    assert one.reduce() == {
        "moonpool loaded_tokens": 5,
        f"moonpool recomputed_tokens ({REASONS[0]})": 1,
        f"moonpool recomputed_tokens ({REASONS[1]})": 4,
    }
    assert not one.is_empty()
    one.reset()
    assert one.is_empty()


def test_inside_of_a_multi_connector_it_counts_as_well(engine: Any, shared_node: Any, client: moonpool.Client) -> None:
    inner = {
        "kv_connector": "MoonpoolConnector",
        "kv_connector_module_path": "moonpool.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "url": shared_node.url,
            "tokens_per_object": OBJECT,
            "load_min_tokens": OBJECT,
            "admission": "always",
        },
    }
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [inner]}
    )
    made: Engine = engine(url=None, kv_transfer_config=transfer)
    prompt = prompt_of(1, 5 * OBJECT + 1)
    made.generate([prompt])
    settled(client)
    made.generate([prompt])
    assert shown("loaded_tokens") == 5 * OBJECT
    assert shown("stored_tokens") == 5 * OBJECT
    # As vLLM's log does, in a process that has nothing but the connector's name.
    told = {"MoonpoolConnector": {"loaded_tokens": {"": 3}}}
    assert MultiConnector.build_kv_connector_stats(told).reduce() == {
        "MoonpoolConnector": {"moonpool loaded_tokens": 3}
    }
