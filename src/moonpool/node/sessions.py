"""Sessions: what each client process holds, and until when.

A session is a client's connection and its process. It ends when the client says that its I/O has stopped, or when
its process is gone; a closed socket alone only quarantines what it holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

TOKEN_BYTES = 16


class Standing(Enum):
    LIVE = "live"
    """Connected."""
    QUARANTINED = "quarantined"
    """The connection is gone, the process may live: nothing that it holds is evicted or reused."""
    SILENT = "silent"
    """Of an earlier incarnation, its process may live, not yet reconnected."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Hold:
    """What `match` keeps in place for a request id, in the order of its groups' needed keys."""

    name: str
    session: Session
    length: int
    slots: Sequence[int]


@dataclass(slots=True, eq=False)
class Session:
    """One client's account. `pins` counts by object id, `reservations` holds slots: what is pinned, and every
    reservation is, keeps its slot."""

    number: int
    name: str = ""
    read_only: bool = False
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    standing: Standing = Standing.LIVE
    pins: dict[int, int] = field(default_factory=dict)
    pinned_since: float = 0.0
    """When it last went from no pin to some; on the node's monotonic clock."""
    reservations: set[int] = field(default_factory=set)
    holds: dict[str, Hold] = field(default_factory=dict)
    pid: int = 0
    """As the node sees it; 0 where it can't. For people to read: nothing rests on it."""

    @property
    def idle(self) -> bool:
        """Holds nothing."""
        return not (self.pins or self.reservations or self.holds)
