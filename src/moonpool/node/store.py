"""The store: what a session's batch of keys does, one status per key. No sockets, no clock of its own.

Calls that may have to wait (for space, for another writer, for a checksum) are generators of steps, see `steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moonpool.errors import FolderError, InvalidRequest
from moonpool.folder.layout import (
    GENERATION_BITS,
    INLINE_KEY_BYTES,
    INLINE_VALUE_BYTES_MAX,
    KEY_BYTES_MAX,
    METADATA_BYTES_MAX,
    RECORD_WORDS,
    Field,
    State,
)
from moonpool.keys.fingerprints import fingerprint, fingerprints
from moonpool.node.catalogue import Catalogue
from moonpool.node.sessions import Session
from moonpool.node.steps import Steps, finish
from moonpool.probes import ARMED, reach
from moonpool.status import Status
from moonpool.wire import messages as m

SLICE_MASK = 127
"""A batch lets others in after each 128 keys: at most 1 ms."""
LARGEST_AGE_S = 0.1
"""How old the figure in a NO_SPACE may be: all pins are read for it."""
CHAIN_STEP_S = 1e-6
"""How much older than its forerunner each object of a chain is in the records: a restart has only those."""
SLOT_MASK = 0xFFFF_FFFF
_OK, _MISS = int(Status.OK), int(Status.MISS)
_EXISTS, _STALE = int(Status.EXISTS), int(Status.STALE)


class Store:
    """Batches of keys on one pool, for any number of sessions. Single-threaded.

    `pool` is the pool's memory, into which inline values are copied.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        pool: memoryview,
        *,
        clock: Callable[[], float],
        reserve_wait_s: float,
        reserve_wait_max_s: float,
        pin_share: float,
    ) -> None:
        self.catalogue = catalogue
        self.pool = pool
        self.pool_bytes = len(pool)
        self.clock = clock
        self.reserve_wait_s, self.reserve_wait_max_s = reserve_wait_s, reserve_wait_max_s
        self.pin_bytes_max = int(self.pool_bytes * pin_share)
        self.space, self.pins = catalogue.space, catalogue.pins
        self.words, self.floats = catalogue.words, catalogue.floats
        self.growing = False
        """Whether the system is still setting the pool's memory aside: then space that is missing comes by itself."""
        self.background: Callable[[Steps[None]], None] = finish
        """Takes over work that nobody waits for, once it has lasted a step."""
        self._largest = (float("-inf"), 0)  # when it was looked for, and what it was
        self.refused_at = float("-inf")
        """When there was no space for a key at last, by `clock`."""
        self.waiting = 0
        """Reservations that wait for space or for another writer."""

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, session: Session, request: m.Reserve) -> Steps[m.Reserved]:
        """An extent per key for the caller to fill, its own until commit or abort."""
        keys, sizes = request.keys, request.sizes
        statuses, ids, offsets = [_OK] * len(keys), [0] * len(keys), [0] * len(keys)
        details: dict[int, str] = {}
        if len(sizes) != len(keys) or (request.metadata and len(request.metadata) != len(keys)):
            return m.Reserved(request.id, [int(Status.INVALID)] * len(keys), ids, offsets, {0: "one size a key"})
        duplicates = _duplicates(keys)
        plain = not duplicates and not request.metadata and request.options == m.DEFAULT_OPTIONS
        prints: list[int] = fingerprints(keys).tolist() if plain else []
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
                    offsets[i] = words[slot * RECORD_WORDS + 1]
                    add(slot)
                else:
                    statuses[i] = int(slot[0])
                    if slot[1]:
                        details[i] = slot[1]
                if i & SLICE_MASK == SLICE_MASK:
                    yield None
        except BaseException:  # also where the one who asked is gone: nobody will learn of them
            self.abort(session, ids)
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
        duplicates = _duplicates(keys)
        catalogue, pool, words = self.catalogue, self.pool, self.words
        plain = not duplicates and not request.metadata and options == m.DEFAULT_OPTIONS
        prints: list[int] = fingerprints(keys).tolist() if plain else []
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
                if i & SLICE_MASK == SLICE_MASK:
                    yield None
                continue
            if slot == -1:
                metadata = request.metadata[i] if request.metadata else b""
                slot = yield from self._reserve_one(session, key, size, metadata, options, deadline, i in duplicates)
            if isinstance(slot, int):
                offset = words[slot * RECORD_WORDS + 1]
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
            if i & SLICE_MASK == SLICE_MASK:
                yield None
        # What came later in the batch, or from others meanwhile, may have evicted what came first.
        self.touch_chain([slot for slot in written if words[slot * RECORD_WORDS] & 0xFF == State.COMMITTED])
        return m.StatusReply(request.id, statuses, details)

    def commit(self, session: Session, ids: Sequence[int], checksums: Sequence[int]) -> list[int]:
        """Make filled extents visible. An id that is committed already is fine: the client asks again after a
        reconnect."""
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
        self.touch_chain(written)
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
        steps = self._giving_back(pinned, reservations)
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

    def take_back(self, session: Session, reply: m.Message) -> None:
        """Undo what a reply that never reached its client would have granted to it."""
        if isinstance(reply, m.Acquired):
            self.release(session, [number for number in reply.ids if number in session.pins])
        elif isinstance(reply, m.Reserved):
            self.abort(session, reply.ids)

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

    def touch(self, keys: Sequence[bytes]) -> list[int]:
        slots = [self.visible_slot(key) for key in keys]
        self.touch_chain([slot for slot in slots if slot >= 0])
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
            size = self.words[slot * RECORD_WORDS + Field.SIZE]
            if level and not catalogue.protection(slot) and catalogue.protected_bytes + size > self.pin_bytes_max:
                statuses.append(int(Status.TOO_LARGE))
                details[i] = self._pin_limit()
                continue
            catalogue.protect(slot, level, catalogue.wall() + ttl_s if level == 1 else 0.0)
            statuses.append(_OK)
        return m.StatusReply(0, statuses, details)

    # ---- within --------------------------------------------------------------------------------------------------

    def acquire_slots(self, session: Session, request_id: int, slots: list[int], place: int = 0) -> m.Acquired:
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
            if slot >= 0 and ((state := words[base]) & 0xFF == State.COMMITTED) and (simple or catalogue.visible(slot)):
                number = slot | state >> 8 << 32 & 0xFF_FFFF << 32
                pins[slot] += 1
                held[number] = held.get(number, 0) + 1
                found.append(slot)
                statuses.append(0)
                ids.append(number)
                offsets.append(words[base + 1])
                sizes.append(words[base + 2])
                places.append(words[base + 4] >> 32)
                checksums.append(words[base + 8])
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

    def touch_chain(self, slots: list[int], place: int = 0) -> None:
        """Mark as used, tail to head, so that of a chain the tail is evicted first, after a restart too.

        A long chain comes in slices, the last one first; `place` is where in it the slice begins.
        """
        self.space.touch_chain(slots)
        floats, used = self.floats, self.catalogue.wall() - place * CHAIN_STEP_S
        for slot in slots:
            floats[slot * RECORD_WORDS + 6] = used
            used -= CHAIN_STEP_S

    def _reserve_now(self, session: Session, key: bytes, print_: int, size: int, now: float) -> int:
        """The common case of `_reserve_one` without its generality, see `_extent_now`: a slot, or -1."""
        found = self._extent_now(key, size)
        if found is None:
            return -1
        slot, offset = found
        catalogue = self.catalogue
        catalogue.claim(key, slot)
        catalogue.begin(slot, key, print_, catalogue.spaces.number_of(key), offset, size, session.number, now)
        return slot

    def _extent_now(self, key: bytes, size: int) -> tuple[int, int] | None:
        """Slot and offset for a new key for which there is free space; None where it takes more than that (then
        nothing has changed)."""
        catalogue = self.catalogue
        if not (0 < size <= self.pool_bytes and 0 < len(key) <= INLINE_KEY_BYTES) or catalogue.find(key) >= 0:
            return None
        slot = catalogue.take_slot()
        if slot < 0:
            return None
        offset = self.space.allocate(slot, size)
        if offset < 0:
            catalogue.give_slot(slot)
            return None
        if ARMED:
            reach("node-allocated")
        catalogue.counters.reserved_bytes += size
        return slot, offset

    def _refusal(self, key: bytes, size: int, metadata: bytes, options: m.Options) -> tuple[Status, str] | None:
        """Why a key can't be reserved whatever the state of the pool."""
        if not key:
            return Status.EMPTY, "a key has at least 1 byte"
        if len(key) > KEY_BYTES_MAX:
            return Status.KEY_TOO_LONG, f"a key of {len(key)} bytes exceeds the limit of {KEY_BYTES_MAX}"
        if len(metadata) > METADATA_BYTES_MAX:
            return Status.KEY_TOO_LONG, f"metadata of {len(metadata)} bytes exceeds the limit of {METADATA_BYTES_MAX}"
        if size <= 0:
            return Status.EMPTY, "an object has at least 1 byte"
        if size > self.pool_bytes:
            return Status.TOO_LARGE, f"{size} bytes exceed the pool's {self.pool_bytes}"
        if options.pin and self.catalogue.protected_bytes + size > self.pin_bytes_max:
            return Status.TOO_LARGE, self._pin_limit()
        return None

    def _pin_limit(self) -> str:
        used = self.catalogue.protected_bytes
        return f"pins may take {self.pin_bytes_max} bytes (pin_share), {used} are taken; unpin some first"

    def _deadline(self, options: m.Options) -> float:
        """Until when a whole batch may wait, for space or for other writers."""
        wait_s = self.reserve_wait_max_s if self.growing else self.reserve_wait_s
        if options.wait_s >= 0:
            wait_s = options.wait_s
        return self.clock() + min(wait_s, self.reserve_wait_max_s)

    def _reserve_one(
        self,
        session: Session,
        key: bytes,
        size: int,
        metadata: bytes,
        options: m.Options,
        deadline: float,
        duplicate: bool,
    ) -> Steps[int | tuple[Status, str]]:
        """A slot in state RESERVED, pinned for its writer, or why not."""
        catalogue = self.catalogue
        problem = self._refusal(key, size, metadata, options)
        if problem is not None:
            return problem
        if duplicate:
            return Status.DUPLICATE, "the key stands earlier in the batch"
        while (slot := catalogue.find(key)) >= 0:
            if catalogue.state(slot) == State.COMMITTED:
                if catalogue.visible(slot):
                    return Status.EXISTS, ""
                if catalogue.find(key) == slot:  # purged, its sweep not there yet
                    catalogue.drop(slot, "purged")
            elif not options.wait_for_others or self.clock() >= deadline:
                return Status.IN_PROGRESS, "another writer has reserved this key and not committed it yet"
            else:
                yield from self._wait(deadline)
        slot = yield from self._slot(deadline)
        if slot < 0:
            return Status.NO_SPACE, f"all {catalogue.records.slots} places of the table are taken by pinned objects"
        if catalogue.find(key) >= 0:  # another writer came while we waited for the place
            catalogue.give_slot(slot)
            return Status.IN_PROGRESS, "another writer has reserved this key and not committed it yet"
        catalogue.claim(key, slot)
        placed = False
        try:
            offset = self.space.allocate(slot, size, durable=options.pin == 2)
            if offset < 0:
                offset = yield from self._make_room(slot, size, options, deadline)
            if offset < 0:
                catalogue.counters.no_space += 1
                self.refused_at = self.clock()
                largest = yield from self._largest_available()
                return Status.NO_SPACE, (
                    f"{size} bytes were wanted, {largest} is the largest run of free and "
                    f"evictable bytes; the rest is pinned, being written or held by readers"
                )
            now = catalogue.wall()
            if ARMED:
                reach("node-made-room")
            if options.pin and catalogue.protected_bytes + size > self.pin_bytes_max:  # others came while we waited
                self.space.free(slot)
                return Status.TOO_LARGE, self._pin_limit()
            try:
                catalogue.begin(
                    slot,
                    key,
                    fingerprint(key),
                    catalogue.spaces.number_of(key),
                    offset,
                    size,
                    session.number,
                    now,
                    expiry=now + options.ttl_s if options.ttl_s > 0 else 0.0,
                    priority=options.priority & 0xFF,
                    pin=options.pin,
                    pin_expiry=now + options.pin_ttl_s if options.pin == 1 and options.pin_ttl_s > 0 else 0.0,
                    metadata=metadata,
                )
            except FolderError as error:
                self.space.free(slot)
                return Status.NO_SPACE, str(error)
            placed = True
            catalogue.counters.reserved_bytes += size
            return slot
        finally:
            if not placed:
                catalogue.unclaim(key, slot)

    def _make_room(self, slot: int, size: int, options: m.Options, deadline: float) -> Steps[int]:
        """Evict until there is an extent for `slot`; waits for releases until the deadline, then gives -1."""
        while True:
            offset = yield from self.space.make_room(slot, size, self.catalogue.evicted, durable=options.pin == 2)
            if offset >= 0 or self.clock() >= deadline:
                return offset
            yield from self._wait(deadline)

    def _largest_available(self) -> Steps[int]:
        """The largest run of free and evictable bytes, as it was within the last `LARGEST_AGE_S`."""
        looked, found = self._largest
        if self.clock() - looked > LARGEST_AGE_S:
            found = yield from self.space.look_for_largest()
            self._largest = self.clock(), found
        return found

    def _slot(self, deadline: float) -> Steps[int]:
        """A free place in the table, evicting the coldest object for it as a full pool would."""
        catalogue = self.catalogue
        while (slot := catalogue.take_slot()) < 0:
            victim = self.space.coldest()
            if victim >= 0:
                catalogue.drop(victim, "table-full")
            elif self.clock() >= deadline:
                return -1
            else:
                yield from self._wait(deadline)
        return slot

    def _wait(self, deadline: float) -> Steps[None]:
        self.waiting += 1
        try:
            yield deadline
        finally:
            self.waiting -= 1


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
