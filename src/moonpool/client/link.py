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
from collections import deque
from collections.abc import Callable, Sequence

from moonpool import errors
from moonpool.client.attachment import Attachment, Prefault
from moonpool.client.channel import Channel
from moonpool.client.interface import Begun
from moonpool.folder.folder import Folder, open_file
from moonpool.folder.layout import Header
from moonpool.probes import ARMED, reach
from moonpool.wire import messages as m
from moonpool.wire.versions import FEATURES, Version, boot_id

log = logging.getLogger("moonpool.client")

WATCH_S = 0.1
"""How often the watching thread looks for views that have been dropped."""
RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.02, 1.0
HELLO_TIMEOUT_S = 2.0
"""The longest that a node may take to answer Hello: other threads' releases wait for it."""
TRIES_MAX = 3
"""How often one call is sent anew because the connection broke under it."""


class SocketLink:
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
        self._pins: dict[int, int] = {}
        self._reservations: set[int] = set()
        self._dropped: deque[tuple[Attachment, int]] = deque()
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
        channel = Channel(sock, min(self.timeout_s, HELLO_TIMEOUT_S), self._arrived, self._give_back)
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
            welcome = channel.finish(*channel.begin(self._hello(channel.number())))
            if not isinstance(welcome, m.Welcome):
                raise errors.NodeUnavailable(f"the node answered Hello with {type(welcome).__name__}")
            Version.ours().check(Version(welcome.major, welcome.minor), welcome.layout, who="the node")
            channel.set_timeout(self.timeout_s)
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
            self._watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self),), name="moonpool-watch", daemon=True
            )
            self._watcher.start()

    def _hello(self, number: int) -> m.Hello:
        ours = Version.ours()
        pool_id = self._attachment.pool_id if self._attachment is not None else b""
        return m.Hello(
            number, ours.major, ours.minor, sorted(FEATURES), boot_id(), self.name, self.read_only,
            self._session, self._token, pool_id, list(self._pins.items()), list(self._reservations),
        )  # fmt: skip

    def _adopt(self, channel: Channel, welcome: m.Welcome) -> None:
        if not welcome.resumed:
            # Not (or no longer) our session: whatever we held is of an earlier pool or node, whose mapping stays.
            self._pins.clear()
            self._reservations.clear()
            self._lock_session(welcome.session)
        for number in welcome.stale:
            self._pins.pop(number, None)
            self._reservations.discard(number)
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

    def exchange(self, request: m.Message, meanwhile: Callable[[], None] | None = None) -> tuple[m.Message, Attachment]:
        for left in reversed(range(TRIES_MAX)):
            try:
                begun = self.begin(request)
                if meanwhile is not None:
                    try:
                        meanwhile()
                    except BaseException:
                        self.abandon(begun)
                        raise
                    meanwhile = None
                return self.finish(begun)
            except errors.VersionMismatch:
                raise
            except errors.NodeUnavailable:
                channel = self._channel
                if not left or channel is None or channel.broken is None:
                    raise
        raise AssertionError("the last try returns or raises")

    def begin(self, request: m.Message) -> Begun:
        channel = self._current()
        return channel, channel.begin(_numbered(request, channel.number()))[0]

    def begin_many(self, requests: Sequence[m.Message]) -> list[Begun]:
        channel = self._current()
        numbered = [_numbered(request, channel.number()) for request in requests]
        return [(channel, pending) for pending in channel.begin(*numbered)]

    def finish(self, begun: Begun) -> tuple[m.Message, Attachment]:
        channel, pending = begun
        return channel.finish(pending), channel.attachment

    def answered(self, begun: Begun | None) -> bool:
        if begun is None:
            return True
        channel, pending = begun
        return bool(channel.answered(pending))

    def wait(self, begun: Begun, timeout_s: float) -> bool:
        channel, pending = begun
        return bool(channel.wait(pending, timeout_s))

    def every_round(self, call: Callable[[], None]) -> None:
        self._rounds.append(weakref.WeakMethod(call))

    def abandon(self, begun: Begun) -> None:
        channel, pending = begun
        channel.abandon(pending)

    def begin_commit(
        self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float
    ) -> Begun | None:
        with self._state:
            channel = self._channel
            if channel is None or channel.broken is not None:  # else also while closing: what is filled is to stay
                channel = self._current()
            if attachment.token != self._token:
                return None
            return channel, channel.begin(m.Commit(channel.number(), ids, checksums, transfer_s))[0]

    def committed(self, attachment: Attachment, ids: list[int]) -> None:
        with self._state:
            if attachment.token == self._token:
                self._reservations.difference_update(ids)

    def release(self, attachment: Attachment, ids: list[int], transfer_s: float = 0.0) -> None:
        with self._state:
            if attachment.token != self._token:
                return
            pins = self._pins
            held = []
            for number in ids:
                left = pins.pop(number, 0)
                if left:  # else the node has lost it meanwhile, and told us
                    held.append(number)
                    if left > 1:
                        pins[number] = left - 1
            if held:
                self._send(m.Release(0, held, transfer_s))

    def abort(self, attachment: Attachment, ids: list[int]) -> None:
        with self._state:
            if attachment.token == self._token:
                self._reservations.difference_update(ids)
                self._send(m.Abort(0, ids))

    def send(self, message: m.Message) -> None:
        with self._state:
            self._send(message)

    def _send(self, message: m.Message) -> None:
        """With the state locked. A broken connection loses nothing: what is held is declared at the next."""
        channel = self._channel
        if channel is not None and channel.broken is None:
            with contextlib.suppress(errors.NodeUnavailable):
                channel.send(message)

    def drop(self, attachment: Attachment, number: int) -> None:
        self._dropped.append((attachment, number))

    def flush(self) -> None:
        dropped = self._dropped
        while dropped:
            ids: dict[Attachment, list[int]] = {}
            with contextlib.suppress(IndexError):
                for _ in range(m.KEYS_MAX):
                    attachment, number = dropped.popleft()
                    ids.setdefault(attachment, []).append(number)
            for attachment, numbers in ids.items():
                self.release(attachment, numbers)

    def _arrived(self, channel: Channel, reply: m.Message) -> None:
        """Note what a reply gives us to hold, before anybody acts on it."""
        if isinstance(reply, m.Acquired):
            with self._state:
                self._check(channel)
                for number in reply.ids:
                    if number:
                        self._pins[number] = self._pins.get(number, 0) + 1
        elif isinstance(reply, m.Reserved):
            with self._state:
                self._check(channel)
                self._reservations.update(filter(None, reply.ids))

    def _check(self, channel: Channel) -> None:
        if channel is not self._channel:
            # The node has been told meanwhile, over another connection, that we don't hold this.
            channel.fail("the connection was replaced")
            raise errors.ProtocolError("the connection was replaced")

    def _give_back(self, channel: Channel, reply: m.Message) -> None:
        """A reply whose caller has given up. Its ids are of the channel's session; in another they name others."""
        if isinstance(reply, m.Acquired):
            self.release(channel.attachment, [number for number in reply.ids if number])
        elif isinstance(reply, m.Reserved):
            self.abort(channel.attachment, [number for number in reply.ids if number])

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
            if not self._closing or self._pins or self._reservations:
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
                (bye,) = channel.begin(m.Bye(channel.number()))
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
