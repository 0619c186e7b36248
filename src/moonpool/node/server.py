"""The node's loop: accepts clients, drives work that waits, and does what is due now and then."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

from moonpool.errors import FolderError
from moonpool.folder.folder import Folder
from moonpool.node.checksums import JOB, RESULT
from moonpool.node.connection import Connection, peer_pid, peer_pidfd
from moonpool.node.dispatch import Dispatcher
from moonpool.node.node import Node
from moonpool.node.sessions import Session
from moonpool.node.steps import Steps

log = logging.getLogger("moonpool.node")
T = TypeVar("T")

TICK_S = 0.1
"""How often locks, expiry and the scrub are looked at."""
ACCEPT_BACKLOG = 1024
ACCEPTS_PER_STEP = 16
"""Connections accepted in one step, at some 40 us each."""
CLIENTS_MAX = 4096
"""Connections at a time: each takes three file descriptors here (socket, pidfd, session file)."""
ACCEPT_PAUSE_S = 1.0
"""How long nobody is accepted after the system had no file descriptor left: it would be asked again at once else."""
NO_DESCRIPTOR = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
REFUSED_RECENTLY_S = 2.0
"""A pool counts as stuck only while writers are refused."""
JOBS_INFLIGHT_MAX = 32
"""Checksum jobs sent ahead: enough to keep the process busy, few enough that urgent ones come soon."""


class Server:
    """Serves one node on a Unix socket. All of it runs on one event loop; see `Connection` for a client's side."""

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.stopping = False
        self.connections: set[Connection] = set()
        self._current: dict[int, Connection] = {}
        self._listener: socket.socket | None = None
        self._refusing = False  # and said so
        self._background: set[asyncio.Task[None]] = set()
        self.on_stuck: Callable[[], None] | None = None
        """Called when silent sessions of an earlier incarnation leave no space for longer than the stated bound."""
        self.use(node)

    def use(self, node: Node) -> None:
        """Serve this node from now on (at the start, and when a pool is replaced): all clients have to come anew."""
        self.node = node
        self.dispatcher = Dispatcher(node, self.background)
        self._current.clear()
        node.roster.on_end.append(self._session_ended)
        for connection in list(self.connections):
            connection.forget()

    # ---- listening -----------------------------------------------------------------------------------------------

    def listen(self, folder: Folder, mode: int, group: int | None) -> None:
        """Bind the folder's socket, over a dead node's. Raises `FolderError` where that fails."""
        folder.socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(folder.socket))
            if group is not None:
                os.chown(folder.socket, -1, group)
            os.chmod(folder.socket, folder.file_mode(mode))
            listener.listen(ACCEPT_BACKLOG)
        except OSError as error:
            listener.close()
            raise FolderError(f"{folder.socket} can't be bound: {error.strerror}") from error
        self._listener = listener
        self.loop.add_reader(listener, self.measured, self._accept)
        self._keep(self.loop.create_task(self._chores()))

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionError):
            for _ in range(ACCEPTS_PER_STEP):
                try:
                    sock, _ = self._listener.accept()
                except OSError as error:
                    if error.errno not in NO_DESCRIPTOR:
                        raise
                    self._pause_accepting(error)
                    return
                if len(self.connections) >= CLIENTS_MAX:
                    log.warning("%d clients are connected; a further one was turned away", CLIENTS_MAX)
                    sock.close()
                    continue
                sock.setblocking(False)
                connection = Connection(self, peer_pidfd(sock), peer_pid(sock))
                self.connections.add(connection)
                self._keep(self.loop.create_task(self._connect(connection, sock)))

    def _pause_accepting(self, error: OSError) -> None:
        """No descriptor left: those who wait are asked in later, when others may have gone."""
        assert self._listener is not None
        if not self._refusing:
            self._refusing = True
            log.warning("no further client can be accepted: %s; raise `ulimit -n`", error.strerror)
        self.loop.remove_reader(self._listener)
        self.loop.call_later(ACCEPT_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener is not None and not self.stopping:
            self.loop.add_reader(self._listener, self.measured, self._accept)

    async def _connect(self, connection: Connection, sock: socket.socket) -> None:
        await self.loop.connect_accepted_socket(lambda: connection, sock)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def attach(self, session: Session, connection: Connection) -> None:
        """This connection speaks for the session now."""
        earlier = self._current.get(session.number)
        self._current[session.number] = connection
        if earlier is not None and earlier is not connection:
            earlier.forget()

    def current(self, session: Session) -> Connection | None:
        return self._current.get(session.number)

    def _session_ended(self, session: Session) -> None:
        """What its requests still wait for would be granted to nobody."""
        connection = self._current.pop(session.number, None)
        if connection is not None:
            connection.retire()
            self.loop.call_soon(connection.close)  # after the reply to a Bye

    def measured(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call, as a step of the loop that the metrics count."""
        begun = perf_counter()
        try:
            return call(*arguments)
        finally:
            self.node.catalogue.counters.step(perf_counter() - begun)

    # ---- work that waits -----------------------------------------------------------------------------------------

    async def drive(self, steps: Steps[T], step: float | None) -> T:
        """Run steps to their end; `step` is what the last one yielded. Between two of them others are served."""
        try:
            while True:
                if step is None:
                    await asyncio.sleep(0)
                else:
                    await self._change(step)
                step = self.measured(steps.send, None)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _change(self, deadline: float) -> None:
        """Until something changed that may let a waiting request go on, or the deadline has come."""
        woken = self.loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = self.loop.call_later(max(0.0, deadline - self.node.store.clock()) + 0.0005, wake)
        self.node.catalogue.changed.append(wake)
        try:
            await woken
        finally:
            timer.cancel()

    def background(self, steps: Steps[None]) -> None:
        """Work that nobody waits for."""
        self._keep(self.loop.create_task(self.drive(steps, None)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---- now and then --------------------------------------------------------------------------------------------

    async def _chores(self) -> None:
        """What is looked at each `TICK_S`, or as soon as the last look is over."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.drive(self.node.roster.tick(), None)
                await self.drive(self.node.sweeper.sweep(), None)
                if self.on_stuck is not None and self._stuck():
                    self.measured(self.on_stuck)
            except Exception:
                log.exception("a chore of the node's failed")

    def _stuck(self) -> bool:
        """Whether a silent living process keeps the pool from taking anything new, for longer than the bound."""
        node = self.node
        return (
            node.roster.barrier is not None
            and node.store.clock() - node.store.refused_at < REFUSED_RECENTLY_S
            and node.store.clock() - node.roster.barrier_since > node.config.reconnect_grace_s
        )

    def stop(self) -> None:
        """Close the socket and all connections. What living clients hold stays theirs for the next node."""
        self.stopping = True
        self.node.mark_closed()
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
            self._listener.close()
        for task in list(self._background):
            task.cancel()
        for connection in list(self.connections):
            connection.close()


class ChecksumProcess:
    """The process that reads the pool for checksums: started with the node, started again if it dies."""

    def __init__(self, server: Server, folder: Folder, share: float) -> None:
        self.server, self.folder, self.share = server, folder, share
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._inflight = 0
        self._pending = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the process and begin to feed it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket = ours
        self._inflight = 0
        self.server.node.checksums.lost()
        self._pending.clear()
        command = [sys.executable, "-m", "moonpool.node.checksum_process", str(theirs.fileno()), str(self.folder.pool)]
        self._process = subprocess.Popen(
            [*command, str(self.share)], pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.server.loop.add_reader(ours, self.server.measured, self._results)
        self._timer = self.server.loop.call_later(TICK_S, self._tick)

    def stop(self, *, wait: bool = True) -> None:
        """End the process and, by default, wait for it: of low priority as it is, that may take long. Safe to call
        twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self.server.loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2 if wait else 0)
            self._process = None

    def _tick(self) -> None:
        self._timer = self.server.loop.call_later(TICK_S / 2, self._tick)
        self.server.measured(self._feed)

    def _feed(self) -> None:
        if self._socket is None or self._inflight >= JOBS_INFLIGHT_MAX:
            return
        jobs = self.server.node.checksums.jobs(JOBS_INFLIGHT_MAX - self._inflight)
        if jobs:
            # 32 jobs of 33 bytes always fit into the socket's buffer: no more than that are ever on their way.
            with contextlib.suppress(ConnectionError):  # it has died: `_results` hears of that, and starts another
                self._socket.send(b"".join(JOB.pack(*job) for job in jobs))
            self._inflight += len(jobs)

    def _results(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:  # it died with jobs unread
            data = b""
        if not data:
            log.warning("the checksum process ended; starting it again")
            self.stop()
            self.server.loop.call_later(1.0, self.start)
            return
        self._pending += data
        whole = len(self._pending) // RESULT.size * RESULT.size
        for slot, generation, value in RESULT.iter_unpack(bytes(self._pending[:whole])):
            self._inflight -= 1
            self.server.node.checksums.done(slot, generation, value)
        del self._pending[:whole]
        self._feed()
