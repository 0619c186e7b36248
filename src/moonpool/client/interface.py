"""What a link to a node is: the interface that the rest of the client is written against.

There are two: `link.SocketLink` over a socket, and `embedded.EmbeddedLink` inside this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from moonpool.client.attachment import Attachment
from moonpool.client.grants import Ended, Grant
from moonpool.wire import messages as m


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

    def exchange(self, request: m.Message, meanwhile: Callable[[], None] | None = None) -> tuple[m.Message, Grant]:
        """As `call`, with what owns all that the reply gives. `meanwhile` is called once, while the node is at work."""

    def begin(self, request: m.Message) -> Grant:
        """Send a request now; `finish` waits for the reply, once."""

    def begin_many(self, requests: Sequence[m.Message]) -> list[Grant]:
        """Send several requests at once."""

    def finish(self, grant: Grant) -> tuple[m.Message, Grant]: ...

    def send(self, message: m.Message) -> None:
        """Send a message that has no reply, if the connection is there."""

    def answered(self, grant: Grant | None) -> bool:
        """Whether `finish` would come to an end at once; so it is for None, which was never sent."""

    def wait(self, grant: Grant, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; the same as `answered` then."""

    def every_round(self, call: Callable[[], None]) -> None:
        """Have the watching thread, where there is one, call this method some ten times a second, while its object
        lives: the link doesn't keep it."""

    def begin_commit(
        self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float
    ) -> Grant | None:
        """Send the commit of filled extents. None where they belong to a session that is no more."""

    def settled(self, grants: Iterable[Grant]) -> None:
        """The node has answered the commit of all that these gave: it is no reservation of ours any more."""

    def give_back(self, grant: Grant, places: Sequence[int] | None = None, transfer_s: float = 0.0) -> None:
        """Give pins or extents back: all, or those at these places of the reply; not waited for. The caller's I/O on
        them has stopped. Of a request that is unanswered, whatever it will give; where it waits in the node, its wait
        ends."""

    ended: Ended
    """Queues a grant, or an array that was handed out, that is gone. Called by finalizers."""

    def flush(self) -> None:
        """Give back what `ended` has queued."""

    holds: dict[str, Any]
    """Names of holds that this client has asked for and not released."""

    def close(self, wait: bool = True) -> None:
        """End the session, at once or when the last view is gone; `wait` for the node to say that it has. Safe to call
        twice."""

    def prefaulted(self, timeout_s: float | None) -> bool:
        """Wait until this process's mapping has been faulted in."""
