"""A worker's stores: reserved, copied and made visible by two threads of their own, off the engine's critical path.

The engine's thread only says what is to be stored, and marks what must have been computed before. One thread reserves
room for it (a pool that is full evicts first, which takes 10 ms a GB) and submits the copies; the other waits for
copies to end and commits, also while the engine is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from moonpool.client.writing import Reservations
from moonpool.engines.vllm.guard import note_fault, text_of
from moonpool.engines.vllm.metadata import Moved, Save, WorkerReport
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.spaces import RankSpaces
from moonpool.errors import MoonpoolError, NodeUnavailable
from moonpool.gpu.mover import Mover, Region, Ticket, Transfer
from moonpool.keys import KeySpace
from moonpool.node.checksums import checksum
from moonpool.status import Status

log = logging.getLogger("moonpool.vllm")

CLOSE_WAIT_S = 5.0
"""How long `close` waits for what is under way to end. It ends by itself in a fraction of that."""
REUSE_WAIT_S = 5.0
"""How long blocks that the engine has taken back are kept for the stores that read them. They take a fraction of that;
what is read later is not made visible."""
COMMIT_POLL_S = 0.002
"""How often it is looked whether copies have ended: seldom enough to leave the interpreter to the engine's thread."""


class Wanted(NamedTuple):
    """One object that is to be stored."""

    key: bytes
    group: int
    blocks: tuple[int, ...]
    note: bytes


@dataclass(slots=True, eq=False)
class Storing:
    """A step's stores. The blocks are the engine's, which leaves them as they are until `read`; the extents are
    reserved by this process from `reservations` on until they are committed or aborted, by the committing thread."""

    saves: Sequence[Save]
    wanted: list[Wanted]
    spaces: list[KeySpace]
    mover: Mover
    mark: object | None
    size: int
    began: float
    ticket: Ticket | None = None
    reservations: Reservations | None = None
    given_up: bool = False
    """There will be no copy."""
    spoilt: bool = False
    """Its blocks may have been written to while they were read."""

    def read(self) -> bool:
        """Whether its blocks aren't read any more, and won't be."""
        return self.given_up or (self.ticket is not None and self.ticket.read())


