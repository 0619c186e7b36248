"""Who owns what a node grants: whoever asked, from before the request is sent until it is given back.

An interrupt may come between any two steps of a call, also between a reply's decoding and the `try` whose `finally`
would give its pins back. So no such `try` is relied on alone: a request, and all that its reply gives, belongs to a
`Grant`, and when nobody refers to that any more, whatever brought it about, the node is told.

The end of a grant only appends to a queue. That is a deque's own method: where Python code ran instead, the next
interrupt could come in the middle of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.client.attachment import Attachment
from moonpool.wire import messages as m

Array = npt.NDArray[np.uint8]
Ended = Callable[[Any], None]
"""Queues a `Pending` or an `Exported` whose object is gone. Not Python code, see above."""


class Grant:
    """A request that was sent, then what came of it: pins, reservations, or a hold.

    Its end cancels a request that is unanswered, and gives back what is still to be given back. A link's `give_back`
    does so at once, which is the better way where the end is known: an exception's traceback may keep a grant for long.
    """

    __slots__ = ("__weakref__", "attachment", "pending")

    def __init__(
        self, ended: Ended | None, attachment: Attachment | None, channel: Any = None, request: m.Message | None = None
    ) -> None:
        self.attachment: Any = attachment
        """What the ids and offsets in the reply belong to."""
        hold = request.hold if type(request) is m.Match else ""
        pending = Pending(self, ended)
        pending.channel, pending.number, pending.hold = channel, 0 if request is None else request.id, hold
        pending.reply = pending.gate = None
        pending.ids, pending.wanted, pending.made = (), True, False
        self.pending: Any = pending  # a `Pending`, or
        """None once nothing is left to be given back."""


class Pending(weakref.ref[Grant]):
    """What link and channel know of a grant, which is not kept by it."""

    __slots__ = ("channel", "gate", "hold", "ids", "made", "number", "reply", "wanted")

    number: int
    channel: Any
    """Where it was sent."""
    hold: str
    """The name that a `Match` asks for; "" once that hold is its caller's to release."""
    made: bool
    """Where the reply doesn't say that the hold is new, it may be an earlier request of ours that made it."""
    reply: m.Message | None
    ids: Sequence[int]
    """What the reply gave, in its order, with 0 where there is nothing (any more) to be given back."""
    gate: Lock | None
    """Locked, where a thread waits for it to be opened: the reply is there, or it is to read for all."""
    wanted: bool
    """Until its caller has given up an unanswered request."""

    def settle_hold(self) -> None:
        """The hold is its caller's from now on, whose name for it it is."""
        self.hold, self.reply = "", _SETTLED

    def orphaned(self) -> bool:
        """Nobody asks for this reply any more."""
        return not self.wanted or self() is None

    def wake(self) -> None:
        gate = self.gate
        if gate is not None:
            try:
                gate.release()
            except RuntimeError:  # it is open
                pass


_SETTLED = m.Count(0, 0)


class Exported(weakref.ref[Array]):
    """An array over something granted that was handed out: it, and all that was made from it without a copy, keeps
    the grant. Where it has a place there, its own end gives that one back."""

    __slots__ = ("grant", "place")
    grant: Grant
    place: int

    @classmethod
    def keep(cls, array: Array, grant: Grant, place: int, ended: Ended) -> None:
        """From now on `array` keeps `grant`; `place` is -1 where its end gives nothing back by itself."""
        exported = cls(array, ended)
        exported.grant, exported.place = grant, place
        _exported[id(exported)] = exported

    def forget(self) -> None:
        """To be called once what `ended` queued has been dealt with."""
        _exported.pop(id(self), None)


_exported: dict[int, Exported] = {}
"""Keeps the weak references themselves until their arrays are gone. By id: they hash as their arrays would."""
