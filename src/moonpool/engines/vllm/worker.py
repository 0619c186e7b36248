"""A worker's side: moves the objects that the scheduler names between the pool and this rank's blocks.

Nothing here waits for a copy: loads and stores are submitted, and looked at when the engine asks what has finished. A
thread of its own waits for stores to end and makes them visible, also while the engine is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from moonpool.client.attachment import Attachment
from moonpool.client.writing import Reservations
from moonpool.engines.vllm.bystander import Bystander
from moonpool.engines.vllm.guard import note_fault
from moonpool.engines.vllm.metadata import (
    Check,
    Checked,
    Ended,
    Extent,
    Load,
    Moved,
    Save,
    StepMetadata,
    WorkerReport,
    extents_of,
    own_extents,
)
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.shadow import Comparer
from moonpool.engines.vllm.spaces import RankSpaces
from moonpool.errors import MoonpoolError, NodeUnavailable
from moonpool.gpu.mover import Mover, Region, Ticket, Transfer
from moonpool.node.checksums import checksum
from moonpool.status import Status

log = logging.getLogger("moonpool.vllm")

CLOSE_WAIT_S = 5.0
"""How long `close` waits for what is under way to end. It ends by itself in a fraction of that."""
REUSE_WAIT_S = 5.0
"""How long blocks that the engine has taken back are kept for the stores that read them. They take a fraction of that;
what is read later is not made visible."""


@dataclass(slots=True, eq=False)
class Loading:
    """A load under way on this rank."""

    load: Load
    ticket: Ticket | None
    began: float
    size: int = 0
    error: str = ""
    differs: Future[bool] | None = None
    """Where loads are verified: whether the bytes that were read aren't those that were stored."""

    def ended(self) -> bool:
        """Whether no I/O of it is under way any more, and all is known of it that there is to know."""
        done = self.ticket is None or self.ticket.done()
        return done and (self.differs is None or self.differs.done())


@dataclass(slots=True, eq=False)
class Storing:
    """A step's stores under way on this rank. The extents are reserved by this process until `Worker._conclude`."""

    ticket: Ticket
    reservations: Reservations
    groups: list[int]
    """Of each reservation its KV group."""
    size: int
    began: float
    saves: list[Save] = field(default_factory=list)
    spoilt: bool = False
    """Its blocks may have been written to while they were read."""


