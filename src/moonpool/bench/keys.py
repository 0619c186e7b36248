"""Keys as engines build them: 16 bytes that all of a key space share, then 32 of a digest."""

from __future__ import annotations

from random import Random

KEY_BYTES = 48


class Keys:
    """Endless 48-byte keys, reproducible from `seed`; `name` keeps measurements apart."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self._space = name.encode()[:16].ljust(16, b".")
        self._random = Random(seed)

    def take(self, count: int) -> list[bytes]:
        """The next `count` keys, never given before."""
        digests = self._random.randbytes(32 * count)
        return [self._space + digests[32 * i : 32 * i + 32] for i in range(count)]
