"""The messages, one struct each. `docs/protocol.md` tells in which order they are sent.

All are MessagePack arrays `[tag, id, fields…]`. `id` pairs a reply with its request; 0 asks for no reply. Later
versions append fields with defaults, so that one minor version apart the shorter form still decodes.

An *object id* is `slot | generation << 32`. Ids are valid for the node incarnation that gave them.
"""

from __future__ import annotations

import msgspec

from moonpool.folder.layout import LAYOUT_VERSION

KEYS_MAX = 4096
"""Keys in one message; clients split longer batches. So many take 0.3 ms to decode."""
INLINE_KEYS_MAX = 1024
"""Values that a client puts into one `PutInline`: they take 0.3 us each to decode beside their keys."""

FRAME_BYTES_MAX = 4 << 20
"""The longest frame that is read; a longer one closes the connection."""

INLINE_BATCH_BYTES_MAX = 1 << 20
"""Bytes of values in one `PutInline`; clients split longer batches, so that no copy of the node's exceeds 1 ms."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=True):
    """The base of all messages."""

    id: int


def object_id(slot: int, generation: int) -> int:
    return slot | generation << 32


# ---- session -----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """The first message of a connection. With `token`, an earlier session is taken up again: `pins` (id, count) and
    `reservations` are all that the client still holds; other pins and reservations of the session's are given back,
    holds of `match` stay."""

    major: int
    minor: int
    features: list[str]
    boot_id: str
    name: str = ""
    read_only: bool = False
    session: int = 0
    token: bytes = b""
    pool_id: bytes = b""
    pins: list[tuple[int, int]] = []
    reservations: list[int] = []
    layout: int = LAYOUT_VERSION  # of the shared table


class Welcome(Message, frozen=True, tag=65):
    major: int
    minor: int
    features: list[str]
    boot_id: str
    session: int
    token: bytes
    pool_id: bytes
    incarnation: int
    pool_bytes: int
    reserve_wait_max_s: float
    resumed: bool = False
    stale: list[int] = []
    layout: int = LAYOUT_VERSION


class Bye(Message, frozen=True, tag=2):
    """No I/O of this client's is outstanding: end the session and give back all that it holds."""


# ---- objects -----------------------------------------------------------------------------------------------------


class Options(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=True):
    """What a writer asks for all keys of its batch."""

    ttl_s: float = 0.0
    pin: int = 0  # 0 none, 1 soft, 2 hard
    pin_ttl_s: float = 0.0
    priority: int = 0
    wait_s: float = -1.0  # for space; negative = the node's default
    wait_for_others: bool = False


DEFAULT_OPTIONS = Options()


class Reserve(Message, frozen=True, tag=3):
    keys: list[bytes]
    sizes: list[int]
    options: Options = DEFAULT_OPTIONS
    metadata: list[bytes] = []  # empty, or one per key


class Reserved(Message, frozen=True, tag=66):
    statuses: list[int]
    ids: list[int]
    offsets: list[int]
    details: dict[int, str] = {}


class PutInline(Message, frozen=True, tag=4):
    """Reserve, write and commit in one: values up to 64 KiB travel with the message."""

    keys: list[bytes]
    values: list[memoryview]
    options: Options = DEFAULT_OPTIONS
    metadata: list[bytes] = []
    checksums: list[int] = []


class Commit(Message, frozen=True, tag=5):
    ids: list[int]
    checksums: list[int] = []  # empty, or one per id; 0 = none given
    transfer_s: float = 0.0  # what the client spent on filling them, for the node's metrics


class Abort(Message, frozen=True, tag=6):
    """The writer's I/O into these extents has stopped; give them back."""

    ids: list[int]


class Acquire(Message, frozen=True, tag=7):
    """Pin each key's object for this session. With `checksums`, wait until each one's checksum is known."""

    keys: list[bytes]
    checksums: bool = False


class Acquired(Message, frozen=True, tag=67):
    statuses: list[int]
    ids: list[int]
    offsets: list[int]
    sizes: list[int]
    words: list[int]
    checksums: list[int]
    epoch: int
    details: dict[int, str] = {}


class Release(Message, frozen=True, tag=8):
    """The reader's I/O from these extents has stopped; one pin each."""

    ids: list[int]
    transfer_s: float = 0.0  # what the client spent on reading them, for the node's metrics


class Check(Message, frozen=True, tag=9):
    """Which of these pinned objects are still visible? Asked after a copy when a purge came in between."""

    ids: list[int]


class Remove(Message, frozen=True, tag=10):
    keys: list[bytes]
    force: bool = False


class Touch(Message, frozen=True, tag=11):
    keys: list[bytes]


class Pin(Message, frozen=True, tag=12):
    """Set the protection of stored objects: 0 none, 1 soft until `ttl_s` from now, 2 hard."""

    keys: list[bytes]
    level: int
    ttl_s: float = 0.0


class Stat(Message, frozen=True, tag=13):
    keys: list[bytes]


