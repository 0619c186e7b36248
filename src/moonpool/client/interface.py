"""What a link to a node is: the interface that the rest of the client is written against.

There are two: `link.SocketLink` over a socket, and `embedded.EmbeddedLink` inside this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moonpool.client.attachment import Attachment
from moonpool.wire import messages as m

Begun = Any
"""A request under way: what `begin` gives and `finish` takes, once."""


class Link(Protocol):
    """A session with one node. Thread-safe."""

    @property
    def attachment(self) -> Attachment:
        """What is mapped now. Raises `NodeUnavailable` while there is no node."""

    @property
    def connected(self) -> bool:
        """Whether there is a node, as far as is known. Without I/O: it may be asked thousands of times a second."""

    def call(self, request: m.Message) -> m.Message:
        """Send a request and wait for its reply; sent anew where the connection broke. `id` is filled in."""

    def exchange(self, request: m.Message, meanwhile: Callable[[], None] | None = None) -> tuple[m.Message, Attachment]:
        """As `call`, with the attachment that the ids and offsets in the reply belong to. `meanwhile` is called once,
        while the node is at work."""

    def begin(self, request: m.Message) -> Begun:
        """Send a request now; `finish` waits for the reply."""

    def begin_many(self, requests: Sequence[m.Message]) -> list[Begun]:
        """Send several requests at once."""

    def finish(self, begun: Begun) -> tuple[m.Message, Attachment]: ...

    def send(self, message: m.Message) -> None:
        """Send a message that has no reply, if the connection is there."""

    def answered(self, begun: Begun | None) -> bool:
        """Whether `finish` would come to an end at once; so it is for None, which was never sent."""

    def wait(self, begun: Begun, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; the same as `answered` then."""

    def every_round(self, call: Callable[[], None]) -> None:
        """Have the watching thread, where there is one, call this method some ten times a second, while its object
        lives: the link doesn't keep it."""

    def abandon(self, begun: Begun) -> None:
        """Nobody asks for this reply any more: what it gives is given back."""

    def begin_commit(
        self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float
    ) -> Begun | None:
        """Send the commit of filled extents. None where they belong to a session that is no more."""

    def committed(self, attachment: Attachment, ids: list[int]) -> None:
        """The node has answered a commit: these are no reservations of ours any more."""

    def release(self, attachment: Attachment, ids: list[int], transfer_s: float = 0.0) -> None:
        """Give pins back; not waited for. The caller's I/O on them has stopped."""

    def abort(self, attachment: Attachment, ids: list[int]) -> None:
        """Give extents back unfilled; not waited for. The caller's I/O on them has stopped."""

    def drop(self, attachment: Attachment, number: int) -> None:
        """A view's last reference is gone: its pin is released soon. Called by finalizers; only appends to a queue."""

    def flush(self) -> None:
        """Release what `drop` has queued."""

    def close(self, wait: bool = True) -> None:
        """End the session, at once or when the last view is gone; `wait` for the node to say that it has. Safe to call
        twice."""

    def prefaulted(self, timeout_s: float | None) -> bool:
        """Wait until this process's mapping has been faulted in."""
