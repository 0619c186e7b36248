"""One connection to a node: requests out, replies in, several threads at a time, no thread of its own.

Whoever waits for a reply reads the socket for all (the "reader"); when its own has come it hands the part on to
another that waits. So a lone thread's round trip costs no thread switch.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from moonpool import errors
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_reply, encode

RECEIVE_BYTES = 1 << 18
UNREAD_MAX = 5
"""So many looks in a row, 0.1 s apart, may find the reader's lock taken and nobody reading."""


class Pending:
    """A request under way."""

    __slots__ = ("abandoned", "event", "number", "reply")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: m.Message | None = None
        self.event: threading.Event | None = None
        self.abandoned = False


class Channel:
    """A connected socket. Thread-safe.

    `arrived` is called for every reply, on the thread that read it, before its caller sees it; `unwanted` after it
    where the caller has given up, so that what the reply gives can be given back. `broken` says that the
    connection is over: everything raises `NodeUnavailable` from then on.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float,
        arrived: Callable[[Channel, m.Message], None],
        unwanted: Callable[[Channel, m.Message], None],
    ) -> None:
        self.sock = sock
        self.broken: str | None = None
        self.sick = False
        """An answer is overdue: new requests are refused at once until something comes."""
        self.attachment: Any = None
        """What the link has mapped for this connection; ids and offsets in its replies belong to that."""
        self._arrived, self._unwanted = arrived, unwanted
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Pending] = {}
        self._receiving = False
        self._unread = 0
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._frames = FrameReader()
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

    def begin(self, *requests: m.Message) -> list[Pending]:
        """Send requests, all at once; `finish` waits for the reply of each. Raises `NodeUnavailable`."""
        begun = [Pending(request.id) for request in requests]
        for pending in begun:
            self._waiting[pending.number] = pending
        try:
            self.send(*requests)
        except BaseException:
            for pending in begun:
                self._waiting.pop(pending.number, None)
            raise
        return begun

    def send(self, *messages: m.Message) -> None:
        """Send messages that have no reply, or whose reply somebody waits for. Raises `NodeUnavailable`."""
        frame = encode(messages[0]) if len(messages) == 1 else b"".join(map(encode, messages))
        with self._sending:
            if self.broken is not None:
                raise errors.NodeUnavailable(self.broken)
            if self.sick and messages[0].id:
                raise errors.NodeUnavailable("the node doesn't answer: an earlier request is overdue")
            try:
                self.sock.sendall(frame)
            except OSError as error:
                # Part of the frame may be out: nothing more can be said on this connection.
                self.fail(f"the node is not reading ({error.strerror or error})")
                raise errors.NodeUnavailable(str(self.broken)) from error
            except BaseException:
                self.fail("a send was interrupted")
                raise

    def finish(self, pending: Pending) -> m.Message:
        """Wait for the reply. Raises `RequestTimeout`, `NodeUnavailable`, or what the node refused with."""
        deadline = time.monotonic() + self.timeout_s
        try:
            while pending.reply is None:
                if self._reading.acquire(blocking=False):
                    try:
                        self._read_until(pending, deadline)
                    finally:
                        self._reading.release()
                        self._pass_on()
                    continue
                event = pending.event = pending.event or threading.Event()
                # Looked at once more after the event is in place: either the reader sees it, or we see its end.
                if not self._reading.locked():
                    continue
                if not event.wait(max(0.0, deadline - time.monotonic())):
                    self._late()
                event.clear()
                if self.broken is not None and pending.reply is None:
                    raise errors.NodeUnavailable(self.broken)
        except BaseException:
            self.abandon(pending)
            self._pass_on()  # it may have been our turn to read
            raise
        self._waiting.pop(pending.number, None)
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

    def abandon(self, pending: Pending) -> None:
        """Nobody asks for this reply any more: what it gives is given back, now or when it comes."""
        pending.abandoned = True
        self._give_up(pending)

    def collect(self) -> None:
        """Read what has come, unless somebody else does: replies that nobody waits for now, or ever."""
        if not self._waiting:
            return
        if self._reading.acquire(blocking=False):
            try:
                self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._reading.release()
                self._pass_on()
            self._unread = 0
        elif not self._receiving:
            # An interrupt between taking the lock and the `try` after it leaves the lock taken, and nobody reading.
            self._unread += 1
            if self._unread >= UNREAD_MAX:
                self.fail("its reader was interrupted")

    def fail(self, why: str) -> None:
        """The connection is over: wake everybody who waits on it."""
        if self.broken is None:
            self.broken = why
        for pending in list(self._waiting.values()):
            if pending.event is not None:
                pending.event.set()

    def close(self) -> None:
        self.fail("the connection was closed")
        # Ends a receive that is under way in another thread, which closing alone does not.
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()

    def _read_until(self, mine: Pending, deadline: float) -> None:
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
        """Take in what has come, with `_reading` held. Raises `BlockingIOError` where nothing comes."""
        try:
            self._receiving = True
            data = self.sock.recv(RECEIVE_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            self.fail(f"the connection to the node broke ({error.strerror or error})")
            return
        except BaseException:
            # What had come may be lost with the interrupt: the next connection says what is held.
            self.fail("a receive was interrupted")
            raise
        finally:
            self._receiving = False
        if not data:
            self.fail("the node closed the connection")
            return
        self.sick = False
        try:
            for body in self._frames.feed(data):
                self._deliver(decode_reply(body))
        except errors.ProtocolError as error:
            self.fail(str(error))
        except BaseException:
            self.fail("reading replies was interrupted")
            raise

    def _deliver(self, reply: m.Message) -> None:
        pending = self._waiting.get(reply.id)
        if pending is None:
            return
        try:
            self._arrived(self, reply)
            pending.reply = reply
        except errors.ProtocolError:
            raise
        except BaseException:
            self._unwanted(self, reply)
            raise
        if pending.abandoned:
            self._give_up(pending)
        elif pending.event is not None:
            pending.event.set()

    def _give_up(self, pending: Pending) -> None:
        """Give back what an abandoned reply gives, once: whichever comes later, the reply or its abandonment."""
        if pending.reply is not None and self._waiting.pop(pending.number, None) is not None:
            self._unwanted(self, pending.reply)

    def _pass_on(self) -> None:
        """Let another thread that waits take the reader's part."""
        for pending in list(self._waiting.values()):
            if pending.event is not None and pending.reply is None and not pending.abandoned:
                pending.event.set()
                return


def refusal(reply: m.Refused) -> errors.MoonpoolError:
    """The exception that a node's refusal names."""
    kind: Any = getattr(errors, reply.kind, errors.RemoteError)
    if not (isinstance(kind, type) and issubclass(kind, errors.MoonpoolError)):
        kind = errors.RemoteError
    found: errors.MoonpoolError = kind(reply.text)
    return found
