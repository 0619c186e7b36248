"""A worker's side against a real node, over a KV cache that is an array."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import Group, Status
from moonpool.client.attachment import Attachment
from moonpool.engines.vllm.compat import Parallel
from moonpool.engines.vllm.identity import RankReport
from moonpool.engines.vllm.metadata import Ended, Extent, Load, Part, Piece, Save, StepMetadata, WorkerReport
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.spaces import RankSpaces
from moonpool.engines.vllm.worker import Worker
from moonpool.gpu.host import HostMover
from moonpool.gpu.mover import SKIP, MoverFailed, Plane, Region, Transfer
from moonpool.keys import KeySpace
from moonpool.testing.node import RunningNode, eventually

BLOCKS, LAYERS, PIECE, PER_OBJECT = 20, 3, 512, 2
OBJECT_BYTES = LAYERS * PER_OBJECT * PIECE
BASE = KeySpace(
    weights="sha256:" + "1" * 64, tokens_per_block=32, kv_dtype="bfloat16", layout="plane,block,bytes",
    layout_version=1, model="model", engine="vllm",
)  # fmt: skip
DIGESTS = [bytes([i]) * 32 for i in range(10)]


class Mover(HostMover):
    """A host's mover whose copies can be held up, and fail."""

    def __init__(self, pool: Any, regions: Any) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fails = ""
        super().__init__(pool, regions)

    def _copy(self, transfer: Transfer, *, load: bool) -> None:
        while not self.gate.wait(0.01) and self._stopped is None:
            pass
        if self.fails:
            raise OSError(self.fails)
        super()._copy(transfer, load=load)


class Rank:
    """One worker, with its KV cache: LAYERS layers of BLOCKS blocks of PIECE bytes."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.cache = np.random.default_rng(1).integers(0, 255, (LAYERS, BLOCKS, PIECE), np.uint8)
        planes = tuple(Plane(layer.ctypes.data, PIECE, PIECE) for layer in self.cache)
        regions = (Region(planes, PER_OBJECT),)
        report = RankReport((0, 0), b"common", ("group 0",), (OBJECT_BYTES,), (4,), (False,))
        self.spaces = RankSpaces(Parallel(1, 1, ((0, LAYERS),), LAYERS, 4), report)
        self.pool = Pool(url, "test", failures_max=1000, retry_s=1.0, prefault=False)
        self.movers: list[Mover] = []

        def make(attachment: Attachment) -> Mover:
            self.movers.append(Mover(attachment.pool.bytes, regions))
            return self.movers[-1]

        self.worker = Worker(Settings(**settings), 0, regions, self.spaces, self.pool, make)
        self.worker.attach()
        self.steps(StepMetadata(space=BASE.canonical.decode()))
        self.numbers = 0
        self.ended = Ended(set(), set(), set())
        self.reported = WorkerReport()

    @property
    def mover(self) -> Mover:
        return self.movers[-1]

    def steps(self, metadata: StepMetadata | None = None) -> None:
        """One step of the engine; what came of it is added to `ended` and `reported`."""
        metadata = metadata or StepMetadata()
        self.worker.before_forward(metadata)
        self.worker.start_loads(metadata)
        self.worker.start_saves(metadata)
        ended, report = self.worker.finished(), self.worker.report()
        if hasattr(self, "ended"):
            before = self.ended
            self.ended = Ended(
                before.received | ended.received,
                before.failed | ended.failed,
                before.failed_blocks | ended.failed_blocks,
            )
            if report is not None:
                self.reported = self.reported.aggregate(report)

    def save(self, blocks: dict[int, tuple[int, int]], request: str = "a") -> int:
        """Store objects by digest number; returns the save's own."""
        self.numbers += 1
        pieces = tuple(Piece(DIGESTS[digest], (held,), b"note") for digest, held in blocks.items())
        self.steps(StepMetadata(saves=[Save(self.numbers, request, "", pieces)]))
        return self.numbers

    def key(self, digest: int) -> bytes:
        return bytes(self.spaces.of("")[0].digest + DIGESTS[digest])

    def until(self, condition: Callable[[], bool]) -> None:
        def stepped() -> bool:
            self.steps()
            return condition()

        eventually(stepped)

    def load(self, client: moonpool.Client, blocks: dict[int, tuple[int, int]], request: str = "a") -> Load:
        """The load of objects into blocks, under a hold."""
        found = client.match([Group([self.key(digest)]) for digest in blocks], hold=f"hold {request}", extents=True)
        where = found.extents
        assert where is not None
        extents = map(Extent, where.offsets, where.sizes, where.ids, where.words, where.checksums)
        parts = tuple(Part(0, into, (extent,)) for into, extent in zip(blocks.values(), extents, strict=True))
        return Load(request, where.pool_id, where.epoch, parts, 32 * len(blocks))


