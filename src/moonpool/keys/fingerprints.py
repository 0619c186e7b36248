"""The 64-bit fingerprint of a key, by which the shared table is addressed.

A key of exactly 48 bytes (key space digest and block digest) is what engines send by the hundred, so it has
a form that numpy computes for a whole batch at once; keys of any other length take xxh3. A fingerprint is a
hint: two keys may share one, and whoever holds the object compares the whole key. It is part of the table's
layout, though: node and clients must agree on it, so a change of it is a change of the table layout version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt
import xxhash

PAIRED_KEY_BYTES = 48
"""Length of a key made of a key space digest (16 bytes) and a block digest (32 bytes)."""

_WORDS = 12
# Words of 32 bits under multipliers of 64 bits, not 64 under 64: modulo 2**64 the top bits of a full-width
# word reach only the top bits of the sum, so that keys differing in the last bytes of two words would
# collide. It costs no more in numpy.
_unpack_words = Struct(f"<{_WORDS}I").unpack

_MASK = (1 << 64) - 1
_FOLD_BITS = 32
_LAST_FOLD_BITS = 29


def _constant(index: int) -> int:
    """Return odd constant `index`, drawn from SHA-256 of a fixed text so that nobody chose it."""
    return int.from_bytes(hashlib.sha256(f"moonpool fingerprint {index}".encode()).digest()[:8], "little") | 1


MULTIPLIERS = tuple(_constant(index) for index in range(_WORDS))
FINAL_MULTIPLIER = _constant(_WORDS)
XXH3_SEED = _constant(_WORDS + 1)

_M0, _M1, _M2, _M3, _M4, _M5, _M6, _M7, _M8, _M9, _M10, _M11 = MULTIPLIERS
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)
_FINAL = np.uint64(FINAL_MULTIPLIER)
_FOLD = np.uint64(_FOLD_BITS)
_LAST_FOLD = np.uint64(_LAST_FOLD_BITS)

# Below this many keys numpy's fixed cost of about 4 us exceeds that of the scalar form, 0.7 us a key.
_VECTOR_KEYS_MIN = 6


def fingerprint(key: bytes) -> int:
    """Return the fingerprint of `key`, an unsigned 64-bit integer; any value may occur, zero included."""
    if len(key) != PAIRED_KEY_BYTES:
        return xxhash.xxh3_64_intdigest(key, XXH3_SEED)
    # Written out, because a loop over the twelve words takes three times as long.
    a, b, c, d, e, f, g, h, i, j, k, m = _unpack_words(key)
    x: int = (
        a * _M0 + b * _M1 + c * _M2 + d * _M3 + e * _M4 + f * _M5
        + g * _M6 + h * _M7 + i * _M8 + j * _M9 + k * _M10 + m * _M11
    ) & _MASK  # fmt: skip
    x ^= x >> _FOLD_BITS
    x = (x * FINAL_MULTIPLIER) & _MASK
    return x ^ (x >> _LAST_FOLD_BITS)


def fingerprints(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the fingerprints of `keys` in their order, a new uint64 array of shape (len(keys),).

    The same values as `fingerprint` gives one by one, for keys of any mixture of lengths.
    """
    count = len(keys)
    if count >= _VECTOR_KEYS_MIN and list(map(len, keys)).count(PAIRED_KEY_BYTES) == count:
        return fingerprints48(b"".join(keys), count)
    return np.fromiter(map(fingerprint, keys), dtype=np.uint64, count=count)


def fingerprints48(joined: bytes | bytearray | memoryview, count: int) -> npt.NDArray[np.uint64]:
    """Return the fingerprints of `count` keys of 48 bytes lying end to end in `joined`, a new uint64 array.

    `joined` is only read. Raises ValueError when it isn't `count` * 48 bytes long.
    """
    if len(joined) != count * PAIRED_KEY_BYTES:
        raise ValueError(f"{count} keys of {PAIRED_KEY_BYTES} bytes don't lie in {len(joined)} bytes")
    words = np.frombuffer(joined, dtype="<u4").reshape(count, _WORDS)
    x: npt.NDArray[np.uint64] = words @ _MULTIPLIERS
    x ^= x >> _FOLD
    x *= _FINAL
    x ^= x >> _LAST_FOLD
    return x
