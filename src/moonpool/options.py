"""The node's options: each one's name, the field it sets, and how its text is read."""

from __future__ import annotations

import difflib
import grp
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.capacity import PAGE_BYTES, POOL_BYTES_MIN
from moonpool.folder.layout import MODE_NAMES
from moonpool.sizes import format_bytes, parse_bytes, parse_duration

ENVIRONMENT_PREFIX = "MOONPOOL_"
RESERVE_WAIT_MAX_S = 5.0  # longer, and an engine's step would hang on a store that is full
LOG_LEVELS = ("debug", "info", "warning", "error")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Address(NamedTuple):
    """A TCP address to listen at; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name (in flags with dashes), the field of `NodeConfig` it sets, and how its text is read."""

    name: str
    field: str
    parse: Callable[[str], Any]
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def parse_folder(text: str) -> Path:
    if not text.strip():
        raise ValueError("the name of a folder is missing")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _pool_bytes(text: str) -> int:
    size = parse_bytes(text)
    if size < POOL_BYTES_MIN:
        raise ValueError(f"{text!r} is too small: a pool has at least {format_bytes(POOL_BYTES_MIN, binary=True)}")
    return -(-size // PAGE_BYTES) * PAGE_BYTES  # memory comes in pages; "500MB" isn't a whole number of them


def _address(text: str) -> Address | None:
    if text.strip().lower() in ("", "none", "off"):
        return None
    host, separator, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (separator and not host) or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not an address: write host:port, such as 127.0.0.1:9400, or none")
    return Address(host or "127.0.0.1", int(port))


def _folder_mode(text: str) -> int:
    try:
        mode = int(text.removeprefix("0o"), 8)
    except ValueError:
        mode = -1
    # Whoever may enter the folder may use the node: its files are readable and writable for the same people.
    if mode not in (0o700, 0o750, 0o770):
        raise ValueError(
            f"{text!r} is not a mode for the folder: 0700 is for its user alone, 0750 or 0770 for a group as well; "
            "the owner has all rights and strangers may not write"
        )
    return mode


def _group(text: str) -> int | None:
    if text.strip().lower() in ("", "none"):
        return None
    if text.isdecimal():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        known = [entry.gr_name for entry in grp.getgrall()]
        raise ValueError(f"there is no group {text!r}{suggestion(text, known)}") from None


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is not a name: up to 64 letters, digits, '.', '_' and '-', a letter or digit first")
    return text


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return word in _TRUE


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"{text!r} is none of {', '.join(words)}{suggestion(word, words)}")
        return word

    return parse


def _duration(*, most_s: float = float("inf")) -> Callable[[str], float]:
    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if seconds > most_s:
            raise ValueError(f"{text!r} is too long: at most {most_s:g} s")
        return seconds

    return parse


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip().replace("_", "").replace(",", "")
        if not digits.isdecimal() or not least <= int(digits) <= most:
            raise ValueError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(digits)

    return parse


def _nice(text: str) -> int:
    try:
        nice = int(text)
    except ValueError:
        nice = 99
    if not -20 <= nice <= 19:
        raise ValueError(f"{text!r} is not a priority from -20 (first) to 19 (last)")
    return nice


def _share(text: str) -> float:
    number, scale = (text.strip()[:-1], 100) if text.strip().endswith("%") else (text, 1)
    try:
        share = float(number) / scale
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not a share: write a number from 0 to 1, or a percentage such as 10%")
    return share


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("dir", "dir", parse_folder, "the folder shared with clients"),
        Option("pool", "pool_bytes", _pool_bytes, "the pool's size, such as 48GiB"),
        Option("slots", "slots", _count(1024, 1 << 26), "how many objects the table has room for"),
        Option("metrics", "metrics", _address, "where to serve metrics and health, such as 127.0.0.1:9400"),
        Option("folder_mode", "folder_mode", _folder_mode, "the folder's permissions, in octal"),
        Option("group", "group", _group, "the group that owns the folder, by name or number"),
        Option("reserve_wait", "reserve_wait_s", _duration(most_s=RESERVE_WAIT_MAX_S), "how long to wait for space"),
        Option("pin_share", "pin_share", _share, "the share of the pool that pins may hold"),
        Option("checksum_share", "checksum_share", _share, "the share of one core that checksums may use"),
        Option("nice", "nice", _nice, "the node's priority, where the system allows it"),
        Option("scrub_interval", "scrub_interval_s", _duration(), "time for one pass of the scrub; 0 = none"),
        Option("reconnect_grace", "reconnect_grace_s", _duration(), "how long a restarted node waits for clients"),
        Option("log_level", "log_level", _one_of(LOG_LEVELS), "how much to log"),
        Option("mode", "mode", _one_of(MODE_NAMES), "the operator's switch at the start"),
        Option("name", "name", _name, "the node's name in metrics and logs"),
        Option("feed_events", "feed_events", _count(1024, 1 << 24), "how many changes the feed keeps"),
        Option("prefault", "prefault", _truth, "touch the pool's memory in the background"),
    )
}


def suggestion(word: str, known: Iterable[str]) -> str:
    """What the writer may have meant: "; did you mean 'x'?", or the choice where nothing is near."""
    choice = sorted(known)
    near = difflib.get_close_matches(word.replace("-", "_"), choice, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(choice)}" if len(choice) <= 40 else ""
