"""What a client holds on its node: noted when it comes, given back once, and told anew with each connection."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from moonpool import errors
from moonpool.client.grants import Exported, Grant, Pending
from moonpool.wire import messages as m
from moonpool.wire.frames import encode


class Holding:
    """The part of a `SocketLink` that keeps the account of pins, reservations and holds.

    An entry ends in one go with queueing the message that tells the node (see `Channel.queue`), so that no interrupt
    can part the two: twice given back, a pin would be another thread's.
    """

    _state: threading.RLock
    """Guards what is held, and which channel is current."""
    _channel: Any
    """The current `Channel`, or what stands for one; None before the first."""
    _token: bytes

    def _send_queued(self) -> None:
        """Send what is queued. A broken connection loses nothing: what is held is declared at the next."""
        channel = self._channel
        if channel is not None and channel.broken is None:
            try:
                channel.send_queued()
            except errors.NodeUnavailable:
                pass

    def _hold_nothing(self) -> None:
        self._held: dict[int, Pending] = {}
        """Requests that gave pins or reservations which are not given back yet, by `id`."""
        self.holds: dict[str, Pending] = {}
        """Names of holds that were asked for and not released, with the last request for each."""
        self._ended: deque[Pending | Exported] = deque()
        self.ended = self._ended.append
        """Grants and arrays that are gone."""
        self._ending: list[Pending | Exported] = []
        """What `flush` has taken from there and not dealt with yet."""

    # ---- coming ------------------------------------------------------------------------------------------------------

    def _arrived(self, pending: Pending, reply: m.Message) -> None:
        """Note what a reply gives, before anybody acts on it."""
        kind = type(reply)
        if kind is not m.Acquired and kind is not m.Reserved:
            pending.reply = reply
            return
        ids, channel, key = list(reply.ids), pending.channel, id(pending)  # type: ignore[attr-defined]
        some = any(ids)
        with self._state:
            if channel is not self._channel:
                # The node has been told meanwhile, over another connection, that we don't hold this.
                channel.fail("the connection was replaced")
                raise errors.ProtocolError("the connection was replaced")
            if some:
                pending.ids = ids
                self._held[key] = pending
            pending.reply = reply

    # ---- a new connection --------------------------------------------------------------------------------------------

    def _declared(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Pins, as ids with their counts, and reservations: what `Hello` says that we hold."""
        pins: Counter[int] = Counter()
        reservations: list[int] = []
        for pending in self._held.values():
            ids = filter(None, pending.ids)
            if isinstance(pending.reply, m.Reserved):
                reservations += ids
            else:
                pins.update(ids)
        return list(pins.items()), reservations

    def _lose(self, stale: set[int]) -> None:
        """The node has said that these are not ours any more."""
        if stale:
            for pending in self._held.values():
                pending.ids = [0 if number in stale else number for number in pending.ids]

    # ---- going -------------------------------------------------------------------------------------------------------

    def give_back(self, grant: Grant, places: Sequence[int] | None = None, transfer_s: float = 0.0) -> None:
        with self._state:
            pending = grant.pending
            if pending is None:
                return
            self._give_back(pending, places, transfer_s)
            if places is None or not any(pending.ids):
                grant.pending = None
        self._send_queued()

    def settled(self, grants: Iterable[Grant]) -> None:
        with self._state:
            for grant in grants:
                if grant.pending is not None:
                    self._held.pop(id(grant.pending), None)
                    grant.pending = None

    def flush(self) -> None:
        while self._ended or self._ending:
            with self._state:
                # Moved by one call; what is on the list is dealt with again where an interrupt comes in.
                self._ending.extend(map(deque.popleft, repeat(self._ended, min(len(self._ended), m.KEYS_MAX))))
                places: dict[Grant, list[int]] = {}
                for ended in self._ending:
                    if isinstance(ended, Pending):
                        self._give_back(ended)
                    elif ended.place >= 0:
                        places.setdefault(ended.grant, []).append(ended.place)
                for grant, gone in places.items():
                    if grant.pending is not None:
                        self._give_back(grant.pending, gone)
                for ended in self._ending:
                    if isinstance(ended, Exported):
                        ended.forget()
                self._ending = []
            self._send_queued()

    def _give_back(self, pending: Pending, places: Sequence[int] | None = None, transfer_s: float = 0.0) -> None:
        """Give back all, or what stands at these places, with the state locked. A request that has no answer yet is
        cancelled, and its reply given back when it comes."""
        reply, ids, hold, channel = pending.reply, pending.ids, pending.hold, self._channel
        broken = channel is None or channel.broken is not None
        left: Sequence[int] = ()
        frame: bytearray | None = None
        if ids:
            if places is not None:
                left = list(ids)
                for place in places:
                    left[place] = 0
                ids = [ids[place] for place in places]
            frame = _giving_back(reply, list(filter(None, ids)), transfer_s)
        elif reply is None:
            if channel is pending.channel is not None and channel.cancels:
                frame = encode(m.Cancel(0, pending.number))
        elif hold and not broken:
            frame, hold = self._ending_hold(pending), ""
        # Else the node learns of it with the next connection, or it was of an earlier session.
        if frame and not broken and pending.channel.attachment.token == self._token:
            queue = channel.queue
            pending.ids, pending.hold, pending.wanted = left, hold, False
            queue(frame)
        else:
            pending.ids, pending.hold, pending.wanted = left, hold, False
        if not left or not any(left):
            self._held.pop(id(pending), None)

    # ---- holds of `match` --------------------------------------------------------------------------------------------

    def _ask_for_hold(self, pending: Pending) -> None:
        """A `Match` was sent. What an earlier one that nobody waits for any more may make, is this one's."""
        earlier = self.holds.get(pending.hold)
        pending.made = earlier is not None and earlier.hold != ""
        self.holds[pending.hold] = pending

    def _ending_hold(self, pending: Pending) -> bytearray | None:
        """What ends the hold that this request has made, unless a later one has taken it over."""
        hold, reply = pending.hold, pending.reply
        if self.holds.get(hold, pending) is not pending:
            return None
        new = reply is None  # where the reply was lost
        if isinstance(reply, m.Matched) and reply.length:
            new = reply.created or pending.made
            if not new:
                return None
        self.holds.pop(hold, None)
        return encode(m.ReleaseHold(0, hold)) if new else None

    def _end_lost_holds(self, channel: Any) -> None:
        """On a new connection: end what requests have made, or may have made, that nobody asks for any more."""
        for pending in list(self.holds.values()):
            if pending.hold and pending.orphaned():
                frame, pending.hold = self._ending_hold(pending), ""
                if frame is not None:
                    channel.queue(frame)


def _giving_back(reply: m.Message | None, ids: list[int], transfer_s: float) -> bytearray | None:
    """What tells the node, for ids that this reply gave."""
    if len(ids) > m.KEYS_MAX:
        parts = (ids[start : start + m.KEYS_MAX] for start in range(0, len(ids), m.KEYS_MAX))
        return bytearray().join(_giving_back(reply, part, 0.0) or b"" for part in parts)
    if not ids:
        return None
    return encode(m.Abort(0, ids) if type(reply) is m.Reserved else m.Release(0, ids, transfer_s))
