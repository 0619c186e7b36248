"""From a message to what it does: the one table of requests, for sockets and for `embedded:` alike."""

from __future__ import annotations

from collections.abc import Callable, Sized
from time import perf_counter
from typing import Any

import msgspec

from moonpool.errors import InvalidRequest, ReadOnly
from moonpool.folder.layout import INLINE_VALUE_BYTES_MAX, RECORD_WORDS, Mode
from moonpool.node.node import Node
from moonpool.node.sessions import Session
from moonpool.node.slices import SLICE, Whole, cut
from moonpool.node.steps import Steps
from moonpool.node.store import SLOT_MASK
from moonpool.observe.stats import node_stats
from moonpool.options import RESERVE_WAIT_MAX_S
from moonpool.status import Status
from moonpool.wire import messages as m
from moonpool.wire.versions import Version, boot_id

INLINE_BYTES_MAX = m.INLINE_BATCH_BYTES_MAX + INLINE_VALUE_BYTES_MAX
"""Values of one `PutInline`: what waits for space is kept in memory, up to `INFLIGHT_MAX` messages a client."""
LIST_MAX = 4096
"""Objects in one listing."""
LIST_BYTES = 2 << 20
LISTED_BYTES = 640
"""A listing ends at so many bytes of keys and metadata, and this for the rest of each: it fits into a frame."""
LIST_PAGE_SLOTS = 65_536
"""Slots looked at for one listing, however few are found: some 40 ms, in steps."""
LIST_SLOTS = 512
"""Slots looked at in one step of a listing, at 1 us each."""

Handler = Callable[[Session, Any], "m.Message | Steps[Any] | None"]
ByKey = Callable[[Session, Any, int], "m.Message | None"]
"""Serves a slice of a request, which begins at this place of it."""
_WRITES = (m.Reserve, m.PutInline, m.Commit, m.Abort, m.Remove, m.Pin, m.Clear, m.Purge, m.SetMode)


