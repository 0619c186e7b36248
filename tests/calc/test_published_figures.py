"""The sizes are those that the models' makers and users publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.calc import Model, Report, calculate, read_model

CONFIGS = Path(__file__).parent / "configs"
KIB = 1024


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def model(name: str) -> Model:
    return read_model(CONFIGS / f"{name}.json")


def report(name: str, **options: Any) -> Report:
    return calculate(model(name), **options)


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-2-7b", 512 * KIB),
        ("llama-3.1-8b", 128 * KIB),
        ("llama-3.1-70b", 320 * KIB),
        ("llama-3.1-405b", 504 * KIB),
        ("mistral-7b-v0.1", 128 * KIB),
        ("mistral-7b-v0.3", 128 * KIB),
        ("mixtral-8x7b", 128 * KIB),
        ("qwen2.5-7b", 56 * KIB),
        ("qwen3-8b", 144 * KIB),
        ("gemma-2-9b", 336 * KIB),
        ("gemma-3-4b-it", 136 * KIB),
        ("gemma-3-27b-it", 496 * KIB),
        ("gpt-oss-20b", 48 * KIB),
        ("falcon-7b", 8 * KIB),
        ("deepseek-v2-lite", 27 * 576 * 2),
        ("deepseek-v3", 70_272),
        ("jamba-v0.1", 16 * KIB),
        ("nemotron-h-8b", 16 * KIB),
        ("qwen3-next-80b-a3b", 24 * KIB),
    ],
)
def test_bytes_a_token(name: str, token_bytes: int) -> None:
    assert report(name).token_bytes == token_bytes


def test_the_reference_workload_is_1_31_gb_a_request_and_42_gb_in_all() -> None:
    size = report("llama-3.1-8b", tokens=10_000)
    assert size.request_bytes == 1_310_720_000
    assert 32 * size.request_bytes == pytest.approx(42e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gib"), [("llama-2-7b", 128), ("mistral-7b-v0.3", 32), ("mixtral-8x7b", 32), ("jamba-v0.1", 4)]
)
def test_the_jamba_papers_table_of_256k_tokens_in_16_bits(name: str, gib: int) -> None:
    size = report(name, tokens=256 * KIB)
    assert size.request_bytes - size.state_bytes == gib * 2**30


def test_windows_bound_what_a_long_request_keeps() -> None:
    # All layers of Mistral 7B 0.1 look back 4,096 tokens: 0.5 GiB, however long the request.
    assert report("mistral-7b-v0.1", tokens=4_096).request_bytes == 2**29
    assert report("mistral-7b-v0.1", tokens=100_000).request_bytes == 2**29
    # gpt-oss: 12 layers of 128 tokens, 12 of all; 2 KiB a token and layer.
    assert report("gpt-oss-20b", tokens=10_000).request_bytes == 12 * (10_000 + 128) * 2 * KIB
    # Gemma 3 27B: one layer of six sees everything, ten of 62; 8 KiB a token and layer.
    assert report("gemma-3-27b-it", tokens=32_768).request_bytes == (10 * 32_768 + 52 * 1_024) * 8 * KIB
    # Gemma 2 alternates.
    assert report("gemma-2-9b", tokens=8_192).request_bytes == (21 * 8_192 + 21 * 4_096) * 8 * KIB


def test_states_are_constant_a_request() -> None:
    jamba, nemotron, qwen = (report(name) for name in ("jamba-v0.1", "nemotron-h-8b", "qwen3-next-80b-a3b"))
    assert jamba.state_bytes == 28 * 8_192 * (16 + 3) * 2
    assert nemotron.state_bytes == 24 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 8 * 128)) * 2
    assert qwen.state_bytes == 36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * 2
    for name in ("jamba-v0.1", "nemotron-h-8b", "qwen3-next-80b-a3b"):
        short, long = report(name, tokens=1), report(name, tokens=50_001)
        assert short.state_bytes == long.state_bytes
        assert long.request_bytes - short.request_bytes == 50_000 * short.token_bytes


def test_recurrent_states_may_be_wider_than_the_rest() -> None:
    wide = report("qwen3-next-80b-a3b", state_dtype="float32")
    assert wide.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    named = read_model({**config("qwen3-next-80b-a3b"), "mamba_ssm_dtype": "float32"})
    assert calculate(named).state_bytes == wide.state_bytes


@pytest.mark.parametrize(("dtype", "factor"), [("fp8", 0.5), ("int8", 0.5), ("fp16", 1), ("bf16", 1), ("fp32", 2)])
def test_the_cache_s_own_element_type_counts(dtype: str, factor: float) -> None:
    assert report("llama-3.1-8b", kv_dtype=dtype).token_bytes == 128 * KIB * factor


def test_a_checkpoint_that_asks_for_an_8_bit_cache_gets_one() -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    quantised = calculate(read_model({**config("llama-3.1-8b"), "quantization_config": scheme}))
    assert (quantised.kv_dtype, quantised.token_bytes) == ("fp8", 64 * KIB)


@pytest.mark.parametrize(
    ("name", "tp_size", "rank_token_bytes", "copies"),
    [
        ("llama-3.1-8b", 1, 128 * KIB, 1),
        ("llama-3.1-8b", 2, 64 * KIB, 1),
        ("llama-3.1-8b", 8, 16 * KIB, 1),
        ("llama-3.1-8b", 16, 16 * KIB, 2),
        ("qwen2.5-7b", 8, 14 * KIB, 2),
        ("falcon-7b", 4, 8 * KIB, 4),
        ("deepseek-v3", 8, 70_272, 8),
        ("qwen3-next-80b-a3b", 8, 12 * KIB, 4),
    ],
)
def test_tensor_parallel_ranks_split_heads_and_copy_what_cannot_be_split(
    name: str, tp_size: int, rank_token_bytes: int, copies: int
) -> None:
    size = report(name, tp_size=tp_size)
    assert size.rank_token_bytes == rank_token_bytes
    assert size.kv_copies == copies
    assert size.rank_token_bytes * tp_size == size.token_bytes * copies, "each copy is counted once in the whole"


def test_states_split_by_heads_and_copy_groups_that_are_too_few() -> None:
    half = report("nemotron-h-8b", tp_size=2)
    assert half.rank_state_bytes * 2 == half.state_bytes
    sixteenth = report("nemotron-h-8b", tp_size=16)
    assert sixteenth.rank_state_bytes == 24 * (8 * 64 * 128 + 3 * (8 * 64 + 2 * 128)) * 2


def test_draft_layers_are_mentioned_for_what_they_are() -> None:
    assert any("draft layer" in note for note in report("deepseek-v3").notes)
    assert not any("draft layer" in note for note in report("llama-3.1-8b").notes)
