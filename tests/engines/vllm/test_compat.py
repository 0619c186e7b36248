from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.engines.vllm import compat
from moonpool.engines.vllm.compat import BlockTables, Kind, KvGroup, Unsupported


def engine() -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )


# ---- what can't use the pool -----------------------------------------------------------------------------------------


def test_an_engine_that_fits_is_not_refused() -> None:
    assert compat.refusal(engine()) is None


def _set(part: str, **values: Any) -> Callable[[Any], None]:
    return lambda engine: getattr(engine, part).__dict__.update(values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("cache_config", prefix_caching_hash_algo="xxhash"), "collide"),
        (_set("cache_config", cache_dtype="turboquant_k8v4"), "turboquant"),
        (_set("cache_config", cache_dtype="fp8", calculate_kv_scales=True), "scales"),
        (_set("parallel_config", decode_context_parallel_size=2), "decode_context"),
        (_set("parallel_config", prefill_context_parallel_size=2), "prefill_context"),
        (_set("attention_config", hisparse_config=object()), "HiSparse"),
        (
            lambda engine: setattr(engine, "speculative_config", SimpleNamespace(method="extract_hidden_states")),
            "hidden_states",
        ),
    ],
)
def test_what_cannot_be_shared_safely_is_off_with_one_line(change: Callable[[Any], None], reason: str) -> None:
    config = engine()
    change(config)
    line = compat.refusal(config)
    assert line is not None
    assert reason in line
    assert "\n" not in line


@pytest.mark.parametrize(("text", "fits"), [("0.26.0", True), ("0.32.1+cpu", True), ("0.25.9", False), ("dev", True)])
def test_versions_that_fit(text: str, fits: bool) -> None:
    assert (compat.check(text) is None) is fits


def test_an_untested_version_warns(caplog: pytest.LogCaptureFixture) -> None:
    compat.check("0.32.0")
    assert not caplog.records
    compat.check("0.40.0")
    assert "untested" in caplog.text


def test_what_fails_to_load_is_computed() -> None:
    transfer = SimpleNamespace(kv_load_failure_policy="fail")
    compat.recompute_on_failure(transfer)
    assert transfer.kv_load_failure_policy == "recompute"


# ---- block hashes ----------------------------------------------------------------------------------------------------


def hashing_module(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    """As much of a vLLM as its hashes."""
    hashing = SimpleNamespace(**members)
    core = SimpleNamespace(kv_cache_utils=hashing)
    v1 = SimpleNamespace(core=core)
    for name, module in (
        ("vllm", SimpleNamespace(v1=v1)),
        ("vllm.v1", v1),
        ("vllm.v1.core", core),
        ("vllm.v1.core.kv_cache_utils", hashing),
    ):
        monkeypatch.setitem(sys.modules, name, module)


def test_hashes_with_a_random_root_are_made_to_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing_module(monkeypatch)
    environ: dict[str, str] = {}
    compat.fix_hash_root(environ)
    assert environ == {"PYTHONHASHSEED": "0"}


def test_a_root_that_is_fixed_or_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"PYTHONHASHSEED": "7"}
    hashing_module(monkeypatch)
    compat.fix_hash_root(chosen)
    assert chosen == {"PYTHONHASHSEED": "7"}
    environ: dict[str, str] = {}
    hashing_module(monkeypatch, DEFAULT_NONE_HASH_SEED="vllm-none-hash")
    compat.fix_hash_root(environ)
    assert environ == {}


def test_this_vllms_hashes_are_the_same_whatever_process_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    from vllm.utils.hashing import sha256

    roots = set()
    for _ in range(2):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        compat.fix_hash_root()
        hashing.init_none_hash(sha256)
        roots.add(bytes(hashing.NONE_HASH))
    assert len(roots) == 1


# ---- KV groups -------------------------------------------------------------------------------------------------------


def config_of(spec: Any, **group: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    return KVCacheConfig(8, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec, **group)])


