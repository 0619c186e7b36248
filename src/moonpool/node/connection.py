"""One client's connection, on the node's side: bytes in, replies out, and what its end means."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from moonpool import errors
from moonpool.node.sessions import Session, Standing
from moonpool.node.steps import STEP_S, Steps
from moonpool.probes import told
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_request, encode

if TYPE_CHECKING:
    from moonpool.node.feed import Subscriber
    from moonpool.node.server import Server

log = logging.getLogger("moonpool.node")
T = TypeVar("T")

SO_PEERPIDFD = 77
"""Socket option of Linux 6.5: a file descriptor of the peer's process, readable once it is gone."""

INFLIGHT_MAX = 256
"""Requests of one connection that may wait (for space, a writer, a checksum) at a time; further ones are refused."""
FRAMES_PER_STEP = 256
"""Frames cut out of what has come in, at 0.4 us each, before the first of them is served."""
WRITE_BUFFER_BYTES_MAX = 8 << 20
"""Replies that a client has not read; one that lets more pile up is cut off (its session is quarantined)."""
LAST_WORDS_S = 0.1
"""How long a dead process's socket may take to end before its session does: only where a forked child holds it."""
EVENTS_PER_MESSAGE = 256
_CANCELLED = (m.Reserve, m.PutInline, m.Acquire, m.Verify)
"""What may wait, for space, a writer or a checksum, and is ended by `Cancel`; all else is carried through."""
SNAPSHOT_OBJECTS = 256


def peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process that connected, owned by the caller; None where the kernel is too old to tell."""
    if told("no-pidfd") is not None:
        return None
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None


def peer_pid(sock: socket.socket) -> int:
    """The connecting process's pid as this process sees it; 0 across pid namespaces. For people to read."""
    try:
        return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    except OSError:
        return 0


