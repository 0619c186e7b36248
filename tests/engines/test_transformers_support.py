"""What a `PrefixCache` can't do right it refuses at once, and says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.errors import InvalidRequest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moonpool.engines.transformers import BlockLayout, PrefixCache, UnsupportedModel  # noqa: E402

HYBRID = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: transformers.MistralForCausalLM(small(transformers.MistralConfig, sliding_window=8)), "Sliding"),
        (lambda: transformers.Qwen2ForCausalLM(small(transformers.Qwen2Config, **HYBRID)), "Sliding"),
        (lambda: transformers.LlamaForCausalLM(small(transformers.LlamaConfig, rope_parameters=DYNAMIC)), "dynamic"),
    ],
    ids=["sliding window", "hybrid", "dynamic rotary"],
)  # fmt: skip
def test_a_cache_that_cant_be_cut_into_blocks_is_refused_with_what_to_do(
    client: Any, make: Any, says: str
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{says}.*: use a model"):
        PrefixCache(make().eval(), client)


def small(kind: Any, **changes: Any) -> Any:
    return kind(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"attention_mask": torch.tensor([[0] * 5 + [1] * 95])}, "hides tokens"),
        ({"inputs_embeds": torch.zeros(1, 100, 64)}, "inputs_embeds"),
        ({"past_key_values": object()}, "leave 'past_key_values' out"),
        ({"cache_implementation": "static"}, "leave 'cache_implementation' out"),
        (
            {"generation_config": transformers.GenerationConfig(cache_implementation="static")},
            "cache_implementation = None",
        ),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation can't go on"),
    ],
    ids=["padding", "embeddings", "a cache", "a static cache", "a static cache by config", "assisted"],
)
def test_arguments_under_which_tokens_dont_name_the_cache_are_refused(
    model: Any, client: Any, prompt: list[int], arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        PrefixCache(model, client, tokens_per_object=16).generate(prompt, **arguments)


def test_several_rows_no_tokens_and_training_are_refused(make_model: Any, client: Any) -> None:
    model = make_model()
    cache = PrefixCache(model, client, tokens_per_object=16)
    with pytest.raises(InvalidRequest, match="one sequence at a time"):
        cache.prefill(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(InvalidRequest, match="empty"):
        cache.prefill([])
    model.train()
    with pytest.raises(InvalidRequest, match=r"call model\.eval\(\)"):
        cache.prefill([1, 2, 3])


def test_layout_takes_row_strides_and_offsets_as_they_come() -> None:
    layout = BlockLayout(layers=2, kv_heads=3, tokens=4, head_dim=8, dtype="bfloat16")
    keys = [torch.randn(1, 3, 11, 8).to(torch.bfloat16) for _ in range(4)]
    layers = [(keys[0], keys[1]), (keys[2].transpose(2, 3).contiguous().transpose(2, 3), keys[3])]
    bodies = [bytearray(layout.object_bytes) for _ in range(2)]
    arrays = [torch.frombuffer(body, dtype=torch.uint8).numpy() for body in bodies]
    for index, array in enumerate(arrays):
        layout.write(layers, index * 4, array)

    for (mine_k, mine_v), (k, v) in zip(layout.read(arrays, torch.device("cpu")), layers, strict=True):
        assert torch.equal(mine_k, k[:, :, :8])
        assert torch.equal(mine_v, v[:, :, :8])
