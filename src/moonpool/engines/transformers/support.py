"""Which models and calls a `PrefixCache` can serve: checked once, refused with what to do instead."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer

from moonpool.engines.transformers.layout import BlockLayout
from moonpool.errors import InvalidRequest, MoonpoolError

CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""What this version of transformers calls the KV cache in `forward` and `generate`."""

DTYPES = ("float32", "float16", "bfloat16")

LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})
"""Rotary scalings under which the keys of a token depend on how long its whole sequence is."""

_TENSORS_ALLOWED = frozenset({"attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask"})
# The ways to generate that take the tokens of a given cache as seen. Assisted ones compute them a second time.
_MODES = frozenset({"greedy_search", "sample", "beam_search", "beam_sample"})
_ARGUMENTS_OWNED = ("cache", "past_key_values", "cache_implementation", "use_cache")


class UnsupportedModel(MoonpoolError):
    """The model's KV cache isn't one that can be kept as blocks of tokens; the text says why and what to do."""


def empty_cache(model: Any) -> Any:
    """Return a new, empty `DynamicCache` for `model`."""
    return DynamicCache(config=model.config)


def layers_of(cache: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of each layer of a filled cache. No copies: they are the cache's own tensors."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def fill(cache: Any, layers: list[tuple[Any, Any]]) -> None:
    """Make `layers` the contents of an empty cache, which takes ownership of the tensors. No copies.

    `DynamicLayer.update` would concatenate them to nothing, which is a second pass over all bytes.
    """
    for layer, (keys, values) in zip(cache.layers, layers, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values


def device_of(model: Any) -> Any:
    """Return the one device that `model` lies on. Raises `UnsupportedModel` when there are several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        names = ", ".join(sorted(str(device) for device in devices)) or "none"
        raise UnsupportedModel(f"the model's weights lie on several devices ({names}): load it on one device")
    return devices.pop()


def probe_layout(model: Any, tokens_per_object: int) -> BlockLayout:
    """Return the layout of `model`'s KV cache, found by running it over one token.

    Raises `UnsupportedModel` for a cache that can't be cut into blocks of tokens: sliding window, hybrid, quantised,
    or keys and values of different shapes.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models have two caches: wrap a decoder-only model")
    for rotary in _rotary_types(config):
        if rotary in LENGTH_DEPENDENT_ROTARY:
            raise UnsupportedModel(
                f"rotary scaling {rotary!r} makes a prefix's keys depend on the length of the whole sequence, so they "
                "can't be shared: use a model with 'default', 'linear', 'yarn' or 'llama3' scaling"
            )
    cache = empty_cache(model)
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise UnsupportedModel(
                f"the model keeps its KV cache in {type(layer).__name__}, and only full attention (DynamicLayer) can "
                "be cut into blocks of tokens: use a model without sliding-window, linear or quantised layers, or "
                "call model.generate without PrefixCache"
            )
    token = torch.zeros((1, 1), dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})
    parts = [part for pair in layers_of(cache) for part in pair]
    if any(part is None for part in parts) or len({part.shape for part in parts}) != 1:
        shapes = sorted({str(None if part is None else tuple(part.shape)) for part in parts})
        raise UnsupportedModel(
            f"keys and values must have one shape in all layers, and this model's have {', '.join(shapes)}: "
            "models with latent attention (MLA) or layers that share a cache aren't supported here"
        )
    dtype = str(parts[0].dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"KV dtype {dtype} isn't one of {', '.join(DTYPES)}: load the model in one of them"
        )
    _, kv_heads, _, head_dim = parts[0].shape
    return BlockLayout(len(cache.layers), kv_heads, tokens_per_object, head_dim, dtype)


def token_row(input_ids: Any, device: Any) -> Any:
    """Return `input_ids` (a list of ints, a 1-D tensor, or a tensor of one row) as a tensor `[1, n]` on `device`."""
    row = torch.as_tensor(input_ids, dtype=torch.long, device=device)
    if row.ndim == 1:
        row = row.unsqueeze(0)
    if row.ndim != 2 or row.shape[0] != 1:
        raise InvalidRequest(
            f"input_ids have the shape {list(row.shape)}, and PrefixCache takes one sequence at a time: "
            "call it once a sequence (rows differ in how much of them is stored)"
        )
    if row.shape[1] == 0:
        raise InvalidRequest("input_ids are empty: give at least one token")
    return row


def rows_generated(model: Any, arguments: Mapping[str, Any]) -> int:
    """Return how many rows `generate` makes of a prompt: beams, or sequences drawn.

    Raises `InvalidRequest` for arguments under which the token ids alone don't decide the KV cache, or with which
    `generate` can't go on from a prefix.
    """
    for name in _ARGUMENTS_OWNED:
        if arguments.get(name) is not None:
            raise InvalidRequest(f"PrefixCache brings the KV cache itself: leave {name!r} out")
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in _TENSORS_ALLOWED:
            raise InvalidRequest(
                f"{name!r} would change the KV cache without changing the token ids that name it: "
                "call model.generate for this input"
            )
    mask = arguments.get("attention_mask")
    if mask is not None and not bool((torch.as_tensor(mask) == 1).all()):
        raise InvalidRequest("attention_mask hides tokens: give the sequence without padding")
    settings = _settings(model, arguments)
    if settings.cache_implementation is not None:
        raise InvalidRequest(
            f"the generation config asks for the cache {settings.cache_implementation!r}, and PrefixCache brings a "
            "DynamicCache: set generation_config.cache_implementation = None"
        )
    mode = settings.get_generation_mode(arguments.get("assistant_model")).value
    if mode not in _MODES or arguments.get("custom_generate") is not None:
        raise InvalidRequest(
            f"{mode} can't go on from a prefix's KV cache in transformers: PrefixCache generates by "
            f"{', '.join(sorted(_MODES))}; call model.generate for the others"
        )
    return max(settings.num_beams or 1, settings.num_return_sequences or 1)


def _settings(model: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the generation config that `model.generate(**arguments)` would act on."""
    given = arguments.get("generation_config")
    settings = GenerationConfig() if given is None else copy.deepcopy(given)
    settings.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    settings.update(**{name: value for name, value in arguments.items() if name != "generation_config"})
    return settings


def _rotary_types(config: Any) -> set[str]:
    found: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if isinstance(parameters, Mapping):
            for part in (parameters, *parameters.values()):
                if isinstance(part, Mapping):
                    found.add(str(part.get("rope_type") or part.get("type") or "default"))
    return found
