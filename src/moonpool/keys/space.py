"""Key spaces: what makes KV bytes incompatible, said once, and the digest that every key begins with."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from moonpool.keys.canonical import Json, canonical_json, description_digest

BLOCK_DIGEST_BYTES = 32

FORMAT = 1
"""Version of the description's own form. It leaves out fields at their default, so a new one changes no digest."""

_FINGERPRINT = re.compile(r"[a-z0-9][a-z0-9.-]*:[0-9a-f]{32,128}")
_FINGERPRINTS = ("weights", "kv_scales", "lora", "draft_weights")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySpace:
    """All that two engines must have in common for the KV bytes of one to be right in the other.

    Two spaces are equal when their descriptions are; equal spaces have the same `digest` on every host. A
    space names the whole KV cache of a model; `shard` derives the space of a part. Raises ValueError for
    fields that can't be right.
    """

    weights: str
    """Fingerprint of the model's weights, as `fingerprint_weights` or `fingerprint_state` gives it; never a name."""
    tokens_per_block: int
    kv_dtype: str
    """Element type of the stored KV, such as "bfloat16" or "fp8_e4m3"."""
    layout: str
    """Order of the bytes in an object, such as "layer,kv,token,head,dim"; defined by whoever writes the objects."""
    layout_version: int = 1
    inline_scales: bool = False
    """Whether scales lie in the object, beside the quantised KV."""
    quantization: str = ""
    """Quantisation of the weights as the engine runs them, "" for none: it changes the KV."""
    kv_scales: str = ""
    """Fingerprint of the KV scales where they don't come with the weights, else ""."""
    lora: str = ""
    """Fingerprint of the adapter's content, "" for the base model."""
    speculative: str = ""
    """Speculative decoding method whose KV lies in the objects too, "" for none."""
    draft_weights: str = ""
    """Fingerprint of the draft model's weights, "" where the method has none."""
    context_parallel_interleave: int = 0
    """Tokens that go to one context-parallel rank before the next one's turn; 0 without that."""
    tenant: str = ""
    """Who may share these objects; other tenants have other keys."""
    model: str = ""
    """The model's name, for people and for `purge`. Part of the digest: engines that share give the same."""
    engine: str = ""
    """Engine whose numerics or layout aren't shared with others, such as "vllm"; "" when any may read it."""
    layers: tuple[int, int, int] | None = None
    """What a shard holds: layers a to b (exclusive) of L; None for all."""
    heads: tuple[int, int, int] | None = None
    """What a shard holds: KV heads c to d (exclusive) of H; None for all, and for KV that is replicated."""
    context: tuple[int, int] | None = None
    """What a shard holds: the tokens of context-parallel rank r of n; None for all."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """Anything else that conditions the bytes: strings, integers, booleans, lists and mappings of them."""
    canonical: bytes = field(init=False, repr=False)
    """The description's canonical JSON."""
    digest: bytes = field(init=False, repr=False)
    """First 16 bytes of every key of this space."""

    def __post_init__(self) -> None:
        self._check()
        # A copy, so that a later change to the caller's mapping doesn't leave a space that differs from its
        # digest.
        set_field = object.__setattr__
        set_field(self, "extra", json.loads(canonical_json(self.extra)))
        set_field(self, "layers", _part("layers", self.layers))
        set_field(self, "heads", _part("heads", self.heads))
        set_field(self, "context", self._checked_context())
        set_field(self, "canonical", canonical_json({"format": FORMAT, **self._changed_fields()}))
        set_field(self, "digest", description_digest(self.canonical))

    def __eq__(self, other: object) -> bool:
        return self.canonical == other.canonical if isinstance(other, KeySpace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.canonical)

    @property
    def description(self) -> dict[str, Any]:
        """The description as a new dict: "format" and every field that isn't at its default."""
        return cast(dict[str, Any], json.loads(self.canonical))

    @classmethod
    def from_description(cls, description: Mapping[str, Any] | str | bytes) -> KeySpace:
        """Return the key space that `description`, a mapping or JSON text, describes.

        Raises ValueError for another format, for fields that this version doesn't know and for what
        `KeySpace` refuses.
        """
        members = json.loads(description) if isinstance(description, str | bytes) else description
        if not isinstance(members, Mapping):
            raise ValueError("a key space's description is a JSON object")
        values = dict(members)
        if (given := values.pop("format", None)) != FORMAT:
            raise ValueError(f"this version reads key-space descriptions of format {FORMAT}, not {given!r}")
        known = {item.name for item in dataclasses.fields(cls) if item.init}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"the key space's description has fields this version doesn't know: {', '.join(unknown)}")
        missing = sorted({"weights", "tokens_per_block", "kv_dtype", "layout"} - set(values))
        if missing:
            raise ValueError(f"the key space's description lacks {', '.join(missing)}")
        return cls(**values)

    def shard(
        self,
        *,
        layers: tuple[int, int, int] | None = None,
        heads: tuple[int, int, int] | None = None,
        context: tuple[int, int] | None = None,
    ) -> KeySpace:
        """Return the key space of a part: layers a to b of L, KV heads c to d of H, tokens of rank r of n.

        Named by what it holds: ranks that hold the same share it, and the whole is the space itself. Leave
        `heads` out where every rank holds all of the KV, as with MLA. Raises ValueError for an impossible
        range, or when the space is a shard already.
        """
        if self.layers or self.heads or self.context:
            raise ValueError("this key space is a shard already: derive shards from the whole model's space")
        return dataclasses.replace(self, layers=layers, heads=heads, context=context)

    def key(self, block_digest: bytes) -> bytes:
        """Return a block's 48-byte key: the space's digest, then its own. ValueError unless that has 32 bytes."""
        if len(block_digest) != BLOCK_DIGEST_BYTES:
            raise ValueError(f"a block digest has {BLOCK_DIGEST_BYTES} bytes, not {len(block_digest)}")
        return self.digest + block_digest

    def keys(self, block_digests: Sequence[bytes]) -> list[bytes]:
        """Return the 48-byte keys of `block_digests`, in their order. ValueError unless each has 32 bytes."""
        if list(map(len, block_digests)).count(BLOCK_DIGEST_BYTES) != len(block_digests):
            raise ValueError(f"every block digest has to have {BLOCK_DIGEST_BYTES} bytes")
        digest = self.digest
        return [digest + block_digest for block_digest in block_digests]

    def _changed_fields(self) -> dict[str, Json]:
        changed: dict[str, Json] = {}
        for item in dataclasses.fields(self):
            if item.init:
                value = getattr(self, item.name)
                default = {} if item.name == "extra" else item.default
                if value != default:
                    changed[item.name] = value
        return changed

    def _check(self) -> None:
        for name in ("layout_version", "tokens_per_block", "context_parallel_interleave"):
            value = getattr(self, name)
            least = 0 if name == "context_parallel_interleave" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: it has to be an integer of at least {least}")
        if not isinstance(self.inline_scales, bool):
            raise ValueError(f"inline_scales is {self.inline_scales!r}: it has to be True or False")
        for item in dataclasses.fields(self):
            if item.type == "str" and not isinstance(getattr(self, item.name), str):
                raise ValueError(f"{item.name} is {getattr(self, item.name)!r}: it has to be a string")
        for name in _FINGERPRINTS:
            value = getattr(self, name)
            if (value or name == "weights") and not _FINGERPRINT.fullmatch(value):
                raise ValueError(
                    f"{name} is {value!r}: it has to be a fingerprint of the content, 'scheme:hexdigits' as "
                    "fingerprint_weights gives it; a name can't tell two checkpoints of that name apart"
                )
        for name in ("kv_dtype", "layout"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: say what the objects hold")
        if not isinstance(self.extra, Mapping):
            raise ValueError(f"extra is {self.extra!r}: it has to be a mapping")

    def _checked_context(self) -> tuple[int, int] | None:
        if self.context is None:
            return None
        rank, size = _integers("context", self.context, 2)
        if not 0 <= rank < size:
            raise ValueError(f"context is {self.context!r}: it has to be (rank, size) with 0 <= rank < size")
        if size == 1:
            return None
        if not self.context_parallel_interleave:
            raise ValueError(
                "a context-parallel shard needs context_parallel_interleave: which tokens it holds depends on it"
            )
        return rank, size


def _part(name: str, part: Sequence[int] | None) -> tuple[int, int, int] | None:
    """Return `part`, None when it is the whole. Raises ValueError unless it is (first, end, total)."""
    if part is None:
        return None
    first, end, total = _integers(name, part, 3)
    if not 0 <= first < end <= total:
        raise ValueError(f"{name} is {part!r}: it has to be (first, end, total) with 0 <= first < end <= total")
    return None if (first, end) == (0, total) else (first, end, total)


def _integers(name: str, values: Sequence[object], count: int) -> tuple[int, ...]:
    given = tuple(values)
    integers = tuple(value for value in given if isinstance(value, int) and not isinstance(value, bool))
    if len(given) != count or len(integers) != count:
        raise ValueError(f"{name} is {values!r}: it has to be {count} integers")
    return integers
