"""Work that may have to pause: generators that say what they wait for, and a driver for each kind of caller.

A step yields None to let others be served, or a deadline (on the node's monotonic clock) until which it waits for a
change: a release, a commit, a checksum. It must look again after every wake-up, since others may have come first.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[float | None, None, T]

STEP_S = 0.001
"""The longest step of the node's loop that is planned for; a metric shows the longest seen."""
SLICE_KEYS = 128
"""What there may be thousands of is worked on so many at a time, at up to 4 us each, then others are let in."""
SLICE_MASK = SLICE_KEYS - 1


def finish(steps: Steps[T]) -> T:
    """Run to the end where nobody else could change anything meanwhile: a wait is over at once."""
    try:
        while True:
            if next(steps) is not None:
                steps.close()
                raise AssertionError("this work waits for somebody else; it can't be finished alone")
    except StopIteration as stop:
        result: T = stop.value
        return result
