"""The mover on a real GPU: the same promises as over the fake, and those that only CUDA can keep or break."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="a GPU is used through torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moonpool.folder.mapping import Mapping, create_file  # noqa: E402
from moonpool.gpu.cudart import CudaError, Runtime, find_library  # noqa: E402
from moonpool.gpu.device import DeviceMover  # noqa: E402
from moonpool.gpu.mover import SKIP, MoverFailed, Plane, Region, Transfer  # noqa: E402
from moonpool.gpu.plan import Piece, split  # noqa: E402
from moonpool.gpu.registration import Registration  # noqa: E402

POOL_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20
SHAPES = [([65536] * 8, 16, 256), ([4096, 4096, 512], 4, 512), ([2 << 20], 4, 48), ([20, 36], 8, 256)]
"""Pieces of each plane, blocks of an object, blocks: usual ones; small ones of two lengths; direct ones; odd ones."""


class Cache:
    """Regions in the GPU's memory, random."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.planes: list[list[Any]] = []
        regions = []
        for pieces, blocks_per_object, blocks in SHAPES:
            arrays = [
                torch.randint(0, 256, (blocks, piece + 256), dtype=torch.uint8, device="cuda") for piece in pieces
            ]
            planes = tuple(
                Plane(array.data_ptr(), piece + 256, piece) for array, piece in zip(arrays, pieces, strict=True)
            )
            self.planes.append(arrays)
            regions.append(Region(planes, blocks_per_object))
        self.regions = tuple(regions)
        torch.cuda.synchronize()

    def on_host(self) -> list[list[Any]]:
        torch.cuda.synchronize()
        return [[array.cpu().numpy() for array in arrays] for arrays in self.planes]

    def move(self, planes: list[list[Any]], pool: Any, transfer: Transfer, *, load: bool) -> None:
        """The plain way, on copies."""
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

    def same(self, expected: list[list[Any]]) -> bool:
        return all(
            np.array_equal(array, wanted)
            for arrays, others in zip(self.on_host(), expected, strict=True)
            for array, wanted in zip(arrays, others, strict=True)
        )


@pytest.fixture(scope="module")
def pool_file() -> Iterator[Path]:
    """A file under /dev/shm, as a node's pool is."""
    path = Path(f"/dev/shm/moonpool-test-{os.getpid()}")
    os.close(create_file(path, POOL_BYTES, 0o600))
    yield path
    path.unlink()


@pytest.fixture
def pool(pool_file: Path) -> Mapping:
    mapping = Mapping.open(pool_file, writable=True)
    mapping.bytes[:] = np.random.default_rng(3).integers(0, 256, POOL_BYTES, np.uint8)
    return mapping


@pytest.fixture
def registration(pool: Mapping) -> Iterator[Registration]:
    found = Registration(pool, chunk_bytes=CHUNK_BYTES)
    assert found.done.wait(30)
    assert found.refused is None
    yield found
    found.close()


def batches(cache: Cache, seed: int, count: int) -> Iterator[tuple[bool, list[Transfer]]]:
    """Batches in either direction, of blocks and extents of their own."""
    random = Random(seed)
    free = [list(range(blocks)) for _, _, blocks in SHAPES]
    for ids in free:
        random.shuffle(ids)
    at = 0
    for _ in range(count):
        found = []
        for number, region in enumerate(cache.regions):
            if random.random() < 0.8 and len(free[number]) >= region.blocks_per_object:
                ids = [SKIP if random.random() < 0.1 else free[number].pop() for _ in range(region.blocks_per_object)]
                at += random.choice((0, 4096, 12288))
                found.append(Transfer(at, number, tuple(ids)))
                at += (region.object_bytes + 4095) // 4096 * 4096
        if at > POOL_BYTES - (32 << 20):
            return
        yield random.random() < 0.5, found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("staging_bytes", [256 << 20, 5 << 20])
def test_batches_in_both_directions_move_their_bytes_and_no_others(
    pool: Mapping, registration: Registration, seed: int, staging_bytes: int
) -> None:
    """Across chunk borders, whole and with skipped blocks; with the smaller staging also objects cut into parts."""
    cache = Cache(seed)
    mover = DeviceMover(pool, cache.regions, registration, "cuda", staging_bytes)
    planes, expected = cache.on_host(), pool.bytes.copy()
    tickets = []
    for load, transfers in batches(cache, seed, 30):
        for transfer in transfers:
            cache.move(planes, expected, transfer, load=load)
        tickets.append((mover.load if load else mover.store)(transfers, after=mover.mark()))
    assert len(tickets) > 5
    assert all(ticket.wait(30) for ticket in tickets)
    assert [ticket.error for ticket in tickets] == [None] * len(tickets)
    assert cache.same(planes)
    assert np.array_equal(pool.bytes, expected)
    mover.close()


