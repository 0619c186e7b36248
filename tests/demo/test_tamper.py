"""Every control does to the blocks just what it says, and leaves the store as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from moonpool.demo.tamper import CONTROLS, TamperingClient

LAYERS, BLOCKS = 3, 6
KEYS = [b"mine%d" % index for index in range(BLOCKS)]
OTHERS = [b"other%d" % index for index in range(BLOCKS)]


class Stored:
    """As much of a client as a control needs: read-only views of what is stored."""

    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        self.objects = {
            key: draw.integers(0, 256, LAYERS * 2 * 8, dtype=np.uint8) for key in [*KEYS, *OTHERS]
        }
        for body in self.objects.values():
            body.flags.writeable = False

    @contextmanager
    def view_many(self, keys: Sequence[bytes]) -> Iterator[list[Any]]:
        yield [self.objects[key] for key in keys]

    def prefix_length(self, keys: Sequence[bytes]) -> int:
        return len(keys)


def through(control: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return this prompt's blocks, the other's, and what comes through the control: `[blocks, layers, 2, 8]` each."""
    stored = Stored()
    client = TamperingClient(stored, control, LAYERS, OTHERS)
    assert client.prefix_length(KEYS) == BLOCKS
    with client.view_many(KEYS) as views:
        given = np.stack([view.reshape(LAYERS, 2, 8) for view in views])
    mine, other = (
        np.stack([stored.objects[key].reshape(LAYERS, 2, 8) for key in keys]) for keys in (KEYS, OTHERS)
    )
    return mine, other, given


def test_two_blocks_swapped() -> None:
    mine, _, given = through("two blocks swapped")
    assert np.array_equal(given[[0, 1, 2, 3, 5, 4]], mine)


def test_values_swapped_leaves_the_keys() -> None:
    mine, _, given = through("values of two blocks swapped")
    assert np.array_equal(given[:, :, 0], mine[:, :, 0])
    assert np.array_equal(given[[0, 1, 2, 3, 5, 4], :, 1], mine[:, :, 1])


def test_one_layer_shifted_in_one_block() -> None:
    mine, _, given = through("one layer shifted")
    assert np.array_equal(given[4, [1, 2, 0]], mine[4])
    assert np.array_equal(np.delete(given, 4, 0), np.delete(mine, 4, 0))


def test_another_prompts_block() -> None:
    mine, other, given = through("another prompt's block")
    assert np.array_equal(given[4], other[4])
    assert np.array_equal(np.delete(given, 4, 0), np.delete(mine, 4, 0))


@pytest.mark.parametrize("control", CONTROLS)
def test_what_comes_through_is_never_right(control: str) -> None:
    mine, _, given = through(control)
    assert not np.array_equal(mine, given)
