"""A KV cache in this process's memory, and what objects of it should look like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonpool.gpu.mover import SKIP, Plane, Region, Transfer

Bytes = npt.NDArray[np.uint8]
Shapes = Sequence[tuple[Sequence[int], int, int]]
"""For each region: the bytes of a piece of each plane, the blocks of an object, and the blocks that there are."""


class Cache:
    """Regions of planes with random bytes."""

    def __init__(self, shapes: Shapes, seed: int, gap: int = 32) -> None:
        random = np.random.default_rng(seed)
        self.planes: list[list[Bytes]] = []
        regions = []
        for pieces, blocks_per_object, blocks in shapes:
            arrays = [random.integers(0, 256, (blocks, piece + gap), np.uint8) for piece in pieces]
            self.planes.append(arrays)
            planes = tuple(
                Plane(array.ctypes.data, piece + gap, piece) for array, piece in zip(arrays, pieces, strict=True)
            )
            regions.append(Region(planes, blocks_per_object))
        self.regions = tuple(regions)

    def copy(self) -> list[list[Bytes]]:
        return [[array.copy() for array in arrays] for arrays in self.planes]

    def same(self, expected: list[list[Bytes]]) -> bool:
        """Every byte, those between the blocks too."""
        return all(
            np.array_equal(array, wanted)
            for arrays, others in zip(self.planes, expected, strict=True)
            for array, wanted in zip(arrays, others, strict=True)
        )

    def load(self, planes: list[list[Bytes]], pool: Bytes, transfer: Transfer) -> None:
        """What a load does, the slow and plain way."""
        self._move(planes, pool, transfer, load=True)

    def store(self, planes: list[list[Bytes]], pool: Bytes, transfer: Transfer) -> None:
        self._move(planes, pool, transfer, load=False)

    def _move(self, planes: list[list[Bytes]], pool: Bytes, transfer: Transfer, *, load: bool) -> None:
        at = transfer.offset
        for plane, array in zip(self.regions[transfer.region].planes, planes[transfer.region], strict=True):
            for block in transfer.blocks:
                if block != SKIP:
                    here, there = pool[at : at + plane.piece_bytes], array[block, : plane.piece_bytes]
                    if load:
                        there[:] = here
                    else:
                        here[:] = there
                at += plane.piece_bytes
