"""A CUDA that isn't there: streams run their operations in any order that streams and events allow, on the host's
memory, so that a missing wait shows as wrong bytes. And the pool and the device that go with it."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.folder.mapping import Mapping
from moonpool.gpu.cudart import CudaError
from moonpool.gpu.kernels import Group, Ids, Launch, host_array
from moonpool.gpu.plan import Piece, split

INVALID_VALUE = 1
Operation = Callable[[], bool]
"""Runs, or answers False where it has to wait."""


class FakeCuda:
    """Runs queued operations whenever somebody asks an event, a few at a time, from streams drawn at random."""

    def __init__(self, random: Random, pool: tuple[int, int, int] | None = None) -> None:
        """`pool`: address, size and chunk of the pool's memory, no border of which a copy may cross."""
        self.random, self.pool = random, pool
        self.registered_bytes = 0
        self.streams: dict[int, deque[Operation]] = {}
        self.recorded: dict[int, list[bool] | None] = {}
        self.queued_max = self.copies = self.slow_copies = 0
        self.fail_at_copy = -1
        self.dead = False
        self.log: list[str] = []
        self.frozen = False
        """Nothing moves on."""
        self._lock = threading.RLock()
        self._handle = 100

    # ---- what the mover calls ------------------------------------------------------------------------------------

    def enter_thread(self, device: int) -> None:
        self.log.append(f"enter_thread {device}")

    def stream(self, *, urgent: bool) -> int:
        self.streams[self._next()] = deque()
        return self._handle

    def event(self) -> int:
        self.recorded[self._next()] = None
        return self._handle

    def record(self, event: int, stream: int) -> None:
        reached = [False]
        with self._lock:
            self._alive("cudaEventRecord")
            self.recorded[event] = reached
            self._queue(stream, lambda: bool(reached.__setitem__(0, True)) or True)

    def stream_wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._alive("cudaStreamWaitEvent")
            reached = self.recorded[event]
            if reached is not None:
                self._queue(stream, lambda: reached[0])

    def event_query(self, event: int) -> bool:
        with self._lock:
            self._alive("cudaEventQuery")
            self.run(self.random.randrange(6))
            reached = self.recorded[event]
            return reached is None or reached[0]

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        with self._lock:
            self._alive("cudaMemcpyAsync")
            self.copies += 1
            if self.copies == self.fail_at_copy:
                raise CudaError("cudaMemcpyAsync", INVALID_VALUE, "as told")
            for address in (target, source):
                assert self._in_pool(address, length) in (None, True), "a copy that CUDA would refuse, or make slowly"
            self._queue(stream, lambda: bool(ctypes.memmove(target, source, length)) or True)

    def copy_pageable(self, target: int, source: int, length: int, stream: int) -> None:
        """As CUDA does it: what the stream has before is waited for."""
        assert threading.current_thread() is not threading.main_thread(), "the engine's thread would block"
        done = [False]
        with self._lock:
            self.slow_copies += 1
            assert any(self._in_pool(address, length) is not None for address in (target, source))
            self._queue(stream, lambda: bool(ctypes.memmove(target, source, length)) or True)
            self._queue(stream, lambda: bool(done.__setitem__(0, True)) or True)
            while not done[0]:
                self.run(1)

    def register(self, address: int, length: int, flags: int) -> None:
        self.log.append(f"register {address} {length} {flags}")

    def unregister(self, address: int) -> None:
        self.log.append(f"unregister {address}")

    def destroy_event(self, event: int) -> None:
        with self._lock:
            reached = self.recorded.pop(event)
            assert reached is None or reached[0], "an event that something may still wait for"

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            assert not self.streams.pop(stream), "a stream that is still at work"

    # ---- what tests call -----------------------------------------------------------------------------------------

    def run(self, count: int = 1 << 30) -> None:
        """Run up to `count` operations; all that can be run by default."""
        with self._lock:
            while count > 0 and not self.frozen:
                ready = [stream for stream, queue in self.streams.items() if queue]
                self.random.shuffle(ready)
                for stream in ready:
                    if self.streams[stream][0]():
                        self.streams[stream].popleft()
                        count -= 1
                        break
                else:
                    return

    def submit(self, stream: int, operation: Callable[[], object]) -> None:
        """Queue what an engine, or a kernel, does."""
        with self._lock:
            self._queue(stream, lambda: (operation(), True)[1])

    @property
    def pending(self) -> int:
        return sum(map(len, self.streams.values()))

    def _queue(self, stream: int, operation: Operation) -> None:
        self.streams[stream].append(operation)
        self.queued_max = max(self.queued_max, len(self.streams[stream]))

    def _in_pool(self, address: int, length: int) -> bool | None:
        """None outside of the pool; True inside of what is registered, within one chunk."""
        if self.pool is None:
            return None
        start, size, chunk = self.pool
        offset = address - start
        if not 0 <= offset < size:
            return None
        return offset // chunk == (offset + length - 1) // chunk and offset + length <= self.registered_bytes

    def _alive(self, call: str) -> None:
        if self.dead:
            raise CudaError(call, 700, "an illegal memory access was encountered")

    def _next(self) -> int:
        self._handle += 1
        return self._handle