def figures() -> dict[str, Any]:
    import torch

    return {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def test_vllms_groups_are_told_by_what_a_token_needs() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    specs = [
        FullAttentionSpec(**figures()),
        SlidingWindowSpec(**figures(), sliding_window=128),
        ChunkedLocalAttentionSpec(**figures(), attention_chunk_size=256),
        MLAAttentionSpec(**figures() | {"num_kv_heads": 1}),
    ]
    groups = [compat.kv_groups(config_of(spec))[0] for spec in specs]
    assert [(g.kind, g.window_tokens) for g in groups] == [
        (Kind.FULL, 0),
        (Kind.WINDOW, 128),
        (Kind.WINDOW, 256),
        (Kind.FULL, 0),
    ]
    assert [g.layers[0].replicated for g in groups] == [False, False, False, True]
    assert [g.layers[0].block_bytes for g in groups] == [2 * 32 * 2 * 32 * 4] * 3 + [32 * 32 * 4]
    assert len({g.layers[0].text for g in groups}) == 4


def test_padding_is_no_part_of_a_block() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain, padded = FullAttentionSpec(**figures()), FullAttentionSpec(**figures(), page_size_padded=1 << 20)
    groups = [compat.kv_groups(config_of(spec))[0] for spec in (plain, padded)]
    assert groups[0].layers == groups[1].layers


def test_layers_that_a_prefix_does_not_decide_are_refused() -> None:
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, MambaSpec

    state = MambaSpec(block_size=32, shapes=((2, 8),), dtypes=(torch.float32,))
    for spec in (FullAttentionSpec(**figures(), non_causal=True), CrossAttentionSpec(**figures()), state):
        with pytest.raises(Unsupported):
            compat.kv_groups(config_of(spec))
    with pytest.raises(Unsupported, match="outside"):
        compat.kv_groups(config_of(FullAttentionSpec(**figures()), host_resident=True))
    with pytest.raises(Unsupported, match="no KV cache"):
        compat.kv_groups(SimpleNamespace(kv_cache_groups=[]))


def test_objects_are_whole_blocks_of_every_group() -> None:
    groups = (KvGroup(0, Kind.FULL, 32, 0, ()), KvGroup(1, Kind.STATE, 48, 0, ()))
    assert compat.object_tokens(groups, 16, 256) == 288
    assert compat.object_tokens(groups[:1], 32, 256) == 256
    assert [group.blocks_per_object(288) for group in groups] == [9, 1]


# ---- what a step is --------------------------------------------------------------------------------------------------


def step(new: list[Any], cached: dict[str, Any], resumed: set[str], state: Any = None) -> Any:
    data = SimpleNamespace(
        req_ids=list(cached),
        resumed_req_ids=resumed,
        new_block_ids=[blocks for blocks, _ in cached.values()],
        num_computed_tokens=[computed for _, computed in cached.values()],
    )
    output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=data)
    if state is not None:
        output.kv_connector_block_state = state
    return output


def test_tables_grow_are_replaced_and_stay() -> None:
    new = SimpleNamespace(req_id="new", block_ids=([1, 2],), num_computed_tokens=16)
    tables = BlockTables(
        step([new], {"grown": (([9],), 64), "same": (None, 32), "resumed": (([7, 8],), 0)}, {"resumed"})
    )
    before = ([4, 5],)
    assert list(tables.changed()) == ["new", "grown", "same", "resumed"]
    assert tables.updated("new", ()) == ([1, 2],)
    assert tables.updated("grown", before) == ([4, 5, 9],)
    assert tables.updated("same", before) == before == ([4, 5],)
    assert tables.updated("resumed", before) == ([7, 8],)
    assert [tables.computed(name) for name in ("new", "grown", "same", "resumed")] == [16, 64, 32, 0]


def test_whole_tables_are_preferred_where_the_engine_gives_them() -> None:
    state = SimpleNamespace(get_block_ids={"grown": ([0, 6],)}.get)
    tables = BlockTables(step([], {"grown": (([9],), 64), "other": (([9],), 64)}, set(), state))
    assert tables.updated("grown", ([4, 5],)) == ([0, 6],)
    assert tables.updated("other", ([4, 5],)) == ([4, 5, 9],)
