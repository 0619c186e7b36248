"""One connection to a node: requests out, replies in, several threads at a time, no thread of its own.

Whoever waits for a reply reads the socket for all (the "reader"); when its own has come it hands the part on to
another that waits. So a lone thread's round trip costs no thread switch.

An interrupt may come anywhere, and takes nothing from other threads. What is to be sent, what has been received and
is to be delivered stay queued until they have been dealt with, whoever goes on with them; where a step must not be
taken twice, one call of the interpreter's own takes it whole.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from operator import itemgetter
from typing import Any, NoReturn

from moonpool import errors
from moonpool.client.grants import Ended, Grant, Pending
from moonpool.wire import messages as m
from moonpool.wire.frames import decode_reply, encode, frame_length

RECEIVE_BYTES = 1 << 18
LOOK_S = 0.1
"""How often one who waits for the reader looks whether there still is one: the last may have been interrupted in the
moment of handing its part on."""

_ignore: Ended = deque[Any](maxlen=0).append


def _note(pending: Pending, reply: m.Message) -> None:
    pending.reply = reply


class Channel:
    """A connected socket. Thread-safe.

    `arrived` is called for every reply, on the thread that read it, and stores it as its request's: then its caller has
    it. It may be called again where it was interrupted before that. `ended` queues grants that are gone, and those
    whose reply comes when their caller has given up. `broken` says that the connection is over: everything raises
    `NodeUnavailable` from then on.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float,
        arrived: Callable[[Pending, m.Message], None] = _note,
        ended: Ended = _ignore,
    ) -> None:
        self.sock = sock
        self.broken: str | None = None
        self.sick = False
        """An answer is overdue: new requests are refused at once until something comes."""
        self.attachment: Any = None
        """What the link has mapped for this connection; ids and offsets in its replies belong to that."""
        self.cancels = False
        """Whether the node knows `Cancel`."""
        self._arrived, self._ended = arrived, ended
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Pending] = {}
        """Requests without an answer, by number; also those that nobody asks for any more."""
        self._outbox: deque[bytearray] = deque()
        self.queue = self._outbox.append
        """Has a frame sent with whatever is sent next, at the latest by `collect`. Not Python code: no interrupt comes
        in before it has done so."""
        first, popped = map(itemgetter(0), repeat(self._outbox)), map(deque.popleft, repeat(self._outbox))
        self._sends = zip(map(sock.send, first), popped, strict=False)
        """Each item: the next frame has been sent, so many bytes of it, and taken off the queue."""
        self._sent: deque[tuple[int, bytearray]] = deque()
        """The latest item, until what is left of the frame is queued again."""
        self._sending = threading.Lock()
        self._reader: Pending | None = None
        self._choosing = threading.Lock()
        self._inbox: deque[bytes] = deque()
        """What has just been received."""
        self._data, self._at = b"", 0
        """What was received before, and up to where it has been delivered."""
        self._behind = False
        """Whether whole replies may be left in it."""
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """How long an answer may take. The kernel's own timeout: no poll beside each receive."""
        self.timeout_s = timeout_s
        packed = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def number(self) -> int:
        """An id for the next request."""
        return next(self._numbers)

    # ---- sending -------------------------------------------------------------------------------------------------

    def begin(self, request: m.Message) -> Grant:
        """Send a request; `finish` waits for the reply. Raises `NodeUnavailable`."""
        if self.broken is not None or self.sick:
            self._refuse()
        frame, queue = encode(request), self.queue
        grant = Grant(self._ended, self.attachment, self, request)
        # No call in between that an interrupt could come after: what is waited for is sent.
        self._waiting[request.id] = grant.pending
        queue(frame)
        self.send_queued()
        return grant

    def begin_many(self, requests: Sequence[m.Message]) -> list[Grant]:
        """Send requests, all at once. Raises `NodeUnavailable`."""
        if self.broken is not None or self.sick:
            self._refuse()
        frame, queue = bytearray().join(map(encode, requests)), self.queue
        grants = [Grant(self._ended, self.attachment, self, request) for request in requests]
        asked = {grant.pending.number: grant.pending for grant in grants}
        self._waiting |= asked
        queue(frame)
        self.send_queued()
        return grants

    def _refuse(self) -> NoReturn:
        raise errors.NodeUnavailable(self.broken or "the node doesn't answer: an earlier request is overdue")

    def send(self, message: m.Message) -> None:
        """Send a message that has no reply. Raises `NodeUnavailable`."""
        self.queue(encode(message))
        self.send_queued()

    def send_queued(self) -> None:
        """Send all that is queued. Raises `NodeUnavailable`."""
        outbox, sent = self._outbox, self._sent
        with self._sending:
            while outbox or sent:
                if self.broken is not None:
                    raise errors.NodeUnavailable(self.broken)
                if not sent:
                    try:
                        # One call sends and notes it, so that everything goes out once.
                        sent.extend(islice(self._sends, 1))
                    except OSError as error:
                        self.fail(f"the node is not reading ({error.strerror or error})")
                        raise errors.NodeUnavailable(str(self.broken)) from error
                count, frame = sent[0]
                rest, queue = frame[count:], outbox.appendleft
                del sent[0]
                if rest:
                    queue(rest)
                else:
                    del frame[:]  # `_sends` keeps its latest item, and a message may be large

    # ---- waiting for replies ---------------------------------------------------------------------------------------

    def finish(self, grant: Grant) -> m.Message:
        """Wait for the reply. Raises `RequestTimeout`, `NodeUnavailable`, or what the node refused with."""
        pending: Pending = grant.pending
        assert pending is not None, "a request is finished once"
        deadline = time.monotonic() + self.timeout_s
        try:
            while pending.reply is None:
                if self._lead(pending):
                    self._read(pending, deadline)
                else:
                    self._follow(pending, deadline)
        finally:
            pending.gate = None
            if self._reader is pending:
                self._reader = None
            if self._reader is None and self._waiting:  # it may also have been our turn, and an interrupt came
                self._pass_on()
        reply = pending.reply
        if isinstance(reply, m.Refused):
            raise refusal(reply)
        return reply

    def answered(self, pending: Pending) -> bool:
        """Whether `finish` would return or raise at once."""
        return pending.reply is not None or self.broken is not None

    def wait(self, pending: Pending, timeout_s: float) -> bool:
        """Wait for the reply, but for at most `timeout_s`; the same as `answered` then. Raises nothing."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        while not self.answered(pending):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poller.poll(max(1, int(left_s * 1000)))
            self.collect()  # or another thread reads it
        return True

    def collect(self) -> None:
        """Read what has come, unless somebody else does: replies that nobody waits for now, or ever. Sends what an
        interrupt has left queued, and gives the reader's part to somebody who waits."""
        if self.broken is not None:
            return
        if self._outbox or self._sent:
            try:
                self.send_queued()
            except errors.NodeUnavailable:
                return
        if not self._waiting:
            return
        reader = Grant(None, None)
        if self._lead(reader.pending):
            try:
                self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._reader = None
                self._pass_on()

    def fail(self, why: str) -> None:
        """The connection is over: wake everybody who waits on it."""
        if self.broken is None:
            self.broken = why
        for pending in self._waiting.copy().values():
            pending.wake()

    def close(self) -> None:
        self.fail("the connection was closed")
        # Ends a receive that is under way in another thread, which closing alone does not.
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()

    # ---- the reader's part -----------------------------------------------------------------------------------------

    def _lead(self, pending: Pending) -> bool:
        """Become the reader, unless there is one. One whose grant has gone has gone itself, by an interrupt."""
        with self._choosing:
            reader = self._reader
            if reader is None or reader() is None:
                self._reader = pending
                return True
            return False

    def _follow(self, pending: Pending, deadline: float) -> None:
        """Wait for the reader to bring the reply, or to hand its part on."""
        if pending.gate is None:
            gate = threading.Lock()
            gate.acquire()
            pending.gate = gate
        # Nobody opens a gate for what happened before it was there, so all of it is looked at once more.
        reader = self._reader
        if pending.reply is not None or reader is None or reader() is None:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self._late()
        if self.broken is None:
            pending.gate.acquire(timeout=min(left_s, LOOK_S))
        if self.broken is not None and pending.reply is None:
            raise errors.NodeUnavailable(self.broken)

    def _pass_on(self) -> None:
        """Let another thread that waits take the reader's part."""
        for pending in self._waiting.copy().values():
            if pending.gate is not None and pending.reply is None and not pending.orphaned():
                pending.wake()
                return

    def _read(self, mine: Pending, deadline: float) -> None:
        while mine.reply is None:
            if self.broken is not None:
                raise errors.NodeUnavailable(self.broken)
            if time.monotonic() >= deadline:
                self._late()
            try:
                self._receive()
            except BlockingIOError:
                self._late()

    def _late(self) -> NoReturn:
        """The node has not answered in time: don't let others wait for it as well, until it does."""
        self.sick = True
        raise errors.RequestTimeout(f"no answer from the node within {self.timeout_s} s")

    def _receive(self, flags: int = 0) -> None:
        """As the reader, take in what has come, or what an earlier one has left. Raises `BlockingIOError` where nothing
        comes."""
        try:
            if not (self._inbox or self._behind):
                # One call receives and keeps, so that nothing is received and lost.
                self._inbox.extend(map(self.sock.recv, (RECEIVE_BYTES,), (flags,)))
        except BlockingIOError:
            raise
        except OSError as error:
            return self.fail(f"the connection to the node broke ({error.strerror or error})")
        if self._inbox:
            came = self._inbox[0]
            if not came:
                return self.fail("the node closed the connection")
            self.sick = False
            received = self._data[self._at :] + came if self._at < len(self._data) else came
            self._data, self._at, self._behind = received, 0, True
            del self._inbox[0]
        data, at, end = memoryview(self._data), self._at, len(self._data)
        try:
            while end - at >= 4:
                start = at + 4
                stop = start + frame_length(data, at)
                if stop > end:
                    break
                self._deliver(decode_reply(data[start:stop]))
                self._at = at = stop
        except errors.ProtocolError as error:
            self.fail(str(error))
        if at == end:
            self._data, self._at = b"", 0
        self._behind = False

    def _deliver(self, reply: m.Message) -> None:
        """Hand a reply to its caller. An interrupted delivery is done once more, as much of it as is left."""
        pending = self._waiting.get(reply.id)
        if pending is None:
            return
        if pending.reply is None:
            self._arrived(pending, reply)
        if pending.orphaned():
            self._ended(pending)
        elif pending.gate is not None:
            pending.wake()
        self._waiting.pop(reply.id, None)


def refusal(reply: m.Refused) -> errors.MoonpoolError:
    """The exception that a node's refusal names."""
    kind: Any = getattr(errors, reply.kind, errors.RemoteError)
    if not (isinstance(kind, type) and issubclass(kind, errors.MoonpoolError)):
        kind = errors.RemoteError
    found: errors.MoonpoolError = kind(reply.text)
    return found
