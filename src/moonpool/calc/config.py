"""A model's config.json: found, read, unwrapped, and asked for fields by name so that none is guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.errors import ConfigError

# A configuration is a few kB; one of hundreds of MB is weights given by mistake.
CONFIG_BYTES_MAX = 16 * 2**20

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


class ModelConfigError(ConfigError):
    """A model's configuration can't be read, or doesn't say what its KV cache consists of."""


def load_config(path: str | Path) -> dict[str, Any]:
    """Return the configuration in `path`, a config.json or the folder that holds one. Raises ModelConfigError."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        if file.stat().st_size > CONFIG_BYTES_MAX:
            raise ModelConfigError(f"{file} is larger than {CONFIG_BYTES_MAX} bytes: give a config.json, not weights")
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelConfigError(
            f"{file} can't be read ({error.strerror}): give a model's config.json, or the folder that holds it"
        ) from None
    except ValueError as error:
        raise ModelConfigError(f"{file} is not JSON ({error}): give a model's config.json") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file} holds no JSON object: give a model's config.json")
    return config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `config` that describes the language model, which multimodal models nest.

    What it leaves to the outer part (the element type) is taken over from there.
    """
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            outer = {name: config[name] for name in ("torch_dtype", "dtype", "quantization_config") if name in config}
            return text_config({**outer, **inner})
    return dict(config)


class Fields:
    """A configuration's fields under their usual names, with an architecture's own names and defaults behind them."""

    def __init__(
        self,
        config: Mapping[str, Any],
        names: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self._names = names or {}
        self._defaults = defaults or {}

    def get(self, name: str) -> Any:
        """Return the field's value as given, null included; the architecture's default, else None, if it is absent."""
        for known in (name, self._names.get(name, name)):
            if known in self._config:
                return self._config[known]
        return self._defaults.get(name)

    def integer(self, name: str) -> int:
        """Return a field that has to be there and to be a positive integer. Raises ModelConfigError."""
        value = self.get(name)
        own_name = self._names.get(name, name)
        if value is None:
            raise ModelConfigError(f"the configuration lacks {own_name}, without which the KV cache's size isn't known")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"{own_name} is {value!r}: it has to be a positive integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return a field that may be absent or null, but not anything other than a positive integer."""
        return None if self.get(name) is None else self.integer(name)

    def names(self, name: str) -> list[str] | None:
        """Return a field that is a list of names, None when it is absent. Raises ModelConfigError for anything else."""
        value = self.get(name)
        if value is None:
            return None
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(isinstance(item, str) for item in value)
        ):
            raise ModelConfigError(f"{name} is {value!r}: it has to be a list of names")
        return list(value)

    def attention_heads(self) -> int:
        return self.integer("num_attention_heads")

    def head_dim(self) -> int:
        """Return the head dimension: as given, else the hidden size spread over the attention heads."""
        given = self.optional_integer("head_dim")
        if given is not None:
            return given
        hidden, heads = self.integer("hidden_size"), self.attention_heads()
        if hidden % heads:
            raise ModelConfigError(f"hidden_size {hidden} doesn't divide by {heads} heads, and head_dim isn't given")
        return hidden // heads
