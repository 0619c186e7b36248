"""What makes KV cache another keeps it apart: nothing is loaded, and every answer is the engine's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moonpool
from tests.vllm.engines import OBJECT, Engine, Prompt, assert_same, cached, differences, prompt_of, settled

PROMPTS: list[Prompt] = [prompt_of(1, 300), prompt_of(2, 5 * OBJECT)]
BFLOAT16 = 0.15
"""Sums in another order, in bfloat16's 8 bits over three layers; logprobs of two models are several apart."""


def shared(first: Engine, second: Engine, client: moonpool.Client, right: list[Any], tolerance: float) -> None:
    """Both find what they have stored themselves, and nothing else."""
    first.generate(PROMPTS)
    objects = settled(client).objects
    found = second.generate(PROMPTS)
    assert cached(found) == [0, 0]
    assert_same(found, right, tolerance)
    assert settled(client).objects == 2 * objects
    again = second.generate(PROMPTS)
    assert cached(again) == [4 * OBJECT, 5 * OBJECT]
    assert_same(again, right, tolerance)


def test_other_weights_of_the_same_configuration(
    models: Callable[..., Path], plain: Engine, engine: Any, client: moonpool.Client
) -> None:
    other = models(seed=1)
    right = engine(other, url=None).generate(PROMPTS)
    assert differences(right, plain.generate(PROMPTS), 1.0), "it matters"
    shared(engine(), engine(other), client, right, 2e-3)


def test_another_dtype(engine: Any, client: moonpool.Client) -> None:
    right = engine(url=None, dtype="bfloat16").generate(PROMPTS)
    shared(engine(), engine(dtype="bfloat16"), client, right, BFLOAT16)


def test_another_tenant(plain: Engine, engine: Any, client: moonpool.Client) -> None:
    right = plain.generate(PROMPTS)
    shared(engine(extra={"tenant": "a"}), engine(extra={"tenant": "b"}), client, right, 2e-3)


def test_another_cache_salt(engine: Any, client: moonpool.Client) -> None:
    pooled: Engine = engine()
    pooled.generate(PROMPTS, salt="one")
    settled(client)
    assert cached(pooled.generate(PROMPTS, salt="two")) == [0, 0]
    assert cached(pooled.generate(PROMPTS)) == [0, 0]
    assert cached(pooled.generate(PROMPTS, salt="one")) == [4 * OBJECT, 5 * OBJECT]


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of the first layer's projections, with weights of that seed."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    hidden, width, rank = config["hidden_size"], config["head_dim"], 8
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in (("k_proj", config["num_key_value_heads"] * width), ("v_proj", 2 * width)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Callable[[int], Any]:
    """An adapter of that seed, always of one name, number and path: vLLM's own hashes cover those."""
    from vllm.lora.request import LoRARequest

    def make(seed: int) -> Any:
        path = tmp_path / "adapter"
        shutil.rmtree(path, ignore_errors=True)
        return LoRARequest("adapter", 1, str(write_adapter(path, model, seed)))

    return make


LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def test_adapters_of_one_name(engine: Any, client: moonpool.Client, adapter: Callable[[int], Any]) -> None:
    first, second, third = engine(**LORA), engine(**LORA), engine(**LORA)
    right = engine(url=None, **LORA).generate(PROMPTS, lora_request=adapter(0))
    assert_same(first.generate(PROMPTS, lora_request=adapter(0)), right)
    settled(client)
    found = second.generate(PROMPTS, lora_request=adapter(1))
    assert cached(found) == [0, 0]
    assert differences(found, right, 1.0), "it matters"
    assert cached(second.generate(PROMPTS)) == [0, 0], "nor does the base model share with either"
    settled(client)
    found = third.generate(PROMPTS, lora_request=adapter(0))
    assert cached(found) == [4 * OBJECT, 5 * OBJECT], "the same content is the same adapter"
    assert_same(found, right)


def test_an_adapter_whose_content_cannot_be_told_is_neither_stored_nor_loaded(
    engine: Any, client: moonpool.Client, adapter: Callable[[int], Any]
) -> None:
    pooled: Engine = engine(**LORA)
    request = adapter(0)
    right = pooled.generate(PROMPTS, lora_request=request)
    objects = settled(client).objects
    adapter(1)  # written anew: the engine holds the one before, or reads the new one, who knows
    found = pooled.generate([*PROMPTS, prompt_of(3, 200)], lora_request=request)
    assert_same(found[:2], right)
    assert cached(found) == [0, 0, 0]
    assert settled(client).objects == objects


def test_an_adapter_that_is_computed_in_another_dtype(
    engine: Any, client: moonpool.Client, adapter: Callable[[int], Any]
) -> None:
    request = adapter(0)
    engine(**LORA).generate(PROMPTS, lora_request=request)
    settled(client)
    assert cached(engine(**LORA, lora_dtype="bfloat16").generate(PROMPTS, lora_request=request)) == [0, 0]
    assert cached(engine(**LORA).generate(PROMPTS, lora_request=request)) == [4 * OBJECT, 5 * OBJECT]
