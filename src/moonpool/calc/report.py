"""What a model's layers come to: bytes, times, and how many tokens an object should hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moonpool.calc.bandwidths import DEFAULT_BANDWIDTHS, Bandwidth
from moonpool.calc.config import ModelConfigError
from moonpool.calc.layers import AttentionLayers, Model
from moonpool.calc.objects import OBJECT_OVERHEAD_S, ObjectSize, object_sizes, recommend

ELEMENT_BYTES = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}
"""Bytes of one number of each element type that is known."""


@dataclass(frozen=True, slots=True)
class Move:
    """The time to move one request's KV over a wire, each rank over its own."""

    name: str
    bytes_per_s: float
    source: str
    seconds: float
    break_even_tokens_per_s: float
    """Moving beats computing as long as prefill is slower than this."""
    times_faster: float | None
    """Computing time by moving time; None where no prefill rate was given."""


@dataclass(frozen=True, slots=True)
class Report:
    """KV-cache sizes of a model, whole (each byte counted once) and on one tensor-parallel rank, and what follows."""

    model_type: str
    layers: tuple[str, ...]
    kv_dtype: str
    state_dtype: str | None
    tp_size: int
    kv_copies: int
    """How many ranks hold the same KV."""
    tokens: int
    tokens_per_block: int
    token_bytes: int
    """What a token adds while no window is full."""
    block_bytes: int
    state_bytes: int
    """Constant a request, whatever its length."""
    request_bytes: int
    """KV of `tokens` tokens, windows considered, and the state."""
    rank_token_bytes: int
    rank_block_bytes: int
    rank_state_bytes: int
    rank_request_bytes: int
    prefill_tokens_per_s: float | None
    compute_s: float | None
    break_even_bytes_per_s: float | None
    """The slowest wire, for each rank, over which moving beats computing."""
    moves: tuple[Move, ...]
    objects: tuple[ObjectSize, ...]
    recommended_tokens_per_object: int
    recommendation: str
    pool_bytes: int | None
    """A node's, where one was asked."""
    pool_tokens: int | None
    """How many tokens of such requests it holds, if they share nothing."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return asdict(self)


def calculate(
    model: Model,
    *,
    tokens: int = 10_000,
    kv_dtype: str = "auto",
    state_dtype: str = "auto",
    tp_size: int = 1,
    tokens_per_block: int = 16,
    prefill_tokens_per_s: float | None = None,
    bandwidths: Sequence[Bandwidth] = DEFAULT_BANDWIDTHS,
    object_overhead_s: float = OBJECT_OVERHEAD_S,
    pool_bytes: int | None = None,
) -> Report:
    """Return the sizes and times of one request of `tokens` tokens.

    "auto" types are those that the configuration names. Computing takes `tokens / prefill_tokens_per_s`, as measured
    for this model and hardware at about this length; nothing is assumed where it isn't given. Raises ModelConfigError
    for numbers below one, types that aren't known or named, and heads that don't spread over `tp_size` ranks.
    """
    for name, value in (("tokens", tokens), ("tp_size", tp_size), ("tokens_per_block", tokens_per_block)):
        if value < 1:
            raise ModelConfigError(f"{name} is {value}: it has to be at least 1")
    if (prefill_tokens_per_s is not None and prefill_tokens_per_s <= 0) or object_overhead_s < 0 or not bandwidths:
        raise ModelConfigError(
            "the prefill rate has to be positive, the overhead at least 0, with one bandwidth at least"
        )
    kv_type, kv_bytes = _element("KV", "--dtype", kv_dtype, model.kv_dtype or model.dtype)
    state_type: str | None = None
    whole_state = rank_state = 0
    if model.states:
        # What convolutions keep are activations; only the recurrences are ever kept wider than the model.
        conv_bytes = _element("state", "--state-dtype", "auto" if model.dtype else state_dtype, model.dtype)[1]
        state_type, recurrent_bytes = _element("state", "--state-dtype", state_dtype, model.state_dtype or model.dtype)
        whole_state, rank_state = (_state_bytes(model, size, conv_bytes, recurrent_bytes) for size in (1, tp_size))
    token_bytes, rank_token_bytes = (model.token_elements(size) * kv_bytes for size in (1, tp_size))
    rank_request_bytes = model.request_elements(tokens, tp_size) * kv_bytes + rank_state
    compute_s = None if prefill_tokens_per_s is None else tokens / prefill_tokens_per_s
    objects = object_sizes(
        rank_token_bytes,
        tokens=tokens,
        tokens_per_block=tokens_per_block,
        overhead_s=object_overhead_s,
        bytes_per_s=max(wire.bytes_per_s for wire in bandwidths),
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    recommended, recommendation = recommend(objects)
    request_bytes = model.request_elements(tokens) * kv_bytes + whole_state
    return Report(
        model_type=model.model_type,
        layers=_described(model),
        kv_dtype=kv_type,
        state_dtype=state_type,
        tp_size=tp_size,
        kv_copies=min(layers.copies(tp_size) for layers in model.attention),
        tokens=tokens,
        tokens_per_block=tokens_per_block,
        token_bytes=token_bytes,
        block_bytes=token_bytes * tokens_per_block,
        state_bytes=whole_state,
        request_bytes=request_bytes,
        rank_token_bytes=rank_token_bytes,
        rank_block_bytes=rank_token_bytes * tokens_per_block,
        rank_state_bytes=rank_state,
        rank_request_bytes=rank_request_bytes,
        prefill_tokens_per_s=prefill_tokens_per_s,
        compute_s=compute_s,
        break_even_bytes_per_s=None if compute_s is None else rank_request_bytes / compute_s,
        moves=tuple(_move(wire, rank_request_bytes, tokens, compute_s) for wire in bandwidths),
        objects=objects,
        recommended_tokens_per_object=recommended.tokens,
        recommendation=recommendation,
        pool_bytes=pool_bytes,
        pool_tokens=None if pool_bytes is None else pool_bytes * tokens // request_bytes,
        notes=_notes(model, tokens, state_type),
    )


def _element(noun: str, option: str, asked: str, configured: str | None) -> tuple[str, int]:
    """Return an element type's name and its bytes: the one asked for, else the configuration's."""
    name = configured if asked == "auto" else asked
    if name is None:
        raise ModelConfigError(f"the configuration names no element type: say which the {noun} has with {option}")
    if name not in ELEMENT_BYTES:
        raise ModelConfigError(f"element type {name!r} isn't known for the {noun} (known: {', '.join(ELEMENT_BYTES)})")
    return name, ELEMENT_BYTES[name]


def _state_bytes(model: Model, tp_size: int, conv_bytes: int, recurrent_bytes: int) -> int:
    return sum(
        layers.conv_elements(tp_size) * conv_bytes + layers.recurrent_elements(tp_size) * recurrent_bytes
        for layers in model.states
    )


def _move(wire: Bandwidth, request_bytes: int, tokens: int, compute_s: float | None) -> Move:
    seconds = request_bytes / wire.bytes_per_s
    return Move(
        name=wire.name,
        bytes_per_s=wire.bytes_per_s,
        source=wire.source,
        seconds=seconds,
        break_even_tokens_per_s=tokens / seconds,
        times_faster=None if compute_s is None else compute_s / seconds,
    )


def _described(model: Model) -> tuple[str, ...]:
    described = []
    for layers in model.attention:
        if isinstance(layers, AttentionLayers):
            reach = f"the last {layers.window:,} tokens" if layers.window else "all tokens"
            described.append(
                f"{layers.count} attention layers, {layers.kv_heads} KV heads of {layers.head_dim}, {reach}"
            )
        else:
            described.append(f"{layers.count} latent-attention layers of {layers.latent_dim}, the same on every rank")
    described.extend(f"{states.count} state layers, constant a request" for states in model.states)
    return tuple(described)


def _notes(model: Model, tokens: int, state_type: str | None) -> tuple[str, ...]:
    notes = list(model.notes)
    if any(layers.window and layers.window < tokens for layers in model.attention):
        notes.append(
            "of a layer with a window only the last tokens are kept and moved; a token and a block count all layers"
        )
    if state_type is not None:
        notes.append(f"recurrent states counted as {state_type}; engines differ, see --state-dtype")
        notes.append("a state can be resumed only at the token at which it was stored")
    return tuple(notes)
