"""Faults on demand, for the tests: named crash points and pretended older surroundings.

`MOONPOOL_TEST` holds comma-separated words: `crash=NAME` (the process kills itself with -9 on reaching that point),
`crash=NAME:7` (on the seventh time), `no-pidfd` (as on a kernel before 6.5), `protocol=1.1`. Unset, all of it is off.
"""

from __future__ import annotations

import os
import signal

_words = [word.strip() for word in os.environ.get("MOONPOOL_TEST", "").split(",") if word.strip()]


def told(name: str) -> str | None:
    """The value of `name=value` in `MOONPOOL_TEST`, "" for a bare word, None where it doesn't stand there."""
    for word in _words:
        key, _, value = word.partition("=")
        if key == name:
            return value
    return None


_crash_name, _, _crash_count = (told("crash") or "").partition(":")
_left = int(_crash_count or 1)

ARMED = bool(_crash_name)
"""Whether any crash point is armed; hot paths ask this first."""


def reach(name: str) -> None:
    """The code has come to crash point `name`: die here, at once and without clean-up, if it is armed."""
    global _left
    if name == _crash_name:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
