"""What is kept beside each stored object: enough to tell routers which prompt it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

NOTE_BYTES_MAX = 1024
"""What the pool keeps of a caller's own beside an object."""
TOKEN_BYTES = 3
"""Of one token id: vocabularies have fewer than 16 million entries."""


class Note(msgspec.Struct, array_like=True, frozen=True):
    """One object's place in a prompt."""

    parent: bytes
    """Digest of the object before it in the chain, empty for the first."""
    packed: bytes
    """The object's token ids, little-endian, three bytes each; empty where they don't fit."""
    adapter: str = ""
    """The LoRA adapter's name, "" for the base model."""

    @property
    def tokens(self) -> list[int]:
        wide = np.zeros((len(self.packed) // TOKEN_BYTES, 4), np.uint8)
        wide[:, :TOKEN_BYTES] = np.frombuffer(self.packed, np.uint8).reshape(-1, TOKEN_BYTES)
        found: list[int] = wide.view("<u4").reshape(-1).tolist()
        return found


def encode_note(parent: bytes, tokens: Sequence[int], adapter: str = "") -> bytes:
    """A note's bytes, at most `NOTE_BYTES_MAX`: without the tokens where they are too many, or aren't all known."""
    packed = b""
    if tokens and TOKEN_BYTES * len(tokens) <= NOTE_BYTES_MAX - 128 and max(tokens) < 1 << 8 * TOKEN_BYTES:
        packed = np.array(tokens, "<u4").view(np.uint8).reshape(-1, 4)[:, :TOKEN_BYTES].tobytes()
    note = msgspec.msgpack.encode(Note(parent, packed, adapter[:64]))
    return note if len(note) <= NOTE_BYTES_MAX else msgspec.msgpack.encode(Note(parent, b""))


def decode_note(data: bytes) -> Note | None:
    """The note, or None where these bytes are none."""
    try:
        return msgspec.msgpack.decode(data, type=Note)
    except msgspec.MsgspecError:
        return None
