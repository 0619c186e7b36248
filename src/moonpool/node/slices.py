"""Long requests in slices: what names thousands of keys is served as several short requests, and answered as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from moonpool.wire import messages as m

SLICE: dict[type[m.Message], int] = {
    m.Acquire: 512,
    m.Release: 512,
    m.Check: 512,
    m.Touch: 512,
    m.Pin: 256,
    m.Commit: 128,
    m.Abort: 128,
    m.Remove: 128,
    m.Stat: 128,
}
"""Keys or ids of a request that are served in one step, by its kind: some 0.5 ms of work. Longer requests are cut."""

_CHAINS = m.Acquire, m.Commit, m.Touch
"""What marks objects as used: of a chain the tail first, so that it is evicted first."""


def cut(request: m.Message) -> Iterator[tuple[int, m.Message]]:
    """Requests of up to `SLICE` keys or ids each, and where in `request` each begins, in the order to serve them: the
    keys' own, but for chains."""
    lists = {name: value for name in request.__struct_fields__ if isinstance(value := getattr(request, name), list)}
    size = SLICE[type(request)]
    starts = range(0, max(map(len, lists.values())), size)
    for start in reversed(starts) if isinstance(request, _CHAINS) else starts:
        end = start + size
        yield start, msgspec.structs.replace(request, **{name: value[start:end] for name, value in lists.items()})


class Whole:
    """One reply of `count` keys, put together out of the replies to slices, in whatever order these come."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._first: m.Message | None = None
        self._fields: dict[str, Any] = {}

    def add(self, start: int, part: m.Message | None) -> None:
        """Take in the reply to the slice that begins at `start`."""
        if part is None:
            return
        fields = self._fields
        if self._first is None:
            self._first = part
            for name in part.__struct_fields__:
                value = getattr(part, name)
                fields[name] = [0] * self._count if isinstance(value, list) else {} if isinstance(value, dict) else None
        for name in part.__struct_fields__:
            value, known = getattr(part, name), fields[name]
            if isinstance(value, list):
                known[start : start + len(value)] = value
            elif isinstance(value, dict):  # details, by place
                known.update((start + place, text) for place, text in value.items())
            elif name == "count":
                fields[name] = value + (known or 0)
            elif known is None:  # also of the epoch the first, so that a purge that comes in between is noticed
                fields[name] = value

    def reply(self) -> m.Message | None:
        """The whole, or what there is of it so far; None where the slices have no reply."""
        return None if self._first is None else msgspec.structs.replace(self._first, **self._fields)
