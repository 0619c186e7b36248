"""The demo's transformer: a Llama of its own size with seeded random weights, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from moonpool.demo.prompts import VOCABULARY
from moonpool.demo.settings import Settings

WEIGHTS_SCALE = 0.05
"""Standard deviation of the weights. At the customary 0.02 attention is all but uniform, and a wrong block would change
the logits by little more than rounding does; at 0.05 it changes the tokens."""


def build_model(settings: Settings) -> Any:
    """Return the model in eval mode on the CPU. Draws its weights, which takes about a second."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 11 // 4,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=8192,
        initializer_range=WEIGHTS_SCALE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(settings.seed)
    return transformers.LlamaForCausalLM(config).to(getattr(torch, settings.dtype)).eval()
