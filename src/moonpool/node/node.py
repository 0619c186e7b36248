"""A node's parts, put together: over files of a folder, or over private memory for `embedded:`."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.config import NodeConfig, default_slots
from moonpool.errors import FolderError
from moonpool.folder.folder import Folder
from moonpool.folder.layout import MODE_NAMES, Header
from moonpool.folder.mapping import Mapping, create_file, reserve_file
from moonpool.folder.records import Identity, Records
from moonpool.folder.spaces import SpaceFile
from moonpool.folder.table import TableWriter, table_bytes
from moonpool.node.catalogue import Catalogue
from moonpool.node.checksums import Checksums
from moonpool.node.feed import Feed
from moonpool.node.holds import Holds
from moonpool.node.keyspaces import KeySpaces
from moonpool.node.purge import Sweeper
from moonpool.node.restart import recover
from moonpool.node.roster import Roster
from moonpool.node.space import Space
from moonpool.node.store import Store
from moonpool.observe.counters import Counters
from moonpool.options import RESERVE_WAIT_MAX_S
from moonpool.probes import ARMED, reach


@dataclass(slots=True)
class Node:
    """One pool and everything that manages it. Single-threaded; does no socket I/O."""

    config: NodeConfig
    pool_id: bytes
    incarnation: int
    pool: Mapping
    store: Store
    roster: Roster
    holds: Holds
    sweeper: Sweeper
    checksums: Checksums
    recovered: int = 0
    """Objects found at a restart."""
    touched_bytes: int = 0
    """How much of the pool has been faulted in ahead of use."""
    started: float = field(default_factory=time.monotonic)

    @property
    def catalogue(self) -> Catalogue:
        return self.store.catalogue

    @property
    def reserved_bytes(self) -> int:
        """How much of the pool the system has set aside so far; only that is handed out."""
        return self.catalogue.table.header[Header.RESERVED_BYTES]

    def grow(self, reserved_bytes: int) -> None:
        """The system has set this much of the pool aside: hand it out from now on."""
        if reserved_bytes > self.reserved_bytes:
            self.catalogue.space.grow(reserved_bytes)
            self.catalogue.table.header[Header.RESERVED_BYTES] = reserved_bytes
            self.store.growing = reserved_bytes < self.config.pool_bytes
            self.catalogue.wake()

    @property
    def mode(self) -> int:
        return self.catalogue.table.header[Header.MODE]

    def set_mode(self, mode: int) -> None:
        """The operator's switch: clients read it from the shared header at each call. Kept for the next node, unless
        that is told a mode."""
        self.catalogue.table.header[Header.MODE] = mode
        self.catalogue.spaces.mode = mode

    def close(self) -> None:
        """Let go of the files that stay open while a node serves; it doesn't any more."""
        self.roster.close()
        self.catalogue.records.close()

    def mark_closed(self) -> None:
        """Tell clients through the header that this incarnation has stopped cleanly."""
        self.catalogue.table.header[Header.CLOSED] = 1


def embedded_node(pool_bytes: int, *, name: str = "embedded") -> Node:
    """A node in this process's private memory, all of it reserved on first touch."""
    config = NodeConfig(dir=Path("embedded"), pool_bytes=pool_bytes, slots=default_slots(pool_bytes), name=name)
    records = Records(Mapping.anonymous(Records.file_bytes(config.slots)), config.slots)
    table = Mapping.anonymous(table_bytes(config.slots))
    node = _assemble(config, None, Mapping.anonymous(pool_bytes), table, records, secrets.token_bytes(16), 1)
    node.grow(pool_bytes)
    return node