class Dispatcher:
    """Serves requests of any session on one node. A handler returns the reply, None where there is none, or steps.

    Whoever calls runs the steps, letting others in between, and calls `background` to be handed work that nobody
    waits for.
    """

    def __init__(self, node: Node, background: Callable[[Steps[None]], None]) -> None:
        self.node = node
        self.background = background
        self._store, self._catalogue = node.store, node.catalogue
        node.store.background = background
        self._counters = node.catalogue.counters
        self._by_key: dict[type, ByKey] = {
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.Acquire: self._acquire,
            m.Release: self._release,
            m.Check: self._check,
            m.Remove: self._remove,
            m.Touch: self._touch,
            m.Pin: self._pin,
            m.Stat: self._stat,
        }
        self._handlers: dict[type, Handler] = {
            m.Reserve: self._reserve,
            m.PutInline: self._put_inline,
            m.Acquire: self._acquire_summed,
            m.List: self._list,
            m.Match: self._match,
            m.Adopt: self._adopt,
            m.ReleaseHold: self._release_hold,
            m.Clear: self._clear,
            m.Declare: self._declare,
            m.Spaces: self._spaces,
            m.Purge: self._purge,
            m.SetMode: self._set_mode,
            m.Statistics: self._statistics,
            m.Verify: self._verify,
        }

    def serve(self, session: Session, request: m.Message) -> m.Message | Steps[m.Message | None] | None:
        """Start one request. Raises `MoonpoolError` where it is refused as a whole."""
        count = _count_of(request)
        if count > m.KEYS_MAX:
            raise InvalidRequest(f"{count} keys or ids in a message exceed the limit of {m.KEYS_MAX}; send fewer")
        if session.read_only and isinstance(request, _WRITES):
            raise ReadOnly(f"{type(request).__name__.lower()} on a session opened read-only")
        if not self.in_order(request):
            return self._handlers[type(request)](session, request)
        if count > SLICE[type(request)]:
            return self._in_slices(session, request)
        begun = perf_counter()
        reply = self._by_key[type(request)](session, request, 0)
        self._observe(request, perf_counter() - begun)
        return reply

    def in_order(self, request: m.Message) -> bool:
        """Whether whatever its connection sends after `request` is served after it, however many steps it takes: a
        client doesn't wait for a commit or a release before it asks on. What may itself have to wait isn't."""
        return type(request) in SLICE and not (isinstance(request, m.Acquire) and request.checksums)

    def _in_slices(self, session: Session, request: m.Message) -> Steps[m.Message | None]:
        """Serve a long request as several short ones, others in between, and answer as if it were one."""
        begun, serve, pins = perf_counter(), self._by_key[type(request)], session.pins
        whole = Whole(_count_of(request))
        try:
            for i, (start, part) in enumerate(cut(request)):
                if i:
                    yield None
                whole.add(start, serve(session, part, start))
        except BaseException:  # also where the one who asked is gone
            self._store.take_back(session, whole.reply(), pins)
            raise
        self._observe(request, perf_counter() - begun)
        return whole.reply()

    # ---- sessions ------------------------------------------------------------------------------------------------

    def hello(self, request: m.Hello) -> Steps[tuple[Session, m.Welcome]]:
        """Open or resume a session. Raises `VersionMismatch` for a peer too far away."""
        ours = Version.ours()
        ours.check(Version(request.major, request.minor), request.layout, who=f"client {request.name!r}")
        node = self.node
        resumed = None
        if request.token and request.pool_id == node.pool_id:
            resumed = yield from node.roster.resume(request.session, request.token, request.pins, request.reservations)
        if resumed is not None:
            session, stale = resumed
            session.read_only = request.read_only  # a restarted node doesn't know
        else:
            session = node.roster.open(request.name, read_only=request.read_only)
            stale = [*(number for number, _ in request.pins), *request.reservations]
        return session, m.Welcome(
            request.id,
            ours.major,
            ours.minor,
            ours.features,
            boot_id(),
            session.number,
            session.token,
            node.pool_id,
            node.incarnation,
            node.config.pool_bytes,
            RESERVE_WAIT_MAX_S,
            resumed is not None,
            stale,
        )

    # ---- objects -------------------------------------------------------------------------------------------------

    def _reserve(self, session: Session, request: m.Reserve) -> m.Message | Steps[m.Message]:
        if not self.node.mode & Mode.WRITE:
            empty = [0] * len(request.keys)
            return m.Reserved(request.id, [int(Status.DISABLED)] * len(request.keys), empty, empty)
        return self._timed("put", "allocate", request.keys, self._store.reserve(session, request))

    def _put_inline(self, session: Session, request: m.PutInline) -> m.Message | Steps[m.Message]:
        if sum(map(len, request.values)) > INLINE_BYTES_MAX:
            raise InvalidRequest(f"values in one message exceed the limit of {INLINE_BYTES_MAX} bytes; send fewer")
        if not self.node.mode & Mode.WRITE:
            return m.StatusReply(request.id, [int(Status.DISABLED)] * len(request.keys))
        return self._timed("put_inline", "commit", request.keys, self._store.put_inline(session, request))

    def _commit(self, session: Session, request: m.Commit, place: int) -> m.Message:
        return m.StatusReply(request.id, self._store.commit(session, request.ids, request.checksums, place))

    def _abort(self, session: Session, request: m.Abort, place: int) -> m.Message:
        self._store.abort(session, request.ids)
        return m.Count(request.id, len(request.ids))

    def _acquire(self, session: Session, request: m.Acquire, place: int) -> m.Message:
        if not self.node.mode & Mode.READ:
            empty = [0] * len(request.keys)
            disabled = [int(Status.DISABLED)] * len(request.keys)
            return m.Acquired(request.id, disabled, empty, empty, empty, empty, empty, 0)
        space = self._space_of(request.keys)
        slots = self._catalogue.find_many(request.keys)
        reply = self._store.acquire_slots(session, request.id, slots, place)
        hits = reply.statuses.count(0)
        counters = self._counters
        counters.hits[space] += hits
        counters.misses[space] += len(request.keys) - hits
        counters.bytes_read[space] += sum(reply.sizes)
        return reply

    def _acquire_summed(self, session: Session, request: m.Acquire) -> Steps[m.Message]:
        pins = session.pins
        reply = yield from self._in_slices(session, msgspec.structs.replace(request, checksums=False))
        assert isinstance(reply, m.Acquired)
        try:
            return (yield from self.node.checksums.complete(reply))
        except BaseException:  # also where the one who asked is gone
            self._store.take_back(session, reply, pins)
            raise

    def _release(self, session: Session, request: m.Release, place: int) -> None:
        self._store.release(session, request.ids)

    def _check(self, session: Session, request: m.Check, place: int) -> m.Message:
        return m.StatusReply(request.id, self._store.check(request.ids))

    def _remove(self, session: Session, request: m.Remove, place: int) -> m.Message:
        return msgspec.structs.replace(self._store.remove(request.keys, request.force), id=request.id)

    def _touch(self, session: Session, request: m.Touch, place: int) -> m.Message:
        return m.StatusReply(request.id, self._store.touch(request.keys, place))

    def _pin(self, session: Session, request: m.Pin, place: int) -> m.Message:
        return msgspec.structs.replace(self._store.pin(request.keys, request.level, request.ttl_s), id=request.id)

    def _stat(self, session: Session, request: m.Stat, place: int) -> m.Message:
        slots = map(self._store.visible_slot, request.keys)
        return m.Stats(request.id, [self._describe(slot) if slot >= 0 else None for slot in slots])

    def _list(self, session: Session, request: m.List) -> Steps[m.Message]:
        catalogue = self._catalogue
        found: list[m.ObjectStat] = []
        limit = max(1, min(request.limit, LIST_MAX))
        slot = max(0, request.cursor)
        last, room = slot + LIST_PAGE_SLOTS, LIST_BYTES
        while slot < min(last, catalogue.slots_used_top) and len(found) < limit and room > 0:
            if catalogue.visible(slot) and (
                not request.prefix or catalogue.records.key(slot).startswith(request.prefix)
            ):
                found.append(stat := self._describe(slot))
                room -= len(stat.key) + len(stat.metadata) + LISTED_BYTES
                if len(found) % 128 == 0:
                    yield None
            slot += 1
            if slot % LIST_SLOTS == 0:
                yield None
        return m.Listing(request.id, found, slot if slot < catalogue.slots_used_top else 0)

    # ---- match, administration -----------------------------------------------------------------------------------

    def _match(self, session: Session, request: m.Match) -> m.Message | Steps[m.Message]:
        if not self.node.mode & Mode.READ:
            return m.Matched(request.id, 0, False)
        keys = request.groups[0].keys if request.groups else []
        return self._timed("match", "query", keys, self.node.holds.match(session, request))

    def _adopt(self, session: Session, request: m.Adopt) -> Steps[m.Acquired]:
        return self.node.holds.adopt(session, request)

    def _release_hold(self, session: Session, request: m.ReleaseHold) -> m.Message:
        return m.Count(request.id, int(self.node.holds.release(request.hold)))

    def _clear(self, session: Session, request: m.Clear) -> Steps[m.Message]:
        return self._purge_spaces(request.id, self._catalogue.spaces.spaces, 0.0)

    def _purge(self, session: Session, request: m.Purge) -> Steps[m.Message]:
        spaces = self._catalogue.spaces.select(request.spaces, request.model, request.tenant)
        return self._purge_spaces(request.id, spaces, request.older_than_s)

    def _purge_spaces(self, request_id: int, spaces: list[Any], older_than_s: float) -> Steps[m.Message]:
        try:
            count = yield from self.node.sweeper.purge(list(spaces), older_than_s)
            if len(spaces) == len(self._catalogue.spaces.spaces) and not older_than_s:
                self._catalogue.feed.publish("cleared")
        finally:  # whatever became of the one who asked, what is invisible is to be freed
            self.background(self.node.sweeper.free_purged())
        return m.Count(request_id, count)

    def _declare(self, session: Session, request: m.Declare) -> m.Message:
        spaces = self._catalogue.spaces
        space = spaces.declare(request.digest, request.description, read_only=session.read_only)
        return m.Count(request.id, space.number)

    def _spaces(self, session: Session, request: m.Spaces) -> m.Message:
        return m.SpaceList(request.id, self._catalogue.spaces.infos())

    def _set_mode(self, session: Session, request: m.SetMode) -> m.Message:
        self.node.set_mode(request.mode & Mode.ON)
        return m.Count(request.id, self.node.mode)

    def _statistics(self, session: Session, request: m.Statistics) -> Steps[m.Message]:
        quarantined = yield from self.node.roster.quarantined_bytes()
        return m.StatisticsReply(request.id, msgspec.json.encode(node_stats(self.node, quarantined)))

    def _verify(self, session: Session, request: m.Verify) -> Steps[m.Message]:
        statuses = yield from self.node.checksums.verify(request.keys)
        return m.StatusReply(request.id, statuses)

    # ---- within --------------------------------------------------------------------------------------------------

    def _timed(self, operation: str, stage: str, keys: list[bytes], steps: Steps[Any]) -> Steps[m.Message]:
        begun = perf_counter()
        reply: m.Message = yield from steps
        self._counters.stage(operation, stage, self._space_of(keys), perf_counter() - begun)
        return reply

    def _observe(self, request: m.Message, seconds: float) -> None:
        """Tell the metrics of a batch that was served, in one step or in several."""
        counters = self._counters
        if isinstance(request, m.Acquire):
            counters.stage("get", "query", self._space_of(request.keys), seconds)
        elif isinstance(request, m.Commit):
            space = self._space_of_id(request.ids)
            if request.transfer_s > 0:
                counters.stage("put", "transfer", space, request.transfer_s)
            counters.stage("put", "commit", space, seconds)
        elif isinstance(request, m.Release) and request.transfer_s > 0:
            counters.stage("get", "transfer", self._space_of_id(request.ids), request.transfer_s)

    def _describe(self, slot: int) -> m.ObjectStat:
        writer = self._catalogue.words[slot * RECORD_WORDS] >> 32
        session = self.node.roster.sessions.get(writer)
        return self._catalogue.stat(slot, session.name if session else f"session {writer}")

    def _space_of(self, keys: list[bytes]) -> int:
        return self._catalogue.spaces.number_of(keys[0]) if keys else 0

    def _space_of_id(self, ids: list[int]) -> int:
        slot = ids[0] & SLOT_MASK if ids else 0
        return self._catalogue.space_of(slot) if slot < self._catalogue.records.slots else 0


def _count_of(request: m.Message) -> int:
    """How many keys or ids a request names."""
    names: Sized = getattr(request, "keys", ()) or getattr(request, "ids", ())
    return len(names)
