"""What all parts of the client share."""

from __future__ import annotations

from moonpool.client.commits import Commits
from moonpool.client.copying import Copier
from moonpool.client.interface import Link
from moonpool.errors import ReadOnly


class Base:
    """A link to a node and the threads that copy."""

    link: Link
    copier: Copier
    commits: Commits
    read_only: bool

    @property
    def pool_bytes(self) -> int:
        """Size of the pool that is mapped now. Raises `NodeUnavailable`."""
        return self.link.attachment.pool.size

    def _writable(self) -> None:
        """Raises `ReadOnly` on a client that may not write."""
        if self.read_only:
            raise ReadOnly("this client was opened with read_only=True; connect without it to write")