class FakePool:
    """A mapped pool of which as much is registered as a test says."""

    def __init__(self, size: int, chunk_bytes: int, random: Random) -> None:
        self.mapping = Mapping.anonymous(size)
        self.chunk_bytes = chunk_bytes
        self.cuda = FakeCuda(random, (self.mapping.bytes.ctypes.data, size, chunk_bytes))
        self.advance(size)

    def advance(self, frontier_bytes: int) -> None:
        self.frontier_bytes = self.cuda.registered_bytes = frontier_bytes

    def split(self, offset: int, length: int) -> list[Piece]:
        return split(offset, length, self.chunk_bytes, self.frontier_bytes)


class FakeDevice:
    """The device of a `FakeCuda`: its memory is the host's."""

    index = 3

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.engine = cuda.stream(urgent=False)

    def device(self, size: int) -> Any:
        return _Buffer(size)

    def pinned(self, count: int) -> Ids:
        return np.zeros(count, np.int64)

    def current_stream(self) -> int:
        return self.engine

    def settle(self) -> None:
        self.cuda.run()

    def kernels(self) -> FakeKernels:
        return FakeKernels(self.cuda)


class _Buffer:
    """Memory at a multiple of 256, poisoned."""

    def __init__(self, size: int) -> None:
        self._bytes = np.full(size + 256, 0xEE, np.uint8)

    def data_ptr(self) -> int:
        return int(self._bytes.ctypes.data + 255) // 256 * 256


class FakeKernels:
    """Moves bytes when its stream comes to it, by the ids that the device has then."""

    name = "fake"

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def prepare(self, group: Group, *, gather: bool) -> Launch:
        def launch(slot: int, ids: Ids, ids_address: int, stream: int) -> None:
            objects = len(ids)
            self._cuda.submit(stream, lambda: self._move(group, gather, slot, objects, ids_address))

        return launch

    def _move(self, group: Group, gather: bool, slot: int, objects: int, ids_address: int) -> None:
        shape = (objects, group.blocks)
        ids = host_array(ids_address, (objects * group.blocks * 8,)).view(np.int64).reshape(shape)
        size = group.piece_bytes
        for item in range(objects):
            for plane, start in zip(group.planes, group.starts, strict=True):
                for block, number in enumerate(ids[item]):
                    if number < 0:
                        continue
                    there = plane.address + int(number) * plane.stride_bytes
                    here = slot + item * group.part_bytes + start + block * size
                    target, source = (here, there) if gather else (there, here)
                    ctypes.memmove(target, source, size)


Bytes = npt.NDArray[np.uint8]
