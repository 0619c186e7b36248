"""Negative controls: blocks that come back wrong, between the store and the model.

Each is done to copies on the way, by a client that stands before the real one, so that nothing wrong is ever stored and
the code under test is exactly what runs otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = list[npt.NDArray[np.uint8]]
"""Objects as `[layers, 2, bytes]`: keys and values of every layer."""


def _swap_blocks(blocks: Blocks, other: Blocks) -> None:
    """Two blocks in each other's place, keys and values."""
    first, second = _places(blocks)
    blocks[first], blocks[second] = blocks[second], blocks[first]


def _swap_values(blocks: Blocks, other: Blocks) -> None:
    """The values of two blocks in each other's place, their keys where they belong."""
    first, second = _places(blocks)
    values = blocks[first][:, 1].copy()
    blocks[first][:, 1] = blocks[second][:, 1]
    blocks[second][:, 1] = values


def _shift_layer(blocks: Blocks, other: Blocks) -> None:
    """In one block, every layer's KV cache given to the next layer."""
    first, _ = _places(blocks)
    blocks[first] = np.roll(blocks[first], 1, axis=0)


def _other_prompt(blocks: Blocks, other: Blocks) -> None:
    """One block of another prompt, from the same place in it."""
    first, _ = _places(blocks)
    blocks[first] = other[first]


CONTROLS: dict[str, Callable[[Blocks, Blocks], None]] = {
    "two blocks swapped": _swap_blocks,
    "values of two blocks swapped": _swap_values,
    "one layer shifted": _shift_layer,
    "another prompt's block": _other_prompt,
}
"""What is done to a prompt's blocks, given another prompt's as well."""


class TamperingClient:
    """Stands before a client; its `view_many` gives what a control has made of the blocks. All else passes through."""

    def __init__(self, client: Any, control: str, layers: int, other_keys: Sequence[bytes]) -> None:
        self._client, self._change, self._layers = client, CONTROLS[control], layers
        self._other_keys = list(other_keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @contextmanager
    def view_many(self, keys: Sequence[bytes]) -> Iterator[list[npt.NDArray[np.uint8]]]:
        """Yield changed copies of the objects of `keys`."""
        blocks, other = self._copies(keys), self._copies(self._other_keys)
        self._change(blocks, other)
        yield [block.reshape(-1) for block in blocks]

    def _copies(self, keys: Sequence[bytes]) -> Blocks:
        with self._client.view_many(keys) as views:
            return [view.copy().reshape(self._layers, 2, -1) for view in views if view is not None]


def _places(blocks: Blocks) -> tuple[int, int]:
    """Return two places in the prefix, both behind what all prompts share."""
    return len(blocks) * 2 // 3, len(blocks) - 1
