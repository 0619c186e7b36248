"""What a user may set in vLLM's `kv_connector_extra_config`: checked, with defaults, unknown keys refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from moonpool.errors import ConfigError
from moonpool.options import suggestion
from moonpool.sizes import format_bytes, parse_bytes

LOOKUP_TIMEOUT_MAX_S = 0.05
"""A lookup waits on the engine's scheduling thread: longer than this, and every other request feels it."""
LOAD_TIMEOUT_MAX_S = 600.0
STAGING_BYTES_MIN = 1 << 20
"""Below this a copy engine spends more time starting copies than making them."""
TOKENS_PER_OBJECT_MAX = 1 << 16


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's settings. `parse_settings` makes one of the extra config."""

    url: str | None = None
    """The node, as `moonpool.connect` takes it ("unix:/dev/shm/…"); left out, the one that MOONPOOL_URL names, else the
    host's own."""
    tokens_per_object: int = 256
    """Tokens whose KV is stored and loaded as one; rounded up to whole blocks of all of the model's KV groups."""
    save: Literal["prompt", "all", "seen"] = "prompt"
    """What is stored: "prompt", prompts; "all", generated tokens too; "seen", prompts that were asked for `seen_times`
    times (of an engine that loads as well: it is lookups that are counted)."""
    seen_times: int = 2
    """With `save` "seen": how often a prefix has to be asked for before it is stored."""
    admission: Literal["auto", "always"] = "auto"
    """Which hits are loaded: "auto", those that load faster than they are computed, as measured; "always", all."""
    load_min_tokens: int = 256
    """Hits that spare fewer tokens than this are computed: too short to be worth a load."""
    verify: bool = False
    """Whether loaded bytes are checked against the checksum that they were stored with: a pass over them, by a thread
    of the worker's, at either end."""
    shadow_rate: float = 0.0
    """Share of hits, 0 to 1, that are computed all the same and compared with what is stored."""
    shadow_tolerance: float = 0.05
    """How far apart, relative to the largest value of a block, computed and stored KV may be; 0: not by one bit.

    Kernels add in another order when a prompt is computed in other pieces, and bfloat16 keeps 8 bits: what differs
    in the first layers by 2**-8 is a few percent after dozens of layers. Another prompt's KV differs by 100%.
    """
    lookup_timeout_s: float = 0.002
    """How long one step waits for the answer to a lookup; the request is asked for again the next step."""
    load_timeout_s: float = 10.0
    """A load that takes longer has failed, and with it all that are under way; their tokens are computed."""
    store_inflight_bytes: int = 8 << 30
    """KV that may wait to be stored; beyond it, what is computed isn't stored."""
    staging_bytes: int = 256 << 20
    """The GPU's memory that each worker takes beside vLLM's own, to gather small pieces for large copies."""
    failures_max: int = 5
    """After so many failures in a row the engine goes on without the pool for `retry_s`."""
    retry_s: float = 5.0
    """How long until the pool is tried again."""
    tenant: str = ""
    """Who may share what this engine stores: only engines with the same text."""
    events: bool = False
    """Whether what the pool stores and removes is told to vLLM's KV event subscribers."""


def parse_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Return the settings that `extra_config` gives; every other one has its default.

    Sizes may be texts such as "2GiB". Raises `ConfigError` that names the key and what would do, for an unknown key,
    a value of the wrong kind, and one outside its limits.
    """
    values: dict[str, Any] = {}
    for key, value in extra_config.items():
        if key not in _READERS:
            raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config{suggestion(str(key), _READERS)}")
        try:
            values[key] = _READERS[key](value)
        except ValueError as error:
            raise ConfigError(f"kv_connector_extra_config[{key!r}]: {error}") from None
    return Settings(**values)


def _url(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{value!r} is not a node's address: write 'unix:/folder', or leave it out for the host's own")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise ValueError(f"{value!r} is neither true nor false")
    return word == "true"


def _one_of(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in words:
            raise ValueError(f"{value!r} is none of {', '.join(words)}{suggestion(str(value), words)}")
        return str(value)

    return read


def _count(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{value!r} is not a whole number from {least:,} to {most:,}")
        return value

    return read


def _number(least: float, most: float, unit: str = "") -> Callable[[Any], float]:
    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not least <= number <= most:
            raise ValueError(f"{value!r} is not a number from {least:g} to {most:g}{unit}")
        return number

    return read


def _size(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        size = parse_bytes(value)
        if size < least:
            raise ValueError(f"{value!r} is too small: at least {format_bytes(least, binary=True)}")
        return size

    return read


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "url": _url,
    "tokens_per_object": _count(1, TOKENS_PER_OBJECT_MAX),
    "save": _one_of("prompt", "all", "seen"),
    "seen_times": _count(1, 1_000_000),
    "admission": _one_of("auto", "always"),
    "load_min_tokens": _count(0, 1 << 30),
    "verify": _truth,
    "shadow_rate": _number(0, 1),
    "shadow_tolerance": _number(0, 1),
    "lookup_timeout_s": _number(0, LOOKUP_TIMEOUT_MAX_S, " s"),
    "load_timeout_s": _number(0.01, LOAD_TIMEOUT_MAX_S, " s"),
    "store_inflight_bytes": _size(0),
    "staging_bytes": _size(STAGING_BYTES_MIN),
    "failures_max": _count(1, 1_000_000),
    "retry_s": _number(0.01, 3600, " s"),
    "tenant": _text,
    "events": _truth,
}
