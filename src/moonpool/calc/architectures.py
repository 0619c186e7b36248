"""Which model types keep what: the table that a config.json is read by.

A model type that isn't in the table is refused, because a field that this code doesn't know may change the size
(shared KV, another latent form, a window). The defaults are those that a type's published configurations leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.calc.config import Fields, ModelConfigError, load_config, text_config
from moonpool.calc.hybrid import (
    granite_kinds,
    jamba_kinds,
    mamba1,
    mamba2,
    nemotron_h_kinds,
    qwen_next_kinds,
    qwen_next_state,
)
from moonpool.calc.layers import AttentionLayers, LatentLayers, Model, StateLayers

Kinds = Callable[[Fields, int], list[str]]
State = Callable[[Fields, int], StateLayers]

# Fields that change what is kept in ways that aren't counted here, wherever they are set.
_UNCOUNTED = {
    "index_head_dim": "a sparse-attention index beside the KV, whose form differs between engines",
    "num_kv_shared_layers": "layers that share another layer's KV",
    "cross_attention_layers": "cross-attention to another sequence",
    "is_encoder_decoder": "an encoder and cross-attention to it",
    "attn_type_list": "layers of several types, in a form that isn't known here",
    "block_configs": "layers that differ from each other, in a form that isn't known here",
    "use_cla": "layers that share another layer's KV",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the configuration of one model type is read."""

    kinds: Kinds
    """Returns each layer's kind where `layer_types` isn't given: full, sliding, state or none."""
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: Callable[[Fields], int] = lambda fields: fields.integer("num_key_value_heads")
    state: State | None = None
    latent: bool = False


def read_model(source: str | Path | Mapping[str, Any], *, model_type: str | None = None) -> Model:
    """Return the model that `source` describes: a config.json, the folder that holds one, or its content.

    `model_type` reads it as another type than it names, on the caller's word that they keep the same. Reads only.
    Raises ModelConfigError for a type that isn't known, and for a field that is missing, contradictory or not counted.
    """
    config = text_config(source if isinstance(source, Mapping) else load_config(source))
    named = model_type or config.get("model_type")
    if not named:
        raise ModelConfigError("the configuration lacks model_type, without which its fields can't be read")
    architecture = _ARCHITECTURES.get(named)
    if architecture is None:
        raise ModelConfigError(
            f"model type {named!r} isn't known; if it keeps the same KV as one that is, name that with --model-type "
            f"(known: {', '.join(MODEL_TYPES)})"
        )
    for name, meaning in _UNCOUNTED.items():
        if config.get(name):
            raise ModelConfigError(
                f"the configuration's {name} means {meaning}: that isn't counted, so no size is given"
            )
    fields = Fields(config, architecture.names, architecture.defaults)
    layers = fields.integer("num_hidden_layers")
    if architecture.latent:
        attention: tuple[AttentionLayers | LatentLayers, ...] = (_latent(fields, layers),)
        states: tuple[StateLayers, ...] = ()
    else:
        attention, states = _by_kind(fields, architecture, layers)
    return Model(
        model_type=named,
        attention=attention,
        states=states,
        dtype=config.get("torch_dtype") or config.get("dtype"),
        kv_dtype=_quantised_kv_dtype(config),
        state_dtype=config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype"),
        notes=_notes(config),
    )


