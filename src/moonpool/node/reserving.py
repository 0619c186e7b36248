"""Reserving: a slot and an extent for one key, at once where there is free space, else by evicting and waiting."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.errors import FolderError
from moonpool.folder.layout import INLINE_KEY_BYTES, KEY_BYTES_MAX, METADATA_BYTES_MAX, State
from moonpool.keys.fingerprints import fingerprint
from moonpool.node.catalogue import Catalogue
from moonpool.node.sessions import Session
from moonpool.node.steps import Steps, finish
from moonpool.probes import ARMED, reach
from moonpool.status import Status
from moonpool.wire import messages as m

LARGEST_AGE_S = 0.1
"""How old the figure in a NO_SPACE may be: all pins are read for it."""


class Reserving:
    """The part of `Store` that finds room. Single-threaded.

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
            offset = self.space.allocate(slot, size, durable=options.pin == 2, priority=options.priority & 0xFF)
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
            offset = yield from self.space.make_room(
                slot, size, self.catalogue.evicted, durable=options.pin == 2, priority=options.priority & 0xFF
            )
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
