"""Copies between the pool and a caller's buffers: without the interpreter lock, over several threads, and never
still running when the call has ended."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from moonpool.client.streaming import Copy, choose
from moonpool.probes import ARMED, reach

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 64 * 1024
"""Up to here a plain memoryview copy, holding the interpreter lock for a few us, is quicker than numpy's call."""
STREAMING_BYTES_MIN = 512 * 1024
"""From here on pieces are streamed past the caches (`streaming.py`): below, waiting at the end until all stores are out
costs what they save. GB/s of pieces one after the other, on memory unused for long, numpy's copy and the native one,
on a virtual machine with AMD EPYC cores:

              64 KiB       256 KiB      512 KiB      1 MiB        2 MiB        4 MiB        32 MiB
into the pool 16.5 | 12.3  20.2 | 19.4  18.7 | 20.0  17.3 | 21.8  18.3 | 23.7  19.4 | 26.4  19.2 | 26.6
out of it     14.4 | 12.3  17.3 | 19.8  16.8 | 20.8  17.1 | 22.6  18.3 | 24.8  19.3 | 26.4  19.4 | 27.0
"""
PIECE_BYTES = 4 << 20
"""What a thread takes at a time: some 0.3 ms, so that an interrupt is noticed soon and no thread idles long."""
SPREAD_BYTES_MIN = 8 << 20
"""Below this waking other threads costs more than they save."""


class Copier:
    """Copies batches of slices with `threads` threads, the caller's being one of them. Thread-safe. Raises
    `ConfigError` where the copy that `MOONPOOL_COPY` names can't be had.

    Its threads are plain ones that take work from a queue: an executor's own locks are written in Python, and an
    interrupt inside one of them would leave it locked for good.
    """

    def __init__(self, threads: int | None = None) -> None:
        available = len(os.sched_getaffinity(0))
        self.threads = max(1, threads if threads is not None else min(4, available))
        self.streaming = choose()
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._started = 0
        _copiers.add(self)

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each (target, source) pair of equally long slices. When it returns or raises (interrupts too), no
        copy that it started is running any more."""
        if self.threads == 1 or sum(len(target) for target, _ in pairs) < SPREAD_BYTES_MIN:
            for target, source in pairs:
                _copy_piece(target, source, self.streaming.copy)
            return
        batch = _Batch(self.streaming.copy)
        for target, source in pairs:
            for start in range(0, len(target), PIECE_BYTES):
                batch.pieces.append((target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES]))
        try:
            queue = self._helpers()
            for _ in range(min(self.threads, len(batch.pieces)) - 1):
                queue.put(batch)
            batch.drain()
            batch.settle()
        except BaseException:
            batch.stop()
            raise
        if batch.error is not None:
            raise batch.error

    def close(self) -> None:
        """End the threads, each after the copy that it may be at."""
        with self._lock:
            for _ in range(self._started):
                self._queue.put(None)
            self._started = 0

    def after_fork(self) -> None:
        """In a forked child: the threads are the parent's; new ones are started when needed."""
        self._lock = threading.Lock()
        self._queue = SimpleQueue()
        self._started = 0

    def _helpers(self) -> SimpleQueue[_Batch | None]:
        """The queue that the threads read, all of them started."""
        with self._lock:
            while self._started < self.threads - 1:
                threading.Thread(target=_help, args=(self._queue,), name="moonpool-copy", daemon=True).start()
                self._started += 1
            return self._queue


class _Batch:
    """The pieces of one call, taken by the caller's thread and by helpers until none is left."""

    def __init__(self, streaming: Copy) -> None:
        self._streaming = streaming
        self.pieces: deque[tuple[Bytes, Bytes]] = deque()
        self.error: BaseException | None = None
        self._gates: list[threading.Lock] = []

    def drain(self) -> None:
        """Copy pieces until none is left."""
        while True:
            try:
                target, source = self.pieces.popleft()
            except IndexError:
                return
            _copy_piece(target, source, self._streaming)

    def help(self) -> None:
        """The same in a helper. Whoever sees its gate waits for it; whoever doesn't has left it nothing."""
        gate = threading.Lock()
        with gate:
            self._gates.append(gate)
            try:
                self.drain()
            except BaseException as error:
                self.error = error

    def settle(self) -> None:
        """Leave nothing to be taken, and wait until no helper copies."""
        self.pieces.clear()
        for gate in list(self._gates):
            with gate:
                pass

    def stop(self) -> None:
        """`settle`, whatever comes in between: an interrupt is raised already."""
        while True:
            try:
                return self.settle()
            except BaseException:
                continue


def _copy_piece(target: Bytes, source: Bytes, streaming: Copy) -> None:
    if ARMED:
        reach("client-copying")
    if len(target) < STREAMING_BYTES_MIN:
        np.copyto(target, source)
    else:
        streaming(target, source)


def _help(queue: SimpleQueue[_Batch | None]) -> None:
    while (batch := queue.get()) is not None:
        batch.help()
        del batch  # and with it what it refers to


def copy_out(source: Bytes) -> bytes:
    """The bytes of a contiguous array as a `bytes` object; a large copy doesn't hold the interpreter lock."""
    if len(source) <= SMALL_BYTES:
        return source.tobytes()
    # Nobody else has seen this object yet, so filling it in place breaks no promise of immutability; `tobytes` would
    # stall every thread for as long as the copy takes. ctypes lets go of the lock during a foreign call. Streaming
    # doesn't pay here (17 GB/s against 18 at 2 MB): what an allocator hands out is in the caches, or has no pages yet.
    result = bytes(len(source))
    ctypes.memmove(ctypes.c_char_p(result), source.ctypes.data, len(source))
    return result


_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()


def _after_fork() -> None:
    for copier in list(_copiers):
        copier.after_fork()


os.register_at_fork(after_in_child=_after_fork)
