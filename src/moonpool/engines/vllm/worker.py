"""A worker's side: moves the objects that the scheduler names between the pool and this rank's blocks.

Nothing here waits for a copy: loads and stores are submitted, and looked at when the engine asks what has finished. A
thread of its own waits for stores to end and makes them visible, also while the engine is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

from moonpool.client.attachment import Attachment
from moonpool.client.writing import Reservations
from moonpool.engines.vllm.bystander import Bystander
from moonpool.engines.vllm.metadata import Extent, Load, Moved, Save, StepMetadata, WorkerReport, own_extents
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.spaces import RankSpaces
from moonpool.errors import MoonpoolError
from moonpool.gpu.mover import Mover, Region, Ticket, Transfer
from moonpool.matching import Extents
from moonpool.status import Status

log = logging.getLogger("moonpool.vllm")

CLOSE_WAIT_S = 5.0
"""How long `close` waits for what is under way to end. It ends by itself in a fraction of that."""


@dataclass(slots=True, eq=False)
class Loading:
    """A load under way on this rank."""

    load: Load
    ticket: Ticket | None
    began: float
    size: int = 0
    error: str = ""


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
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport(ranks=(spaces.report,))
        self._stored: SimpleQueue[Storing | None] = SimpleQueue()
        self._storing_bytes = 0
        self._told: SimpleQueue[WorkerReport] = SimpleQueue()
        """What the committing thread has to report."""
        self._committer = threading.Thread(target=self._commit_all, name="moonpool-commit", daemon=True)
        self._committer.start()

    # ---- a step --------------------------------------------------------------------------------------------------

    def before_forward(self, metadata: StepMetadata) -> None:
        """Blocks of preempted requests may be written to from now on: wait until no store reads them any more."""
        if metadata.space:
            self.spaces.tell(metadata.space)
        self._mark = self._mover.mark() if metadata.loads and self._mover is not None else None
        if metadata.preempted:
            for storing in self._storing:
                if any(save.request_id in metadata.preempted for save in storing.saves):
                    while not storing.ticket.read():
                        time.sleep(0.0001)
        self._finishing |= metadata.finishing

    def start_loads(self, metadata: StepMetadata) -> None:
        """Submit the step's loads. Each is reported exactly once by `finished`, whatever becomes of it."""
        for load in metadata.loads:
            loading = Loading(load, None, self._clock())
            self._loading[load.request_id] = loading
            try:
                loading.ticket = self._submit(loading)
            except (MoonpoolError, ValueError) as error:
                loading.error = f"{error}"

    def start_saves(self, metadata: StepMetadata) -> None:
        """Reserve room for what the step has completed and the pool lacks, and submit its stores."""
        if not metadata.saves:
            return
        saves, storing = metadata.saves, None
        try:
            if self._attached():
                if self._storing_bytes < self.settings.store_inflight_bytes:
                    storing = self._store(saves)
                else:
                    self._unstored("too much under way", sum(len(save.pieces) for save in saves) * len(self.regions))
        except (MoonpoolError, ValueError) as error:
            self._report.errors.append(f"{error}")
        if storing is None:
            self._mark_read(saves)
            return
        self._storing_bytes += storing.size
        self._storing.append(storing)
        self._stored.put(storing)

    def finished(self) -> tuple[set[str], set[str]]:
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
        received: set[str] = set()
        for request_id, loading in list(self._loading.items()):
            if loading.ticket is not None and not loading.ticket.done():
                continue
            del self._loading[request_id]
            received.add(request_id)
            self._conclude(loading)
        return sent, received

    def failed_blocks(self) -> set[int]:
        """Blocks whose load failed, of requests that `finished` has named; each is told once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> WorkerReport | None:
        """What has happened since the last report; None for nothing."""
        while not self._told.empty():
            self._report = self._report.aggregate(self._told.get())
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def give_up(self) -> Bystander:
        """Stop all copies, and have somebody answer for what was under way: for the case that this object can't."""
        if self._mover is not None:
            self._mover.close()
        bystander = Bystander("the worker failed", self.pool)
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
        if self._mover is not None:
            self._mover.close()
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
            if self._mover is not None:
                self._mover.close()
            self._mover = self._make_mover(attachment)
            self._pool_id = attachment.pool_id
        return True

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

    def _submit(self, loading: Loading) -> Ticket:
        load = loading.load
        if not self._attached() or load.pool_id != self._pool_id:
            raise MoonpoolError("the pool that holds it is not attached here")
        assert self._mover is not None
        transfers = []
        for part, extent in own_extents(load, self.rank):
            expected = self.regions[part.group].object_bytes
            if extent.size != expected:
                raise MoonpoolError(f"an object of {extent.size} bytes where this worker's have {expected}")
            transfers.append(Transfer(extent.offset, part.group, part.blocks))
            loading.size += extent.size
        return self._mover.load(transfers, after=self._mark)

    def _conclude(self, loading: Loading) -> None:
        """A load's I/O has ended: are its bytes good?"""
        load = loading.load
        error = loading.error or (loading.ticket.error if loading.ticket is not None else None) or ""
        if not error and not self.pool.client.still_good(_extents(load, [e for _, e in own_extents(load, self.rank)])):
            error = "the object went away meanwhile"
        if error:
            self._failed_blocks |= load.blocks
            self._report.failed[load.request_id] = error
            return
        now = self._clock()
        self._report.loaded[load.request_id] = Moved(loading.size, now - max(loading.began, self._counted_until))
        self._counted_until = now

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
                now = self._clock()
                took_s, counted_until = now - max(storing.began, counted_until), now
                if storing.ticket.error is not None:
                    objects = storing.reservations.statuses.count(Status.OK)
                    storing.reservations.abort()
                    self._told.put(WorkerReport(unstored={"copy failed": objects}, errors=[storing.ticket.error]))
                    continue
                statuses = storing.reservations.commit()
                groups = [g for g, status in zip(storing.groups, statuses, strict=True) if status is Status.OK]
                size = sum(self.regions[group].object_bytes for group in groups)
                self._told.put(WorkerReport(stored_objects=groups.count(0), stored=Moved(size, took_s)))
            except MoonpoolError as error:
                log.info("a step's stores are lost: %s", error)
            except Exception:  # a thread that ends would leave every later store reserved
                log.exception("a step's stores are lost")


def _extents(load: Load, own: list[Extent]) -> Extents:
    return Extents(
        load.pool_id, load.epoch, [e.id for e in own], [e.offset for e in own], [e.size for e in own],
        [e.word for e in own],
    )  # fmt: skip


