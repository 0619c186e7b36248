"""The catalogue of objects and their life: reserved → committed → doomed → free.

The one place where a slot changes state. It does no I/O but stores to shared memory, and decides nothing about who
may do what: that is `store`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moonpool.folder.layout import GENERATION_MASK, NO_WORD, RECORD_WORDS, Field, Flag, State
from moonpool.folder.mapping import column
from moonpool.folder.records import Records
from moonpool.folder.table import TableWriter
from moonpool.node.feed import Feed
from moonpool.node.keyspaces import KeySpaces
from moonpool.node.space import Space
from moonpool.observe.counters import Counters
from moonpool.probes import ARMED, reach
from moonpool.wire.messages import ObjectStat, object_id

_SHARD_KEYS = 512
"""Keys per shard of the index at full capacity: growing a dict of that size takes some 10 us, never milliseconds."""

UNSUMMED_MAX = 65_536
"""Objects that wait for their checksum; beyond that the scrub finds them."""

_SPACE_MASK = 0xFFFF_FFFF
_CHECKSUM_MASK = 0xFFFF_FFFF_FFFF_FFFF
# Plain numbers, because looking an enumeration's member up costs more than the store it names.
_SIZE, _WORD, _CREATED, _TOUCHED = (int(f) for f in (Field.SIZE, Field.WORD_AND_SPACE, Field.CREATED, Field.TOUCHED))
_PRINT = int(Field.FINGERPRINT)
_EXPIRY, _CHECKSUM, _FLAGS, _EPOCH = (int(f) for f in (Field.EXPIRY, Field.CHECKSUM, Field.FLAGS, Field.EPOCH))
_RESERVED, _COMMITTED, _DOOMED = int(State.RESERVED), int(State.COMMITTED), int(State.DOOMED)
_SUMMED, _PROTECTED = Flag.CHECKSUM, Flag.SOFT | Flag.HARD


class Catalogue:
    """All objects of a node, by key and by slot. Single-threaded.

    The index maps a key to its slot from its claim until it is dropped; everything else lies in the records
    (kept for a restart), in the pool's bookkeeping (`space`), or in the shared table (`table`).
    """

    def __init__(
        self,
        records: Records,
        table: TableWriter,
        space: Space,
        spaces: KeySpaces,
        feed: Feed,
        counters: Counters,
        wall: Callable[[], float],
    ) -> None:
        self.records, self.table, self.space = records, table, space
        self.spaces, self.feed, self.counters, self.wall = spaces, feed, counters, wall
        self.words, self.floats, self.pins = records.words, records.floats, space.pins
        shards = 1
        while shards * _SHARD_KEYS < records.slots:
            shards *= 2
        self.index: list[dict[bytes, int]] = [{} for _ in range(shards)]
        self.index_mask = shards - 1
        self.live = 0
        """Committed objects that are visible."""
        self.doomed = 0
        self.generations = 0
        """The last generation that was given out."""
        self.forgotten = 0
        """Counts objects that ceased to be visible: whoever paused looks whether any did meanwhile."""
        self.has_expiry = False
        """Whether any object has a TTL (spares everybody else the look)."""
        self.purging = 0
        """Purges whose sweep is under way: until then lookups check epochs."""
        self.protected_bytes = 0
        """Bytes under soft and hard pins, reservations included: from `begin` on."""
        self.unsummed: deque[int] = deque(maxlen=UNSUMMED_MAX)
        """Slots that wait for their checksum, oldest first."""
        self.changed: list[Callable[[], None]] = []
        """Called (and forgotten) at the next change that may let somebody waiting go on."""
        self._next_free = column("i", records.slots)
        self._free_head = -1
        self._free_top = 0  # slots from here on were never used

    # ---- slots ---------------------------------------------------------------------------------------------------

    def take_slot(self) -> int:
        """A free slot, or -1 where the table is full."""
        slot = self._free_head
        if slot >= 0:
            self._free_head = self._next_free[slot]
        elif self._free_top < self.records.slots:
            slot = self._free_top
            self._free_top += 1
        return slot

    @property
    def slots_used_top(self) -> int:
        """No slot from here on has ever held anything."""
        return self._free_top

    def give_slot(self, slot: int) -> None:
        self._next_free[slot] = self._free_head
        self._free_head = slot

    def adopt_slots(self, used: npt.NDArray[np.int64]) -> None:
        """After a restart: these slots are in use, all others below the highest are free."""
        top = int(used.max()) + 1 if len(used) else 0
        gaps = np.setdiff1d(np.arange(top), used, assume_unique=True)
        if len(gaps):
            chain = np.frombuffer(self._next_free, np.int32)
            chain[gaps[:-1]] = gaps[1:]
            chain[gaps[-1]] = -1
            self._free_head = int(gaps[0])
        self._free_top = top

    # ---- looking up ----------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """The slot of a key that is claimed, reserved or committed, or -1. Says nothing about visibility."""
        return self.index[hash(key) & self.index_mask].get(key, -1)

    def find_many(self, keys: list[bytes]) -> list[int]:
        """`find` for a batch."""
        index, mask = self.index, self.index_mask
        return [index[hash(key) & mask].get(key, -1) for key in keys]

    def state(self, slot: int) -> int:
        return self.words[slot * RECORD_WORDS] & 0xFF

    def generation(self, slot: int) -> int:
        return self.words[slot * RECORD_WORDS] >> 8 & GENERATION_MASK

    def size(self, slot: int) -> int:
        """The object's size in bytes, as its writer gave it."""
        return self.words[slot * RECORD_WORDS + _SIZE]

    def space_of(self, slot: int) -> int:
        """The number of the object's key space."""
        return self.words[slot * RECORD_WORDS + _WORD] & _SPACE_MASK

    def id_of(self, slot: int) -> int:
        return object_id(slot, self.generation(slot))

    def has_id(self, slot: int, generation: int) -> bool:
        """Whether `slot` is in range and still holds the object of that generation."""
        if slot >= self.records.slots:
            return False
        word = self.words[slot * RECORD_WORDS]
        return word >> 8 & GENERATION_MASK == generation and word & 0xFF != State.FREE

    def visible(self, slot: int) -> bool:
        """Whether a reader may have the object: committed, not expired (drops it if so), not purged."""
        base = slot * RECORD_WORDS
        if self.words[base] & 0xFF != _COMMITTED:
            return False
        if self.has_expiry:
            expiry = self.floats[base + _EXPIRY]
            if expiry and expiry <= self.wall():
                self.drop(slot, "expired")
                return False
        return not (self.purging and self.purged(slot))

    def purged(self, slot: int) -> bool:
        """Whether a purge that has begun covers the object."""
        base = slot * RECORD_WORDS
        space = self.spaces.spaces[self.words[base + _WORD] & _SPACE_MASK]
        return self.words[base + _EPOCH] >> 8 < space.epoch or self.floats[base + _CREATED] < space.created_after

    def still_visible(
        self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64], *, purged: bool
    ) -> npt.NDArray[np.bool_]:
        """Whether each slot holds the object of that generation still, and, where there was a purge since it was found,
        that doesn't cover it. Vectorised: 10 ns a slot, 50 after a purge."""
        table = self.records.table
        states = table["state"][slots] & np.uint64(GENERATION_MASK << 8 | 0xFF)
        same: npt.NDArray[np.bool_] = states == (generations << np.uint64(8) | np.uint64(_COMMITTED))
        if purged:
            same[same] = ~self.spaces.covered(table[slots[same]])
        return same

    def summed(self, slot: int) -> bool:
        """Whether the object's checksum is known."""
        return bool(self.words[slot * RECORD_WORDS + _FLAGS] & _SUMMED)

    def protection(self, slot: int) -> int:
        """0 none, 1 soft, 2 hard."""
        flags = self.words[slot * RECORD_WORDS + _FLAGS]
        return 2 if flags & Flag.HARD else 1 if flags & Flag.SOFT else 0

    def stat(self, slot: int, writer: str) -> ObjectStat:
        """All that is known of an occupied slot."""
        base, words, floats = slot * RECORD_WORDS, self.words, self.floats
        return ObjectStat(
            key=self.records.key(slot),
            size=words[base + _SIZE],
            generation=self.generation(slot),
            space=words[base + _WORD] & _SPACE_MASK,
            created=floats[base + _CREATED],
            touched=floats[base + _TOUCHED],
            expiry=floats[base + _EXPIRY],
            checksum=words[base + _CHECKSUM],
            has_checksum=self.summed(slot),
            pin=self.protection(slot),
            pin_expiry=floats[base + Field.PIN_EXPIRY],
            priority=words[base + _EPOCH] & 0xFF,
            writer=writer,
            metadata=self.records.metadata(slot),
            pins=self.pins[slot],
        )

    # ---- changing state ------------------------------------------------------------------------------------------

    def claim(self, key: bytes, slot: int) -> None:
        """Put a key into the index before it has an extent, so that no second writer starts."""
        self.index[hash(key) & self.index_mask][key] = slot

    def unclaim(self, key: bytes, slot: int) -> None:
        """Take back a claim that came to nothing, and the slot with it."""
        del self.index[hash(key) & self.index_mask][key]
        self.give_slot(slot)
        self.wake()

    def begin(
        self,
        slot: int,
        key: bytes,
        print_: int,
        space: int,
        offset: int,
        size: int,
        session: int,
        now: float,
        *,
        expiry: float = 0.0,
        priority: int = 0,
        pin: int = 0,
        pin_expiry: float = 0.0,
        metadata: bytes = b"",
    ) -> None:
        """A claimed key has its extent: write its record as RESERVED and pin it for the writer.

        Raises `FolderError` where metadata can't be kept (then nothing changed).
        """
        # Counted over the whole node, so that an id or a word of the table fits no other object for 16 million
        # reservations; 0 is skipped, so that an id is never 0.
        generation = self.generations = self.generations % GENERATION_MASK + 1
        flags = Flag.HARD if pin == 2 else Flag.SOFT if pin == 1 else 0
        self.records.write(
            slot,
            state=_RESERVED,
            generation=generation,
            session=session,
            offset=offset,
            size=size,
            print_=print_,
            space=space,
            now=now,
            expiry=expiry,
            checksum=0,
            flags=flags,
            pin_expiry=pin_expiry,
            epoch_and_priority=self.spaces.epoch << 8 | priority,
            key=key,
            metadata=metadata,
        )
        self.pins[slot] += 1
        if flags:
            self.protected_bytes += size

    def commit(self, slot: int, checksum: int = 0) -> bool:
        """Make a reserved object visible and drop its writer's pin.

        False where a purge came in between: the object is gone then.
        """
        base = slot * RECORD_WORDS
        words = self.words
        number = words[base + _WORD] & _SPACE_MASK
        space = self.spaces.spaces[number]
        if words[base + _EPOCH] >> 8 < space.epoch or self.floats[base + _CREATED] < space.created_after:
            self.abort(slot)
            return False
        flags = words[base + _FLAGS]
        if checksum:
            words[base + _CHECKSUM] = checksum & _CHECKSUM_MASK
            words[base + _FLAGS] = flags | _SUMMED
        else:
            self.unsummed.append(slot)
        state = words[base]
        words[base] = state ^ (_RESERVED ^ _COMMITTED)
        if ARMED:
            reach("node-record-state")
        self.pins[slot] -= 1
        if flags & _PROTECTED:
            self.space.protect(slot, self.protection(slot))
        if not self.has_expiry and self.floats[base + _EXPIRY]:
            self.has_expiry = True
        self._appear(slot, state >> 8 & GENERATION_MASK, words[base + _PRINT], number, words[base + _SIZE])
        return True

    def admit(
        self,
        slot: int,
        key: bytes,
        print_: int,
        space: int,
        offset: int,
        size: int,
        session: int,
        now: float,
        checksum: int,
    ) -> None:
        """`claim`, `begin` and `commit` in one, for a plain object whose bytes lie in its extent already."""
        self.index[hash(key) & self.index_mask][key] = slot
        generation = self.generations = self.generations % GENERATION_MASK + 1
        self.records.write(
            slot,
            state=_COMMITTED,
            generation=generation,
            session=session,
            offset=offset,
            size=size,
            print_=print_,
            space=space,
            now=now,
            expiry=0.0,
            checksum=checksum & _CHECKSUM_MASK,
            flags=_SUMMED if checksum else 0,
            pin_expiry=0.0,
            epoch_and_priority=self.spaces.epoch << 8,
            key=key,
            metadata=b"",
        )
        if ARMED:
            reach("node-record-state")
        if not checksum:
            self.unsummed.append(slot)
        self._appear(slot, generation, print_, space, size)

    def abort(self, slot: int) -> None:
        """A writer gives up: nothing became visible, its extent is free once nobody else holds it."""
        key = self.records.key(slot)
        shard = self.index[hash(key) & self.index_mask]
        if shard.get(key) == slot:
            del shard[key]
        base = slot * RECORD_WORDS
        if self.words[base + _FLAGS] & _PROTECTED:
            self.protected_bytes -= self.words[base + _SIZE]
        self._doom(slot)
        self.unpin(slot)
        self.wake()

    def drop(self, slot: int, reason: str) -> None:
        """Make a committed object invisible at once; its extent is free now, or when the last pin goes."""
        self._forget(slot, reason)
        if self.pins[slot]:
            self._doom(slot)
        else:
            self._recycle(slot)

    def hide(self, slot: int) -> None:
        """Take a committed object's word out of the shared table, ahead of its being dropped."""
        place = slot * RECORD_WORDS + _WORD
        word = self.words[place]
        self.table.clear(word >> 32)
        self.words[place] = NO_WORD << 32 | word & _SPACE_MASK

    def evicted(self, slot: int) -> None:
        """`Space.make_room`'s callback: the object goes; the caller frees its extent itself."""
        self.counters.evicted_bytes += self.space.size(slot)
        self.counters.victim_age_s.observe(self.wall() - self.floats[slot * RECORD_WORDS + _TOUCHED])
        self._forget(slot, "evicted")
        if ARMED:
            reach("node-evicting")
        self.records.erase(slot)
        self.give_slot(slot)

    def unpin(self, slot: int) -> None:
        """One pin less; the last one of a doomed object frees its extent."""
        left = self.pins[slot] - 1
        assert left >= 0, f"slot {slot} was unpinned once too often"
        self.pins[slot] = left
        if not left:
            if self.words[slot * RECORD_WORDS] & 0xFF == _DOOMED:
                self.free_doomed(slot)
            if self.changed:
                self.wake()

    def free_doomed(self, slot: int) -> None:
        """Free the extent of an invisible object that nobody holds any more."""
        self.doomed -= 1
        self._recycle(slot)

    def set_checksum(self, slot: int, checksum: int) -> None:
        base = slot * RECORD_WORDS
        self.words[base + _CHECKSUM] = checksum
        self.words[base + _FLAGS] |= _SUMMED
        self.wake()

    def protect(self, slot: int, level: int, pin_expiry: float) -> None:
        """Change a committed object's protection: 0 none, 1 soft until `pin_expiry`, 2 hard."""
        base = slot * RECORD_WORDS
        flags = self.words[base + _FLAGS]
        self.protected_bytes += self.words[base + _SIZE] * (bool(level) - bool(flags & _PROTECTED))
        wanted = Flag.HARD if level == 2 else Flag.SOFT if level == 1 else 0
        self.words[base + _FLAGS] = flags & ~_PROTECTED | wanted
        self.floats[base + Field.PIN_EXPIRY] = pin_expiry
        self.space.protect(slot, level)
        self.wake()

    def wake(self) -> None:
        """Let those who wait for a change look again."""
        if self.changed:
            waiting, self.changed = self.changed, []
            for call in waiting:
                call()

    # ---- within --------------------------------------------------------------------------------------------------

    def _appear(self, slot: int, generation: int, print_: int, number: int, size: int) -> None:
        """Put an object whose record says COMMITTED into shared table, accounts and feed."""
        self.words[slot * RECORD_WORDS + _WORD] = self.table.insert(print_, generation) << 32 | number
        space = self.spaces.spaces[number]
        space.objects += 1
        space.live_bytes += size
        self.counters.bytes_written[number] += size
        self.live += 1
        if self.feed.subscribers:
            self.feed.publish("stored", self.records.key(slot), size, number, "", self.records.metadata(slot))
        else:
            self.feed.sequence += 1
        if self.changed:
            self.wake()

    def _forget(self, slot: int, reason: str) -> None:
        """Take a committed object out of table, index and accounts."""
        base, words = slot * RECORD_WORDS, self.words
        self.hide(slot)
        number = words[base + _WORD] & _SPACE_MASK
        key = self.records.key(slot)
        del self.index[hash(key) & self.index_mask][key]
        size = words[base + _SIZE]
        space = self.spaces.spaces[number]
        space.objects -= 1
        space.live_bytes -= size
        self.live -= 1
        self.forgotten += 1
        if words[base + _FLAGS] & _PROTECTED:
            self.protected_bytes -= size
            self.space.protect(slot, 0)
        self.counters.removals[reason] += 1
        if self.feed.subscribers:
            self.feed.publish("removed", key, size, number, reason, self.records.metadata(slot))
        else:
            self.feed.sequence += 1

    def _doom(self, slot: int) -> None:
        base = slot * RECORD_WORDS
        self.words[base] = self.words[base] & ~0xFF | _DOOMED
        self.doomed += 1

    def _recycle(self, slot: int) -> None:
        self.records.erase(slot)
        self.space.free(slot)
        self.give_slot(slot)
        if self.changed:
            self.wake()