class ObjectStat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One stored object. Times are seconds since 1970; `expiry` and `pin_expiry` are 0 where there is none."""

    key: bytes
    size: int
    generation: int
    space: int
    created: float
    touched: float
    expiry: float
    checksum: int
    has_checksum: bool
    pin: int
    pin_expiry: float
    priority: int
    writer: str
    metadata: bytes
    pins: int


class Stats(Message, frozen=True, tag=68):
    objects: list[ObjectStat | None]


class List(Message, frozen=True, tag=14):
    """Stored objects whose key starts with `prefix`, from slot `cursor` on; at most `limit` of them."""

    prefix: bytes = b""
    cursor: int = 0
    limit: int = 1024


class Listing(Message, frozen=True, tag=69):
    objects: list[ObjectStat]
    cursor: int  # 0 = the end


class StatusReply(Message, frozen=True, tag=70):
    statuses: list[int]
    details: dict[int, str] = {}


class Count(Message, frozen=True, tag=71):
    count: int


# ---- match and holds ---------------------------------------------------------------------------------------------


class GroupKeys(msgspec.Struct, array_like=True, frozen=True, gc=False):
    keys: list[bytes]
    rule: int  # 0 all up to n, 1 the last `window` up to n, 2 the one that ends exactly at n
    window: int
    step: int


class Match(Message, frozen=True, tag=15):
    """The largest n that satisfies every group, and a hold under `hold` on what that n needs. Idempotent. With
    `extents` the answer says where the held objects lie."""

    groups: list[GroupKeys]
    hold: str
    extents: bool = False


class Matched(Message, frozen=True, tag=72):
    """With `extents`, one entry a held object, in the order of the groups' needed keys."""

    length: int
    created: bool
    ids: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    words: list[int] = []
    epoch: int = 0
    checksums: list[int] = []  # 0 = not known yet


class Adopt(Message, frozen=True, tag=16):
    """Pin for this session what a hold holds: answered with `Acquired`, in the hold's order."""

    hold: str


class ReleaseHold(Message, frozen=True, tag=17):
    hold: str


# ---- administration ----------------------------------------------------------------------------------------------


class Clear(Message, frozen=True, tag=18):
    pass


class Declare(Message, frozen=True, tag=19):
    digest: bytes
    description: bytes  # canonical JSON


class Spaces(Message, frozen=True, tag=20):
    pass


class SpaceInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One key space: its number on this node, digest, description (canonical JSON), live objects and bytes."""

    number: int
    digest: bytes
    description: bytes
    live_objects: int
    live_bytes: int


class SpaceList(Message, frozen=True, tag=73):
    spaces: list[SpaceInfo]


class Purge(Message, frozen=True, tag=21):
    """Make objects invisible at once: by space digests, and by age. Empty `spaces` = all spaces."""

    spaces: list[bytes] = []
    model: str = ""
    tenant: str = ""
    older_than_s: float = 0.0


class SetMode(Message, frozen=True, tag=22):
    mode: int


class Statistics(Message, frozen=True, tag=23):
    pass


class StatisticsReply(Message, frozen=True, tag=74):
    body: bytes  # observe.stats.NodeStats as JSON


class Verify(Message, frozen=True, tag=24):
    """Compare the keys' bytes with their checksums now."""

    keys: list[bytes]


class Cancel(Message, frozen=True, tag=26):
    """Nobody asks for the answer to an earlier request of this connection: if it waits, it ends with `Refused` of kind
    `Cancelled`, and has granted nothing."""

    request: int


# ---- feed --------------------------------------------------------------------------------------------------------


class Subscribe(Message, frozen=True, tag=25):
    """Turn this connection into a feed: `Events` from now on. With `snapshot`, an event of kind "snapshot" for each
    object that is there comes first, then one of kind "snapshot-end"."""

    snapshot: bool = False


class Event(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One change.

    `kind`: stored, removed, cleared, snapshot (an object that was there), snapshot-end, or lagged (later events were
    lost: subscribe again with a snapshot). `reason` tells why something was removed.
    """

    sequence: int
    kind: str
    key: bytes = b""
    size: int = 0
    space: int = 0
    reason: str = ""
    metadata: bytes = b""


class Events(Message, frozen=True, tag=75):
    events: list[Event]


class Refused(Message, frozen=True, tag=76):
    """The request could not be served; `kind` names an exception of `moonpool.errors`."""

    kind: str
    text: str


Request = (
    Hello
    | Bye
    | Reserve
    | PutInline
    | Commit
    | Abort
    | Acquire
    | Release
    | Check
    | Remove
    | Touch
    | Pin
    | Stat
    | List
    | Match
    | Adopt
    | ReleaseHold
    | Clear
    | Declare
    | Spaces
    | Purge
    | SetMode
    | Statistics
    | Verify
    | Subscribe
    | Cancel
)
Reply = (
    Welcome
    | Reserved
    | Acquired
    | Stats
    | Listing
    | StatusReply
    | Count
    | Matched
    | SpaceList
    | StatisticsReply
    | Events
    | Refused
)
