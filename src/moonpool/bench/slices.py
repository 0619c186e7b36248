"""Memory to copy from and to: touched, and each slice unused for long enough that no cache still has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

UNUSED_BYTES = 1_000_000_000
"""Traffic after which a slice counts as unused: some thirty times the last-level cache of a large server core."""


@dataclass(slots=True)
class Traffic:
    """Bytes copied so far in this process, each copy counted once."""

    copied_bytes: int = 0
    least_gap_bytes: int = 1 << 62
    """The least traffic that lay between two uses of a slice."""

    def add(self, count: int) -> None:
        self.copied_bytes += count

    def used_again(self, last_bytes: int) -> None:
        """A slice is used again that was last used when `copied_bytes` was `last_bytes`."""
        self.least_gap_bytes = min(self.least_gap_bytes, self.copied_bytes - last_bytes)


class Ring:
    """A heap array cut into pieces of `piece_bytes`, dealt out in turn, so that each is the one unused for longest.

    Filled on creation (which touches it) with random bytes from `seed`, or with one byte where `seed` is None.
    """

    def __init__(self, traffic: Traffic, total_bytes: int, piece_bytes: int, seed: int | None) -> None:
        self.piece_bytes = piece_bytes
        self.count = max(1, total_bytes // piece_bytes)
        size = self.count * piece_bytes
        if seed is None:
            self._array = np.full(size, 0xAA, np.uint8)
        else:
            words = np.random.default_rng(seed).integers(0, 1 << 64, -(-size // 8), np.uint64)
            self._array = words.view(np.uint8)[:size]
        self.checksums: list[int] = []
        """xxh3 of each piece as filled, computed by `sum_up`."""
        self._traffic = traffic
        self._last = [-1] * self.count
        self._next = 0

    def sum_up(self) -> Ring:
        """Compute `checksums`; for rings that are only read."""
        self.checksums = [xxhash.xxh3_64_intdigest(self.piece(i).data) for i in range(self.count)]
        return self

    def piece(self, index: int) -> Bytes:
        start = index * self.piece_bytes
        return self._array[start : start + self.piece_bytes]

    def take(self, count: int) -> list[int]:
        """The next `count` pieces, by index; the caller copies them now and tells `Traffic` of it afterwards."""
        found = [(self._next + i) % self.count for i in range(count)]
        self._next = (self._next + count) % self.count
        now = self._traffic.copied_bytes
        end = now + count * self.piece_bytes
        for index in found:
            if self._last[index] >= 0:
                self._traffic.used_again(self._last[index])
            self._last[index] = end
        return found


def checksum_of(array: Bytes) -> int:
    """xxh3 of an array's bytes."""
    return xxhash.xxh3_64_intdigest(array.data)
