"""Purges and sweeps: making many objects invisible at once, and freeing them a little at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moonpool.folder.layout import Flag, Header, State
from moonpool.node.catalogue import Catalogue
from moonpool.node.keyspaces import KeySpace
from moonpool.node.steps import Steps
from moonpool.probes import ARMED, reach

SLICE_RECORDS = 16_384
"""Records looked at in one step, vectorised: some 200 us."""

SLICE_DROPS = 128
"""Objects dropped in one step: each costs some 4 us."""


class Sweeper:
    """Walks the records in slices, for purges and for what time ends (TTLs, soft pins). Single-threaded."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._cursor = 0

    def purge(self, spaces: list[KeySpace], older_than_s: float) -> Steps[int]:
        """Make what `spaces` hold invisible, at once for whoever acquires, and from shared memory when this returns
        the number of objects. Their memory is freed by `free_purged`, afterwards.

        With `older_than_s`, only objects created longer ago. A reservation begun before is refused at its commit;
        a reader that had its extents before learns of it by the purge epoch in the shared header.
        """
        catalogue = self.catalogue
        registry = catalogue.spaces
        cut = catalogue.wall() - older_than_s
        before = self._marks()
        registry.epoch += 1
        for space in spaces:
            if older_than_s > 0:
                space.created_after = max(space.created_after, cut)
            else:
                space.epoch = registry.epoch
        catalogue.purging += 1
        catalogue.table.header[Header.PURGE_EPOCH] = registry.epoch
        if ARMED:
            reach("node-purging")
        registry.save()
        if ARMED:
            reach("node-purge-saved")
        count = 0
        for start in range(0, catalogue.records.slots, SLICE_RECORDS):
            slots = self._purged(start, self._marks())
            if len(slots):  # what an earlier purge covers, and its sweep hasn't come to, isn't counted twice
                count += len(slots) - len(self._purged(start, before))
            for slot in slots.tolist():
                catalogue.hide(slot)
            if len(slots) or start % (8 * SLICE_RECORDS) == 0:
                yield None
        return count

    def free_purged(self) -> Steps[None]:
        """Drop what purges made invisible. Ends the purge that it was started for."""
        catalogue = self.catalogue
        for start in range(0, catalogue.records.slots, SLICE_RECORDS):
            slots = self._purged(start, self._marks()).tolist()
            for i, slot in enumerate(slots):
                if catalogue.state(slot) == State.COMMITTED and catalogue.purged(slot):
                    catalogue.drop(slot, "purged")
                if i % SLICE_DROPS == SLICE_DROPS - 1:
                    yield None
            yield None
        catalogue.purging -= 1

    def sweep_once(self) -> None:
        """One slice: drop expired objects and end soft pins whose time is over. Called now and then."""
        catalogue = self.catalogue
        start = self._cursor
        self._cursor = (start + SLICE_RECORDS) % max(1, catalogue.records.slots)
        if self._cursor < start:
            self._cursor = 0
        rows = catalogue.records.table[start : start + SLICE_RECORDS]
        now = catalogue.wall()
        committed = (rows["state"] & 0xFF) == State.COMMITTED
        over = committed & (rows["expiry"] > 0) & (rows["expiry"] <= now)
        for slot in (np.flatnonzero(over)[:SLICE_DROPS] + start).tolist():
            catalogue.drop(slot, "expired")
        soft = committed & ((rows["flags"] & Flag.SOFT) != 0) & (rows["pin_expiry"] <= now)
        for slot in (np.flatnonzero(soft & ~over)[:SLICE_DROPS] + start).tolist():
            catalogue.protect(slot, 0, 0.0)

    def _marks(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
        """Where purges cut, by key space: the first epoch, and the earliest time, of what they leave."""
        spaces = self.catalogue.spaces.spaces
        epochs = np.array([space.epoch for space in spaces], np.uint64)
        return epochs, np.array([space.created_after for space in spaces])

    def _purged(
        self, start: int, marks: tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]
    ) -> npt.NDArray[np.int64]:
        """The slots from `start` on, one slice, that are committed and covered by a purge that cut there."""
        rows = self.catalogue.records.table[start : start + SLICE_RECORDS]
        committed = np.flatnonzero((rows["state"] & 0xFF) == State.COMMITTED)
        if not len(committed):
            return committed
        rows = rows[committed]
        number = (rows["word_and_space"] & 0xFFFF_FFFF).astype(np.int64)
        epochs, cuts = marks
        told = np.minimum(number, len(epochs) - 1)  # spaces may have been declared since
        covered = ((rows["epoch"] >> 8) < epochs[told]) | (rows["created"] < cuts[told])
        covered &= told == number
        return committed[covered] + start
