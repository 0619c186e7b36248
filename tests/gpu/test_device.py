"""The device's mover over a CUDA whose streams run in every order that it allows: the bytes arrive, nothing is touched
too early, nothing blocks, and what fails says so. Orders are drawn from seeds."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from moonpool.gpu import lane as lanes
from moonpool.gpu import plan
from moonpool.gpu.device import DeviceMover
from moonpool.gpu.host import HostMover
from moonpool.gpu.mover import SKIP, Mover, MoverFailed, Ticket, Transfer
from moonpool.gpu.tickets import DeviceTicket
from moonpool.testing.node import eventually
from tests.gpu.caches import Cache, Shapes
from tests.gpu.fake_cuda import FakeDevice, FakePool

SHAPES = [((64, 64, 16), 4, 96), ((128,), 2, 48), ((4096,), 2, 16)]
"""One group of small pieces, one of another shape, one whose blocks are long enough to be copied directly."""
POOL_BYTES = 1 << 20
STAGING_BYTES = 2 * 4 * 2048
CHUNK_BYTES = 3 * 4096


@pytest.fixture(autouse=True)
def short_pieces_count_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is copied directly needs no megabytes."""
    for name in ("DIRECT_LOAD_BYTES_MIN", "DIRECT_STORE_BYTES_MIN"):
        monkeypatch.setattr(plan, name, 4096)
    monkeypatch.setattr(lanes, "STEPS_MAX", 32)  # as much as the test's pool has objects for
    monkeypatch.setattr(lanes, "OPERATIONS_MAX", 480)


class Setup:
    """A cache, a pool and a mover between them."""

    def __init__(self, seed: int, *, shapes: Shapes = SHAPES, pool_bytes: int = POOL_BYTES):
        self.random = Random(seed)
        self.cache = Cache(shapes, seed)
        self.pool = FakePool(pool_bytes, CHUNK_BYTES, self.random)
        self.bytes = self.pool.mapping.bytes
        self.bytes[:] = np.random.default_rng(seed + 1).integers(0, 256, pool_bytes, np.uint8)
        self.cuda = self.pool.cuda
        self.device = FakeDevice(self.cuda)
        self.mover = DeviceMover(self.pool.mapping, self.cache.regions, self.pool, self.device, STAGING_BYTES)
        self._free = [list(range(blocks)) for _, _, blocks in shapes]
        self._at = 0

    def transfer(self, region: int, *, skips: float = 0.0, adjacent: bool = False) -> Transfer:
        """An object of its own extent and, while there are any, blocks of its own."""
        found = self.cache.regions[region]
        free = self._free[region]
        blocks = [
            SKIP if self.random.random() < skips else free.pop(self.random.randrange(len(free)))
            for _ in range(found.blocks_per_object)
        ]
        offset = self._at + (0 if adjacent else self.random.choice((0, 16, 4096)))
        self._at = offset + found.object_bytes
        return Transfer(offset, region, tuple(blocks))

    def finish(self, ticket: DeviceTicket) -> None:
        assert ticket.wait(20)
        assert ticket.error is None


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    setup = Setup(5)
    yield setup
    setup.cuda.frozen = setup.cuda.dead = False
    setup.mover.close()


@pytest.mark.parametrize("seed", range(30))
def test_batches_in_both_directions_at_once_move_their_bytes_and_no_others(seed: int) -> None:
    setup = Setup(seed)
    expected, pool = setup.cache.copy(), setup.bytes.copy()
    tickets = []
    for _ in range(6):
        load = setup.random.random() < 0.5
        batch = [setup.transfer(region, skips=0.2) for region in (0, 0, 1, 0) if setup.random.random() < 0.8]
        if setup.random.random() < 0.4:
            batch.append(setup.transfer(2, skips=0.3))
        for transfer in batch:
            (setup.cache.load if load else setup.cache.store)(expected, pool, transfer)
        submit = setup.mover.load if load else setup.mover.store
        tickets.append(submit(batch, after=setup.mover.mark() if setup.random.random() < 0.5 else None))
        setup.cuda.run(setup.random.randrange(20))
    setup.random.shuffle(tickets)
    for ticket in tickets:
        setup.finish(ticket)
    assert setup.cache.same(expected)
    assert np.array_equal(setup.bytes, pool)
    setup.mover.close()


