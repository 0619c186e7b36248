"""What all parts of the client share."""

from __future__ import annotations

from moonpool.client.commits import Commits
from moonpool.client.copying import Copier
from moonpool.client.interface import Link


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