class Stores:
    """The stores of one rank. Its methods are for the engine's thread; `told` is called by others too."""

    def __init__(
        self,
        settings: Settings,
        regions: tuple[Region, ...],
        spaces: RankSpaces,
        pool: Pool,
        told: Callable[[WorkerReport], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._regions, self._spaces, self._pool = settings, regions, spaces, pool
        self._told, self._clock = told, clock
        self._unread: list[Storing] = []
        self._bytes = 0
        self._asked: SimpleQueue[Storing | None] = SimpleQueue()
        self._copying: SimpleQueue[Storing | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"moonpool-{name}", daemon=True)
            for name, run in (("reserve", self._reserve_all), ("commit", self._commit_all))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, saves: Sequence[Save], mover: Mover) -> bool:
        """Store what `saves` name, as it is when the engine's stream has come this far. False where nothing of it
        will be: nobody reads its blocks."""
        wanted = list(self._wanted(saves))
        if not wanted:
            return False
        if self._bytes >= self._settings.store_inflight_bytes:
            self._told(WorkerReport(unstored={"too much under way": len(wanted)}))
            return False
        size = sum(self._regions[item.group].object_bytes for item in wanted)
        storing = Storing(saves, wanted, self._spaces.all(), mover, mover.mark(), size, self._clock())
        self._bytes += size
        self._unread.append(storing)
        self._asked.put(storing)
        return True

    def take_read(self) -> list[Save]:
        """Saves whose blocks aren't read any more, each told once."""
        if not self._unread:
            return []
        found: list[Save] = []
        for storing in [storing for storing in self._unread if storing.read()]:
            self._unread.remove(storing)
            self._bytes -= storing.size
            found += storing.saves
        return found

    @property
    def unread(self) -> Iterator[Save]:
        """Saves whose blocks may still be read."""
        return (save for storing in self._unread for save in storing.saves)

    def await_read(self, numbers: frozenset[int]) -> None:
        """Blocks of these saves may be written to when this returns: nothing reads them, or what reads them won't
        become visible."""
        for storing in self._unread:
            if any(save.number in numbers for save in storing.saves):
                deadline = time.monotonic() + REUSE_WAIT_S
                while not storing.read():
                    if time.monotonic() > deadline:
                        storing.spoilt = True
                        break
                    time.sleep(0.0001)

    def close(self) -> None:
        """Let what is under way end; what is whole is made visible. Nothing may begin any more."""
        self._asked.put(None)
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)

    # ---- within --------------------------------------------------------------------------------------------------

    def _wanted(self, saves: Sequence[Save]) -> Iterator[Wanted]:
        seen: set[bytes] = set()
        for save in saves:
            for piece in save.pieces:
                for group, blocks in enumerate(piece.blocks):
                    key = self._spaces.of(save.adapter)[group].digest + piece.digest
                    if blocks is not None and key not in seen:
                        seen.add(key)
                        yield Wanted(key, group, blocks, piece.note)

    def _reserve_all(self) -> None:
        """The reserving thread."""
        while (storing := self._asked.get()) is not None:
            try:
                self._submit(storing)
            except NodeUnavailable as error:
                log.debug("a step's stores are lost: %s", error)
                self._told(WorkerReport(unstored={"node gone": len(storing.wanted)}))
            except Exception as error:  # a thread that ends would leave every later store's blocks unread
                self._told(WorkerReport(errors=[text_of("a store", error)]))
            finally:
                storing.given_up = storing.ticket is None
            if storing.ticket is not None:
                self._copying.put(storing)
        self._copying.put(None)

    def _submit(self, storing: Storing) -> None:
        """Reserve and begin to copy. Sets `ticket` where copies have begun."""
        if storing.spoilt:
            return
        self._pool.declare(storing.spaces)
        wanted = storing.wanted
        reservations = self._pool.client.reserve_many(
            [item.key for item in wanted],
            [self._regions[item.group].object_bytes for item in wanted],
            wait_s=0.0,
            metadata=[item.note for item in wanted],
        )
        if short := reservations.statuses.count(Status.NO_SPACE) + reservations.statuses.count(Status.TOO_LARGE):
            self._told(WorkerReport(unstored={"no room": short}))
        try:
            transfers = [
                Transfer(extent.offset, item.group, item.blocks)
                for extent, item in zip(reservations, wanted, strict=True)
                if extent.status is Status.OK
            ]
            if not transfers:
                return
            storing.mover.enter_thread()
            storing.reservations = reservations
            storing.ticket = storing.mover.store(transfers, after=storing.mark)
        except BaseException:
            reservations.abort()  # nothing was started
            raise
        finally:
            storing.mark = None

    def _commit_all(self) -> None:
        """The committing thread: a store becomes visible when all its bytes are in the pool, never before."""
        counted_until = 0.0
        while (storing := self._copying.get()) is not None:
            assert storing.ticket is not None
            assert storing.reservations is not None
            try:
                while not storing.ticket.done():
                    time.sleep(COMMIT_POLL_S)
                now = self._clock()
                took_s, counted_until = now - max(storing.began, counted_until), now
                self._conclude(storing, took_s)
            except MoonpoolError as error:
                log.info("a step's stores are lost: %s", error)
            except Exception as error:  # a thread that ends would leave every later store reserved
                note_fault("a store", error)
                storing.reservations.abort()

    def _conclude(self, storing: Storing, took_s: float) -> None:
        reservations = storing.reservations
        assert storing.ticket is not None
        assert reservations is not None
        error = storing.ticket.error or ("blocks were reused while they were read" if storing.spoilt else None)
        if error is not None:
            objects = reservations.statuses.count(Status.OK)
            reservations.abort()
            self._told(WorkerReport(unstored={"copy failed": objects}, errors=[error]))
            return
        statuses = reservations.commit(self._checksums(reservations))
        groups = [w.group for w, status in zip(storing.wanted, statuses, strict=True) if status is Status.OK]
        size = sum(self._regions[group].object_bytes for group in groups)
        self._told(WorkerReport(stored_objects=groups.count(0), stored=Moved(size, took_s)))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("stored %d objects, %d bytes, in %.1f ms", len(groups), size, took_s * 1e3)

    def _checksums(self, reservations: Reservations) -> list[int]:
        """What loads will be verified by. Elsewhere the node sums what it has, when it has time."""
        if not self._settings.verify:
            return []
        return [0 if item.buffer is None else checksum(item.buffer.data) for item in reservations]