@pytest.mark.parametrize("seed", range(10))
def test_slots_ids_and_events_used_many_times_over_stay_apart(seed: int) -> None:
    """Some 90 slots of work in batches of one region, all submitted at once: more than there are slots, rows of ids
    and events, several times."""
    setup = Setup(seed, shapes=[((64, 64), 8, 48)])
    expected, pool = setup.cache.copy(), setup.bytes.copy()
    tickets = []
    for number in range(90):
        blocks = tuple(setup.random.sample(range(48), 8))
        transfer = Transfer(number * 1024, 0, blocks)
        setup.cache.store(expected, pool, transfer)
        tickets.append(setup.mover.store([transfer]))
    for ticket in tickets:
        setup.finish(ticket)
    assert np.array_equal(setup.bytes, pool)
    assert setup.cache.same(expected)
    setup.mover.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_store_reads_blocks_only_after_its_mark_and_not_any_more_once_read(seed: int) -> None:
    setup = Setup(seed)
    transfers = [setup.transfer(seed % 3), setup.transfer(seed % 3)]
    fresh = Cache(SHAPES, seed + 100)
    planes = setup.cache.planes

    def write(source: list[list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]) -> None:
        for arrays, others in zip(planes, source, strict=True):
            for array, other in zip(arrays, others, strict=True):
                array[:] = other

    expected = setup.bytes.copy()
    setup.cuda.submit(setup.device.engine, lambda: write(fresh.planes))  # the forward, still running
    for transfer in transfers:
        setup.cache.store(fresh.copy(), expected, transfer)
    ticket = setup.mover.store(transfers, after=setup.mover.mark())
    eventually(ticket.read, "the blocks are read")
    write([[np.zeros_like(array) for array in arrays] for arrays in planes])  # reused by another request
    setup.finish(ticket)
    assert np.array_equal(setup.bytes, expected)
    setup.mover.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_load_writes_blocks_only_after_its_mark_and_reads_no_extent_once_read(seed: int) -> None:
    setup = Setup(seed)
    transfers = [setup.transfer(seed % 3), setup.transfer(seed % 3)]
    seen: list[bool] = []
    before = setup.cache.copy()
    expected = setup.cache.copy()
    for transfer in transfers:
        setup.cache.load(expected, setup.bytes, transfer)
    # The engine's stream still reads what the blocks held before.
    setup.cuda.submit(setup.device.engine, lambda: seen.append(setup.cache.same(before)))
    ticket = setup.mover.load(transfers, after=setup.mover.mark())
    eventually(ticket.read, "the extents are read")
    setup.bytes[:] = 0
    setup.finish(ticket)
    assert seen == [True]
    assert setup.cache.same(expected)
    setup.mover.close()


def test_loads_of_neighbouring_extents_are_one_copy_up_to_the_border_of_a_chunk(setup: Setup) -> None:
    region = setup.cache.regions[0]
    at = CHUNK_BYTES - region.object_bytes
    blocks = [tuple(range(4 * i, 4 * i + 4)) for i in range(3)]
    setup.finish(setup.mover.load([Transfer(at + i * region.object_bytes, 0, blocks[i]) for i in range(3)]))
    assert setup.cuda.copies == 1 + 2  # the block ids; the first object, and the other two across the border


def test_a_step_takes_few_operations_of_the_device(setup: Setup) -> None:
    setup.cuda.frozen = True
    setup.mover.load([setup.transfer(0, adjacent=True) for _ in range(3)])
    # Ids, copy, filled; filled awaited, two kernels (pieces of 64 and of 16), ended; the wires joined; the ticket's two
    # events and wait.
    assert setup.cuda.pending == 3 + 4 + 2 + 3


def test_a_ticket_of_nothing_is_done(setup: Setup) -> None:
    setup.finish(setup.mover.load([]))
    setup.finish(setup.mover.store([Transfer(0, 0, (SKIP,) * 4)]))
    assert not setup.cuda.copies


