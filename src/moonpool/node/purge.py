"""Purges and sweeps: making many objects invisible at once, and freeing them a little at a time."""

from __future__ import annotations

import numpy as np

from moonpool.folder.layout import Flag, Header, State
from moonpool.folder.spaces import Marks
from moonpool.node.catalogue import Catalogue
from moonpool.node.keyspaces import KeySpace
from moonpool.node.steps import Steps
from moonpool.probes import ARMED, reach

SLICE_RECORDS = 16_384
"""Records looked at for what time ends in one step, vectorised: some 400 us."""
SLICE_PURGED = 8192
"""Records compared with purges in one step, some 400 us: in columns, as copying whole rows takes four times as long."""

SLICE_HIDDEN = 512
"""Objects taken out of the shared table in one step: each costs 1 us."""
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
        before = registry.marks()
        if ARMED:
            reach("node-purging")
        registry.cut(spaces, catalogue.wall() - older_than_s if older_than_s > 0 else None)
        catalogue.purging += 1
        catalogue.table.header[Header.PURGE_EPOCH] = registry.epoch
        if ARMED:
            reach("node-purge-saved")
        count = 0
        for start in range(0, catalogue.slots_used_top, SLICE_PURGED):
            slots, earlier = self._purged(start, before)
            count += len(slots) - earlier
            yield None
            for i, slot in enumerate(slots, 1):
                if catalogue.state(slot) == State.COMMITTED and catalogue.purged(slot):
                    catalogue.hide(slot)
                if i % SLICE_HIDDEN == 0:
                    yield None
        return count

    def free_purged(self) -> Steps[None]:
        """Drop what purges made invisible. Ends the purge that it was started for."""
        catalogue = self.catalogue
        for start in range(0, catalogue.slots_used_top, SLICE_PURGED):
            slots, _ = self._purged(start)
            for i, slot in enumerate(slots):
                if i % SLICE_DROPS == 0:
                    yield None
                if catalogue.state(slot) == State.COMMITTED and catalogue.purged(slot):
                    catalogue.drop(slot, "purged")
            yield None
        catalogue.purging -= 1

    def sweep(self) -> Steps[None]:
        """Go on with a slice in which much is over until it is done."""
        while self.sweep_once():
            yield None

    def sweep_once(self) -> bool:
        """One slice: drop expired objects and end soft pins whose time is over, up to `SLICE_DROPS` of each. Called now
        and then; True where there is more to do in this slice."""
        catalogue = self.catalogue
        # Records that were never used aren't read: each page of them would cost a page fault.
        top = catalogue.slots_used_top
        start = self._cursor if self._cursor < top else 0
        rows = catalogue.records.table[start : min(start + SLICE_RECORDS, top)]
        now = catalogue.wall()
        committed = (rows["state"] & 0xFF) == State.COMMITTED
        expired = committed & (rows["expiry"] > 0) & (rows["expiry"] <= now)
        soft = committed & ((rows["flags"] & Flag.SOFT) != 0) & (rows["pin_expiry"] <= now) & ~expired
        over, soft_over = np.flatnonzero(expired) + start, np.flatnonzero(soft) + start
        for slot in over[:SLICE_DROPS].tolist():
            catalogue.drop(slot, "expired")
        for slot in soft_over[:SLICE_DROPS].tolist():
            catalogue.protect(slot, 0, 0.0)
        more = len(over) > SLICE_DROPS or len(soft_over) > SLICE_DROPS
        self._cursor = start if more else start + SLICE_RECORDS
        return more

    def _purged(self, start: int, before: Marks | None = None) -> tuple[list[int], int]:
        """The slots from `start` on, one slice, that are committed and covered by a purge; and how many of them were
        covered already by those that cut at `before`: what their sweep hasn't come to isn't to count twice."""
        spaces = self.catalogue.spaces
        rows = self.catalogue.records.table[start : start + SLICE_PURGED]
        purged = ((rows["state"] & 0xFF) == State.COMMITTED) & spaces.covered(rows)
        earlier = int((purged & spaces.covered(rows, before)).sum()) if before and purged.any() else 0
        return (np.flatnonzero(purged) + start).tolist(), earlier
