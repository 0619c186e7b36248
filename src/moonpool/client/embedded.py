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
from moonpool.folder.mapping import Mapping
from moonpool.folder.table import TableReader
from moonpool.node.dispatch import Dispatcher
from moonpool.node.node import Node, embedded_node
from moonpool.node.steps import Steps, finish
from moonpool.wire import messages as m
from moonpool.wire.frames import decode_request, encode
from moonpool.wire.versions import FEATURES, Version, boot_id

Begun = tuple[m.Message, Attachment]


SWEEP_S = 0.1
"""How often, at most, what time has ended is looked for."""


class EmbeddedLink:
    """A node in private memory, called directly under one lock. Thread-safe; another process can't reach it.

    A forked child has a copy of its own of everything (the memory is private), so its calls stay valid there.
    """

    def __init__(self, pool_bytes: int, *, read_only: bool, name: str) -> None:
        self.node: Node = embedded_node(pool_bytes)
        self.lock = threading.Condition(threading.RLock())
        self._background: deque[Steps[None]] = deque()
        self._dispatcher = Dispatcher(self.node, self._background.append)
        self._dropped: deque[int] = deque()
        self._closed = False
        self._sweep_at = 0.0
        _links.add(self)
        ours = Version.ours()
        hello = m.Hello(0, ours.major, ours.minor, sorted(FEATURES), boot_id(), name, read_only)
        self._session, welcome = finish(self._dispatcher.hello(hello))
        self._session.pid = os.getpid()
        pool: Mapping = self.node.pool
        table = TableReader(self.node.catalogue.table.mapping)
        self._attachment = Attachment(pool, table, welcome.pool_id, welcome.token)

    @property
    def attachment(self) -> Attachment:
        if self._closed:
            raise errors.Closed("the client has been closed")
        return self._attachment

    @property
    def connected(self) -> bool:
        return not self._closed

    def call(self, request: m.Message) -> m.Message:
        with self.lock:
            if self._closed:
                raise errors.Closed("the client has been closed")
            if self.node.store.clock() >= self._sweep_at:
                self._sweep_at = self.node.store.clock() + SWEEP_S
                self.node.sweeper.sweep_once()
            # Through the wire's own checks, so that what a socket refuses is refused here too.
            reply = self._dispatcher.serve(self._session, decode_request(bytes(encode(request)[4:])))
            return self._finish(reply) or m.Count(0, 0)

    def exchange(self, request: m.Message, meanwhile: Callable[[], None] | None = None) -> Begun:
        if meanwhile is not None:
            meanwhile()
        return self.call(request), self._attachment

    def begin(self, request: m.Message) -> Begun:
        return self.call(request), self._attachment

    def begin_many(self, requests: Sequence[m.Message]) -> list[Begun]:
        return [self.begin(request) for request in requests]

    def finish(self, begun: Begun) -> Begun:
        return begun

    def send(self, message: m.Message) -> None:
        self.call(message)

    def answered(self, begun: Begun | None) -> bool:
        return True

    def wait(self, begun: Begun, timeout_s: float) -> bool:
        return True

    def every_round(self, call: Callable[[], None]) -> None:
        pass

    def abandon(self, begun: Begun) -> None:
        reply, attachment = begun
        if isinstance(reply, m.Reserved):
            self.abort(attachment, [number for number in reply.ids if number])

    def begin_commit(
        self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float
    ) -> Begun | None:
        return self.begin(m.Commit(0, ids, checksums, transfer_s))

    def committed(self, attachment: Attachment, ids: list[int]) -> None:
        pass

    def release(self, attachment: Attachment, ids: list[int], transfer_s: float = 0.0) -> None:
        if not self._closed or self._session.pins:
            with self.lock:
                self._finish(self._dispatcher.serve(self._session, m.Release(0, ids, transfer_s)))

    def abort(self, attachment: Attachment, ids: list[int]) -> None:
        with self.lock:
            self._finish(self._dispatcher.serve(self._session, m.Abort(0, ids)))

    def drop(self, attachment: Attachment, number: int) -> None:
        self._dropped.append(number)

    def flush(self) -> None:
        while self._dropped:
            self.release(self._attachment, [self._dropped.popleft()])

    def close(self, wait: bool = True) -> None:
        self.flush()
        self._closed = True
        self._attachment.live = False

    def prefaulted(self, timeout_s: float | None) -> bool:
        return True

    def _finish(self, reply: m.Message | Steps[Any] | None) -> m.Message | None:
        """Run what `serve` gave to its end, and what came of it in the background; wake those who wait."""
        found: m.Message | None = reply if isinstance(reply, m.Message | None) else self._run(reply)
        while self._background:
            self._run(self._background.popleft())
        self.lock.notify_all()
        return found

    def _run(self, steps: Steps[Any]) -> Any:
        """Run steps under the lock, which a wait lets go of: other threads release or commit meanwhile."""
        try:
            while True:
                deadline = next(steps)
                self.flush()
                if self.node.checksums.urgent:
                    self.node.checksums.run_here(self.node.pool.view)
                elif deadline is not None:
                    self.lock.wait(max(0.0, deadline - self.node.store.clock()))
        except StopIteration as stop:
            return stop.value


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
