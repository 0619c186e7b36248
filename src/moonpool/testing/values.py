"""Values that are a function of their key, generation and size, so that any wrong byte shows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

HEAD_BYTES = 16
"""Generation and size, at the start of each value: so a reader needs to know neither beforehand."""

_STRIDE = np.uint64(0x9E37_79B9_7F4A_7C15)


class WrongBytes(AssertionError):
    """A value is not what its key, generation and size make it."""


def value_of(key: str | bytes, generation: int, size: int) -> npt.NDArray[np.uint8]:
    """The `size` bytes (at least 16) that belong to this generation of this key, as a new array.

    Every 8 bytes depend on the key, the generation and their place, so that bytes of another object, of an earlier
    generation, or moved by a few bytes differ.
    """
    if size < HEAD_BYTES:
        raise ValueError(f"a value of {size} bytes has no room for its head of {HEAD_BYTES}")
    name = key.encode() if isinstance(key, str) else bytes(key)
    seed = np.uint64(xxhash.xxh3_64_intdigest(name, seed=generation))
    words = np.arange(-(-size // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        words *= _STRIDE
        words += seed
    words ^= words >> np.uint64(29)
    words[:2] = generation, size
    return words.view(np.uint8)[:size]


def generation_of(key: str | bytes, data: object) -> int:
    """Check that `data` (any buffer) is a value of `key`, and return which generation it is.

    Raises `WrongBytes` with the place of the first byte that differs.
    """
    found = np.frombuffer(data, np.uint8)  # type: ignore[call-overload]
    if len(found) < HEAD_BYTES:
        raise WrongBytes(f"{key!r}: {len(found)} bytes are no value")
    generation, size = (int(word) for word in np.frombuffer(found[:HEAD_BYTES].tobytes(), np.uint64))
    if size != len(found):
        raise WrongBytes(f"{key!r}: {len(found)} bytes, whose head says generation {generation} of {size} bytes")
    wrong = np.flatnonzero(found != value_of(key, generation, size))
    if wrong.size:
        raise WrongBytes(
            f"{key!r}: {wrong.size} of {size} bytes differ from generation {generation}, the first at {wrong[0]}"
        )
    return generation