def _latent(fields: Fields, layers: int) -> LatentLayers:
    return LatentLayers(layers, fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"))


def _by_kind(
    fields: Fields, architecture: Architecture, layers: int
) -> tuple[tuple[AttentionLayers, ...], tuple[StateLayers, ...]]:
    if fields.get("kv_lora_rank"):
        raise ModelConfigError("the configuration has kv_lora_rank, which this model type isn't known to use")
    listed = fields.names("layer_types") or fields.names("layers_block_type")
    kinds = architecture.kinds(fields, layers) if listed is None else [_kind(name) for name in listed]
    if len(kinds) != layers:
        raise ModelConfigError(f"the configuration lists {len(kinds)} layers and says num_hidden_layers is {layers}")
    attention = []
    if full := kinds.count("full"):
        attention.append(AttentionLayers(full, architecture.kv_heads(fields), fields.head_dim()))
    if sliding := kinds.count("sliding"):
        window = fields.integer("sliding_window")
        attention.append(AttentionLayers(sliding, architecture.kv_heads(fields), fields.head_dim(), window))
    if not attention:
        raise ModelConfigError("no layer of this model has attention, so it has no KV cache to store by blocks")
    if not (state_layers := kinds.count("state")):
        return tuple(attention), ()
    if architecture.state is None:
        raise ModelConfigError("the configuration lists state layers, whose form isn't known for this model type")
    return tuple(attention), (architecture.state(fields, state_layers),)


def _kind(name: str) -> str:
    known = {
        "full_attention": "full",
        "attention": "full",
        "sliding_attention": "sliding",
        "linear_attention": "state",
        "mamba": "state",
        "mlp": "none",
        "moe": "none",
    }
    if name not in known:
        raise ModelConfigError(f"layer type {name!r} isn't known (known: {', '.join(known)}), so no size is given")
    return known[name]


def _quantised_kv_dtype(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if not scheme:
        return None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8" if scheme.get("type") == "float" else "int8"
    raise ModelConfigError(
        f"quantization_config.kv_cache_scheme is {scheme!r}, which isn't known: name the type with --dtype"
    )


def _notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    if draft_layers := config.get("num_nextn_predict_layers"):
        return (f"{draft_layers} draft layer(s) for multi-token prediction aren't counted",)
    return ()


def _all_full(fields: Fields, layers: int) -> list[str]:
    return ["full"] * layers


def _one_window(fields: Fields, layers: int) -> list[str]:
    return ["sliding" if fields.get("sliding_window") else "full"] * layers


def _switched_window(fields: Fields, layers: int) -> list[str]:
    if not (fields.get("use_sliding_window") and fields.get("sliding_window")):
        return ["full"] * layers
    first = fields.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ModelConfigError(f"max_window_layers is {first!r}: without it the layers with a window aren't known")
    return ["full"] * min(first, layers) + ["sliding"] * max(0, layers - first)


def _every_nth_full(fields: Fields, layers: int) -> list[str]:
    period = fields.integer("sliding_window_pattern")
    return ["full" if (layer + 1) % period == 0 else "sliding" for layer in range(layers)]


def _listed_only(fields: Fields, layers: int) -> list[str]:
    raise ModelConfigError("the configuration lacks layer_types, without which the layers with a window aren't known")


def _alternating(fields: Fields, layers: int) -> list[str]:
    return ["full" if layer % 2 else "sliding" for layer in range(layers)]


def _own_heads(fields: Fields) -> int:
    """Return the KV heads of types that have one for each attention head unless they say otherwise."""
    return fields.optional_integer("num_key_value_heads") or fields.attention_heads()


def _multi_query_heads(fields: Fields) -> int:
    return 1 if fields.get("multi_query") else fields.attention_heads()


def _falcon_heads(fields: Fields) -> int:
    return fields.integer("num_kv_heads") if fields.get("new_decoder_architecture") else _multi_query_heads(fields)


_GPT2_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
_FULL = Architecture(_all_full)
_OWN = Architecture(_all_full, kv_heads=_own_heads)
_WINDOW = Architecture(_one_window)
_QWEN2 = Architecture(_switched_window)
_QWEN3 = Architecture(_switched_window, defaults={"head_dim": 128})
_QWEN_NEXT = Architecture(
    qwen_next_kinds, defaults={"head_dim": 256, "full_attention_interval": 4}, state=qwen_next_state
)
_LATENT = Architecture(_all_full, latent=True)
_MAMBA2_NAMES = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
}

_ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("llama", "olmo", "olmo2", "olmoe", "opt", "phi", "gpt_neox"), _OWN),
    **dict.fromkeys(("cohere", "ernie4_5", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "internlm2"), _FULL),
    **dict.fromkeys(("internlm3", "seed_oss", "stablelm"), _FULL),
    **dict.fromkeys(("mixtral", "phimoe", "starcoder2"), _WINDOW),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2),
    "smollm3": _QWEN2,
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN_NEXT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LATENT),
    "mistral": Architecture(_one_window, defaults={"sliding_window": 4096}),
    "phi3": Architecture(_one_window, kv_heads=_own_heads),
    "gemma": Architecture(_all_full, defaults={"head_dim": 256}),
    "gemma2": Architecture(_alternating, defaults={"head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": Architecture(
        _every_nth_full,
        defaults={
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "cohere2": Architecture(_every_nth_full, defaults={"sliding_window": 4096, "sliding_window_pattern": 4}),
    "gpt_oss": Architecture(_alternating, defaults={"head_dim": 64, "sliding_window": 128}),
    **dict.fromkeys(("olmo3", "exaone4"), Architecture(_listed_only)),
    "gpt2": Architecture(_all_full, names=_GPT2_NAMES, kv_heads=_own_heads),
    "gpt_bigcode": Architecture(
        _all_full, names=_GPT2_NAMES, kv_heads=_multi_query_heads, defaults={"multi_query": True}
    ),
    "falcon": Architecture(_all_full, kv_heads=_falcon_heads, defaults={"multi_query": True}),
    "jamba": Architecture(jamba_kinds, state=mamba1),
    "bamba": Architecture(granite_kinds, names=_MAMBA2_NAMES, state=mamba2),
    "granitemoehybrid": Architecture(granite_kinds, names=_MAMBA2_NAMES, state=mamba2),
    "nemotron_h": Architecture(
        nemotron_h_kinds, names={"head_dim": "attention_head_dim"}, defaults={"head_dim": 128}, state=mamba2
    ),
}

MODEL_TYPES = tuple(sorted(_ARCHITECTURES))
"""The model types that are known."""
