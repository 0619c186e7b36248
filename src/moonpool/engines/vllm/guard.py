"""No exception of ours reaches the engine: a step of it is worth more than any hit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from moonpool.errors import MoonpoolError

log = logging.getLogger("moonpool.vllm")

Method = TypeVar("Method", bound=Callable[..., Any])
LOGGED_MAX = 10
"""Tracebacks that one process logs; a fault that comes every step would fill the disk."""

_logged = 0


def guarded(otherwise: Callable[..., Any], last: Callable[[], Any] = lambda: None) -> Callable[[Method], Method]:
    """Have a method answer `otherwise(self, …)`, with its own arguments, where it raises, and `last()` where that does.

    What the engine waits for, and what it must not be told wrongly, is `otherwise`'s to see to. The fault is logged and
    told to `self.faulty`.
    """

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                note_fault(method.__name__, error)
                fault = error
            try:
                self.faulty(fault)
            except Exception as second:
                note_fault("faulty", second)
            try:
                return otherwise(self, *args, **kwargs)
            except Exception as third:
                note_fault(f"{method.__name__}, once more", third)
                return last()

        return call  # type: ignore[return-value]

    return wrap


def text_of(name: str, error: Exception) -> str:
    """What there is to say of an exception that ended `name`: one of ours speaks for itself, another is a fault."""
    if isinstance(error, MoonpoolError):
        return str(error)
    note_fault(name, error)
    return f"{type(error).__name__}: {error}"


def note_fault(name: str, error: Exception) -> None:
    """Log a fault of ours that the engine doesn't see."""
    global _logged
    _logged += 1
    if _logged <= LOGGED_MAX:
        log.error("moonpool failed in %s; the engine goes on without this: %s", name, error, exc_info=error)
