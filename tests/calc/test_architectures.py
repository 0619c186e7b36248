"""A configuration is read as its architecture reads it; what isn't known gets an error, never a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.calc import MODEL_TYPES, AttentionLayers, ModelConfigError, calculate, read_model

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a shipped configuration with fields changed, or with `...` removed."""
    changed = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def windows(source: dict[str, Any]) -> dict[int | None, int]:
    """Return how many layers look back how far."""
    return {layers.window: layers.count for layers in read_model(source).attention}


def test_there_are_configurations_to_read() -> None:
    assert len(NAMES) >= 20


def test_the_folder_the_file_and_its_content_are_read_alike(tmp_path: Path) -> None:
    content = config("llama-3.1-8b")
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_model(tmp_path) == read_model(str(tmp_path / "config.json")) == read_model(content)


@pytest.mark.parametrize("nesting", ["text_config", "llm_config", "language_config"])
def test_a_multimodal_model_s_language_part_is_found(nesting: str) -> None:
    inner = config("qwen2.5-7b", torch_dtype=...)
    outer = {"model_type": "some_vision_model", "torch_dtype": "bfloat16", "vision_config": {}, nesting: inner}
    assert read_model(outer) == read_model(config("qwen2.5-7b"))
    assert read_model({"model_type": "outermost", "thinker_config": outer}) == read_model(config("qwen2.5-7b"))


def test_head_dim_is_taken_where_it_is_given_and_derived_where_it_is_not() -> None:
    (derived,) = read_model(config("llama-3.1-8b")).attention
    (given,) = read_model(config("llama-3.1-8b", head_dim=64)).attention
    assert isinstance(derived, AttentionLayers)
    assert isinstance(given, AttentionLayers)
    assert (derived.head_dim, given.head_dim) == (128, 64)


def test_sliding_windows_of_every_pattern() -> None:
    assert windows(config("mistral-7b-v0.1")) == {4096: 32}
    assert windows(config("mistral-7b-v0.3")) == {None: 32}
    assert windows(config("mistral-7b-v0.3", sliding_window=...)) == {4096: 32}, (
        "left out means the default, null means none"
    )
    assert windows(config("qwen2.5-7b")) == {None: 28}
    assert windows(config("qwen2.5-7b", use_sliding_window=True, max_window_layers=20)) == {None: 20, 131072: 8}
    assert windows(config("gemma-2-9b")) == {None: 21, 4096: 21}
    assert windows(config("gemma-3-4b-it")) == {None: 5, 1024: 29}
    assert windows(config("gpt-oss-20b")) == windows(config("gpt-oss-20b", layer_types=...)) == {None: 12, 128: 12}
    listed = ["full_attention"] * 3 + ["sliding_attention"] * 29
    assert windows(config("mistral-7b-v0.1", layer_types=listed)) == {None: 3, 4096: 29}


def test_hybrid_layers_of_every_spelling() -> None:
    for listed in (["mamba", "attention"] * 16, ["linear_attention", "full_attention"] * 16):
        jamba = read_model(config("jamba-v0.1", layers_block_type=listed))
        assert (jamba.attention[0].count, jamba.states[0].count) == (16, 16)
    nemotron = read_model(config("nemotron-h-8b", hybrid_override_pattern="ME*-" * 13))
    assert (nemotron.attention[0].count, nemotron.states[0].count) == (13, 13)
    granite = config(
        "nemotron-h-8b", hybrid_override_pattern=..., layer_types=["mamba", "mlp", "attention", "moe"] * 13
    )
    assert read_model(granite).states[0].count == 13
    bamba = {
        "model_type": "bamba",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "torch_dtype": "bfloat16",
    }
    report = calculate(read_model(bamba))
    assert report.token_bytes == 3 * 2 * 8 * 128 * 2
    assert report.state_bytes == 29 * (128 * 64 * 256 + 3 * (128 * 64 + 2 * 256)) * 2


