"""The mover for a KV cache in the host's memory: one thread that copies with numpy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from moonpool.gpu.kernels import Bytes, host_array
from moonpool.gpu.mover import SKIP, MoverFailed, Plane, Region, Transfer
from moonpool.gpu.plan import check

log = logging.getLogger("moonpool.gpu")

ROWS = 1 << 31
"""Of a plane's view: more than any cache has blocks. Only rows of real blocks are ever touched."""
CLOSE_S = 30.0
"""How long `close` waits for the object that is being copied."""


class HostTicket:
    """A batch of the host's mover. Reading ends with writing: both are one copy."""

    def __init__(self, transfers: Sequence[Transfer], *, load: bool) -> None:
        self.transfers, self.load = transfers, load
        self.error: str | None = None
        self._ended = threading.Event()

    def read(self) -> bool:
        return self._ended.is_set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._ended.wait(timeout_s)

    def end(self, error: str | None = None) -> None:
        self.error = error
        self._ended.set()


class HostMover:
    """Copies between `pool` (all bytes of it) and planes in this process's memory, in the order of submission.

    The planes' memory must outlive the mover until `close()` has returned.
    """

    def __init__(self, pool: Bytes, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self._pool = pool
        self._rows = [[_rows(plane) for plane in region.planes] for region in self.regions]
        self._queue: SimpleQueue[HostTicket | None] = SimpleQueue()
        self._stopped: str | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="moonpool-mover", daemon=True)
        self._thread.start()

    def load(self, transfers: Sequence[Transfer], *, after: object | None = None) -> HostTicket:
        return self._submit(HostTicket(transfers, load=True))

    def store(self, transfers: Sequence[Transfer], *, after: object | None = None) -> HostTicket:
        if not self._pool.flags.writeable:
            raise ValueError("the pool is mapped read-only: nothing can be stored")
        return self._submit(HostTicket(transfers, load=False))

    def enter_thread(self) -> None:
        pass

    def mark(self) -> None:
        return None

    def close(self) -> None:
        with self._lock:
            if self._stopped is None:
                self._stopped = "the mover is closed"
            self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("a copy in the host's memory has not ended within %g s", CLOSE_S)

    def _submit(self, ticket: HostTicket) -> HostTicket:
        check(ticket.transfers, self.regions, len(self._pool))
        with self._lock:
            if self._stopped is not None:
                raise MoverFailed(self._stopped)
            self._queue.put(ticket)
        return ticket

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            try:
                for transfer in ticket.transfers:
                    if self._stopped is not None:
                        break
                    self._copy(transfer, load=ticket.load)
            except Exception as error:
                log.exception("the mover stops")
                self._stopped = f"the mover has failed: {error}"
            ticket.end(self._stopped)

    def _copy(self, transfer: Transfer, *, load: bool) -> None:
        region, blocks = self.regions[transfer.region], transfer.blocks
        ids = np.array(blocks, np.intp)
        kept = None if SKIP not in blocks else np.flatnonzero(ids != SKIP)
        wanted = _compact(ids if kept is None else ids[kept])
        at = transfer.offset
        for plane, rows in zip(region.planes, self._rows[transfer.region], strict=True):
            size = len(blocks) * plane.piece_bytes
            pieces = self._pool[at : at + size].reshape(len(blocks), plane.piece_bytes)
            if load:
                rows[wanted] = pieces if kept is None else pieces[kept]
            elif kept is None:
                np.copyto(pieces, rows[wanted])
            else:
                pieces[kept] = rows[wanted]
            at += size


def _rows(plane: Plane) -> Bytes:
    return host_array(plane.address, (ROWS, plane.piece_bytes), (plane.stride_bytes, 1))


def _compact(ids: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | slice:
    """Consecutive blocks as a slice: one plain copy."""
    if len(ids) and ids[-1] - ids[0] == len(ids) - 1 and (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return ids
