"""What a model's KV cache depends on besides the tokens: the key space of a `PrefixCache`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from moonpool.engines.transformers.layout import LAYOUT, LAYOUT_VERSION, BlockLayout
from moonpool.keys import KeySpace, fingerprint_state

# Fields of a configuration that don't reach the KV cache, and differ between runs that may share it.
_IRRELEVANT = ("transformers_version", "_name_or_path", "use_cache", "return_dict", "output_attentions")

# `fingerprint_state` samples tensors above 64 KiB; an adapter is fed to it in pieces of that size, so whole.
_WHOLE_BYTES = 64 << 10


def key_space(model: Any, layout: BlockLayout, *, tenant: str = "", model_name: str = "") -> KeySpace:
    """Return the key space of `model` as it is now: weights, configuration, adapter, dtype, layout, tenant.

    Reads the model only. Copies up to 64 KiB a tensor to the host, so a large model on a GPU takes a moment.
    """
    return KeySpace(
        weights=fingerprint_state(_tensors(model)),
        tokens_per_block=layout.tokens,
        kv_dtype=layout.dtype,
        layout=LAYOUT,
        layout_version=LAYOUT_VERSION,
        lora=adapter_fingerprint(model),
        tenant=tenant,
        model=model_name,
        engine="transformers",
        extra={"config": config_digest(model.config)},
    )


def state_mark(model: Any) -> tuple[Any, ...]:
    """Return what changes when a weight of `model` is written or replaced, or another adapter is made active.

    Good for comparing within one process only; takes some 100 us. Doesn't see writes that go around
    autograd's version counter (through `tensor.data`).
    """
    tensors = [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for _, tensor in _named(model)
    ]
    return (*tensors, *_adapter_state(model))


def config_digest(config: Any) -> str:
    """Return the SHA-256, in hexadecimal digits, of all in a configuration that can reach the KV cache."""
    fields = json.loads(config.to_json_string(use_diff=False))
    kept = {name: value for name, value in fields.items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def adapter_fingerprint(model: Any) -> str:
    """Return the fingerprint of the adapters (LoRA) in `model`: every value, their configuration, which are active.

    "" for a model without any.
    """
    if not getattr(model, "peft_config", None):
        return ""
    pieces: dict[str, Any] = {}
    for name, tensor in _tensors(model).items():
        if "lora_" in name:
            elements = max(1, _WHOLE_BYTES // tensor.element_size())
            for index, piece in enumerate(tensor.detach().reshape(-1).split(elements)):
                pieces[f"{name}[{index}]"] = piece
    configs = {name: _plain(config) for name, config in model.peft_config.items()}
    state = json.dumps([configs, _adapter_state(model)], sort_keys=True, default=str).encode()
    pieces["adapters"] = np.frombuffer(hashlib.sha256(state).digest(), dtype=np.uint8)
    return fingerprint_state(pieces)


def _adapter_state(model: Any) -> tuple[Any, ...]:
    if not getattr(model, "peft_config", None):
        return ()
    active = getattr(model, "active_adapters", ())
    names = tuple(active() if callable(active) else active)
    off = sum(bool(getattr(module, "disable_adapters", False)) for module in model.modules())
    merged = sum(bool(getattr(module, "merged", False)) for module in model.modules())
    return names, off, merged


def _plain(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else config


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensors(model: Any) -> dict[str, Any]:
    # Buffers that aren't saved (rotary frequencies) count too: they decide the keys as much as weights do.
    return dict(_named(model))
