"""Everything about stored objects and the node that moves no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from moonpool.client.base import Base
from moonpool.client.buffers import encode_key, encode_keys
from moonpool.errors import InvalidRequest, ProtocolError
from moonpool.folder.layout import MODE_NAMES, Mode
from moonpool.keys.space import KeySpace
from moonpool.observe.stats import NodeStats
from moonpool.status import Status, Statuses
from moonpool.wire import messages as m
from moonpool.wire.messages import ObjectStat, SpaceInfo

R = TypeVar("R", bound=m.Message)
Keys = list[bytes]  # spelled out here because `list` is a method below


class Administration(Base):
    """The client's calls about objects and the node. All raise `NodeUnavailable` where there is none."""

    def remove(self, key: str | bytes, force: bool = False) -> Status:
        """Make one object invisible at once; see `remove_many`."""
        return self.remove_many([key], force)[0]

    def remove_many(self, keys: Sequence[str | bytes], force: bool = False) -> Statuses:
        """Make objects invisible at once; their memory is free when the last reader has let go.

        OK, MISS, or PINNED for a hard-pinned one (which `force` removes too). Raises `ReadOnly`.
        """
        self._writable()
        return self._statuses(keys, lambda part: m.Remove(0, part, force))

    def touch(self, key: str | bytes) -> Status:
        """Mark one object as used now; see `touch_many`."""
        return self.touch_many([key])[0]

    def touch_many(self, keys: Sequence[str | bytes]) -> Statuses:
        """Mark objects as used now, the last key first, so that of a chain the tail is evicted first. OK or MISS."""
        return self._statuses(keys, lambda part: m.Touch(0, part))

    def pin_many(self, keys: Sequence[str | bytes], ttl_s: float | None = None) -> Statuses:
        """Protect stored objects: hard (never evicted) or, with `ttl_s`, soft (evicted last until then).

        OK, MISS, or TOO_LARGE where pins would exceed the node's `pin_share`. Raises `ReadOnly`.
        """
        self._writable()
        if ttl_s is not None and not ttl_s > 0:
            raise InvalidRequest(f"ttl_s={ttl_s} is not a positive time in seconds")
        level = 2 if ttl_s is None else 1
        return self._statuses(keys, lambda part: m.Pin(0, part, level, ttl_s or 0.0))

    def unpin_many(self, keys: Sequence[str | bytes]) -> Statuses:
        """End the protection that `pin_many` or a put gave. OK or MISS. Raises `ReadOnly`."""
        self._writable()
        return self._statuses(keys, lambda part: m.Pin(0, part, 0))

    def stat(self, key: str | bytes) -> ObjectStat | None:
        """What is known of one object, None for a miss. Renews nothing."""
        return self.stat_many([key])[0]

    def stat_many(self, keys: Sequence[str | bytes]) -> list[ObjectStat | None]:
        """What is known of each object, None for a miss. Renews nothing."""
        found: list[ObjectStat | None] = []
        wanted = encode_keys(keys)
        for start in range(0, len(wanted), 512):
            found += self._ask(m.Stat(0, wanted[start : start + 512]), m.Stats).objects
        return found

    def list(self, prefix: str | bytes = b"") -> Iterator[ObjectStat]:
        """All stored objects whose key starts with `prefix`, in no order, page by page while you iterate.

        What comes or goes meanwhile may or may not appear.
        """
        wanted, cursor = encode_key(prefix), 0
        while True:
            page = self._ask(m.List(0, wanted, cursor), m.Listing)
            yield from page.objects
            cursor = page.cursor
            if not cursor:
                return

    def verify_many(self, keys: Sequence[str | bytes]) -> Statuses:
        """Have the node compare stored bytes with their checksums now: OK, CORRUPT (dropped), MISS, or IN_PROGRESS
        where it did not come to it within its bounded wait."""
        return self._statuses(keys, lambda part: m.Verify(0, part))

    def clear(self) -> int:
        """Make everything on the node invisible at once; returns the number of objects. Raises `ReadOnly`."""
        self._writable()
        return self._ask(m.Clear(0), m.Count).count

    def declare(self, space: KeySpace) -> bytes:
        """Tell the node of a key space, durably, and return its digest. Declaring it again changes nothing.

        Raises `KeySpaceConflict` where the digest is known with another description.
        """
        self._ask(m.Declare(0, space.digest, space.canonical), m.Count)
        return space.digest

    def spaces(self) -> Sequence[SpaceInfo]:
        """All key spaces that the node knows; number 0 stands for keys of no declared space."""
        return self._ask(m.Spaces(0), m.SpaceList).spaces

    def purge(
        self,
        *,
        space: KeySpace | bytes | None = None,
        model: str | None = None,
        tenant: str | None = None,
        older_than_s: float | None = None,
    ) -> int:
        """Make objects invisible at once, by what is given (all of it must fit); returns how many.

        A get that began before reports a miss, a reservation that began before is refused at its commit. The memory
        is freed in the background. Raises `InvalidRequest` where nothing is given (see `clear`), `ReadOnly`.
        """
        self._writable()
        if space is None and not model and not tenant and older_than_s is None:
            raise InvalidRequest("purge needs a space, a model, a tenant or an age; `clear` removes everything")
        if older_than_s is not None and not older_than_s > 0:
            raise InvalidRequest(f"older_than_s={older_than_s} is not a positive time in seconds")
        digests = [] if space is None else [space if isinstance(space, bytes) else space.digest]
        return self._ask(m.Purge(0, digests, model or "", tenant or "", older_than_s or 0.0), m.Count).count

    def stats(self) -> NodeStats:
        """The node's figures at this moment, as a dataclass."""
        return msgspec.json.decode(self._ask(m.Statistics(0), m.StatisticsReply).body, type=NodeStats)

    def mode(self) -> str:
        """The operator's switch: "off", "read", "write" or "on". From shared memory."""
        return MODE_NAMES[self.link.attachment.table.mode & Mode.ON]

    def set_mode(self, mode: str) -> None:
        """Turn the switch for all clients of the node: reads and writes are then misses and DISABLED at once."""
        self._writable()
        if mode not in MODE_NAMES:
            raise InvalidRequest(f"mode {mode!r} is none of {', '.join(MODE_NAMES)}")
        self._ask(m.SetMode(0, MODE_NAMES.index(mode)), m.Count)

    # ---- within --------------------------------------------------------------------------------------------------

    def _ask(self, request: m.Message, kind: type[R]) -> R:
        self.link.flush()
        reply = self.link.call(request)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the node answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def _statuses(self, keys: Sequence[str | bytes], make: Callable[[Keys], m.Message]) -> Statuses:
        wanted = encode_keys(keys)
        result = Statuses([Status.MISS] * len(wanted))
        # The last part first, since of a chain that is touched the tail is to be the coldest.
        for start in reversed(range(0, len(wanted), m.KEYS_MAX)):
            reply = self._ask(make(wanted[start : start + m.KEYS_MAX]), m.StatusReply)
            result[start : start + m.KEYS_MAX] = map(Status, reply.statuses)
            result.details.update({start + i: text for i, text in reply.details.items()})
        return result
