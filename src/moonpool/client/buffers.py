"""What callers hand in: keys as bytes, values and targets as flat bytes, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from moonpool.errors import InvalidRequest

Buffer = Any
"""Anything with the buffer protocol (bytes, bytearray, mmap, numpy array), or a torch tensor on the CPU."""


def encode_keys(keys: Sequence[str | bytes]) -> list[bytes]:
    """Keys as bytes; `str` becomes UTF-8. Raises `InvalidRequest` for anything else."""
    found = list(keys)
    if all(type(key) is bytes for key in found):
        return found  # type: ignore[return-value]
    return [encode_key(key) for key in found]


def encode_key(key: str | bytes) -> bytes:
    """One key as bytes."""
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise InvalidRequest(f"a key is str or bytes, not {type(key).__name__}")


def as_bytes(value: Buffer) -> memoryview:
    """A value as a flat view of its bytes; nothing is copied. Valid as long as the value's memory is.

    Raises `InvalidRequest` where it is no buffer or not contiguous.
    """
    value = _from_torch(value)
    try:
        view = memoryview(value)
    except TypeError as error:
        raise InvalidRequest(f"{type(value).__name__} has no buffer protocol; pass bytes or an array") from error
    if not view.c_contiguous:
        raise InvalidRequest("the buffer is not C-contiguous; pass a contiguous copy")
    return view if view.format == "B" and view.ndim == 1 else _flat(view, value)


def as_target(target: Buffer) -> memoryview:
    """A target as a flat writable view of its bytes; nothing is copied. Raises `InvalidRequest` where it can't be."""
    view = as_bytes(target)
    if view.readonly:
        raise InvalidRequest(f"the target ({type(target).__name__}) is read-only; pass a bytearray or a writable array")
    return view


def _flat(view: memoryview, value: Buffer) -> memoryview:
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError:
        # Formats that memoryview can't cast (structured, half floats on some versions): numpy can.
        return np.asarray(value).reshape(-1).view(np.uint8).data


def _from_torch(value: Buffer) -> Buffer:
    """A CPU tensor as a numpy array of bytes over the same memory; other values as they are."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu":
        raise InvalidRequest(f"the tensor is on {value.device}; copy it to the CPU first")
    if not value.is_contiguous():
        raise InvalidRequest("the tensor is not contiguous; pass tensor.contiguous()")
    return value.detach().reshape(-1).view(torch.uint8).numpy()
