"""The pool made known to CUDA, so that copies between it and a GPU run at the wire's full speed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import perf_counter

from moonpool.client.attachment import GROWTH_POLL_S, Attachment
from moonpool.errors import MoonpoolError
from moonpool.folder.layout import Header
from moonpool.folder.mapping import TOUCH_CHUNK_BYTES, Mapping
from moonpool.gpu.cudart import REGISTER_PORTABLE, REGISTER_READ_ONLY, Cuda, CudaError, Runtime
from moonpool.gpu.plan import Piece, split
from moonpool.sizes import format_bytes

log = logging.getLogger("moonpool.gpu")

CHUNK_BYTES = 1 << 30
"""What is registered at once, some 60 ms: while it lasts CUDA calls of other threads may have to wait. Every border
cuts a copy in two."""
STOP_S = 30.0
"""How long `close` waits for the chunk that is being registered."""


class Registration:
    """Registers one mapping with CUDA, chunk by chunk in a thread of its own, as far as the node has reserved it.

    Keeps the mapping alive. What is registered stays so until `close()`, which comes after every copy has ended. A
    pool that replaces another is a registration of its own. A mapping that can't be registered still works:
    `refused` says why (it is logged once), and copies take the slow way.
    """

    def __init__(
        self,
        mapping: Mapping,
        *,
        device: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        reserved_bytes: Callable[[], int] | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        """Start at once. `reserved_bytes` tells how much of the pool there is (None: all of it); memory beyond it
        isn't touched. Raises `MoonpoolError` where there is no CUDA."""
        if chunk_bytes <= 0 or chunk_bytes % 4096:
            raise ValueError(f"chunk_bytes {chunk_bytes} is no multiple of 4096")
        self.mapping, self.chunk_bytes = mapping, chunk_bytes
        self.cuda: Cuda = cuda if cuda is not None else Runtime()
        self.frontier_bytes = 0
        """Everything below is registered. Only ever grows, until `close()`."""
        self.done = threading.Event()
        """Set when no more will be registered: all is, or it was refused."""
        self.refused: str | None = None
        self.seconds = 0.0
        """How long the calls that register have taken so far."""
        self._address = mapping.bytes.ctypes.data
        self._device, self._reserved_bytes = device, reserved_bytes or (lambda: mapping.size)
        self._stopping = threading.Event()
        self._chunks: list[int] = []
        self._thread = threading.Thread(target=self._run, name="moonpool-register", daemon=True)
        self._thread.start()

    @classmethod
    def of(
        cls, attachment: Attachment, *, device: int = 0, chunk_bytes: int = CHUNK_BYTES, cuda: Cuda | None = None
    ) -> Registration:
        """Register the pool that a client is attached to, following what its node has reserved."""
        header = attachment.table.header
        return cls(
            attachment.pool,
            device=device,
            chunk_bytes=chunk_bytes,
            reserved_bytes=lambda: int(header[Header.RESERVED_BYTES]),
            cuda=cuda,
        )

    def split(self, offset: int, length: int) -> list[Piece]:
        """Cut a range of the pool at the borders that no copy may cross, each piece with whether it is registered."""
        return split(offset, length, self.chunk_bytes, self.frontier_bytes)

    def close(self) -> None:
        """Register no more, and give back what is. No copy may be running. Safe to call again."""
        self._stopping.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("the pool's registration doesn't end; what is registered stays so until the process ends")
            return
        self.frontier_bytes = 0
        while self._chunks:
            try:
                self.cuda.unregister(self._chunks.pop())
            except CudaError as error:
                log.warning("part of the pool stays registered: %s", error)

    def _run(self) -> None:
        begun = perf_counter()
        try:
            self.cuda.enter_thread(self._device)
            flags = REGISTER_PORTABLE | (0 if self.mapping.writable else REGISTER_READ_ONLY)
            while self.frontier_bytes < self.mapping.size and self._await_memory():
                self._register(flags)
        except MoonpoolError as error:
            self.refused = str(error)
            log.warning(
                "the pool can't be registered with CUDA beyond %s of %s, copies there are slow: %s",
                *(format_bytes(n, binary=True) for n in (self.frontier_bytes, self.mapping.size)),
                error,
            )
        else:
            log.info(
                "%s of the pool registered with CUDA in %.2f s, %.2f s of it in CUDA",
                format_bytes(self.frontier_bytes, binary=True),
                perf_counter() - begun,
                self.seconds,
            )
        finally:
            self.done.set()

    def _await_memory(self) -> bool:
        """Wait until the node has reserved the next chunk, and fault it in: registering untouched memory is slow.
        False when told to stop."""
        at, end = self.frontier_bytes, self._next_border()
        while at < end and not self._stopping.is_set():
            length = min(TOUCH_CHUNK_BYTES, min(end, self._reserved_bytes()) - at)
            if length <= 0:
                self._stopping.wait(GROWTH_POLL_S)
                continue
            self.mapping.touch(at, length)
            at += length
        return not self._stopping.is_set()

    def _register(self, flags: int) -> None:
        start, end = self.frontier_bytes, self._next_border()
        begun = perf_counter()
        self.cuda.register(self._address + start, end - start, flags)
        self.seconds += perf_counter() - begun
        self._chunks.append(self._address + start)
        self.frontier_bytes = end

    def _next_border(self) -> int:
        return min(self.mapping.size, self.frontier_bytes + self.chunk_bytes)
