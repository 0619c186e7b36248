"""Hybrid models: which of their layers keep a state instead of KV, and how large it is."""

from __future__ import annotations

from moonpool.calc.config import Fields, ModelConfigError
from moonpool.calc.layers import StateLayers


def jamba_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers of which every `attn_layer_period`th, from `attn_layer_offset` on, has attention."""
    period = fields.integer("attn_layer_period")
    offset = fields.get("attn_layer_offset")
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise ModelConfigError(f"attn_layer_offset is {offset!r}: it has to lie between 0 and attn_layer_period - 1")
    return ["full" if layer % period == offset else "state" for layer in range(layers)]


def nemotron_h_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds that `hybrid_override_pattern` spells: M a Mamba-2 layer, * attention, - or E neither."""
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
        raise ModelConfigError(f"hybrid_override_pattern is {pattern!r}: it has to spell the layers in M, *, - and E")
    kinds = {"M": "state", "*": "full", "-": "none", "E": "none"}
    return [kinds[letter] for letter in pattern]


def granite_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers of which those in `attn_layer_indices` have attention."""
    indices = fields.get("attn_layer_indices")
    if not isinstance(indices, list) or not all(isinstance(index, int) and 0 <= index < layers for index in indices):
        raise ModelConfigError("the configuration lacks layer_types (or attn_layer_indices): its layers aren't known")
    return ["full" if layer in indices else "state" for layer in range(layers)]


def qwen_next_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers of which every `full_attention_interval`th has attention."""
    period = fields.integer("full_attention_interval")
    return ["full" if (layer + 1) % period == 0 else "state" for layer in range(layers)]


def mamba1(fields: Fields, count: int) -> StateLayers:
    """Return Mamba layers: each channel has `mamba_d_state` numbers of its own."""
    channels = fields.integer("mamba_expand") * fields.integer("hidden_size")
    return StateLayers(
        count=count,
        conv_width=fields.integer("mamba_d_conv") - 1,
        heads=channels,
        conv_channels_per_head=1,
        recurrent_per_head=fields.integer("mamba_d_state"),
    )


def mamba2(fields: Fields, count: int) -> StateLayers:
    """Return Mamba-2 layers: heads of `mamba_head_dim` by `ssm_state_size`, and groups that share B and C."""
    head_dim, state = fields.integer("mamba_head_dim"), fields.integer("ssm_state_size")
    return StateLayers(
        count=count,
        conv_width=fields.integer("conv_kernel") - 1,
        heads=fields.integer("mamba_num_heads"),
        conv_channels_per_head=head_dim,
        recurrent_per_head=head_dim * state,
        groups=fields.integer("n_groups"),
        conv_channels_per_group=2 * state,
    )


def qwen_next_state(fields: Fields, count: int) -> StateLayers:
    """Return gated delta-rule layers: a matrix of key by value dimension for each value head."""
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    return StateLayers(
        count=count,
        conv_width=fields.integer("linear_conv_kernel_dim") - 1,
        heads=fields.integer("linear_num_value_heads"),
        conv_channels_per_head=value_dim,
        recurrent_per_head=key_dim * value_dim,
        groups=fields.integer("linear_num_key_heads"),
        conv_channels_per_group=2 * key_dim,
    )