def test_an_unknown_type_is_refused_unless_the_caller_says_what_it_is_like() -> None:
    renamed = config("llama-3.1-8b", model_type="llama_of_mine")
    with pytest.raises(ModelConfigError, match=r"'llama_of_mine' isn't known.*--model-type.*known: .*llama"):
        read_model(renamed)
    assert read_model(renamed, model_type="llama") == read_model(config("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (config("llama-3.1-8b", model_type=...), "lacks model_type"),
        (config("llama-3.1-8b", num_hidden_layers=...), "lacks num_hidden_layers"),
        (config("llama-3.1-8b", hidden_size=...), "lacks hidden_size"),
        (config("qwen2.5-7b", num_key_value_heads=...), "lacks num_key_value_heads"),
        (config("llama-3.1-8b", num_key_value_heads="8"), "positive integer"),
        (config("llama-3.1-8b", num_key_value_heads=0), "positive integer"),
        (config("llama-3.1-8b", hidden_size=4095), "doesn't divide"),
        (config("llama-3.1-8b", kv_lora_rank=512), "kv_lora_rank"),
        (config("llama-3.1-8b", num_kv_shared_layers=4), "share another layer"),
        (config("deepseek-v3", index_head_dim=128), "sparse-attention index"),
        (config("deepseek-v3", kv_lora_rank=...), "lacks kv_lora_rank"),
        (config("llama-3.1-8b", is_encoder_decoder=True), "encoder"),
        (config("qwen2.5-7b", use_sliding_window=True, max_window_layers=...), "max_window_layers"),
        (config("gpt-oss-20b", layer_types=["full_attention"]), "lists 1 layers"),
        (config("gpt-oss-20b", layer_types=["chunked_attention"] * 24), "'chunked_attention' isn't known"),
        (config("gpt-oss-20b", layer_types="full"), "list of names"),
        (config("gpt-oss-20b", layer_types=["mamba", "attention"] * 12), "form isn't known"),
        (config("jamba-v0.1", layers_block_type=["mamba"] * 32), "no KV cache"),
        (config("jamba-v0.1", attn_layer_offset=8), "attn_layer_offset"),
        (config("nemotron-h-8b", hybrid_override_pattern="MX" * 26), "hybrid_override_pattern"),
        (config("nemotron-h-8b", hybrid_override_pattern="M*"), "lists 2 layers"),
        (config("nemotron-h-8b", mamba_num_heads=...), "lacks mamba_num_heads"),
        (config("mistral-7b-v0.3", layer_types=["sliding_attention"] * 32), "sliding_window"),
        ({"model_type": "olmo3", "num_hidden_layers": 4}, "lacks layer_types"),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": 4}, "attn_layer_indices"),
        (config("llama-3.1-8b", quantization_config={"kv_cache_scheme": {"num_bits": 3}}), "kv_cache_scheme"),
    ],
)
def test_what_is_not_known_is_said_and_not_guessed(source: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        read_model(source)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json can't be read"):
        read_model(tmp_path)
    file = tmp_path / "config.json"
    for text, complaint in (("{", "is not JSON"), ("[1]", "no JSON object"), ("\xff\xfe", "is not JSON")):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(ModelConfigError, match=complaint):
            read_model(file)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2"])
def test_the_layers_are_those_that_transformers_builds(name: str) -> None:
    """Another implementation reads the same file: as many layers of each kind, as many KV heads, of the same size."""
    transformers = pytest.importorskip("transformers")
    fields = config(name)
    fields = {**fields, **fields.pop("text_config", {})}
    theirs = transformers.AutoConfig.for_model(**fields)
    ours = read_model(fields)
    assert theirs.num_hidden_layers >= sum(layers.count for layers in (*ours.attention, *ours.states))
    kinds = getattr(theirs, "layer_types", None) or getattr(theirs, "layers_block_type", None)
    if kinds:
        full = sum(layers.count for layers in ours.attention if not layers.window)
        assert full == sum(kind in ("full_attention", "attention") for kind in kinds)
        assert sum(layers.count for layers in ours.states) == sum(
            kind in ("linear_attention", "mamba") for kind in kinds
        )
    for layers in ours.attention:
        if isinstance(layers, AttentionLayers):
            heads = getattr(theirs, "num_key_value_heads", None) or getattr(theirs, "num_kv_heads", None)
            assert layers.kv_heads == heads or name == "falcon-7b"
            derived = theirs.hidden_size // theirs.num_attention_heads
            assert layers.head_dim == (getattr(theirs, "head_dim", None) or derived)
            assert layers.window is None or layers.window == theirs.sliding_window


TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3},
    "qwen2": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2},
    "gemma3_text": {"hidden_size": 48, "num_hidden_layers": 7, "sliding_window": 64},
    "gpt2": {"n_embd": 48, "n_head": 3, "n_layer": 4},
    "falcon": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "gpt_oss": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TINY)
def test_the_size_is_that_of_the_cache_that_transformers_fills(model_type: str) -> None:
    """Runs a small model and weighs what it keeps; fails if a head, a dimension or a layer is counted wrongly."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    fields = {**TINY[model_type], "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if model_type != "gpt2":
        fields["intermediate_size"] = 32
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    with torch.no_grad():
        cache = theirs(torch.arange(24)[None], use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    ours = calculate(read_model({**fields, "model_type": model_type, "dtype": "float32"}), tokens=24)
    assert ours.request_bytes == kept


def test_the_known_types_are_listed_in_order() -> None:
    assert list(MODEL_TYPES) == sorted(set(MODEL_TYPES))
    assert {"llama", "deepseek_v3", "gemma3_text", "jamba"} <= set(MODEL_TYPES)
