"""What layers keep of the tokens that they have seen, and how many bytes a rank holds of it."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.calc.config import ModelConfigError


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers that keep the keys and values of every token, or with `window` of the last `window` tokens."""

    count: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def token_elements(self, tp_size: int) -> int:
        """Return how many numbers a token adds on one rank."""
        return self.count * 2 * self.head_dim * spread("KV heads", self.kv_heads, tp_size)

    def copies(self, tp_size: int) -> int:
        """Return how many ranks hold the same bytes."""
        return max(1, tp_size // self.kv_heads)


@dataclass(frozen=True, slots=True)
class LatentLayers:
    """Layers of multi-head latent attention: one compressed vector a token, the same on every rank."""

    count: int
    latent_dim: int
    window: None = None

    def token_elements(self, tp_size: int) -> int:
        """Return how many numbers a token adds on one rank, which doesn't depend on `tp_size`."""
        return self.count * self.latent_dim

    def copies(self, tp_size: int) -> int:
        """Return how many ranks hold the same bytes: all of them."""
        return tp_size


@dataclass(frozen=True, slots=True)
class StateLayers:
    """State-space or linear-attention layers: a state of constant size a request, whatever its length.

    A convolution keeps its last `conv_width` inputs of each channel; channels belong to heads, which ranks
    divide, and to groups, which they copy when there are fewer groups than ranks.
    """

    count: int
    conv_width: int
    heads: int
    conv_channels_per_head: int
    recurrent_per_head: int
    groups: int = 0
    conv_channels_per_group: int = 0

    def conv_elements(self, tp_size: int) -> int:
        """Return how many numbers the convolutions keep of a request on one rank."""
        groups = spread("groups", self.groups, tp_size) if self.groups else 0
        channels = self._heads(tp_size) * self.conv_channels_per_head + groups * self.conv_channels_per_group
        return self.count * self.conv_width * channels

    def recurrent_elements(self, tp_size: int) -> int:
        """Return how many numbers the recurrences keep of a request on one rank."""
        return self.count * self._heads(tp_size) * self.recurrent_per_head

    def _heads(self, tp_size: int) -> int:
        if self.heads % tp_size:
            raise ModelConfigError(f"{self.heads} state heads don't divide over {tp_size} tensor-parallel ranks")
        return self.heads // tp_size


@dataclass(frozen=True, slots=True)
class Model:
    """A model's layers, as far as its KV cache is concerned, and the types that its configuration names."""

    model_type: str
    attention: tuple[AttentionLayers | LatentLayers, ...]
    states: tuple[StateLayers, ...] = ()
    dtype: str | None = None
    """Element type of the weights and activations, None where the configuration doesn't say."""
    kv_dtype: str | None = None
    """Element type that the checkpoint's quantisation asks for the KV cache, None for the model's own."""
    state_dtype: str | None = None
    """Element type that the configuration asks for recurrent states, None for the model's own."""
    notes: tuple[str, ...] = ()

    def token_elements(self, tp_size: int = 1) -> int:
        """Return how many numbers a token adds on one rank while no window is full."""
        return sum(layers.token_elements(tp_size) for layers in self.attention)

    def request_elements(self, tokens: int, tp_size: int = 1) -> int:
        """Return how many numbers attention keeps of a request of `tokens` on one rank, windows considered."""
        return sum(layers.token_elements(tp_size) * min(tokens, layers.window or tokens) for layers in self.attention)


def spread(noun: str, heads: int, tp_size: int) -> int:
    """Return how many of `heads` one of `tp_size` ranks holds: its share, or one that other ranks hold too.

    Raises ModelConfigError when neither number divides the other.
    """
    if heads % tp_size == 0:
        return heads // tp_size
    if tp_size % heads == 0:
        return 1
    raise ModelConfigError(
        f"{heads} {noun} don't spread over {tp_size} tensor-parallel ranks: one has to divide the other"
    )
