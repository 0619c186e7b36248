"""Restart: read the records that an earlier incarnation left, keep what is sound, and serve it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moonpool.folder.layout import GENERATION_MASK, INLINE_KEY_BYTES, NO_WORD, Flag, Header, State
from moonpool.folder.records import KEY_LENGTH_SHIFT, LENGTH_MASK
from moonpool.node.catalogue import UNSUMMED_MAX, Catalogue
from moonpool.node.space import GRANULE_BYTES
from moonpool.node.steps import finish

if TYPE_CHECKING:
    from moonpool.node.node import Node

Rows = npt.NDArray[Any]


def recover(node: Node) -> int:
    """Fill a fresh node's parts from its records; returns the number of objects that are served again.

    Each record is validated (state, bounds, lengths, fingerprint against key, overlaps); bad ones are freed and
    counted. What a session of the earlier incarnation may still hold stays untouched until its process has come
    back or is gone: `Roster.recover` sees to that. Vectorised where it is linear in the number of objects.
    """
    catalogue = node.catalogue
    collecting = gc.isenabled()
    gc.disable()  # a million new keys would otherwise set off one full collection after another
    try:
        used, rows = _place(node)
        catalogue.adopt_slots(used)
        generations = catalogue.records.table["state"] >> np.uint64(8)
        catalogue.generations = int((generations & np.uint64(GENERATION_MASK)).max(initial=0))
        states = rows["state"] & 0xFF
        committed = states == State.COMMITTED
        _publish(catalogue, used[committed], rows[committed])
        catalogue.doomed = int((states == State.DOOMED).sum())
        reservations: dict[int, set[int]] = {}
        for slot, session in zip(
            used[states == State.RESERVED].tolist(),
            (rows["state"][states == State.RESERVED] >> 32).tolist(),
            strict=True,
        ):
            reservations.setdefault(session, set()).add(slot)
            catalogue.pins[slot] += 1
            if catalogue.protection(slot):
                catalogue.protected_bytes += catalogue.size(slot)
            catalogue.claim(catalogue.records.key(slot), slot)
        node.roster.recover(used, reservations)
        catalogue.purging += 1  # objects of a purge that was cut short; ends at once where there are none
        finish(node.sweeper.free_purged())
        return catalogue.live
    finally:
        if collecting:
            gc.enable()


def _place(node: Node) -> tuple[npt.NDArray[np.int64], Rows]:
    """Validate all records and give each its extent; returns the slots that are left and their records."""
    catalogue = node.catalogue
    records = catalogue.records
    used, bad = records.check(node.config.pool_bytes)
    rows = records.table[used]
    if len(used):
        last = int((rows["offset"] + rows["size"]).max())
        node.grow(min(node.config.pool_bytes, -(-last // GRANULE_BYTES) * GRANULE_BYTES))
        # Where the registry was lost, later purges are to cover what is older than it.
        catalogue.spaces.epoch = max(catalogue.spaces.epoch, int((rows["epoch"] >> np.uint64(8)).max()))
        catalogue.table.header[Header.PURGE_EPOCH] = catalogue.spaces.epoch
    last_used = node.store.clock() - (catalogue.wall() - rows["touched"])
    offsets, sizes, priorities = (rows[name].astype(np.int64) for name in ("offset", "size", "epoch"))
    placed = catalogue.space.place_many(used, offsets, sizes, last_used, priorities & 0xFF)
    unknown = (rows["word_and_space"] & 0xFFFF_FFFF) >= len(catalogue.spaces.spaces)  # their registry was lost
    records.table["word_and_space"][used[unknown]] = NO_WORD << 32
    bad = np.concatenate((bad, used[~placed]))
    records.table["state"][bad] &= np.uint64(GENERATION_MASK << 8)
    catalogue.counters.bad_records += len(bad)
    return used[placed], records.table[used[placed]]


def _publish(catalogue: Catalogue, slots: npt.NDArray[np.int64], rows: Rows) -> None:
    """Bring committed objects into index, shared table and accounts."""
    lengths = (rows["flags"] >> KEY_LENGTH_SHIFT & LENGTH_MASK).astype(np.int64)
    inline = np.ascontiguousarray(rows["key"]).tobytes()
    index, mask = catalogue.index, catalogue.index_mask
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        start = i * INLINE_KEY_BYTES
        key = inline[start : start + length] if length <= INLINE_KEY_BYTES else catalogue.records.key(slot)
        index[hash(key) & mask][key] = slot
    generations = (rows["state"] >> np.uint64(8)) & np.uint64(GENERATION_MASK)
    places = catalogue.table.insert_many(rows["fingerprint"], generations)
    spaces = catalogue.spaces.spaces
    numbers = (rows["word_and_space"] & 0xFFFF_FFFF).astype(np.int64)
    catalogue.records.table["word_and_space"][slots] = places << np.uint64(32) | numbers.astype(np.uint64)
    counts = np.bincount(numbers, minlength=len(spaces))
    sizes = np.bincount(numbers, rows["size"].astype(np.float64), minlength=len(spaces))
    for space, objects, live_bytes in zip(spaces, counts.tolist(), sizes.tolist(), strict=True):
        space.objects, space.live_bytes = objects, int(live_bytes)
    catalogue.live = len(slots)
    catalogue.has_expiry = bool((rows["expiry"] > 0).any())
    pinned = np.flatnonzero(rows["flags"] & (Flag.SOFT | Flag.HARD))
    for slot in slots[pinned].tolist():
        catalogue.space.protect(slot, catalogue.protection(slot))
    catalogue.protected_bytes += int(rows["size"][pinned].sum())
    unsummed = slots[(rows["flags"] & Flag.CHECKSUM) == 0]
    catalogue.unsummed.extend(unsummed[:UNSUMMED_MAX].tolist())
