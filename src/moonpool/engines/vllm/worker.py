"""A worker's side: moves the objects that the scheduler names between the pool and this rank's blocks.

Nothing here waits for a copy: loads are submitted, and looked at when the engine asks what has finished; `storing` does
the stores in threads of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from moonpool.client.attachment import Attachment
from moonpool.engines.vllm.bystander import Bystander
from moonpool.engines.vllm.guard import note_fault, text_of
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
from moonpool.engines.vllm.storing import Stores
from moonpool.errors import MoonpoolError
from moonpool.gpu.mover import Mover, Region, Ticket, Transfer
from moonpool.node.checksums import checksum

log = logging.getLogger("moonpool.vllm")


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
        self._mark: object | None = None
        """What the engine's stream had to do before this step: loads come after it, not after the step's forward."""
        self._counted_until = 0.0
        """Loads overlap: seconds until here are counted as spent on loading already."""
        self._checker = ThreadPoolExecutor(1, "moonpool-verify") if settings.verify else None
        self._report = WorkerReport(ranks=(spaces.report,))
        self._told: SimpleQueue[WorkerReport] = SimpleQueue()
        """What threads have to report."""
        self._comparer = make_comparer(self._told.put) if make_comparer is not None else None
        self._stores = Stores(settings, regions, spaces, pool, self._told.put, clock)

    # ---- a step --------------------------------------------------------------------------------------------------

    def before_forward(self, metadata: StepMetadata) -> None:
        """Blocks that the engine has taken back may be written to from now on: wait until no store reads them."""
        if metadata.space:
            self.spaces.tell(metadata.space)
            for loading in self._loading.values():  # of before the engine's cache was reset
                loading.error = "the engine's cache was reset meanwhile"
        self._mark = self._mover.mark() if metadata.loads and self._mover is not None else None
        if metadata.unread:
            self._stores.await_read(metadata.unread)

    def start_loads(self, metadata: StepMetadata) -> None:
        """Submit the step's loads. Each is reported exactly once by `finished`, whatever becomes of it."""
        for load in metadata.loads:
            loading = Loading(load, None, self._clock())
            try:
                self._submit(loading)
            except Exception as error:
                loading.error = text_of("start_loads", error)
            self._loading[load.request_id] = loading

    def start_saves(self, metadata: StepMetadata) -> None:
        """Have what the step completes, and the pool lacks, stored once its forward has run."""
        for check in metadata.checks:
            self._check(check)
        if not metadata.saves:
            return
        begun = False
        try:
            if self._attached():
                assert self._mover is not None
                begun = self._stores.begin(metadata.saves, self._mover)
        except Exception as error:
            self._report.errors.append(text_of("start_saves", error))
        if not begun:
            self._mark_read(metadata.saves)

    def finished(self) -> Ended:
        """Requests whose load has ended, each named once."""
        self._mark_read(self._stores.take_read())
        ended = Ended(set(), set(), set())
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
        self._stores.close()
        self._stop_comparing()
        self._hear()
        bystander = Bystander("a worker has failed, see its log", self.pool)
        bystander.pass_on(self._report)
        bystander.take_over(
            {request_id: loading.load.blocks for request_id, loading in self._loading.items()},
            {save.number for save in self._stores.unread},
        )
        return bystander

    def close(self) -> None:
        """End everything: copies are waited for, what is whole is made visible."""
        self._stores.close()
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
            if self._loading or any(self._stores.unread):
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

    def _mark_read(self, saves: Sequence[Save]) -> None:
        for save in saves:
            self._report.read[save.number] = self._report.read.get(save.number, 0) + 1


def _differ(ticket: Ticket, pool: memoryview, extents: Sequence[Extent]) -> bool:
    """Whether the bytes of any of these extents aren't those of its checksum, once they have been read."""
    ticket.wait()
    return any(checksum(pool[e.offset : e.offset + e.size]) != e.checksum for e in extents)
