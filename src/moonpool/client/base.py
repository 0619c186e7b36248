"""What all parts of the client share."""

from __future__ import annotations

from moonpool.client.copying import Copier
from moonpool.client.link import Link


class Base:
    """A link to a node and the threads that copy."""

    link: Link
    copier: Copier
    read_only: bool
