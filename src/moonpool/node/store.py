"""The store: what a session's batch of keys does, one status per key. No sockets, no clock of its own.

Calls that may have to wait (for space, for another writer, for a checksum) are generators of steps, see `steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.errors import InvalidRequest
from moonpool.folder.layout import (
    GENERATION_BITS,
    INLINE_VALUE_BYTES_MAX,
    RECORD_WORDS,
    Field,
    State,
)
from moonpool.keys.fingerprints import fingerprints
from moonpool.node.reserving import Reserving
from moonpool.node.sessions import Session
from moonpool.node.steps import SLICE_KEYS, SLICE_MASK, Steps
from moonpool.probes import ARMED, reach
from moonpool.status import Status
from moonpool.wire import messages as m

CHAIN_STEP_S = 1e-6
"""How much older than its forerunner each object of a chain is in the records: a restart has only those."""
SLOT_MASK = 0xFFFF_FFFF
# Plain numbers, because looking an enumeration's member up costs more than what is done with it.
_OFFSET, _SIZE, _WORD = int(Field.OFFSET), int(Field.SIZE), int(Field.WORD_AND_SPACE)
_TOUCHED, _CHECKSUM, _COMMITTED = int(Field.TOUCHED), int(Field.CHECKSUM), int(State.COMMITTED)
_OK, _MISS = int(Status.OK), int(Status.MISS)
_EXISTS, _STALE = int(Status.EXISTS), int(Status.STALE)


class Store(Reserving):
    """Batches of keys on one pool, for any number of sessions. Single-threaded."""

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, session: Session, request: m.Reserve) -> Steps[m.Reserved]:
        """An extent per key for the caller to fill, its own until commit or abort."""
        keys, sizes = request.keys, request.sizes
        statuses, ids, offsets = [_OK] * len(keys), [0] * len(keys), [0] * len(keys)
        details: dict[int, str] = {}
        if len(sizes) != len(keys) or (request.metadata and len(request.metadata) != len(keys)):
            return m.Reserved(request.id, [int(Status.INVALID)] * len(keys), ids, offsets, {0: "one size a key"})
        if len(keys) > SLICE_KEYS:  # so many were work to decode, and are work to look at
            yield None
        duplicates = _duplicates(keys)
        plain = not duplicates and not request.metadata and request.options == m.DEFAULT_OPTIONS
        prints: list[int] = fingerprints(keys).tolist() if plain else []
        if len(keys) > SLICE_KEYS:
            yield None
        mask = SLICE_MASK if plain else SLICE_MASK >> 1
        now, deadline = self.catalogue.wall(), self._deadline(request.options)
        words, id_of, add = self.words, self.catalogue.id_of, session.reservations.add
        try:
            for i, key in enumerate(keys):
                slot: int | tuple[Status, str] = -1
                if plain:
                    slot = self._reserve_now(session, key, prints[i], sizes[i], now)
                if slot == -1:
                    metadata = request.metadata[i] if request.metadata else b""
                    slot = yield from self._reserve_one(
                        session, key, sizes[i], metadata, request.options, deadline, i in duplicates
                    )
                if isinstance(slot, int):
                    ids[i] = id_of(slot)
                    offsets[i] = words[slot * RECORD_WORDS + _OFFSET]
                    add(slot)
                else:
                    statuses[i] = int(slot[0])
                    if slot[1]:
                        details[i] = slot[1]
                if i & mask == mask:
                    yield None
        except BaseException:  # also where the one who asked is gone: nobody will learn of them
            self.begin(self._aborting(session, ids))
            raise
        if ARMED:
            reach("node-reserved")
        return m.Reserved(request.id, statuses, ids, offsets, details)

    def put_inline(self, session: Session, request: m.PutInline) -> Steps[m.StatusReply]:
        """Reserve, fill and commit values that came with the message."""
        keys, values, options = request.keys, request.values, request.options
        count = len(keys)
        statuses = [_OK] * count
        details: dict[int, str] = {}
        if len(values) != count or any(
            extra and len(extra) != count for extra in (request.metadata, request.checksums)
        ):
            return m.StatusReply(request.id, [int(Status.INVALID)] * count, {0: "one value a key"})
        if count > SLICE_KEYS:
            yield None
        duplicates = _duplicates(keys)
        catalogue, pool, words = self.catalogue, self.pool, self.words
        plain = not duplicates and not request.metadata and options == m.DEFAULT_OPTIONS
        prints: list[int] = fingerprints(keys).tolist() if plain else []
        if count > SLICE_KEYS:
            yield None
        mask = SLICE_MASK if plain else SLICE_MASK >> 1
        now, deadline = catalogue.wall(), self._deadline(options)
        written: list[int] = []
        number_of = catalogue.spaces.number_of
        for i, key in enumerate(keys):
            value = values[i]
            size = len(value)
            slot: int | tuple[Status, str] = -1
            if size > INLINE_VALUE_BYTES_MAX:
                slot = Status.TOO_LARGE, f"{size} bytes exceed the {INLINE_VALUE_BYTES_MAX} that go with a message"
            elif plain and (found := self._extent_now(key, size)) is not None:
                slot, offset = found
                pool[offset : offset + size] = value
                if ARMED:
                    reach("node-inline-filled")
                number, sum_ = number_of(key), request.checksums[i] if request.checksums else 0
                catalogue.admit(slot, key, prints[i], number, offset, size, session.number, now, sum_)
                written.append(slot)
                if i & mask == mask:
                    yield None
                continue
            if slot == -1:
                metadata = request.metadata[i] if request.metadata else b""
                slot = yield from self._reserve_one(session, key, size, metadata, options, deadline, i in duplicates)
            if isinstance(slot, int):
                offset = words[slot * RECORD_WORDS + _OFFSET]
                pool[offset : offset + size] = value
                if ARMED:
                    reach("node-inline-filled")
                if catalogue.commit(slot, request.checksums[i] if request.checksums else 0):
                    written.append(slot)
                else:
                    statuses[i] = _STALE
            else:
                statuses[i] = int(slot[0])
                if slot[1]:
                    details[i] = slot[1]
            if i & mask == mask:
                yield None
        for start in reversed(range(0, len(written), SLICE_KEYS)):
            # What came later in the batch, or from others meanwhile, may have evicted what came first.
            part = written[start : start + SLICE_KEYS]
            self.touch_chain([slot for slot in part if words[slot * RECORD_WORDS] & 0xFF == _COMMITTED], start)
            if start:
                yield None
        return m.StatusReply(request.id, statuses, details)

    def commit(self, session: Session, ids: Sequence[int], checksums: Sequence[int], place: int = 0) -> list[int]:
        """Make filled extents visible, touched as by `touch_chain`. An id that is committed already is fine: the client
        asks again after a reconnect."""
        catalogue = self.catalogue
        statuses: list[int] = []
        written: list[int] = []
        for i, number in enumerate(ids):
            slot = number & SLOT_MASK
            if slot in session.reservations and catalogue.has_id(slot, number >> 32):
                session.reservations.discard(slot)
                if catalogue.commit(slot, checksums[i] if i < len(checksums) else 0):
                    written.append(slot)
                    statuses.append(_OK)
                    continue
            elif catalogue.has_id(slot, number >> 32) and catalogue.state(slot) == State.COMMITTED:
                statuses.append(_OK)
                continue
            catalogue.counters.stale_ids += 1
            statuses.append(_STALE)
        self.touch_chain(written, place)
        if ARMED:
            reach("node-committed")
        return statuses

    def abort(self, session: Session, ids: Iterable[int]) -> None:
        """The writer's I/O has stopped; nothing of it becomes visible."""
        for number in ids:
            slot = number & SLOT_MASK
            if slot in session.reservations and self.catalogue.has_id(slot, number >> 32):
                session.reservations.discard(slot)
                self.catalogue.abort(slot)

    # ---- reading -------------------------------------------------------------------------------------------------

    def release(self, session: Session, ids: Iterable[int]) -> None:
        """One pin less on each; ids that the session doesn't hold are counted and otherwise ignored."""
        held, unpin = session.pins, self.catalogue.unpin
        for number in ids:
            count = held.get(number, 0)
            if count > 1:
                held[number] = count - 1
            elif count:
                del held[number]
            else:
                self.catalogue.counters.stale_ids += 1
                continue
            unpin(number & SLOT_MASK)

    def give_back(self, pinned: Iterable[int], reservations: Iterable[int] = ()) -> None:
        """End these pins (slots, as often as they are pinned) and reservations, which nobody else knows of any more:
        now, or in the background where they are many."""
        self.begin(self._giving_back(pinned, reservations))

    def begin(self, steps: Steps[None]) -> None:
        """Take the first step now, and the others in the background."""
        if next(steps, steps) is None:
            self.background(steps)

    def _giving_back(self, pinned: Iterable[int], reservations: Iterable[int]) -> Steps[None]:
        unpin, abort = self.catalogue.unpin, self.catalogue.abort
        for i, slot in enumerate(pinned):
            if i & SLICE_MASK == SLICE_MASK:
                yield None
            unpin(slot)
        for i, slot in enumerate(reservations):
            if i & SLICE_MASK == SLICE_MASK:
                yield None
            abort(slot)

    def take_back(self, session: Session, reply: m.Message | None, pins: dict[int, int]) -> None:
        """Undo what a reply that never reached its client would have granted to it, while `pins` were the session's:
        others are what its client has declared since, and those are all that it has."""
        if isinstance(reply, m.Acquired):
            self.begin(self._releasing(session, reply.ids, pins))
        elif isinstance(reply, m.Reserved):
            self.begin(self._aborting(session, reply.ids))

    def _releasing(self, session: Session, ids: list[int], pins: dict[int, int]) -> Steps[None]:
        for start in range(0, len(ids), SLICE_KEYS):
            if start:
                yield None
            if session.pins is not pins:
                break
            self.release(session, [number for number in ids[start : start + SLICE_KEYS] if number in pins])

    def _aborting(self, session: Session, ids: list[int]) -> Steps[None]:
        for start in range(0, len(ids), SLICE_KEYS):
            if start:
                yield None
            self.abort(session, ids[start : start + SLICE_KEYS])

    def check(self, ids: Sequence[int]) -> list[int]:
        """Per id whether the object is still visible."""
        catalogue = self.catalogue
        return [
            _OK if catalogue.has_id(n & SLOT_MASK, n >> 32) and catalogue.visible(n & SLOT_MASK) else _STALE
            for n in ids
        ]

    def visible_slot(self, key: bytes) -> int:
        """The slot of a key's visible object, or -1."""
        slot = self.catalogue.find(key)
        return slot if slot >= 0 and self.catalogue.visible(slot) else -1

    # ---- the rest ------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes], force: bool) -> m.StatusReply:
        statuses, details = [], {}
        for i, key in enumerate(keys):
            slot = self.visible_slot(key)
            if slot < 0:
                statuses.append(_MISS)
            elif self.catalogue.protection(slot) == 2 and not force:
                statuses.append(int(Status.PINNED))
                details[i] = "hard-pinned: unpin it first, or remove it with force"
            else:
                self.catalogue.drop(slot, "removed")
                statuses.append(_OK)
        return m.StatusReply(0, statuses, details)

    def touch(self, keys: Sequence[bytes], place: int = 0) -> list[int]:
        slots = [self.visible_slot(key) for key in keys]
        self.touch_chain([slot for slot in slots if slot >= 0], place)
        return [_OK if slot >= 0 else _MISS for slot in slots]

    def pin(self, keys: Sequence[bytes], level: int, ttl_s: float) -> m.StatusReply:
        statuses, details = [], {}
        catalogue = self.catalogue
        if not 0 <= level <= 2:
            raise InvalidRequest(f"protection {level} is none of 0 (none), 1 (soft), 2 (hard)")
        if level == 1 and not ttl_s > 0:
            raise InvalidRequest(f"{ttl_s} s is not how long a soft pin can last")
        for i, key in enumerate(keys):
            slot = self.visible_slot(key)
            if slot < 0:
                statuses.append(_MISS)
                continue
            size = self.words[slot * RECORD_WORDS + _SIZE]
            if level and not catalogue.protection(slot) and catalogue.protected_bytes + size > self.pin_bytes_max:
                statuses.append(int(Status.TOO_LARGE))
                details[i] = self._pin_limit()
                continue
            catalogue.protect(slot, level, catalogue.wall() + ttl_s if level == 1 else 0.0)
            statuses.append(_OK)
        return m.StatusReply(0, statuses, details)

    # ---- within --------------------------------------------------------------------------------------------------

    def acquire_slots(self, session: Session, request_id: int, slots: Sequence[int], place: int = 0) -> m.Acquired:
        """Pin the visible ones of `slots` (-1 = none) for the session, touched as by `touch_chain`."""
        catalogue, words, pins, held = self.catalogue, self.words, self.pins, session.pins
        statuses: list[int] = []
        ids: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        places: list[int] = []
        checksums: list[int] = []
        found: list[int] = []
        simple = not catalogue.has_expiry and not catalogue.purging
        if not held:
            session.pinned_since = self.clock()
        for slot in slots:
            base = slot * RECORD_WORDS
            if slot >= 0 and ((state := words[base]) & 0xFF == _COMMITTED) and (simple or catalogue.visible(slot)):
                number = slot | state >> 8 << 32 & 0xFF_FFFF << 32
                pins[slot] += 1
                held[number] = held.get(number, 0) + 1
                found.append(slot)
                statuses.append(0)
                ids.append(number)
                offsets.append(words[base + _OFFSET])
                sizes.append(words[base + _SIZE])
                places.append(words[base + _WORD] >> 32)
                checksums.append(words[base + _CHECKSUM])
            else:
                statuses.append(_MISS)
                ids.append(0)
                offsets.append(0)
                sizes.append(0)
                places.append(0)
                checksums.append(0)
        self.touch_chain(found, place)
        if ARMED:
            reach("node-acquired")
        return m.Acquired(request_id, statuses, ids, offsets, sizes, places, checksums, catalogue.spaces.epoch)

    def touch_chain(self, slots: Sequence[int], place: int = 0) -> None:
        """Mark as used, tail to head, so that of a chain the tail is evicted first, after a restart too.

        A long chain comes in slices, the last one first; `place` is where in it the slice begins.
        """
        self.space.touch_chain(slots)
        floats, used = self.floats, self.catalogue.wall() - place * CHAIN_STEP_S
        for slot in slots:
            floats[slot * RECORD_WORDS + _TOUCHED] = used
            used -= CHAIN_STEP_S


def _duplicates(keys: Sequence[bytes]) -> set[int]:
    """Places of keys that stand earlier in the batch."""
    if len(set(keys)) == len(keys):
        return set()
    seen: set[bytes] = set()
    places: set[int] = set()
    for i, key in enumerate(keys):
        if key in seen:
            places.add(i)
        seen.add(key)
    return places


assert GENERATION_BITS == 24
