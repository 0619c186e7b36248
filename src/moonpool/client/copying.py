"""Copies between the pool and a caller's buffers: without the interpreter lock, over several threads, and never
still running when the call has ended."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from moonpool.probes import ARMED, reach

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 64 * 1024
"""Up to here a plain memoryview copy, holding the interpreter lock for a few us, is quicker than numpy's call."""
PIECE_BYTES = 4 << 20
"""What a thread takes at a time: some 0.3 ms, so that an interrupt is noticed soon and no thread idles long."""
SPREAD_BYTES_MIN = 8 << 20
"""Below this waking other threads costs more than they save."""


class Copier:
    """Copies batches of slices with `threads` threads, the caller's being one of them. Thread-safe."""

    def __init__(self, threads: int | None = None) -> None:
        available = len(os.sched_getaffinity(0))
        self.threads = max(1, threads if threads is not None else min(4, available))
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        _copiers.add(self)

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each (target, source) pair of equally long slices. When it returns or raises (interrupts too), no
        copy that it started is running any more."""
        if self.threads == 1 or sum(len(target) for target, _ in pairs) < SPREAD_BYTES_MIN:
            for target, source in pairs:
                np.copyto(target, source)
            return
        pieces: deque[tuple[Bytes, Bytes]] = deque()
        for target, source in pairs:
            for start in range(0, len(target), PIECE_BYTES):
                pieces.append((target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES]))
        executor = self._pool()
        helpers: list[Future[None]] = []
        try:
            for _ in range(min(self.threads, len(pieces)) - 1):
                helpers.append(executor.submit(_drain, pieces))
            _drain(pieces)
        finally:
            pieces.clear()
            _settle(helpers)
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    def close(self, wait: bool = True) -> None:
        """End the threads; with `wait`, running copies are waited for."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait)

    def after_fork(self) -> None:
        """In a forked child: the threads are the parent's; new ones are started when needed."""
        self._lock = threading.Lock()
        self._executor = None

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="moonpool-copy")
            return self._executor


def copy_out(source: Bytes) -> bytes:
    """The bytes of a contiguous array as a `bytes` object; a large copy doesn't hold the interpreter lock."""
    if len(source) <= SMALL_BYTES:
        return source.tobytes()
    # Nobody else has seen this object yet, so filling it in place breaks no promise of immutability; `tobytes` would
    # stall every thread for as long as the copy takes. ctypes lets go of the lock during a foreign call.
    result = bytes(len(source))
    ctypes.memmove(ctypes.c_char_p(result), source.ctypes.data, len(source))
    return result


def _drain(pieces: deque[tuple[Bytes, Bytes]]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        if ARMED:
            reach("client-copying")
        np.copyto(target, source)


def _settle(helpers: Sequence[Future[None]]) -> None:
    """Wait until none runs, whatever comes in between; an interrupt is raised afterwards."""
    interrupted: BaseException | None = None
    for helper in helpers:
        if helper.cancel():  # still queued behind another caller's copies: there is nothing left for it to do
            continue
        while not helper.done():
            try:
                helper.exception()
            except BaseException as error:  # KeyboardInterrupt above all: the copy still runs, so wait on
                interrupted = error
    if interrupted is not None:
        raise interrupted


_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()


def _after_fork() -> None:
    for copier in list(_copiers):
        copier.after_fork()


os.register_at_fork(after_in_child=_after_fork)