def test_what_doesnt_fit_in_flight_waits_and_is_submitted_by_the_helper(setup: Setup) -> None:
    """The caller returns at once with the device not moving at all, and never comes back: the helper goes on."""
    setup.cuda.frozen = True
    region = setup.cache.regions[1]
    count = 3 * lanes.STEPS_MAX * (STAGING_BYTES // 2 // lanes.SLOTS // region.object_bytes)
    expected = setup.cache.copy()
    transfers = [Transfer(2 * i * region.object_bytes, 1, (i % 48, SKIP)) for i in range(count)]
    for transfer in transfers:
        setup.cache.load(expected, setup.bytes, transfer)
    ticket = setup.mover.load(transfers)
    assert not ticket.done()
    assert setup.mover._load.waiting
    assert setup.cuda.queued_max < 2 * lanes.OPERATIONS_MAX
    setup.cuda.frozen = False

    def submitted() -> bool:
        setup.cuda.run(50)
        return not setup.mover._load.waiting

    eventually(submitted, "all is submitted")
    setup.finish(ticket)
    assert setup.cache.same(expected)
    assert setup.cuda.queued_max < 2 * lanes.OPERATIONS_MAX


@pytest.mark.parametrize("seed", range(8))
def test_what_isnt_registered_is_copied_by_the_helper_also_while_the_frontier_moves(seed: int) -> None:
    setup = Setup(seed)
    setup.pool.advance(0)
    expected, pool = setup.cache.copy(), setup.bytes.copy()
    tickets = []
    for number in range(8):
        load = number % 2 == 0
        batch = [setup.transfer(0), setup.transfer(1)]
        for transfer in batch:
            (setup.cache.load if load else setup.cache.store)(expected, pool, transfer)
        tickets.append((setup.mover.load if load else setup.mover.store)(batch))
        setup.pool.advance(number // 3 * CHUNK_BYTES)
    for ticket in tickets:
        setup.finish(ticket)
    assert setup.cuda.slow_copies
    assert setup.cache.same(expected)
    assert np.array_equal(setup.bytes, pool)
    assert f"enter_thread {setup.device.index}" in setup.cuda.log
    setup.mover.close()


def test_a_failing_copy_ends_its_batch_with_an_error_when_the_rest_of_it_has_stopped(setup: Setup) -> None:
    before = setup.mover.load([setup.transfer(1)])
    setup.cuda.frozen = True
    setup.cuda.fail_at_copy = setup.cuda.copies + 6
    ticket = setup.mover.load([setup.transfer(2), setup.transfer(0), setup.transfer(1)])
    assert not ticket.done()  # something of it is still queued: its extents are not free yet
    with pytest.raises(MoverFailed, match="has failed: cudaMemcpyAsync: as told"):
        setup.mover.store([setup.transfer(0)])
    setup.cuda.frozen = False
    assert ticket.wait(10)
    assert ticket.error is not None
    assert "as told" in ticket.error
    setup.finish(before)


def test_a_dead_device_ends_all_with_an_error(setup: Setup) -> None:
    setup.cuda.frozen = True
    tickets = [setup.mover.load([setup.transfer(0)]), setup.mover.store([setup.transfer(1)])]
    setup.cuda.dead = True
    for ticket in tickets:
        assert ticket.wait(10)
        assert "illegal memory access" in str(ticket.error)
    refused = setup.mover.load([setup.transfer(0)])
    assert refused.done()
    assert "illegal memory access" in str(refused.error)
    with pytest.raises(MoverFailed, match="illegal memory access"):
        setup.mover.load([setup.transfer(0)])


def test_closing_ends_what_waits_with_an_error_and_what_runs_when_it_has_run(setup: Setup) -> None:
    setup.cuda.frozen = True
    running = setup.mover.load([setup.transfer(0)])
    region = setup.cache.regions[1]
    many = [Transfer(2 * i * region.object_bytes, 1, (0, SKIP)) for i in range(3 * lanes.STEPS_MAX * 8)]
    waiting = setup.mover.load(many)
    setup.cuda.frozen = False
    setup.mover.close()
    setup.mover.close()
    assert running.done()
    assert waiting.done()
    assert running.error is None
    assert waiting.error == "the mover is closed"
    with pytest.raises(MoverFailed, match="closed"):
        setup.mover.store([])


def test_closing_a_hung_device_gives_up_and_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from moonpool.gpu import device

    setup = Setup(1)
    monkeypatch.setattr(device, "CLOSE_S", 0.01)
    setup.cuda.frozen = True
    ticket = setup.mover.load([setup.transfer(0)])
    setup.mover.close()
    assert not ticket.done()
    assert setup.mover.hung
    assert device._hung.pop() is setup.mover


def test_movers_are_movers(setup: Setup) -> None:
    movers: list[Mover] = [setup.mover, HostMover(setup.bytes, setup.cache.regions)]
    for mover in movers:
        ticket: Ticket = mover.load([], after=mover.mark())
        assert ticket.wait(10)
    movers[1].close()


def test_what_doesnt_fit_is_refused_before_anything_starts(setup: Setup) -> None:
    for transfer, said in (
        (Transfer(0, 3, (1, 2, 3, 4)), "region 3"),
        (Transfer(0, 0, (1, 2, 3)), "has 4 blocks"),
        (Transfer(POOL_BYTES, 0, (1, 2, 3, 4)), "isn't inside"),
        (Transfer(-1, 0, (1, 2, 3, 4)), "isn't inside"),
        (Transfer(0, 0, (1, 2, 3, -2)), "block id -2"),
    ):
        with pytest.raises(ValueError, match=said):
            setup.mover.load([setup.transfer(0), transfer])
    setup.pool.mapping.writable = False
    with pytest.raises(ValueError, match="read-only"):
        setup.mover.store([setup.transfer(0)])
    assert not setup.cuda.copies
