"""The node's configuration: options from flags, environment and a TOML file, checked, with defaults filled in.

Every option may be set by a flag of `moonpool serve`, by an environment variable `MOONPOOL_<OPTION>` and in a TOML
file, in this order of precedence. What isn't known or can't be read is refused, by name and with a suggestion.
"""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moonpool.capacity import HOST, Machine, PoolSize, check_fits, default_pool_bytes
from moonpool.errors import ConfigError
from moonpool.folder.folder import default_folder
from moonpool.options import ENVIRONMENT_PREFIX, OPTIONS, Address, parse_folder, suggestion

__all__ = ["NodeConfig", "PoolSize", "Setting", "check_fits", "default_pool_bytes", "default_slots", "load_config"]

CLIENT_VARIABLES = frozenset(ENVIRONMENT_PREFIX + name for name in ("URL", "CONFIG", "COPY", "LOG", "TEST"))
"""Variables that are ours but not the node's options."""
# Kubernetes sets these in every container beside a Service that is called "moonpool".
_SERVICE_VARIABLE = re.compile(r"MOONPOOL_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?)")

SLOTS_MIN, SLOTS_MAX = 65_536, 4_194_304
_BYTES_PER_SLOT = 16 << 10


class Setting(msgspec.Struct, frozen=True):
    """An option as it stands: its value as text that the option reads back, and where that comes from."""

    value: str
    origin: str


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A node's options, checked and with their defaults filled in. `load_config` makes one."""

    dir: Path
    pool_bytes: int
    slots: int
    metrics: Address | None = None
    folder_mode: int = 0o700
    group: int | None = None
    reserve_wait_s: float = 0.1
    pin_share: float = 0.5
    checksum_share: float = 0.1
    nice: int = -10
    scrub_interval_s: float = 3600.0
    reconnect_grace_s: float = 60.0
    log_level: str = "warning"
    mode: str = "on"
    name: str = "node"
    feed_events: int = 65_536
    prefault: bool = True
    origins: Mapping[str, str] = {}
    """Option → where its value comes from: "flag --pool", "environment MOONPOOL_POOL", "file …" or "default"."""

    def settings(self) -> dict[str, Setting]:
        """Every option with its value and origin, for people to look at."""
        return {
            name: Setting(_text_of(option.field, getattr(self, option.field)), self.origins.get(name, "default"))
            for name, option in OPTIONS.items()
        }


def _text_of(field: str, value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if field == "folder_mode":
        return f"{value:04o}"
    unit = " B" if field.endswith("_bytes") else " s" if field.endswith("_s") else ""
    return f"{value}{unit}"


def default_slots(pool_bytes: int) -> int:
    """How many objects a pool's table has room for: one for each 16 KiB of pool, from 65,536 up to 4,194,304.

    KV blocks are larger than that, so that bytes and not slots run out first; the bounds keep the table useful in
    a small pool and its records under 700 MB in a large one.
    """
    return min(max(pool_bytes // _BYTES_PER_SLOT, SLOTS_MIN), SLOTS_MAX)


def load_config(
    flags: Mapping[str, str | None],
    env: Mapping[str, str],
    path: Path | None = None,
    *,
    machine: Machine = HOST,
) -> NodeConfig:
    """Read a node's options from flags, environment and a TOML file, in this order of precedence.

    `flags` maps option names (`scrub_interval`) to their text, None = not given; of `env` only `MOONPOOL_*`
    matters; without a `path`, `MOONPOOL_CONFIG` names the file. Changes nothing and allocates nothing. Raises
    `ConfigError` that names the option, where it was set and what would do.
    """
    if path is None and env.get("MOONPOOL_CONFIG"):
        path = parse_folder(env["MOONPOOL_CONFIG"])
    texts: dict[str, tuple[str, str]] = {}  # option → its text and where that was found; later sources win
    for source in (_from_file(path), _from_environment(env), _from_flags(flags)):
        texts.update(source)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(OPTIONS, "default")
    for name, (text, origin) in texts.items():
        try:
            values[OPTIONS[name].field] = OPTIONS[name].parse(text)
        except ValueError as error:
            raise ConfigError(f"option {name!r} ({origin}): {error}") from None
        origins[name] = origin
    values.setdefault("dir", default_folder())
    values.setdefault("name", re.sub(r"[^A-Za-z0-9.-]|^[.-]+", "", platform.node())[:64] or "node")
    if "pool_bytes" not in values:
        size: PoolSize = default_pool_bytes(values["dir"], machine)
        values["pool_bytes"] = size.bytes
        origins["pool"] = f"default, bound by {size.bound_by}"
    values.setdefault("slots", default_slots(values["pool_bytes"]))
    return NodeConfig(**values, origins=origins)


def _from_flags(flags: Mapping[str, str | None]) -> dict[str, tuple[str, str]]:
    given = {name: text for name, text in flags.items() if text is not None}
    for name in sorted(given.keys() - OPTIONS.keys()):
        raise ConfigError(f"unknown option {name!r} (flag){suggestion(name, OPTIONS)}")
    return {name: (text, f"flag {OPTIONS[name].flag}") for name, text in given.items()}


def _from_environment(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    by_variable = {option.variable: option.name for option in OPTIONS.values()}
    found = {}
    for variable, text in env.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in CLIENT_VARIABLES:
            continue
        if variable in by_variable:
            found[by_variable[variable]] = (text, f"environment {variable}")
        elif not _SERVICE_VARIABLE.fullmatch(variable):
            known = [*by_variable, *CLIENT_VARIABLES]
            raise ConfigError(f"unknown option {variable!r} (environment){suggestion(variable, known)}")
    return found


def _from_file(path: Path | None) -> dict[str, tuple[str, str]]:
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    found = {}
    for name, value in content.items():
        if name not in OPTIONS:
            raise ConfigError(f"unknown option {name!r} (file {path}){suggestion(name, OPTIONS)}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"option {name!r} (file {path}): a text, a number, true or false is wanted")
        found[name] = (str(value).lower() if isinstance(value, bool) else str(value), f"file {path}")
    return found
