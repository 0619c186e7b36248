"""Checksums: which objects to sum next, what a result means, and the process that reads the bytes.

The put doesn't pay for a checksum (a pass over the bytes): a process of its own at low priority computes it later,
within a share of one core, and the scrub compares it now and then.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from moonpool.folder.layout import RECORD_WORDS, Field, State
from moonpool.node.catalogue import Catalogue
from moonpool.node.steps import SLICE_MASK, Steps
from moonpool.node.store import SLOT_MASK
from moonpool.status import Status
from moonpool.wire import messages as m

JOB = struct.Struct("<QQQQB")
"""slot, generation, offset, size, urgent."""
RESULT = struct.Struct("<QQQ")
"""slot, generation, checksum."""

URGENT_MAX = 65_536
"""Objects whose checksum somebody waits for; beyond that the oldest are left to their bounded wait."""
LOOKS_MAX = 1024
"""Queued objects looked at for one call of `jobs`, most of which may have gone: some 0.5 ms."""

Job = tuple[int, int, int, int, bool]


def checksum(data: memoryview) -> int:
    """The checksum of an object's bytes: xxh3, 64 bits, never 0 (which means "none"). Lets go of the interpreter
    lock."""
    return xxhash.xxh3_64_intdigest(data) or 1


class Checksums:
    """Decides what is summed when, and acts on results. Single-threaded; does no hashing itself.

    An object that differs from its checksum is summed a second time before it is dropped: what is wrong may be
    the reading.
    """

    def __init__(
        self, catalogue: Catalogue, *, clock: Callable[[], float], scrub_interval_s: float, wait_max_s: float
    ) -> None:
        self.catalogue = catalogue
        self.clock = clock
        self.scrub_interval_s = scrub_interval_s
        self.wait_max_s = wait_max_s
        self.urgent: deque[tuple[int, int]] = deque(maxlen=URGENT_MAX)
        """Slot and generation of what somebody waits for."""
        self._suspects: set[tuple[int, int]] = set()
        self._verdicts: dict[tuple[int, int], Status] = {}
        self._asked: dict[tuple[int, int], int] = {}
        """Objects that somebody waits for, and how many results to pass over: of readings begun before."""
        self._running: Counter[tuple[int, int]] = Counter()
        self._cursor = 0
        self._pass_started = clock()

    def jobs(self, most: int) -> list[Job]:
        """Up to `most` objects to be summed now: urgent ones, then new ones, then the scrub's next."""
        found: list[Job] = []
        catalogue, looked = self.catalogue, 0
        while self.urgent and len(found) < most and looked < LOOKS_MAX:
            looked += 1
            name = self.urgent.popleft()
            if not self._there(name):
                self._suspects.discard(name)
            elif name in self._asked or name in self._suspects or not catalogue.summed(name[0]):
                self._add(found, name[0], urgent=True)
        while catalogue.unsummed and len(found) < most and looked < LOOKS_MAX:
            looked += 1
            slot = catalogue.unsummed.popleft()
            if catalogue.state(slot) == State.COMMITTED and not catalogue.summed(slot):
                self._add(found, slot, urgent=False)
        if self.scrub_interval_s > 0 and len(found) < most:
            self._scrub(found, most)
        self._running.update(job[:2] for job in found)
        return found

    def lost(self) -> None:
        """The process that was summing has ended: no result of its jobs will come."""
        self._running.clear()
        self._asked = dict.fromkeys(self._asked, 0)

    def done(self, slot: int, generation: int, value: int) -> None:
        """A result came in. It counts only if the slot still holds the object that was read."""
        catalogue = self.catalogue
        name = slot, generation
        self._running[name] -= 1
        if self._running[name] <= 0:
            del self._running[name]
        if not self._there(name):
            self._suspects.discard(name)
            self._conclude(name, Status.MISS)
            return
        counters = catalogue.counters
        counters.checksums += 1
        counters.scrubbed_bytes += catalogue.size(slot)
        if not catalogue.summed(slot):
            catalogue.set_checksum(slot, value)
        elif catalogue.words[slot * RECORD_WORDS + Field.CHECKSUM] != value:
            if name not in self._suspects:
                self._suspects.add(name)
                self.urgent.append(name)
                return
            counters.corrupt_objects += 1
            catalogue.drop(slot, "corrupt")
            self._suspects.discard(name)
            self._conclude(name, Status.CORRUPT)
            return
        self._suspects.discard(name)
        self._conclude(name, Status.OK)

    def verify(self, keys: Sequence[bytes]) -> Steps[list[int]]:
        """Compare the keys' bytes with their checksums now: OK, CORRUPT (dropped), MISS, or IN_PROGRESS where the
        bounded wait ended first."""
        catalogue = self.catalogue
        deadline = self.clock() + self.wait_max_s
        names: list[tuple[int, int] | None] = []
        verdicts: list[int] = []
        try:
            for i, key in enumerate(keys, 1):
                slot = catalogue.find(key)
                name = None
                if slot >= 0 and catalogue.visible(slot):
                    name = slot, catalogue.generation(slot)
                    self._asked[name] = self._running[name]
                    self._verdicts.pop(name, None)
                    self.urgent.append(name)
                names.append(name)
                if i & SLICE_MASK == 0:
                    yield None
            for i, name in enumerate(names, 1):
                while name is not None and name not in self._verdicts and self.clock() < deadline:
                    yield deadline
                verdicts.append(int(Status.MISS if name is None else self._verdicts.get(name, Status.IN_PROGRESS)))
                if i & SLICE_MASK == 0:
                    yield None
            return verdicts
        finally:
            for asked in filter(None, names):
                self._asked.pop(asked, None)
                self._verdicts.pop(asked, None)

    def complete(self, reply: m.Acquired) -> Steps[m.Acquired]:
        """Wait until the checksum of each object in `reply` is known; 0 stays where the bounded wait ended first.

        The objects are pinned by whoever asked, so that their slots stay theirs meanwhile.
        """
        catalogue, words = self.catalogue, self.catalogue.words
        deadline = self.clock() + self.wait_max_s
        slots = [number & SLOT_MASK if number else -1 for number in reply.ids]
        checksums: list[int] = []
        for i, slot in enumerate(slots, 1):
            if slot >= 0 and not catalogue.summed(slot):
                self.urgent.append((slot, catalogue.generation(slot)))
            if i & SLICE_MASK == 0:
                yield None
        for i, slot in enumerate(slots, 1):
            while slot >= 0 and not catalogue.summed(slot) and self.clock() < deadline:
                yield deadline
            checksums.append(words[slot * RECORD_WORDS + Field.CHECKSUM] if slot >= 0 else 0)
            if i & SLICE_MASK == 0:
                yield None
        return msgspec.structs.replace(reply, checksums=checksums)

    def run_here(self, pool: memoryview) -> None:
        """Do all urgent work at once, in this thread: for a store that has no process beside it."""
        while self.urgent:
            for slot, generation, offset, size, _ in self.jobs(len(self.urgent)):
                self.done(slot, generation, checksum(pool[offset : offset + size]))

    def _conclude(self, name: tuple[int, int], verdict: Status) -> None:
        earlier = self._asked.get(name)
        if earlier and verdict is Status.OK:
            self._asked[name] = earlier - 1
        elif earlier is not None:
            self._verdicts[name] = verdict
            self.catalogue.wake()

    def _there(self, name: tuple[int, int]) -> bool:
        """Whether the object is committed still."""
        return self.catalogue.has_id(*name) and self.catalogue.state(name[0]) == State.COMMITTED

    def _add(self, found: list[Job], slot: int, *, urgent: bool) -> None:
        base, words = slot * RECORD_WORDS, self.catalogue.words
        found.append(
            (slot, self.catalogue.generation(slot), words[base + Field.OFFSET], words[base + Field.SIZE], urgent)
        )

    def _scrub(self, found: list[Job], most: int) -> None:
        """Go on through the records, as far as the interval says that we should be by now."""
        catalogue = self.catalogue
        top = catalogue.slots_used_top
        share = (self.clock() - self._pass_started) / self.scrub_interval_s
        looked = 0
        while self._cursor < min(top, int(top * share) + 1) and len(found) < most and looked < 256:
            slot = self._cursor
            self._cursor += 1
            looked += 1
            if catalogue.state(slot) == State.COMMITTED:
                self._add(found, slot, urgent=False)
        if self._cursor >= top and share >= 1:
            self._cursor, self._pass_started = 0, self.clock()