def test_a_store_waits_for_the_forward_that_writes_its_blocks_and_a_load_for_the_one_that_reads(
    pool: Mapping, registration: Registration
) -> None:
    """With a stream of the engine's that is busy for a long time: without the mark, both are wrong."""
    cache = Cache(1)
    mover = DeviceMover(pool, cache.regions, registration, "cuda")
    a = torch.randn(8192, 8192, device="cuda")
    stored, loaded = Transfer(0, 0, tuple(range(16))), Transfer(64 << 20, 0, tuple(range(32, 48)))
    engine = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        for _ in range(40):
            a @ a
        for array in cache.planes[0]:
            array[:16] = 77
        kept = [array[32:48].clone() for array in cache.planes[0]]
        mark = mover.mark()
    before = [array[32:48].cpu() for array in cache.planes[0]]
    store, load = mover.store([stored], after=mark), mover.load([loaded], after=mark)
    assert store.wait(30)
    assert load.wait(30)
    size = cache.regions[0].object_bytes
    assert (pool.bytes[:size] == 77).all()
    assert all(torch.equal(found.cpu(), wanted) for found, wanted in zip(kept, before, strict=True))
    mover.close()


def test_everything_arrives_while_the_frontier_moves_and_without_registration(pool: Mapping) -> None:
    for never in (False, True):
        cache = Cache(2)
        reserved = 0
        registration = Registration(pool, chunk_bytes=CHUNK_BYTES, reserved_bytes=lambda: reserved)  # noqa: B023
        mover = DeviceMover(pool, cache.regions, registration, "cuda")
        planes, expected = cache.on_host(), pool.bytes.copy()
        tickets = []
        for load, transfers in batches(cache, 2, 24):
            for transfer in transfers:
                cache.move(planes, expected, transfer, load=load)
            tickets.append((mover.load if load else mover.store)(transfers))
            reserved = 0 if never else min(POOL_BYTES, reserved + CHUNK_BYTES)
        assert all(ticket.wait(60) for ticket in tickets)
        assert {ticket.error for ticket in tickets} == {None}
        assert cache.same(planes)
        assert np.array_equal(pool.bytes, expected)
        mover.close()
        registration.close()


def test_a_read_only_pool_loads(pool_file: Path, pool: Mapping) -> None:
    mapping = Mapping.open(pool_file, writable=False)
    registration = Registration(mapping, chunk_bytes=CHUNK_BYTES)
    assert registration.done.wait(30)
    cache = Cache(4)
    mover = DeviceMover(mapping, cache.regions, registration, "cuda")
    planes = cache.on_host()
    transfers = [Transfer(CHUNK_BYTES - 4096, 0, tuple(range(16))), Transfer(0, 2, (4, 5, 6, 7))]
    for transfer in transfers:
        cache.move(planes, pool.bytes, transfer, load=True)
    ticket = mover.load(transfers)
    assert ticket.wait(30)
    assert ticket.error is None
    assert cache.same(planes)
    with pytest.raises(ValueError, match="read-only"):
        mover.store(transfers)
    mover.close()
    registration.close()
    print("read-only registration:", registration.refused or "done")


class Uncut:
    """A registration that forgets the borders of its chunks."""

    def __init__(self, registration: Registration) -> None:
        self.cuda = registration.cuda

    def split(self, offset: int, length: int) -> list[Piece]:
        return split(offset, length, POOL_BYTES, POOL_BYTES)


def test_a_copy_that_cuda_refuses_ends_the_mover_and_leaves_torch_at_work(
    pool: Mapping, registration: Registration
) -> None:
    cache = Cache(5)
    mover = DeviceMover(pool, cache.regions, Uncut(registration), "cuda")
    ticket = mover.load([Transfer(CHUNK_BYTES - 4096, 0, tuple(range(16)))])
    assert ticket.wait(30)
    assert ticket.error is not None
    assert "cudaMemcpyAsync: invalid argument" in ticket.error
    with pytest.raises(MoverFailed, match="invalid argument"):
        mover.load([])
    assert int(torch.ones(1000, device="cuda").sum()) == 1000  # raises where an error of ours was left behind
    torch.cuda.synchronize()
    mover.close()


def test_asking_an_event_leaves_no_error_behind() -> None:
    cuda = Runtime()
    stream, event = cuda.stream(urgent=True), cuda.event()
    a = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        a @ a
    cuda.record(event, torch.cuda.current_stream().cuda_stream)
    assert not cuda.event_query(event)
    assert cuda._last_error() == 0
    torch.cuda.synchronize()
    assert cuda.event_query(event)
    cuda.destroy_event(event)
    cuda.destroy_stream(stream)


def test_the_library_is_the_one_that_torch_has_loaded() -> None:
    assert find_library() in Path("/proc/self/maps").read_text()


def test_errors_are_named() -> None:
    with pytest.raises(CudaError, match=r"cudaHostUnregister: .* \(CUDA error \d+\)"):
        Runtime().unregister(4096)


def test_registering_during_a_graphs_capture_doesnt_end_the_capture(pool: Mapping) -> None:
    """An engine captures its graphs at the same time."""
    a = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        registration = Registration(pool, chunk_bytes=CHUNK_BYTES)
        assert registration.done.wait(30)
        a += 1
    graph.replay()
    torch.cuda.synchronize()
    assert int(a.sum()) == 1000
    assert registration.refused is None
    registration.close()
