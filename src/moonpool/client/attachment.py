"""What a client has mapped of one node: the pool, the table, and a thread that faults the pool in."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moonpool.folder.folder import Folder
from moonpool.folder.mapping import TOUCH_CHUNK_BYTES, Mapping
from moonpool.folder.table import TableReader
from moonpool.wire import messages as m

GROWTH_POLL_S = 0.02
"""How often the prefault thread looks whether the node has reserved more of the pool."""


class Attachment:
    """One pool and one table, as seen by this process, and the session (`token`) that was told of them.
    Immutable but for `live`.

    Whoever holds extents of this pool keeps a reference: the mapping stays until the last is gone, also when
    the client has meanwhile attached to another pool.
    """

    def __init__(self, pool: Mapping, table: TableReader, pool_id: bytes, token: bytes) -> None:
        self.pool, self.table = pool, table
        self.pool_id, self.token = pool_id, token
        self.live = True
        """False once the node is known to be gone: lookups from shared memory then don't answer."""
        self.readonly_view = pool.view.toreadonly()

    @classmethod
    def map(cls, folder: Folder, welcome: m.Welcome, *, writable: bool, earlier: Attachment | None) -> Attachment:
        """Map what lies in the folder, keeping the pool's mapping (and with it its faulted pages and any
        registration) where it is the same pool as before. Raises `FolderError`."""
        table = TableReader(Mapping.open(folder.table, writable=False))
        if earlier is not None and earlier.pool_id == welcome.pool_id:
            return cls(earlier.pool, table, welcome.pool_id, welcome.token)
        return cls(Mapping.open(folder.pool, writable=writable), table, welcome.pool_id, welcome.token)


class Prefault(threading.Thread):
    """Faults this process's mapping of the pool in, following what the node has reserved.

    Page tables are per process: without it, the first pass over resident pages runs at a fraction of the speed.
    """

    def __init__(self, pool: Mapping, reserved_bytes: Callable[[], int]) -> None:
        super().__init__(name="moonpool-prefault", daemon=True)
        self.done = threading.Event()
        self._pool, self._reserved_bytes = pool, reserved_bytes
        self._stopping = threading.Event()

    def run(self) -> None:
        at, total = 0, self._pool.size
        while at < total and not self._stopping.is_set():
            length = min(TOUCH_CHUNK_BYTES, self._reserved_bytes() - at)
            if length <= 0:
                self._stopping.wait(GROWTH_POLL_S)
            elif self._pool.touch(at, length):
                at += length
            else:
                break
        self.done.set()

    def stop(self) -> None:
        self._stopping.set()
