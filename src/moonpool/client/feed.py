"""The feed on the client's side: a connection of its own that the node pushes changes into."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from moonpool import errors
from moonpool.client.channel import Channel, refusal
from moonpool.folder.folder import Folder
from moonpool.node.feed import Subscriber
from moonpool.node.node import Node
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_reply, encode
from moonpool.wire.messages import Event
from moonpool.wire.versions import Version, boot_id

__all__ = ["EmbeddedSubscription", "Event", "SocketSubscription", "Subscription"]


class Subscription(Protocol):
    """An iterator of `Event`s and a context manager. Iteration waits for the next change and ends with `close`, or
    after an event of kind "lagged": then subscribe again, with a snapshot."""

    def __iter__(self) -> Iterator[Event]: ...
    def __next__(self) -> Event: ...
    def poll(self, timeout_s: float = 0.0) -> Event | None:
        """The next event, or None where none came in time. Raises `NodeUnavailable` when the node is gone."""

    def close(self) -> None: ...
    def __enter__(self) -> Subscription: ...
    def __exit__(self, *exc: object) -> None: ...


class _Base:
    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._ended = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._ended or self._events:
            event = self.poll(0.25)
            if event is not None:
                return event
        raise StopIteration

    def poll(self, timeout_s: float = 0.0) -> Event | None:
        """The next event, or None where none came in time. Raises `NodeUnavailable` when the node is gone."""
        if not self._events and not self._ended:
            self._fetch(timeout_s)
        if not self._events:
            return None
        event = self._events.popleft()
        if event.kind == "lagged":
            self._ended = True
        return event

    def _fetch(self, timeout_s: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._ended = True
        self._events.clear()

    def __exit__(self, *exc: object) -> None:
        self.close()


class SocketSubscription(_Base):
    """A feed over a socket. For one thread."""

    def __init__(self, folder: Folder, *, name: str, timeout_s: float, snapshot: bool) -> None:
        super().__init__()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = FrameReader()
        self._subscribed = False
        channel = Channel(self._sock, timeout_s)
        try:
            self._sock.connect(str(folder.socket))
            ours = Version.ours()
            hello = m.Hello(1, ours.major, ours.minor, ours.features, boot_id(), name, True)
            channel.finish(channel.begin(hello))
            # From here on the node pushes: frames are read here, not by the channel.
            self._sock.sendall(encode(m.Subscribe(2, snapshot)))
            while not self._subscribed:  # what changes once this has returned is in the feed
                self._receive()
        except BaseException as error:
            self._sock.close()
            if isinstance(error, OSError) and not isinstance(error, errors.MoonpoolError):
                why = error.strerror or error
                raise errors.NodeUnavailable(f"no node answers at {folder.socket} ({why})") from error
            raise

    def __enter__(self) -> SocketSubscription:
        return self

    def _fetch(self, timeout_s: float) -> None:
        try:
            # Not `select`, which refuses descriptors from 1,024 on; an engine has more of them than that.
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            if not poller.poll(timeout_s * 1000):
                return
        except (OSError, ValueError) as error:
            raise errors.NodeUnavailable(f"the feed broke: {error}") from error
        self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except OSError as error:
            raise errors.NodeUnavailable(f"the feed broke: {error}") from error
        if not data:
            self._ended = True
            raise errors.NodeUnavailable("the node closed the feed")
        for body in self._frames.feed(data):
            reply = decode_reply(body)
            if isinstance(reply, m.Events):
                self._events.extend(reply.events)
            elif isinstance(reply, m.Count):
                self._subscribed = True
            elif isinstance(reply, m.Refused):
                raise refusal(reply)

    def close(self) -> None:
        super().close()
        self._sock.close()


class EmbeddedSubscription(_Base):
    """A feed of an embedded node."""

    def __init__(self, node: Node, lock: threading.Condition, *, snapshot: bool) -> None:
        super().__init__()
        self._feed, self._lock = node.catalogue.feed, lock
        self._woken = threading.Event()
        with lock:
            self._subscriber: Subscriber = self._feed.subscribe(self._woken.set)
            if snapshot:
                catalogue, sequence = node.catalogue, self._feed.sequence
                for slot in range(catalogue.slots_used_top):
                    if catalogue.visible(slot):
                        stat = catalogue.stat(slot, "")
                        self._events.append(
                            Event(sequence, "snapshot", stat.key, stat.size, stat.space, "", stat.metadata)
                        )
                self._events.append(Event(sequence, "snapshot-end"))

    def __enter__(self) -> EmbeddedSubscription:
        return self

    def _fetch(self, timeout_s: float) -> None:
        if self._woken.wait(timeout_s):
            with self._lock:
                self._woken.clear()
                while events := self._subscriber.take(256):
                    self._events.extend(events)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._feed.unsubscribe(self._subscriber)
