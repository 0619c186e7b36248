"""Models small enough to make up, with weights that are seeded and large enough that a wrong KV block shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
ALL_SLIDING = {"sliding_window": 96, "layer_types": ["sliding_attention"] * 3}
"""Changes: layers that see no further than 96 tokens back."""
HYBRID = {
    "num_hidden_layers": 4,
    "sliding_window": 96,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
"""Changes: two KV groups."""
SCALE = 0.15
"""Of the weights: with much smaller ones attention is uniform, and all prompts of one length look the same."""


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a Llama with weights of that seed; `changes` are those of its configuration. Returns the folder."""
    import torch
    from safetensors.torch import save_file

    config = {**LLAMA, **changes}
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    hidden, wide, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (heads, hidden),
                "self_attn.k_proj": (kv_heads, hidden),
                "self_attn.v_proj": (kv_heads, hidden),
                "self_attn.o_proj": (hidden, heads),
                "mlp.gate_proj": (wide, hidden),
                "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide),
            }.items()
        }
    weights = {name: torch.randn(shape, generator=generator) * SCALE for name, shape in shapes.items()}
    norms = ["model.norm"] + [
        f"model.layers.{layer}.{name}"
        for layer in range(config["num_hidden_layers"])
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
