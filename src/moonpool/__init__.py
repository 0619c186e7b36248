"""Moonpool: a pool of KV cache outside the engine, for every engine of the host.

client = moonpool.connect()                  # the host's node, see `moonpool serve`
client.put_many(keys, values)                # bytes, numpy arrays, CPU tensors
client.get_many_into(keys, targets)          # one round trip, one copy
with client.view_many(keys) as views: …      # no copy
"""

from __future__ import annotations

from moonpool import keys
from moonpool.client.client import Client, connect
from moonpool.client.reading import Views
from moonpool.client.writing import Reservation, Reservations
from moonpool.errors import (
    Closed,
    ConfigError,
    FolderError,
    IntegrityError,
    InvalidRequest,
    KeySpaceConflict,
    MoonpoolError,
    NodeUnavailable,
    ProtocolError,
    ReadOnly,
    RemoteError,
    RequestTimeout,
    VersionMismatch,
)
from moonpool.matching import Extents, Group, Match
from moonpool.observe.stats import NodeStats
from moonpool.status import Status, Statuses
from moonpool.wire.messages import Event, ObjectStat, SpaceInfo

__version__ = "0.1.0"

__all__ = [
    "Client",
    "Closed",
    "ConfigError",
    "Event",
    "Extents",
    "FolderError",
    "Group",
    "IntegrityError",
    "InvalidRequest",
    "KeySpaceConflict",
    "Match",
    "MoonpoolError",
    "NodeStats",
    "NodeUnavailable",
    "ObjectStat",
    "ProtocolError",
    "ReadOnly",
    "RemoteError",
    "RequestTimeout",
    "Reservation",
    "Reservations",
    "SpaceInfo",
    "Status",
    "Statuses",
    "VersionMismatch",
    "Views",
    "connect",
    "keys",
]