class Connection(asyncio.Protocol):
    """Reads frames, serves them in order, and sends replies; a request that waits doesn't hold up the next.

    Owns its transport and its peer's pidfd. The session outlives the connection: see `roster`.
    """

    def __init__(self, server: Server, pidfd: int | None, pid: int) -> None:
        self.server = server
        self.session: Session | None = None
        self.subscriber: Subscriber | None = None
        self._pidfd, self._pid = pidfd, pid
        self._frames = FrameReader()
        self._backlog: deque[memoryview] = deque()
        self._incoming: Iterator[memoryview] = iter(())  # frames not cut yet, where the backlog is not all
        self._scheduled = False
        self._held_up = False  # by a request that is served in several steps, and what came after it waits for it
        self._paused = False
        self._gone = False  # the peer's process
        self._over = False  # nothing of it is served any more
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, tuple[asyncio.Task[None], Steps[Any]]] = {}  # those of them that can be cancelled
        self._transport: asyncio.Transport | None = None
        self._drained = asyncio.Event()
        self._drained.set()

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=1 << 20)
        if self._pidfd is not None:
            self.server.loop.add_reader(self._pidfd, self.server.measured, self._process_gone)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        begun = perf_counter()
        frames = self._frames.feed(data)
        self._incoming = chain(self._incoming, frames) if self._scheduled or self._held_up else frames
        if not self._scheduled:
            self._work(begun)

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.measured(self._lost)

    def _lost(self) -> None:
        self._transport = None
        self.retire()
        if self.subscriber is not None:
            self.server.node.catalogue.feed.unsubscribe(self.subscriber)
        if self._gone:
            self._end_gone()
        session = self.session
        if session is not None and self.server.current(session) is self and not self.server.stopping:
            self.server.node.roster.quarantine(session)
        if session is None or session.standing is not Standing.QUARANTINED or self.server.current(session) is not self:
            self._drop_pidfd()
        self.server.connections.discard(self)

    # ---- serving -------------------------------------------------------------------------------------------------

    def _work(self, begun: float | None = None) -> None:
        """Serve what has come in, for half a step's time, as a request takes up to the other half; the rest in the
        loop's next round, others first."""
        self._scheduled = False
        begun = perf_counter() if begun is None else begun
        backlog = self._backlog
        while not self._over and not self._held_up:
            try:
                if not backlog:
                    backlog.extend(islice(self._incoming, FRAMES_PER_STEP))
                if not backlog:
                    break
                self._request(decode_request(backlog.popleft()))
            except errors.ProtocolError as error:
                self._reject(error)
                break
            if backlog and perf_counter() - begun > STEP_S / 2:
                self._work_soon()
                break
        self._pace()
        self.server.node.catalogue.counters.step(perf_counter() - begun)

    def _work_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.server.loop.call_soon(self._work)

    def _pace(self) -> None:
        """Read no more from the socket than has been served."""
        if self._transport is None:
            return
        busy = self._scheduled or self._held_up
        if busy and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not busy:
            self._transport.resume_reading()
        self._paused = busy

    def _request(self, request: m.Request) -> None:
        session = self.session
        try:
            if session is None:
                self._first(request)
            elif isinstance(request, m.Hello):
                raise errors.ProtocolError("a second Hello on a connection")
            elif isinstance(request, m.Bye):
                self._bye(session, request)
            elif isinstance(request, m.Subscribe):
                self._subscribe(session, request)
            elif isinstance(request, m.Cancel):
                self._cancel(request.request)
            else:
                reply = self.server.dispatcher.serve(session, request)
                if isinstance(reply, m.Message | None):
                    self._answer(session, reply)
                else:
                    in_order = self.server.dispatcher.in_order(request)
                    task = self._run(request.id, reply, partial(self._answer, session), in_order=in_order)
                    if task is not None and not in_order and isinstance(request, _CANCELLED):
                        self._waiting[request.id] = task, reply
        except errors.ProtocolError:
            raise
        except errors.MoonpoolError as error:
            self.send(m.Refused(request.id, type(error).__name__, str(error)))
        except Exception as error:
            # A fault of ours in one request must not take the node down with it; the log has where it was.
            log.exception("serving %s failed", type(request).__name__)
            self.send(m.Refused(request.id, "RemoteError", f"internal error in the node: {error!r}"))

    def _first(self, request: m.Request) -> None:
        if not isinstance(request, m.Hello):
            raise errors.ProtocolError(f"the first message is {type(request).__name__}, not Hello")
        self._run(request.id, self.server.dispatcher.hello(request), self._welcome, in_order=True)

    def _welcome(self, found: tuple[Session, m.Welcome]) -> None:
        self.session, welcome = found
        self.session.pid = self._pid
        self.server.attach(self.session, self)
        if self._pidfd is None:
            self.server.node.roster.watch(self.session)
        self.send(welcome)

    def _bye(self, session: Session, request: m.Bye) -> None:
        self.server.node.roster.end(session, "bye")
        self.send(m.Count(request.id, 0))
        if self._transport is not None:
            self._transport.close()

    def _run(
        self, request_id: int, steps: Steps[T], answer: Callable[[T], None], *, in_order: bool
    ) -> asyncio.Task[None] | None:
        """Take the first step now: most are over with it. Otherwise go on as a task, which is returned, others in
        between, and where it is to be `in_order` nothing else of this connection's."""
        if len(self._tasks) >= INFLIGHT_MAX and not in_order:  # before the first step, which may grant something
            raise errors.RemoteError(f"{INFLIGHT_MAX} requests of this client are waiting already; wait for some first")
        try:
            step = next(steps)
        except StopIteration as stop:
            answer(stop.value)
            return None
        self._held_up = in_order
        task = self.server.loop.create_task(self._finish(request_id, steps, step, answer, in_order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel(self, request_id: int) -> None:
        """End a request that waits: what it has been granted is given back now, before anything else is served."""
        task, steps = self._waiting.pop(request_id, (None, None))
        if task is not None and steps is not None:
            task.cancel()
            steps.close()
            self.send(m.Refused(request_id, "Cancelled", "its client has cancelled it"))

    async def _finish(
        self, request_id: int, steps: Steps[T], step: float | None, answer: Callable[[T], None], in_order: bool
    ) -> None:
        try:
            answer(await self.server.drive(steps, step))
        except errors.MoonpoolError as error:
            self.send(m.Refused(request_id, type(error).__name__, str(error)))
        except Exception as error:
            log.exception("a waiting request failed")
            self.send(m.Refused(request_id, "RemoteError", f"internal error in the node: {error!r}"))
        finally:
            steps.close()
            self._waiting.pop(request_id, None)
            if in_order:
                self._held_up = False
                self._work_soon()

    def _answer(self, session: Session, reply: m.Message | None) -> None:
        """Send a reply, if there is one; one that can't be sent takes back what it would have granted."""
        if reply is None:
            return
        try:
            self.send(reply)
        except errors.ProtocolError as error:
            self.server.node.store.take_back(session, reply, session.pins)
            self.send(m.Refused(reply.id, "RemoteError", f"the reply is too long: {error}"))

    def send(self, message: m.Message) -> None:
        """Queue a message; a client that doesn't read its replies is cut off at a bound."""
        transport = self._transport
        if transport is None or (message.id == 0 and not isinstance(message, m.Events)):
            return
        transport.write(encode(message))
        if transport.get_write_buffer_size() > WRITE_BUFFER_BYTES_MAX:
            log.warning("client %s doesn't read its replies; disconnected", self.session and self.session.name)
            transport.abort()

    def close(self) -> None:
        """Flush what is queued and close; what the session holds stays its own."""
        if self._transport is not None:
            self._transport.close()

    # ---- feed ----------------------------------------------------------------------------------------------------

    def _subscribe(self, session: Session, request: m.Subscribe) -> None:
        if self.subscriber is not None:
            raise errors.InvalidRequest("this connection is a feed already")
        woken = asyncio.Event()
        self.subscriber = self.server.node.catalogue.feed.subscribe(woken.set)
        self.send(m.Count(request.id, self.server.node.catalogue.feed.sequence))
        task = self.server.loop.create_task(self._feed(session, request, self.subscriber, woken))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, session: Session, request: m.Subscribe, subscriber: Subscriber, woken: asyncio.Event) -> None:
        """Send the snapshot, if asked for, then events as they come; stop after telling of a lag."""
        if request.snapshot:
            sequence = self.server.node.catalogue.feed.sequence
            cursor = 0
            while True:
                steps = cast(
                    "Steps[Any]", self.server.dispatcher.serve(session, m.List(0, b"", cursor, SNAPSHOT_OBJECTS))
                )
                listing = await self.server.drive(steps, None)
                self.send(
                    m.Events(
                        request.id,
                        [
                            m.Event(sequence, "snapshot", o.key, o.size, o.space, "", o.metadata)
                            for o in listing.objects
                        ],
                    )
                )
                await self._drained.wait()
                cursor = listing.cursor
                if not cursor:
                    break
            self.send(m.Events(request.id, [m.Event(sequence, "snapshot-end")]))
        while not subscriber.ended:
            await woken.wait()
            woken.clear()
            while events := subscriber.take(EVENTS_PER_MESSAGE):
                self.server.measured(self.send, m.Events(request.id, events))
                await asyncio.sleep(0)  # others come in between
                await self._drained.wait()

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _reject(self, error: errors.ProtocolError) -> None:
        """Not our protocol: say so once and close; others aren't touched."""
        self.server.node.catalogue.counters.protocol_errors += 1
        self.send(m.Refused(1, "ProtocolError", str(error)))
        self._backlog.clear()
        self.close()

    def _process_gone(self) -> None:
        """The peer's process is gone, and with it all I/O of its own. What it had sent before is served first: its
        socket's end comes next, unless a forked child keeps the socket open."""
        self._drop_pidfd()
        self._gone = True
        self.server.loop.call_later(LAST_WORDS_S, self.server.measured, self._end_gone)
        if self._transport is None:
            self._end_gone()

    def _end_gone(self) -> None:
        if self.session is not None and self.server.current(self.session) is self:
            self.server.node.roster.end(self.session, "process-gone")
        if self._transport is not None:
            self._transport.abort()

    def _drop_pidfd(self) -> None:
        if self._pidfd is not None:
            self.server.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def retire(self) -> None:
        """Serve nothing more: neither what has come in nor what waits, not even if what it waited for has just come."""
        self._over = True
        self._backlog.clear()
        for task in list(self._tasks):
            task.cancel()

    def forget(self) -> None:
        """Another connection has taken the session up: this one is nobody's."""
        self._drop_pidfd()
        self.retire()
        if self._transport is not None:
            self._transport.abort()
