"""A node in memory and one over a folder, with one session each, served by hand: no sockets, no waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moonpool.config import NodeConfig
from moonpool.folder.folder import Folder
from moonpool.node.dispatch import Dispatcher
from moonpool.node.node import Node, embedded_node, open_node
from moonpool.node.sessions import Session
from moonpool.node.steps import Steps, finish
from moonpool.status import Status
from moonpool.wire import messages as m

MIB = 1 << 20


class Desk:
    """A node, one session, and requests served to their end."""

    def __init__(self, pool_bytes: int = 64 * MIB) -> None:
        self.node: Node = embedded_node(pool_bytes)
        self.background: list[Steps[None]] = []
        self.dispatcher = Dispatcher(self.node, self.background.append)
        self.session: Session = self.node.roster.open("desk", read_only=False)

    def begin(self, request: m.Message, session: Session | None = None) -> Any:
        return self.dispatcher.serve(session or self.session, request)

    def ask(self, request: m.Message, session: Session | None = None) -> Any:
        reply = self.begin(request, session)
        return reply if isinstance(reply, m.Message | None) else finish(reply)

    def put(self, *keys: bytes, value: bytes = b"value") -> None:
        reply = self.ask(m.PutInline(1, list(keys), [memoryview(value)] * len(keys)))
        assert set(reply.statuses) == {Status.OK}

    def pins(self, key: bytes) -> int:
        found = self.ask(m.Stat(1, [key])).objects[0]
        assert found is not None
        return int(found.pins)


def steps_of(steps: Any) -> tuple[int, Any]:
    """How often work that waits for nobody lets others in, and what comes of it."""
    pauses = 0
    while True:
        try:
            assert next(steps) is None
        except StopIteration as end:
            return pauses, end.value
        pauses += 1


class House:
    """A folder and the node over it; `restart` starts another as if the first had been killed."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path / "node")
        self.folder.create()
        self.restart()

    def restart(self, **changed: Any) -> Node:
        config = NodeConfig(dir=self.folder.path, pool_bytes=16 * MIB, slots=65_536, **changed)
        self.warnings: list[str] = []
        self.node = open_node(config, self.folder, self.warnings)
        self.node.grow(16 * MIB)
        self.dispatcher = Dispatcher(self.node, lambda steps: finish(steps))
        self.session = self.node.roster.open("test", read_only=False)
        return self.node

    def ask(self, request: m.Message) -> Any:
        reply = self.dispatcher.serve(self.session, request)
        return reply if isinstance(reply, m.Message | None) else finish(reply)

    def put(self, keys: list[bytes], size: int = 5000) -> None:
        assert not any(self.ask(m.PutInline(1, keys, [memoryview(bytes(size))] * len(keys))).statuses)

    def leave(self) -> None:
        """End the session, so that nothing is held at the restart."""
        self.node.roster.end(self.session, "bye")
