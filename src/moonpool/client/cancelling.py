"""Ending from another thread what a call waits for in the node: `aio` does so, whose calls run in threads."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class Scope:
    """One call, run in one thread and cancelled from any other."""

    def __init__(self) -> None:
        self.cancelled = False
        self._stop: Callable[[], None] | None = None

    def run(self, call: Callable[[], T]) -> T:
        """Run it here. Raises `Cancelled` where it waited in the node, or would have, after it was cancelled."""
        token = SCOPE.set(self)
        try:
            return call()
        finally:
            SCOPE.reset(token)

    def waits(self, stop: Callable[[], None]) -> None:
        """Called by a link before it waits: `stop` ends that."""
        self._stop = stop
        if self.cancelled:
            stop()

    def cancel(self) -> None:
        """End what the call waits for, now and from now on. Copies run to their end, and so does the call."""
        self.cancelled = True
        stop = self._stop
        if stop is not None:
            stop()


SCOPE: ContextVar[Scope | None] = ContextVar("moonpool-scope", default=None)
"""The scope of the call that this thread is at."""