def open_node(config: NodeConfig, folder: Folder, warn: list[str]) -> Node:
    """Take a folder into use: go on with the pool that an earlier node left, or make a fresh one.

    The caller holds the folder's lock. Why an earlier pool was not taken over is appended to `warn`. The pool's
    memory is not reserved yet but for what earlier objects lie in: see `Node.grow`.
    """
    identity = Records.identity(folder.records)
    reason = _unusable(config, folder, identity)
    fresh = reason is not None or identity is None
    if reason:
        warn.append(f"the pool in {folder.path} is not taken over: {reason}; starting with an empty one")
    file_mode = folder.file_mode(config.folder_mode)
    if fresh:
        identity = Identity(secrets.token_bytes(16), config.pool_bytes, config.slots, 0)
        folder.forget()
        os.close(create_file(folder.pool, config.pool_bytes, file_mode, config.group))
        fd = create_file(folder.records, Records.file_bytes(config.slots), 0o600)
        reserve_file(fd, 0, Records.reserved_bytes(config.slots), folder.records)
    else:
        fd = os.open(folder.records, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    assert identity is not None
    incarnation = identity.incarnation + 1
    records = Records(Mapping.open(folder.records, writable=True), config.slots, fd, folder.records)
    if fresh:
        records.format(identity)
    records.set_incarnation(incarnation)
    # A new table file for each incarnation: what clients of the earlier one have mapped stays as it was.
    table_fd = create_file(folder.table.with_suffix(".part"), table_bytes(config.slots), file_mode, config.group)
    reserve_file(table_fd, 0, table_bytes(config.slots), folder.table)
    os.close(table_fd)
    table = Mapping.open(folder.table.with_suffix(".part"), writable=True)
    pool = Mapping.open(folder.pool, writable=True)
    node = _assemble(config, folder, pool, table, records, identity.pool_id, incarnation)
    node.store.growing = True
    if not fresh:
        node.recovered = recover(node)
    if ARMED:
        reach("node-recovered")
    folder.table.with_suffix(".part").rename(folder.table)
    return node


def _unusable(config: NodeConfig, folder: Folder, identity: Identity | None) -> str | None:
    """Why an earlier pool can't be gone on with, or None."""
    if identity is None:
        return "its records are missing, cut short or of another version" if folder.records.exists() else None
    if identity.pool_bytes != config.pool_bytes:
        return f"it has {identity.pool_bytes} bytes, {config.pool_bytes} are wanted"
    if identity.slots != config.slots:
        return f"its table has {identity.slots} slots, {config.slots} are wanted"
    try:
        size = os.lstat(folder.pool).st_size
    except OSError:
        return "its pool file is gone"
    return None if size == config.pool_bytes else f"its pool file was cut to {size} bytes"


def _assemble(
    config: NodeConfig,
    folder: Folder | None,
    pool: Mapping,
    table_mapping: Mapping,
    records: Records,
    pool_id: bytes,
    incarnation: int,
) -> Node:
    spaces = KeySpaces(SpaceFile.open(folder.spaces) if folder is not None else None)
    if config.origins.get("mode", "default") != "default":
        spaces.mode = None  # what the node is told now goes before what was switched in an earlier one
    table = TableWriter(table_mapping, config.slots)
    table.format(
        pool_id=pool_id,
        incarnation=incarnation,
        slots=config.slots,
        pool_bytes=config.pool_bytes,
        mode=MODE_NAMES.index(config.mode) if spaces.mode is None else spaces.mode,
    )
    if pool.size != config.pool_bytes:
        raise FolderError(f"the pool file has {pool.size} bytes instead of {config.pool_bytes}")
    table.header[Header.PURGE_EPOCH] = spaces.epoch
    catalogue = Catalogue(
        records,
        table,
        Space(config.pool_bytes, config.slots),
        spaces,
        Feed(config.feed_events),
        Counters(),
        wall=time.time,
    )
    store = Store(
        catalogue,
        pool.view,
        clock=time.monotonic,
        reserve_wait_s=config.reserve_wait_s,
        reserve_wait_max_s=RESERVE_WAIT_MAX_S,
        pin_share=config.pin_share,
    )
    holds = Holds(store)
    return Node(
        config=config,
        pool_id=pool_id,
        incarnation=incarnation,
        pool=pool,
        store=store,
        roster=Roster(store, holds, folder, time.monotonic),
        holds=holds,
        sweeper=Sweeper(catalogue),
        checksums=Checksums(
            catalogue,
            clock=time.monotonic,
            scrub_interval_s=config.scrub_interval_s if folder is not None else 0.0,
            wait_max_s=RESERVE_WAIT_MAX_S,
        ),
    )
