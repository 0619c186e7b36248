"""The one JSON text that a description has, and its digest.

Canonical: keys sorted by code point, no white space, UTF-8 unescaped, strings in Unicode normal form C.
Floating-point numbers are refused, because languages print them differently; write them as strings.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from typing import TypeAlias

Json: TypeAlias = "str | int | bool | list[Json] | tuple[Json, ...] | Mapping[str, Json] | None"

SPACE_DIGEST_BYTES = 16

# The node keeps every description for as long as its objects, and a label of it goes into statistics.
DESCRIPTION_BYTES_MAX = 16 * 1024

# Readers that hold numbers as doubles agree on integers up to here.
INTEGER_MAX = 2**53 - 1

# Far more than a description needs, and far less than the interpreter's stack allows.
DEPTH_MAX = 16


def canonical_json(value: Json) -> bytes:
    """Return the canonical JSON text of `value`.

    Raises ValueError for what has none (a float, a huge integer, a key that isn't text, two keys with one
    normal form) and for a text longer than `DESCRIPTION_BYTES_MAX`; the message says where in `value` it
    lies.
    """
    text = json.dumps(_checked(value, "description", 0), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the description holds a lone surrogate, which UTF-8 can't encode: {error}") from None
    if len(encoded) > DESCRIPTION_BYTES_MAX:
        raise ValueError(
            f"the description takes {len(encoded)} bytes, more than {DESCRIPTION_BYTES_MAX}: "
            "put a digest of long parts into it instead"
        )
    return encoded


def description_digest(canonical: bytes) -> bytes:
    """Return the 16-byte digest of a description's canonical JSON: the first half of its SHA-256.

    Needs no knowledge of the fields, so a node can check a description that a newer client has declared.
    """
    return hashlib.sha256(canonical).digest()[:SPACE_DIGEST_BYTES]


def _checked(value: object, where: str, depth: int) -> Json:
    """Return `value` as plain dicts and lists, its strings normalised; raise ValueError, saying where."""
    if depth > DEPTH_MAX:
        raise ValueError(f"{where} is nested more than {DEPTH_MAX} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, int):
        if abs(value) > INTEGER_MAX:
            raise ValueError(f"{where} is {value}, beyond ±(2**53 - 1): write it as a string")
        return int(value)
    if isinstance(value, list | tuple):
        return [_checked(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        members: dict[str, Json] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, which is not a string")
            normal = unicodedata.normalize("NFC", key)
            if normal in members:
                raise ValueError(f"{where} has two keys that are both {normal!r} in normal form C")
            members[normal] = _checked(item, f"{where}.{key}", depth + 1)
        return members
    if isinstance(value, float):
        raise ValueError(f"{where} is the floating-point number {value!r}: write it as a string")
    raise ValueError(f"{where} is of type {type(value).__name__}, which JSON has no form for")
