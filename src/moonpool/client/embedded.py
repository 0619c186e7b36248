"""The embedded link: the same store inside this process, for tests, notebooks and plain in-process caching."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from moonpool import errors
from moonpool.client.attachment import Attachment
from moonpool.client.cancelling import SCOPE
from moonpool.client.grants import Grant
from moonpool.client.holding import Holding
from moonpool.folder.mapping import Mapping
from moonpool.folder.table import TableReader
from moonpool.node.dispatch import Dispatcher
from moonpool.node.node import Node, embedded_node
from moonpool.node.steps import Steps, finish
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_request, encode
from moonpool.wire.versions import Version, boot_id

SWEEP_S = 0.1
"""How often, at most, what time has ended is looked for."""


class EmbeddedLink(Holding):
    """A node in private memory, called directly under one lock. Thread-safe; another process can't reach it.

    A forked child has a copy of its own of everything (the memory is private), so its calls stay valid there.
    """

    def __init__(self, pool_bytes: int, *, read_only: bool, name: str) -> None:
        self.node: Node = embedded_node(pool_bytes)
        self._state = threading.RLock()
        self.lock = threading.Condition(self._state)
        self._hold_nothing()
        self._background: deque[Steps[None]] = deque()
        self._dispatcher = Dispatcher(self.node, self._background.append)
        self._closed = False
        self._sweep_at = 0.0
        _links.add(self)
        ours = Version.ours()
        hello = m.Hello(0, ours.major, ours.minor, ours.features, boot_id(), name, read_only)
        self._session, welcome = finish(self._dispatcher.hello(hello))
        self._session.pid = os.getpid()
        pool: Mapping = self.node.pool
        table = TableReader(self.node.catalogue.table.mapping)
        self._attachment = Attachment(pool, table, welcome.pool_id, welcome.token)
        self._token = welcome.token
        self._channel = _Inside(self._attachment, self._serve)

    @property
    def attachment(self) -> Attachment:
        if self._closed:
            raise errors.Closed("the client has been closed")
        return self._attachment

    @property
    def connected(self) -> bool:
        return not self._closed

    def call(self, request: m.Message) -> m.Message:
        return self.exchange(request)[0]

    def exchange(self, request: m.Message, meanwhile: Callable[[], None] | None = None) -> tuple[m.Message, Grant]:
        if meanwhile is not None:
            meanwhile()
        return self.finish(self.begin(request))

    def begin(self, request: m.Message) -> Grant:
        grant = Grant(self.ended, self._attachment, self._channel, request)
        pending = grant.pending
        assert pending is not None
        with self.lock:
            if self._closed:
                raise errors.Closed("the client has been closed")
            if self.node.store.clock() >= self._sweep_at:
                self._sweep_at = self.node.store.clock() + SWEEP_S
                self.node.sweeper.sweep_once()
            # Through the wire's own checks, so that what a socket refuses is refused here too.
            self._arrived(pending, self._serve(decode_request(bytes(encode(request)[4:]))))
            if pending.hold:
                self._ask_for_hold(pending)
        return grant

    def begin_many(self, requests: Sequence[m.Message]) -> list[Grant]:
        return [self.begin(request) for request in requests]

    def finish(self, grant: Grant) -> tuple[m.Message, Grant]:
        pending = grant.pending
        assert pending is not None, "a request is finished once"
        assert pending.reply is not None
        if not (pending.ids or pending.hold):
            grant.pending = None
        return pending.reply, grant

    def send(self, message: m.Message) -> None:
        self.call(message)

    def answered(self, grant: Grant | None) -> bool:
        return True

    def wait(self, grant: Grant, timeout_s: float) -> bool:
        return True

    def every_round(self, call: Callable[[], None]) -> None:
        pass

    def begin_commit(
        self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float
    ) -> Grant | None:
        return self.begin(m.Commit(0, ids, checksums, transfer_s))

    def close(self, wait: bool = True) -> None:
        self.flush()
        self._closed = True
        self._attachment.live = False

    def prefaulted(self, timeout_s: float | None) -> bool:
        return True

    def _serve(self, request: m.Request) -> m.Message:
        """Serve a request to its end, and what comes of it in the background; wake those who wait."""
        with self.lock:
            reply = self._dispatcher.serve(self._session, request)
            found: m.Message | None = reply if isinstance(reply, m.Message | None) else self._run(reply)
            while self._background:
                self._run(self._background.popleft())
            self.lock.notify_all()
            return found or m.Count(0, 0)

    def _run(self, steps: Steps[Any]) -> Any:
        """Run steps under the lock, which a wait lets go of: other threads release or commit meanwhile."""
        scope = SCOPE.get()
        if scope is not None:
            scope.waits(self._wake)
        try:
            while True:
                deadline = next(steps)
                self.flush()
                if self.node.checksums.urgent:
                    self.node.checksums.run_here(self.node.pool.view)
                elif deadline is not None:
                    if scope is not None and scope.cancelled:
                        steps.close()
                        raise errors.Cancelled("cancelled while it waited")
                    self.lock.wait(max(0.0, deadline - self.node.store.clock()))
        except StopIteration as stop:
            return stop.value

    def _wake(self) -> None:
        with self.lock:
            self.lock.notify_all()


class _Inside:
    """Stands where a channel stands: what is queued is served here."""

    broken, cancels = None, False

    def __init__(self, attachment: Attachment, serve: Callable[[m.Request], m.Message]) -> None:
        self.attachment, self._serve = attachment, serve
        self._outbox: deque[bytearray] = deque()
        self.queue = self._outbox.append

    def send_queued(self) -> None:
        while self._outbox:
            for body in FrameReader().feed(bytes(self._outbox.popleft())):
                self._serve(decode_request(body))


_links: weakref.WeakSet[EmbeddedLink] = weakref.WeakSet()
_forking: list[EmbeddedLink] = []


def _before_fork() -> None:
    """Fork while no call is under way: the child's copy of a store must be whole, and its lock free."""
    _forking[:] = list(_links)
    for link in _forking:
        link.lock.acquire()


def _after_fork() -> None:
    for link in _forking:
        link.lock.release()
    _forking.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