class Worker:
    """One rank. Its methods are called by the worker's thread, in the order of a step, see `connector`.

    `make_mover` is called once a pool that there is to copy from and to is attached, with what is attached.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        regions: tuple[Region, ...],
        spaces: RankSpaces,
        pool: Pool,
        make_mover: Callable[[Attachment], Mover],
        make_comparer: Callable[[Callable[[WorkerReport], None]], Comparer] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.settings, self.rank, self.regions, self.spaces, self.pool = settings, rank, regions, spaces, pool
        self._make_mover, self._clock = make_mover, clock
        self._mover: Mover | None = None
        self._pool_id = b""
        self._loading: dict[str, Loading] = {}
        self._storing: list[Storing] = []
        self._finishing: set[str] = set()
        self._mark: object | None = None
        """What the engine's stream had to do before this step: loads come after it, not after the step's forward."""
        self._counted_until = 0.0
        """Loads overlap: seconds until here are counted as spent on loading already."""
        self._checker = ThreadPoolExecutor(1, "moonpool-verify") if settings.verify else None
        self._report = WorkerReport(ranks=(spaces.report,))
        self._stored: SimpleQueue[Storing | None] = SimpleQueue()
        self._storing_bytes = 0
        self._told: SimpleQueue[WorkerReport] = SimpleQueue()
        """What threads have to report."""
        self._comparer = make_comparer(self._told.put) if make_comparer is not None else None
        self._committer = threading.Thread(target=self._commit_all, name="moonpool-commit", daemon=True)
        self._committer.start()

    # ---- a step --------------------------------------------------------------------------------------------------

    def before_forward(self, metadata: StepMetadata) -> None:
        """Blocks that the engine has taken back may be written to from now on: wait until no store reads them."""
        self._finishing |= metadata.finishing
        if metadata.space:
            self.spaces.tell(metadata.space)
            for loading in self._loading.values():  # of before the engine's cache was reset
                loading.error = "the engine's cache was reset meanwhile"
        self._mark = self._mover.mark() if metadata.loads and self._mover is not None else None
        if metadata.reused:
            for storing in self._storing:
                if any(save.request_id in metadata.reused for save in storing.saves):
                    self._await_read(storing)

    def start_loads(self, metadata: StepMetadata) -> None:
        """Submit the step's loads. Each is reported exactly once by `finished`, whatever becomes of it."""
        for load in metadata.loads:
            loading = Loading(load, None, self._clock())
            self._loading[load.request_id] = loading
            try:
                self._submit(loading)
            except MoonpoolError as error:
                loading.error = f"{error}"
            except Exception as error:
                note_fault("start_loads", error)
                loading.error = f"{type(error).__name__}: {error}"

    def start_saves(self, metadata: StepMetadata) -> None:
        """Reserve room for what the step has completed and the pool lacks, and submit its stores."""
        for check in metadata.checks:
            self._check(check)
        if not metadata.saves:
            return
        saves, storing = metadata.saves, None
        try:
            if self._attached():
                if self._storing_bytes < self.settings.store_inflight_bytes:
                    storing = self._store(saves)
                else:
                    self._unstored("too much under way", sum(len(save.pieces) for save in saves) * len(self.regions))
        except NodeUnavailable as error:
            log.debug("a step's stores are lost: %s", error)
        except MoonpoolError as error:
            self._report.errors.append(f"{error}")
        except Exception as error:
            note_fault("start_saves", error)
            self._report.errors.append(f"{type(error).__name__}: {error}")
        if storing is None:
            self._mark_read(saves)
            return
        self._storing_bytes += storing.size
        self._storing.append(storing)
        self._stored.put(storing)

    def finished(self) -> Ended:
        """Requests whose blocks are read by no store any more, of those that wait for that, and requests whose load
        has ended. Each is named once."""
        if self._storing:
            for storing in [s for s in self._storing if s.ticket.read()]:
                self._storing.remove(storing)
                self._storing_bytes -= storing.size
                self._mark_read(storing.saves)
        sent: set[str] = set()
        if self._finishing:
            unread = {save.request_id for storing in self._storing for save in storing.saves}
            sent = self._finishing - unread
            self._finishing &= unread
        ended = Ended(sent, set(), set(), set())
        overdue = False
        for request_id, loading in list(self._loading.items()):
            if not loading.ended():
                overdue |= self._clock() - loading.began > self.settings.load_timeout_s
                continue
            good = self._conclude(loading)
            del self._loading[request_id]
            ended.received.add(request_id)
            if not good:
                ended.failed.add(request_id)
                ended.failed_blocks.update(loading.load.blocks)
        if overdue:
            self._stop_copying()
        return ended

    def report(self) -> WorkerReport | None:
        """What has happened since the last report; None for nothing."""
        self._hear()
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def give_up(self) -> Bystander:
        """Stop all copies, and have somebody answer for what was under way: for the case that this object can't."""
        self._stop_copying()
        self._stored.put(None)
        self._stop_comparing()
        self._hear()
        bystander = Bystander("a worker has failed, see its log", self.pool)
        bystander.pass_on(self._report)
        bystander.take_over(
            {request_id: loading.load.blocks for request_id, loading in self._loading.items()},
            {save.number for storing in self._storing for save in storing.saves},
            self._finishing,
        )
        return bystander

    def close(self) -> None:
        """End everything: copies are waited for, what is whole is made visible."""
        self._stored.put(None)
        self._committer.join(CLOSE_WAIT_S)
        self._stop_copying()
        if self._checker is not None:
            self._checker.shutdown()
        self._stop_comparing()
        self.pool.close()

    # ---- within --------------------------------------------------------------------------------------------------

    def _attached(self) -> bool:
        """Whether there is a pool to copy from and to; makes the mover for it where it is new."""
        if not self.pool.usable():
            return False
        attachment = self.pool.client.link.attachment
        if self._mover is None or attachment.pool_id != self._pool_id:
            if self._loading or self._storing:
                return False  # until what is under way over the pool before has ended
            self._stop_copying()
            self._mover = self._make_mover(attachment)
            self._pool_id = attachment.pool_id
        return True

    def _stop_copying(self) -> None:
        """End what the mover has under way: all of it has then ended, unfinished with an error. The next copy takes
        another mover."""
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close()

    def _stop_comparing(self) -> None:
        if self._comparer is not None:
            self._report.checks.update(self._comparer.close())

    def _hear(self) -> None:
        while not self._told.empty():
            self._report = self._report.aggregate(self._told.get())

    def _check(self, check: Check) -> None:
        """Begin to compare what was computed; the scheduler, who holds what is stored, waits for a report."""
        try:
            if self._comparer is None:
                raise MoonpoolError("shadow mode is off on this worker")
            self._comparer.begin(check, self.rank, self.spaces)
        except Exception as error:
            note_fault("a check", error)
            self._report.checks[check.number] = Checked(1, dropped=len(check.load.parts))

    def _await_read(self, storing: Storing) -> None:
        """Wait until a store no longer reads its blocks; what it reads after that is not to be trusted."""
        deadline = time.monotonic() + REUSE_WAIT_S
        while not storing.ticket.read():
            if time.monotonic() > deadline:
                storing.spoilt = True
                return
            time.sleep(0.0001)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until copies run at full speed: a pool is attached, and known to the device."""
        deadline = self._clock() + timeout_s
        while not self._attached():
            if self._clock() > deadline:
                return False
            time.sleep(0.05)
        ready = getattr(self._mover, "wait_ready", None)
        return bool(ready is None or ready(deadline - self._clock()))

    def attach(self) -> None:
        """Get ready before the first request, if there is a node already."""
        try:
            self._attached()
        except MoonpoolError as error:
            self.pool.failed(error)

    def _submit(self, loading: Loading) -> None:
        load = loading.load
        if not self._attached() or load.pool_id != self._pool_id:
            raise MoonpoolError("the pool that holds it is not attached here")
        assert self._mover is not None
        transfers, own = [], own_extents(load, self.rank)
        for part, extent in own:
            expected = self.regions[part.group].object_bytes
            if extent.size != expected:
                raise MoonpoolError(f"an object of {extent.size} bytes where this worker's have {expected}")
            transfers.append(Transfer(extent.offset, part.group, part.blocks))
            loading.size += extent.size
        ticket = self._mover.load(transfers, after=self._mark if self._mark is not None else self._mover.mark())
        loading.ticket = ticket
        if log.isEnabledFor(logging.DEBUG):
            submit_us = (self._clock() - loading.began) * 1e6
            log.debug(
                "load of %s: %d objects, %d bytes; submit %.0f us", load.request_id, len(own), loading.size, submit_us
            )
        if self._checker is not None:
            pool, extents = self.pool.client.link.attachment.pool.view, [extent for _, extent in own]
            loading.differs = self._checker.submit(_differ, ticket, pool, extents)

    def _conclude(self, loading: Loading) -> bool:
        """A load's I/O has ended: are its bytes good? Notes what is to be reported of it."""
        load = loading.load
        try:
            error = self._fault_of(loading)
        except Exception as fault:
            note_fault("finished", fault)
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self._report.failed[load.request_id] = error
            return False
        now = self._clock()
        self._report.loaded[load.request_id] = Moved(loading.size, now - max(loading.began, self._counted_until))
        self._counted_until = now
        if log.isEnabledFor(logging.DEBUG):
            took_s = now - loading.began
            log.debug(
                "loaded %s: %.1f ms since it was submitted, %.1f GB/s",
                load.request_id, took_s * 1e3, loading.size / took_s / 1e9,
            )  # fmt: skip
        return True

    def _fault_of(self, loading: Loading) -> str:
        """Why the bytes of a load that has ended are not to be used; "" for no reason."""
        if loading.error:
            return loading.error
        assert loading.ticket is not None
        if loading.ticket.error:
            return loading.ticket.error
        if not self.pool.client.still_good(extents_of(loading.load, self.rank)):
            return "the object went away meanwhile"
        if loading.differs is not None and loading.differs.result():
            self._report.off = "stored bytes differ from their checksum"  # those of an object that is still held
            return self._report.off
        return ""

    def _store(self, saves: list[Save]) -> Storing | None:
        assert self._mover is not None
        wanted = list(self._wanted(saves))
        if not wanted:
            return None
        self.pool.declare(self.spaces.all())
        reservations = self.pool.client.reserve_many(
            [key for key, *_ in wanted],
            [self.regions[group].object_bytes for _, group, *_ in wanted],
            wait_s=0.0,
            metadata=[note for *_, note in wanted],
        )
        if short := reservations.statuses.count(Status.NO_SPACE) + reservations.statuses.count(Status.TOO_LARGE):
            self._unstored("no room", short)
        try:
            transfers = [
                Transfer(item.offset, group, blocks)
                for item, (_, group, blocks, _) in zip(reservations, wanted, strict=True)
                if item.status is Status.OK
            ]
            if not transfers:
                return None
            ticket = self._mover.store(transfers, after=self._mover.mark())
        except BaseException:
            reservations.abort()  # nothing was started
            raise
        size = sum(self.regions[transfer.region].object_bytes for transfer in transfers)
        return Storing(ticket, reservations, [group for _, group, *_ in wanted], size, self._clock(), saves)

    def _wanted(self, saves: list[Save]) -> Iterator[tuple[bytes, int, tuple[int, ...], bytes]]:
        """Key, KV group, blocks and note of each object that this rank is to store."""
        seen: set[bytes] = set()
        for save in saves:
            for piece in save.pieces:
                for group, blocks in enumerate(piece.blocks):
                    key = self.spaces.of(save.adapter)[group].digest + piece.digest
                    if blocks is not None and key not in seen:
                        seen.add(key)
                        yield key, group, blocks, piece.note

    def _unstored(self, reason: str, objects: int) -> None:
        self._report.unstored[reason] = self._report.unstored.get(reason, 0) + objects

    def _mark_read(self, saves: list[Save]) -> None:
        for save in saves:
            self._report.read[save.number] = self._report.read.get(save.number, 0) + 1

    def _commit_all(self) -> None:
        """The committing thread: a store becomes visible when all its bytes are in the pool, never before."""
        counted_until = 0.0
        while (storing := self._stored.get()) is not None:
            try:
                storing.ticket.wait()
                error = storing.ticket.error or ("blocks were reused while they were read" if storing.spoilt else None)
                now = self._clock()
                took_s, counted_until = now - max(storing.began, counted_until), now
                if error is not None:
                    objects = storing.reservations.statuses.count(Status.OK)
                    storing.reservations.abort()
                    self._told.put(WorkerReport(unstored={"copy failed": objects}, errors=[error]))
                    continue
                statuses = storing.reservations.commit(self._checksums(storing.reservations))
                groups = [g for g, status in zip(storing.groups, statuses, strict=True) if status is Status.OK]
                size = sum(self.regions[group].object_bytes for group in groups)
                self._told.put(WorkerReport(stored_objects=groups.count(0), stored=Moved(size, took_s)))
            except MoonpoolError as error:
                log.info("a step's stores are lost: %s", error)
            except Exception as error:  # a thread that ends would leave every later store reserved
                note_fault("a store", error)
                storing.reservations.abort()

    def _checksums(self, reservations: Reservations) -> list[int]:
        """What loads will be verified by. Elsewhere the node sums what it has, when it has time."""
        if not self.settings.verify:
            return []
        return [0 if item.buffer is None else checksum(item.buffer.data) for item in reservations]


def _differ(ticket: Ticket, pool: memoryview, extents: Sequence[Extent]) -> bool:
    """Whether the bytes of any of these extents aren't those of its checksum, once they have been read."""
    ticket.wait()
    return any(checksum(pool[e.offset : e.offset + e.size]) != e.checksum for e in extents)
