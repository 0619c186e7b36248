"""Stored objects as text: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from moonpool.cli.base import key_text
from moonpool.sizes import format_bytes

if TYPE_CHECKING:
    from moonpool.status import Status
    from moonpool.wire.messages import ObjectStat


READING_OFF = "reading is switched off; 'moonpool mode on' switches it on"


def why(status: Status, detail: str | None) -> str:
    """What a status says, in words, with its detail where there is one."""
    return f"{status.name.lower().replace('_', ' ')}{f' ({detail})' if detail else ''}"


def listed(keys: list[bytes]) -> str:
    """Keys as they may stand in one line: the first five and how many more."""
    shown = ", ".join(repr(key_text(key)) for key in keys[:5])
    return f"{shown} and {len(keys) - 5} more" if len(keys) > 5 else shown


def missing(keys: list[bytes]) -> str:
    """The line for keys that nothing is stored under."""
    return f"not stored: {listed(keys)}"


def time_text(seconds: float) -> str:
    """Seconds since 1970 as a date and time in UTC; a dash for none."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else "-"


def pin_text(entry: ObjectStat) -> str:
    """The kind of pin in a word; a dash for none."""
    return ("-", "soft", "hard")[entry.pin]


def rows(entry: ObjectStat) -> Iterable[tuple[str, str]]:
    """All that is known of an object, as names and texts."""
    yield "key", key_text(entry.key)
    yield "size", f"{entry.size} ({format_bytes(entry.size)})"
    yield "space", str(entry.space)
    yield "created", time_text(entry.created)
    yield "touched", time_text(entry.touched)
    yield "expires", time_text(entry.expiry)
    yield "pin", pin_text(entry) + (f" until {time_text(entry.pin_expiry)}" if entry.pin_expiry else "")
    yield "readers", str(entry.pins)
    yield "priority", str(entry.priority)
    yield "checksum", f"{entry.checksum:016x}" if entry.has_checksum else "not yet"
    yield "writer", entry.writer or "-"
    if entry.metadata:
        yield "metadata", key_text(entry.metadata)


def as_json(entry: ObjectStat) -> dict[str, Any]:
    """An entry with its bytes as text that `key_from` reads back."""
    return {
        name: key_text(value) if isinstance(value, bytes) else value
        for name in entry.__struct_fields__
        for value in (getattr(entry, name),)
    }
