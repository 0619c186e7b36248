"""The device mover's tickets and marks, and the events that they ask."""

from __future__ import annotations

import time
from collections.abc import Callable

from moonpool.gpu.cudart import Cuda, CudaError

PAUSE_S = 50e-6
"""Between two looks of a `wait`: short beside the 0.6 ms that an object of 32 MB takes on the wire."""


class Events:
    """CUDA events to take and to give back: making one costs more than recording it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._free: list[int] = []
        self._closed = False

    def take(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            return self._cuda.event()

    def give(self, event: int) -> None:
        """Back into the pool. Nobody may ask it any more; what has been told to wait for it already, still does."""
        if not self._closed:
            self._free.append(event)

    def close(self) -> None:
        """Destroy what is in the pool. What is out stays until the process ends: a few bytes."""
        self._closed = True
        while self._free:
            self._cuda.destroy_event(self._free.pop())


class Mark:
    """What had been submitted to the engine's stream at some time. Its event goes back when it is dropped."""

    __slots__ = ("_events", "cuda_event")

    def __init__(self, events: Events) -> None:
        self._events = events
        self.cuda_event = events.take()

    def __del__(self) -> None:
        self._events.give(self.cuda_event)


class DeviceTicket:
    """A batch on its way. Until all of it has been submitted it has no events."""

    def __init__(self, cuda: Cuda, events: Events, advance: Callable[[], None]) -> None:
        self.error: str | None = None
        self._cuda, self._pool, self._advance = cuda, events, advance
        self._own: list[int] = []
        self._read = self._done = self._submitted = False
        self._read_event = self._done_event = 0
        self._late_error: str | None = None

    def read(self) -> bool:
        return self._read or self.done() or (self._submitted and self._reached(self._read_event))

    def done(self) -> bool:
        if not self._done:
            self._advance()
            if self._submitted and self._reached(self._done_event):
                self.end(self._late_error)
        return self._done

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    # ---- for the lane --------------------------------------------------------------------------------------------

    def submitted(self, first: int, last: int, *, read_early: bool, error: str | None = None) -> None:
        """All that there will be of the batch has been queued on two streams, of which `last` ends it. It is done
        when both have come this far, with `error` if that is given, and read as soon as `first` has where that is
        `read_early`. Raises `CudaError`."""
        passed, self._done_event = self._pool.take(), self._pool.take()
        self._own += (passed, self._done_event)
        self._read_event = passed if read_early else self._done_event
        self._cuda.record(passed, first)
        self._cuda.stream_wait(last, passed)
        self._cuda.record(self._done_event, last)
        self._late_error, self._submitted = error, True

    def end(self, error: str | None = None) -> None:
        """Nothing of it is running any more."""
        if not self._done:
            self.error = self.error or error
            self._read = self._done = True
        while self._own:
            try:
                self._pool.give(self._own.pop())
            except IndexError:  # another thread was here at the same time
                break

    def _reached(self, event: int) -> bool:
        try:
            return self._cuda.event_query(event)
        except CudaError as error:
            # Errors that an event meets are the device's, which runs nothing of this process from then on.
            self.end(f"the device has failed: {error}")
            return True
