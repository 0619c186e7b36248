"""The link to a node over a socket: what this client holds there, kept true over reconnects."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from moonpool import errors
from moonpool.client.attachment import Attachment, Prefault
from moonpool.client.cancelling import SCOPE
from moonpool.client.channel import Channel
from moonpool.client.grants import Grant, Pending
from moonpool.client.holding import Holding
from moonpool.folder.folder import Folder, open_file
from moonpool.folder.layout import Header
from moonpool.probes import ARMED, reach
from moonpool.wire import messages as m
from moonpool.wire.versions import Version, boot_id

log = logging.getLogger("moonpool.client")

WATCH_S = 0.1
"""How often the watching thread looks for views that have been dropped."""
RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.02, 1.0
HELLO_TIMEOUT_S = 2.0
"""The longest that a node may take to answer Hello: other threads' releases wait for it."""
TRIES_MAX = 3
"""How often one call is sent anew because the connection broke under it."""


class SocketLink(Holding):
    """A session over a Unix socket: reconnects by itself, and then tells the node what it still holds."""

    def __init__(
        self,
        folder: Folder,
        *,
        name: str,
        read_only: bool,
        timeout_s: float,
        prefault: bool,
        required: bool,
        own_folder: bool,
    ) -> None:
        self.folder, self.name, self.read_only = folder, name, read_only
        self.timeout_s, self._prefault_wanted, self._own_folder = timeout_s, prefault, own_folder
        self._rounds: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._reset()
        _links.add(self)
        try:
            with self._state:
                self._connect()
        except errors.NodeUnavailable as error:
            if required:
                raise
            log.info("%s; going on without it until it is there", error)
            self._watch()

    def _reset(self) -> None:
        self._state = threading.RLock()
        """Guards what is held, and which channel is current."""
        self._channel: Channel | None = None
        self._attachment: Attachment | None = None
        self._session, self._token = 0, b""
        self._lock_fd = -1
        self._hold_nothing()
        self._closing = False
        self._watcher: threading.Thread | None = None
        self._prefault: Prefault | None = None
        self._retry_at, self._retry_s = 0.0, RECONNECT_FIRST_S
        self._told = False  # of a node that is too far away, once

    # ---- connecting ----------------------------------------------------------------------------------------------

    @property
    def attachment(self) -> Attachment:
        attachment = self._attachment
        channel = self._channel
        if attachment is None or not attachment.live or self._closing or channel is None or channel.sick:
            if self._current().sick:
                raise errors.NodeUnavailable("the node doesn't answer: an earlier request is overdue")
            attachment = self._attachment
            assert attachment is not None
        if attachment.table.closed:
            raise errors.NodeUnavailable("the node has stopped")
        return attachment

    @property
    def connected(self) -> bool:
        attachment, channel = self._attachment, self._channel
        if attachment is None or channel is None or self._closing:
            return False
        return attachment.live and channel.broken is None and not channel.sick and not attachment.table.closed

    def _current(self) -> Channel:
        """The live channel, connecting anew if need be. Raises `NodeUnavailable`, `Closed`."""
        channel = self._channel
        if channel is not None and channel.broken is None and not self._closing:
            return channel
        with self._state:
            if self._closing:
                raise errors.Closed("the client has been closed")
            channel = self._channel
            if channel is None or channel.broken is not None:
                channel = self._connect()
            return channel

    def _connect(self) -> Channel:
        """Connect and say what is held. With the state locked. Raises `NodeUnavailable`."""
        if self._attachment is not None:
            self._attachment.live = False
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor left
            raise errors.NodeUnavailable(f"no socket to be had: {error.strerror}") from error
        channel = Channel(sock, min(self.timeout_s, HELLO_TIMEOUT_S), self._arrived, self.ended)
        try:
            try:
                self.folder.check(own=self._own_folder)
                sock.connect(os.fspath(self.folder.socket))
            except (OSError, errors.FolderError) as error:
                why = (error.strerror if isinstance(error, OSError) else None) or error
                raise errors.NodeUnavailable(
                    f"no node answers at {self.folder.socket} ({why}); start one with "
                    f"`moonpool serve --dir {self.folder.path}`"
                ) from error
            welcome = channel.finish(channel.begin(self._hello(channel.number())))
            if not isinstance(welcome, m.Welcome):
                raise errors.NodeUnavailable(f"the node answered Hello with {type(welcome).__name__}")
            Version.ours().check(Version(welcome.major, welcome.minor), welcome.layout, who="the node")
            channel.set_timeout(self.timeout_s)
            channel.cancels = "cancel" in welcome.features
            self._adopt(channel, welcome)
        except BaseException as error:
            channel.close()
            if isinstance(error, errors.ProtocolError | errors.FolderError | errors.RequestTimeout | OSError):
                if isinstance(error, errors.NodeUnavailable) and not isinstance(error, errors.RequestTimeout):
                    raise
                raise errors.NodeUnavailable(str(error)) from error
            raise
        self._watch()
        return channel

    def _watch(self) -> None:
        """Start the watching thread, if it isn't there yet."""
        if self._watcher is None:
            watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="moonpool-watch", daemon=True)
            watcher.start()
            self._watcher = watcher

    def _hello(self, number: int) -> m.Hello:
        ours = Version.ours()
        pool_id = self._attachment.pool_id if self._attachment is not None else b""
        pins, reservations = self._declared()
        return m.Hello(
            number, ours.major, ours.minor, ours.features, boot_id(), self.name, self.read_only,
            self._session, self._token, pool_id, pins, reservations,
        )  # fmt: skip

    def _adopt(self, channel: Channel, welcome: m.Welcome) -> None:
        if not welcome.resumed:
            # Not (or no longer) our session: whatever we held is of an earlier pool or node, whose mapping stays.
            self._held.clear()
            self.holds.clear()
            self._lock_session(welcome.session)
        self._lose(set(welcome.stale))
        self._session, self._token = welcome.session, welcome.token
        earlier = self._attachment
        self._attachment = channel.attachment = Attachment.map(
            self.folder, welcome, writable=not self.read_only, earlier=earlier
        )
        if self._attachment.pool is not (earlier.pool if earlier else None) and self._prefault_wanted:
            if self._prefault is not None:
                self._prefault.stop()
            self._prefault = Prefault(self._attachment.pool, self._reserved_bytes)
            self._prefault.start()
        self._channel = channel
        self._end_lost_holds(channel)
        self._retry_s = RECONNECT_FIRST_S

    def _reserved_bytes(self) -> int:
        """How much of the pool that is mapped now the node has reserved."""
        attachment = self._attachment
        return int(attachment.table.header[Header.RESERVED_BYTES]) if attachment is not None else 0

    def _lock_session(self, session: int) -> None:
        """Hold a lock on the session's file for as long as this process lives: a restarted node looks at it."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = open_file(self.folder.session(session), os.O_RDONLY)
        if ARMED:
            reach("client-unlocked")
        fcntl.lockf(self._lock_fd, fcntl.LOCK_SH)

    # ---- calls ---------------------------------------------------------------------------------------------------

    def call(self, request: m.Message) -> m.Message:
        return self.exchange(request)[0]

    def exchange(self, request: m.Message, meanwhile: Callable[[], None] | None = None) -> tuple[m.Message, Grant]:
        for left in reversed(range(TRIES_MAX)):
            channel = None
            try:
                channel = self._current()
                grant = self._begin(channel, request)
                if meanwhile is not None:
                    try:
                        meanwhile()
                    except BaseException:
                        self.give_back(grant)
                        raise
                    meanwhile = None
                return self.finish(grant)
            except errors.VersionMismatch:
                raise
            except errors.NodeUnavailable:
                channel = channel or self._channel
                if not left or channel is None or channel.broken is None:
                    raise
        raise AssertionError("the last try returns or raises")

    def begin(self, request: m.Message) -> Grant:
        return self._begin(self._current(), request)

    def _begin(self, channel: Channel, request: m.Message) -> Grant:
        grant = channel.begin(_numbered(request, channel.number()))
        if grant.pending.hold:
            with self._state:
                self._ask_for_hold(grant.pending)
        return grant

    def begin_many(self, requests: Sequence[m.Message]) -> list[Grant]:
        channel = self._current()
        return channel.begin_many([_numbered(request, channel.number()) for request in requests])

    def finish(self, grant: Grant) -> tuple[m.Message, Grant]:
        pending = grant.pending
        assert pending is not None, "a request is finished once"
        scope = SCOPE.get()
        if scope is not None:
            scope.waits(partial(self._cancel, pending))
        try:
            reply: m.Message = pending.channel.finish(grant)
        except BaseException:
            self.give_back(grant)
            raise
        if not (pending.ids or pending.hold):
            grant.pending = None
        return reply, grant

    def _cancel(self, pending: Pending) -> None:
        """End a request's wait in the node; its caller still gets an answer."""
        if pending.reply is None and pending.channel.cancels:
            with contextlib.suppress(errors.NodeUnavailable):
                pending.channel.send(m.Cancel(0, pending.number))

    def answered(self, grant: Grant | None) -> bool:
        pending = None if grant is None else grant.pending
        return pending is None or pending.channel.answered(pending)

    def wait(self, grant: Grant, timeout_s: float) -> bool:
        pending = grant.pending
        return pending is None or pending.channel.wait(pending, timeout_s)

    def every_round(self, call: Callable[[], None]) -> None:
        self._rounds.append(weakref.WeakMethod(call))

    def begin_commit(
        self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float
    ) -> Grant | None:
        with self._state:
            channel = self._channel
            if channel is None or channel.broken is not None:  # else also while closing: what is filled is to stay
                channel = self._current()
            if attachment.token != self._token:
                return None
            return channel.begin(m.Commit(channel.number(), ids, checksums, transfer_s))

    def send(self, message: m.Message) -> None:
        channel = self._channel
        if channel is not None and channel.broken is None:
            with contextlib.suppress(errors.NodeUnavailable):
                channel.send(message)

    # ---- watching ------------------------------------------------------------------------------------------------

    def watch_once(self) -> bool:
        """One round of the watching thread; False when there is nothing left to watch."""
        channel = self._channel
        if channel is not None and channel.broken is None:
            # Only the hang-up is waited for: replies are read by those who wait for them.
            poller = select.poll()
            try:
                poller.register(channel.sock, select.POLLRDHUP)
                gone = bool(poller.poll(WATCH_S * 1000))
            except (OSError, ValueError):
                gone = True
            if gone:
                channel.fail("the node closed the connection")
            else:
                channel.collect()
        if channel is None or channel.broken is not None:
            self._lost(channel)
        self.flush()
        for reference in self._rounds:
            call = reference()
            if call is not None:
                with contextlib.suppress(errors.MoonpoolError):
                    call()
        return not self._leave_if_idle()

    def _lost(self, channel: Channel | None) -> None:
        """There is no connection (any more): try for one, less and less often."""
        attachment = self._attachment
        if attachment is not None and channel is self._channel:
            attachment.live = False
        now = time.monotonic()
        if now < self._retry_at:
            time.sleep(min(WATCH_S, self._retry_at - now))
            return
        with self._state:
            if self._channel is channel and not (self._closing and channel is None):
                if channel is not None:
                    channel.close()
                try:
                    self._connect()
                    log.info("connected to the node again")
                except errors.MoonpoolError as error:
                    if isinstance(error, errors.VersionMismatch) and not self._told:
                        self._told = True
                        log.error("%s; this client stays off until then", error)
                    log.debug("still no node: %s", error)
                    self._retry_at = now + self._retry_s
                    self._retry_s = min(2 * self._retry_s, RECONNECT_MAX_S)

    # ---- ending --------------------------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        self._closing = True
        self.flush()
        self._leave_if_idle(wait)

    def _leave_if_idle(self, wait: bool = True) -> bool:
        """Once closed and nothing is held: say that no I/O of ours is outstanding, and go."""
        with self._state:
            if not self._closing or self._held:
                return False
            channel, self._channel = self._channel, None
            if self._prefault is not None:
                self._prefault.stop()
            if self._attachment is not None:
                self._attachment.live = False
            fd, self._lock_fd = self._lock_fd, -1
        # Not with the state locked: a thread that reads replies may need it to go on.
        if channel is not None:
            with contextlib.suppress(errors.MoonpoolError):
                bye = channel.begin(m.Bye(channel.number()))
                if wait:
                    channel.finish(bye)
            channel.close()
        if fd >= 0:
            os.close(fd)
        return True

    def after_fork(self) -> None:
        """In a forked child: close what was inherited (the parent's stays as it is) and start anew when used."""
        channel, fd, closing, attachment = self._channel, self._lock_fd, self._closing, self._attachment
        self._reset()
        self._closing = closing
        if attachment is not None:
            attachment.live = False
        if channel is not None:
            with contextlib.suppress(OSError):
                os.close(channel.sock.detach())
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def prefaulted(self, timeout_s: float | None) -> bool:
        return self._prefault is None or self._prefault.done.wait(timeout_s)


_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _watch(reference: weakref.ref[SocketLink]) -> None:
    """The watching thread. It holds no lasting reference: a client that is dropped ends its session."""
    while True:
        link = reference()
        try:
            if link is None or not link.watch_once():
                return
        except Exception:
            # Without this thread nobody would reconnect or give dropped views back.
            log.exception("the watching thread goes on after an error")
            time.sleep(RECONNECT_MAX_S)
        del link


def _numbered(request: m.Message, number: int) -> m.Message:
    fields = [getattr(request, name) for name in request.__struct_fields__[1:]]
    return type(request)(number, *fields)