@pytest.fixture
def client(shared_node: RunningNode) -> Iterator[moonpool.Client]:
    with shared_node.connect() as client:
        client.clear()
        eventually(lambda: (s := client.stats()).reserved_bytes == s.pool_bytes, "the pool is reserved")
        yield client
        assert client.stats().reservations == 0


@pytest.fixture
def rank(shared_node: RunningNode, client: moonpool.Client) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(url: str = shared_node.url, **settings: Any) -> Rank:
        made.append(Rank(url, **settings))
        return made[-1]

    yield make
    for one in made:
        for mover in one.movers:
            mover.gate.set()
        one.worker.close()


def there(client: moonpool.Client, made: Rank, *digests: int) -> bool:
    return all(client.exists_many([made.key(digest) for digest in digests]))


# ---- stores and loads ------------------------------------------------------------------------------------------------


def test_what_one_worker_stores_another_loads(rank: Any, client: moonpool.Client) -> None:
    one, other = rank(), rank()
    other.cache[:] = 0
    number = one.save({0: (3, 4), 1: (9, 7)})
    one.until(lambda: one.reported.read == {number: 1})
    eventually(lambda: there(client, one, 0, 1))
    value = client.get(one.key(1))
    assert value == one.cache[:, [9, 7]].tobytes(), "plane by plane, block by block"
    other.steps(StepMetadata([other.load(client, {0: (1, 2), 1: (SKIP, 6)})]))
    other.until(lambda: other.ended.received == {"a"})
    assert not other.ended.failed
    assert (other.cache[:, [1, 2, 6]] == one.cache[:, [3, 4, 7]]).all()
    assert not other.cache[:, [0, 3, 4, 5, *range(7, BLOCKS)]].any(), "no other block was written to"
    assert other.reported.loaded["a"].size == 2 * OBJECT_BYTES
    client.release_hold("hold a")


