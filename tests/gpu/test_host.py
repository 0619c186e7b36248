"""The host's mover moves the same bytes as the plain way, in the background, and says what fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from moonpool.gpu.host import HostMover
from moonpool.gpu.mover import SKIP, MoverFailed, Transfer
from moonpool.testing.node import eventually
from tests.gpu.caches import Bytes, Cache

SHAPES = [((64, 32), 4, 64), ((4096, 4096), 3, 32)]
POOL_BYTES = 1 << 20


class Setup:
    def __init__(self, seed: int) -> None:
        self.cache = Cache(SHAPES, seed)
        self.pool: Bytes = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)
        self.mover = HostMover(self.pool, self.cache.regions)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup(1)
    yield setup
    setup.mover.close()


@pytest.mark.parametrize("seed", range(10))
def test_loads_and_stores_move_the_wanted_blocks_and_nothing_else(seed: int) -> None:
    """In the order of submission: later batches use what earlier ones moved."""
    setup, random = Setup(seed), Random(seed)
    planes, pool = setup.cache.copy(), setup.pool.copy()
    tickets = []
    for _ in range(8):
        number = random.randrange(2)
        region = setup.cache.regions[number]
        blocks = random.sample(range(SHAPES[number][2]), region.blocks_per_object)
        if random.random() < 0.3:
            blocks = list(range(5, 5 + region.blocks_per_object))
        if random.random() < 0.4:
            blocks[random.randrange(len(blocks))] = SKIP
        transfer = Transfer(random.randrange(POOL_BYTES - region.object_bytes), number, tuple(blocks))
        load = random.random() < 0.5
        (setup.cache.load if load else setup.cache.store)(planes, pool, transfer)
        tickets.append((setup.mover.load if load else setup.mover.store)([transfer]))
    assert all(ticket.wait(10) for ticket in tickets)
    assert [ticket.error for ticket in tickets] == [None] * 8
    assert setup.cache.same(planes)
    assert np.array_equal(setup.pool, pool)
    setup.mover.close()


def test_an_object_of_nothing_but_skipped_blocks_moves_nothing(setup: Setup) -> None:
    planes, pool = setup.cache.copy(), setup.pool.copy()
    for ticket in (setup.mover.load([Transfer(0, 0, (SKIP,) * 4)]), setup.mover.store([Transfer(0, 0, (SKIP,) * 4)])):
        assert ticket.wait(10)
    assert setup.cache.same(planes)
    assert np.array_equal(setup.pool, pool)


def test_submitting_returns_while_the_copy_waits_its_turn(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    copy = setup.mover._copy
    monkeypatch.setattr(setup.mover, "_copy", lambda *args, **more: copy(*args, **more) if gate.wait(10) else None)
    ticket = setup.mover.load([Transfer(0, 0, (1, 2, 3, 4))])
    assert not ticket.done()
    assert not ticket.read()
    assert not ticket.wait(0.001)
    gate.set()
    assert ticket.wait(10)
    assert ticket.read()


def test_closing_ends_what_waits_with_an_error(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Event()

    def copy(*args: object, **more: object) -> None:
        begun.set()
        gate.wait(10)

    monkeypatch.setattr(setup.mover, "_copy", copy)
    tickets = [setup.mover.load([Transfer(0, 0, (1, 2, 3, 4))] * 2) for _ in range(3)]
    assert begun.wait(10)
    closing = threading.Thread(target=setup.mover.close)
    closing.start()
    eventually(lambda: setup.mover._stopped is not None, "the mover is closing")
    assert not tickets[0].done()
    gate.set()
    closing.join(10)
    assert [ticket.wait(0) for ticket in tickets] == [True] * 3
    assert [ticket.error for ticket in tickets] == ["the mover is closed"] * 3
    with pytest.raises(MoverFailed, match="closed"):
        setup.mover.load([])


def test_what_a_copy_meets_is_the_tickets_error_and_the_movers_end(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("as told")

    monkeypatch.setattr(setup.mover, "_copy", fail)
    ticket = setup.mover.store([Transfer(0, 0, (1, 2, 3, 4))])
    assert ticket.wait(10)
    assert ticket.error == "the mover has failed: as told"
    with pytest.raises(MoverFailed, match="as told"):
        setup.mover.load([])


def test_what_doesnt_fit_and_a_store_into_a_read_only_pool_are_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match="isn't inside the pool"):
        setup.mover.load([Transfer(POOL_BYTES, 0, (1, 2, 3, 4))])
    setup.pool.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        setup.mover.store([])