def test_nothing_is_visible_before_it_is_copied(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank()
    made.mover.gate.clear()
    number = made.save({0: (3, 4)})
    eventually(lambda: client.stats().reservations == 1)
    made.steps()
    assert not there(client, made, 0)
    assert number not in made.reported.read
    made.mover.gate.set()
    eventually(lambda: there(client, made, 0))
    made.until(lambda: made.reported.stored_objects == 1)
    assert made.reported.read == {number: 1}


def test_what_is_there_already_is_left_as_it_is(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank()
    assert client.put(made.key(0), b"another writer's", metadata=b"first") is Status.OK
    number = made.save({0: (3, 4), 1: (5, 6)})
    made.until(lambda: number in made.reported.read)
    eventually(lambda: there(client, made, 1))
    assert client.get(made.key(0)) == b"another writer's"


def test_an_object_that_two_requests_complete_at_once_is_stored_once(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank()
    saves = [Save(n, f"request {n}", "", (Piece(DIGESTS[0], ((2 * n, 2 * n + 1),), b""),)) for n in (1, 2)]
    made.steps(StepMetadata(saves=saves))
    made.until(lambda: made.reported.read == {1: 1, 2: 1})
    made.until(lambda: made.reported.stored_objects == 1)
    assert client.get(made.key(0)) == made.cache[:, [2, 3]].tobytes()


def test_no_more_is_under_way_than_was_set(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank(store_inflight_bytes=OBJECT_BYTES)
    made.mover.gate.clear()
    made.save({0: (1, 2)})
    second = made.save({1: (3, 4), 2: (5, 6)})
    made.until(lambda: second in made.reported.read)
    assert made.reported.unstored == {"too much under way": 2}
    made.mover.gate.set()
    eventually(lambda: there(client, made, 0))
    made.until(lambda: made.reported.stored_objects == 1)
    third = made.save({1: (3, 4)})
    made.until(lambda: third in made.reported.read)
    eventually(lambda: there(client, made, 1))


# ---- blocks that are written to --------------------------------------------------------------------------------------


def test_a_step_waits_until_the_stores_that_it_names_have_been_read(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank()
    made.mover.gate.clear()
    number = made.save({0: (3, 4)})
    right = made.cache[:, [3, 4]].tobytes()
    threading.Timer(0.2, made.mover.gate.set).start()
    made.steps(StepMetadata(unread=frozenset({number, 12345})))  # of one of them nobody knows any more
    made.cache[:, [3, 4]] = 0
    eventually(lambda: there(client, made, 0))
    assert client.get(made.key(0)) == right


def test_what_is_not_read_in_time_does_not_become_visible(
    rank: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moonpool.engines.vllm import storing

    monkeypatch.setattr(storing, "REUSE_WAIT_S", 0.05)
    made: Rank = rank()
    made.mover.gate.clear()
    number = made.save({0: (3, 4)})
    made.steps(StepMetadata(unread=frozenset({number})))
    made.mover.gate.set()
    made.until(lambda: bool(made.reported.errors))
    assert made.reported.errors == ["blocks were reused while they were read"]
    assert not there(client, made, 0)
    assert made.reported.read == {number: 1}


# ---- loads that fail -------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(rank: Any, client: moonpool.Client) -> Iterator[tuple[Rank, Load]]:
    """A worker, and a load of an object that is stored."""
    made: Rank = rank(load_timeout_s=0.3)
    made.save({0: (3, 4)})
    eventually(lambda: there(client, made, 0))
    yield made, made.load(client, {0: (8, 9)})
    client.release_hold("hold a")


def failed(made: Rank) -> str:
    """Why the load has failed; it is told once, with its blocks."""
    made.until(lambda: bool(made.ended.received))
    assert made.ended == ({"a"}, {"a"}, {8, 9})
    made.steps()
    (why,) = made.reported.failed.values()
    assert made.worker.finished() == Ended(set(), set(), set()), "told once"
    return why


def test_a_load_from_another_pool_fails(loaded: tuple[Rank, Load]) -> None:
    made, load = loaded
    made.steps(StepMetadata([Load(load.request_id, b"another", load.epoch, load.parts, load.tokens)]))
    assert failed(made) == "the pool that holds it is not attached here"


def test_a_load_of_another_size_fails(loaded: tuple[Rank, Load]) -> None:
    made, load = loaded
    (part,) = load.parts
    parts = (part._replace(extents=(part.extents[0]._replace(size=99),)),)
    made.steps(StepMetadata([Load(load.request_id, load.pool_id, load.epoch, parts, load.tokens)]))
    assert f"an object of 99 bytes where this worker's have {OBJECT_BYTES}" in failed(made)


def test_a_load_that_is_for_nothing_fails(loaded: tuple[Rank, Load]) -> None:
    made, _ = loaded
    made.steps(StepMetadata([Load.of_nothing("a", [8, 9], 32)]))
    assert "not attached" in failed(made)


def test_a_load_whose_object_was_removed_meanwhile_fails(loaded: tuple[Rank, Load], client: moonpool.Client) -> None:
    made, load = loaded
    made.mover.gate.clear()
    made.steps(StepMetadata([load]))
    client.remove(made.key(0), force=True)
    made.mover.gate.set()
    assert failed(made) == "the object went away meanwhile"


def test_a_load_of_before_a_reset_fails(loaded: tuple[Rank, Load]) -> None:
    made, load = loaded
    made.mover.gate.clear()
    made.steps(StepMetadata([load]))
    made.steps(StepMetadata(space=BASE.canonical.decode()))
    assert not made.ended.received, "not before its I/O has ended"
    made.mover.gate.set()
    assert failed(made) == "the engine's cache was reset meanwhile"


def test_a_copy_that_fails_fails_its_load_and_the_next_one_has_another_mover(
    loaded: tuple[Rank, Load], client: moonpool.Client
) -> None:
    made, load = loaded
    made.mover.fails = "no such luck"
    made.steps(StepMetadata([load]))
    assert "no such luck" in failed(made)


def test_a_load_that_takes_too_long_is_stopped_and_the_next_one_has_another_mover(loaded: tuple[Rank, Load]) -> None:
    made, load = loaded
    made.mover.gate.clear()
    made.steps(StepMetadata([load]))
    assert "closed" in failed(made)
    made.ended = Ended(set(), set(), set())
    made.steps(StepMetadata([load]))
    made.until(lambda: made.ended == ({"a"}, set(), set()))
    assert len(made.movers) == 2
    assert (made.cache[:, [8, 9]] == made.cache[:, [3, 4]]).all()


def test_a_fault_in_submitting_is_that_loads_alone(loaded: tuple[Rank, Load], monkeypatch: pytest.MonkeyPatch) -> None:
    made, load = loaded

    def raises(*_: Any, **__: Any) -> Any:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(made.mover, "load", raises)
        made.steps(StepMetadata([load]))
    assert failed(made) == "RuntimeError: on purpose"


def test_a_fault_in_concluding_is_that_loads_alone(loaded: tuple[Rank, Load], monkeypatch: pytest.MonkeyPatch) -> None:
    made, load = loaded

    def raises(*_: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(made.pool.client, "still_good", raises)
    made.steps(StepMetadata([load]))
    assert failed(made) == "RuntimeError: on purpose"


def test_faults_in_storing_free_the_blocks(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Rank = rank()

    def raises(*_: Any, **__: Any) -> Any:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(made.pool.client, "reserve_many", raises)
        first = made.save({0: (1, 2)})
        made.until(lambda: first in made.reported.read)
    with monkeypatch.context() as patch:
        patch.setattr(made.mover, "store", raises)
        second = made.save({0: (1, 2)})
        made.until(lambda: second in made.reported.read)
    with monkeypatch.context() as patch:
        patch.setattr(made.worker._stores, "begin", raises)
        third = made.save({0: (1, 2)})
        made.until(lambda: third in made.reported.read)
    assert made.reported.errors == ["RuntimeError: on purpose"] * 3
    fourth = made.save({0: (1, 2)})
    made.until(lambda: fourth in made.reported.read and made.reported.stored_objects == 1)


# ---- verification ----------------------------------------------------------------------------------------------------


def test_verified_loads_compare_checksums_that_came_with_the_stores(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank(verify=True)
    made.save({0: (3, 4), 1: (5, 6)})
    eventually(lambda: there(client, made, 0, 1))
    load = made.load(client, {0: (8, 9), 1: (10, 11)})
    assert all(part.extents[0].checksum for part in load.parts), "known from the first moment on"
    made.steps(StepMetadata([load]))
    made.until(lambda: made.ended == ({"a"}, set(), set()))
    assert (made.cache[:, [8, 9, 10, 11]] == made.cache[:, [3, 4, 5, 6]]).all()
    made.ended = Ended(set(), set(), set())
    client.link.attachment.pool.bytes[load.parts[1].extents[0].offset + 1000] ^= 1
    made.steps(StepMetadata([load]))
    made.until(lambda: made.ended == ({"a"}, {"a"}, {8, 9, 10, 11}))
    assert made.reported.off == "stored bytes differ from their checksum"
    client.release_hold("hold a")


# ---- the node, the end -----------------------------------------------------------------------------------------------


def test_without_a_node_blocks_are_free_at_once_and_loads_fail(rank: Any, tmp_path: Any) -> None:
    made: Rank = rank(url=f"unix:{tmp_path}/nowhere")
    assert not made.movers
    number = made.save({0: (3, 4)})
    assert made.reported.read == {number: 1}
    made.steps(StepMetadata([Load("a", b"p", 0, (Part(0, (8, 9), (Extent(0, OBJECT_BYTES, 1, 0),)),), 32)]))
    assert failed(made) == "the pool that holds it is not attached here"


def test_a_mover_is_made_when_a_node_appears(rank: Any, node: RunningNode) -> None:
    node.stop()
    made: Rank = rank(url=node.url)
    assert not made.movers
    node.start()
    eventually(made.pool.usable)
    with node.connect() as other:
        eventually(lambda: (s := other.stats()).reserved_bytes == s.pool_bytes, "the pool is reserved")
        made.save({0: (3, 4)})
        eventually(lambda: there(other, made, 0))
    assert len(made.movers) == 1


def test_another_pool_gets_another_mover_once_nothing_of_the_first_is_under_way(rank: Any, node: RunningNode) -> None:
    with node.connect() as other:
        eventually(lambda: (s := other.stats()).reserved_bytes == s.pool_bytes, "the pool is reserved")
    made: Rank = rank(url=node.url)
    made.mover.gate.clear()
    made.save({0: (1, 2)})
    first = made.pool.client.link.attachment.pool_id
    node.kill()
    (node.folder / "records").unlink()  # a fresh pool
    node.start()
    eventually(lambda: made.pool.usable() and made.pool.client.link.attachment.pool_id != first)
    with node.connect() as other:
        eventually(lambda: (s := other.stats()).reserved_bytes == s.pool_bytes, "the pool is reserved")
    refused = made.save({1: (3, 4)})
    assert refused in made.reported.read
    assert len(made.movers) == 1
    made.movers[0].gate.set()
    made.until(lambda: 1 in made.reported.read)
    made.save({2: (5, 6)})
    with node.connect() as other:
        eventually(lambda: there(other, made, 2))
        assert not there(other, made, 0), "what was on its way into the pool before is lost with it"
    assert len(made.movers) == 2


def test_whoever_takes_over_from_a_failed_worker_answers_for_all_that_was_under_way(
    loaded: tuple[Rank, Load], client: moonpool.Client
) -> None:
    made, load = loaded
    made.mover.gate.clear()
    number = made.save({5: (1, 2)}, request="b")
    made.worker.start_loads(StepMetadata([load]))
    bystander = made.worker.give_up()
    assert bystander.finished() == ({"a"}, {"a"}, {8, 9})
    report = bystander.report()
    assert report is not None
    assert report.read[number] == 1
    assert report.failed == {"a": "a worker has failed, see its log"}
    assert report.off
    with pytest.raises(MoverFailed):
        made.mover.store([])
    eventually(lambda: client.stats().reservations == 0)
    assert not there(client, made, 5)


def test_what_is_whole_at_the_end_is_made_visible(rank: Any, client: moonpool.Client) -> None:
    made: Rank = rank()
    for n in range(5):
        made.save({n: (2 * n, 2 * n + 1)})
    made.worker.close()
    assert there(client, made, *range(5))
    assert client.stats().sessions == 1, "the test's own"
    assert not [thread for thread in threading.enumerate() if thread.name in ("moonpool-reserve", "moonpool-commit")]
