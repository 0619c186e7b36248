"""What a node tells of itself, as one dataclass: `client.stats()`, `moonpool status`, and the source of metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moonpool.config import Setting
from moonpool.folder.layout import MODE_NAMES, Mode
from moonpool.node.sessions import Standing

if TYPE_CHECKING:
    from moonpool.node.node import Node


class OldestPin(msgspec.Struct, frozen=True, kw_only=True):
    """The session that has held pins without a break for longest."""

    owner: str
    session: int
    pid: int
    objects: int
    age_s: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of an operation in one key space: batches so far, and quantiles as bucket bounds, in seconds."""

    operation: str
    stage: str
    space: int
    batches: int
    seconds: float
    p50_s: float
    p99_s: float


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node's figures at one moment. Bytes and seconds; counters run since the node started."""

    name: str
    pool_id: str
    incarnation: int
    mode: str
    uptime_s: float
    pool_bytes: int
    reserved_bytes: int
    touched_bytes: int
    live_bytes: int
    free_bytes: int
    largest_free_bytes: int
    objects: int
    slots: int
    doomed: int
    protected_bytes: int
    recovered: int
    bad_records: int
    hits: int
    misses: int
    bytes_read: int
    bytes_written: int
    bytes_reserved: int
    bytes_evicted: int
    removals: dict[str, int]
    no_space: int
    stale_ids: int
    corrupt_objects: int
    checksums: int
    checksums_waiting: int
    scrubbed_bytes: int
    protocol_errors: int
    sessions: int
    sessions_quarantined: int
    sessions_silent: int
    sessions_ended: dict[str, int]
    reservations: int
    reservations_waiting: int
    pins: int
    holds: int
    quarantined_bytes: int
    oldest_pin: OldestPin | None
    feed_sequence: int
    feed_subscribers: int
    purge_epoch: int
    loop_step_max_s: float
    loop_step_cpu_max_s: float
    latencies: list[Latency]
    options: dict[str, Setting] = {}
    """The node's options as they stand, and where each was set."""

    @property
    def evicted_per_reserved(self) -> float:
        """Bytes evicted per byte reserved."""
        return self.bytes_evicted / self.bytes_reserved if self.bytes_reserved else 0.0


def node_stats(node: Node, quarantined_bytes: int, *, latencies: bool = True) -> NodeStats:
    """Collect a node's figures; `quarantined_bytes` comes from its roster, in steps. Changes nothing; some 100 us,
    linear in the number of sessions, not of objects."""
    catalogue, roster, config = node.catalogue, node.roster, node.config
    counters, space = catalogue.counters, catalogue.space
    sessions = list(roster.sessions.values())
    now = node.store.clock()
    return NodeStats(
        name=config.name,
        pool_id=node.pool_id.hex(),
        incarnation=node.incarnation,
        mode=MODE_NAMES[node.mode & Mode.ON],
        uptime_s=now - node.started,
        pool_bytes=config.pool_bytes,
        reserved_bytes=node.reserved_bytes,
        touched_bytes=node.touched_bytes,
        live_bytes=space.live_bytes,
        free_bytes=space.free_bytes,
        largest_free_bytes=space.largest_free(),
        objects=catalogue.live,
        slots=config.slots,
        doomed=catalogue.doomed,
        protected_bytes=catalogue.protected_bytes,
        recovered=node.recovered,
        bad_records=counters.bad_records,
        hits=counters.hits.total(),
        misses=counters.misses.total(),
        bytes_read=counters.bytes_read.total(),
        bytes_written=counters.bytes_written.total(),
        bytes_reserved=counters.reserved_bytes,
        bytes_evicted=counters.evicted_bytes,
        removals=dict(counters.removals),
        no_space=counters.no_space,
        stale_ids=counters.stale_ids,
        corrupt_objects=counters.corrupt_objects,
        checksums=counters.checksums,
        checksums_waiting=len(catalogue.unsummed),
        scrubbed_bytes=counters.scrubbed_bytes,
        protocol_errors=counters.protocol_errors,
        sessions=len(sessions),
        sessions_quarantined=roster.count(Standing.QUARANTINED),
        sessions_silent=roster.count(Standing.SILENT),
        sessions_ended=dict(counters.sessions_ended),
        reservations=sum(len(session.reservations) for session in sessions),
        reservations_waiting=node.store.waiting,
        pins=sum(len(session.pins) for session in sessions),
        holds=len(node.holds.by_name),
        quarantined_bytes=quarantined_bytes,
        oldest_pin=_oldest_pin(node, now),
        feed_sequence=catalogue.feed.sequence,
        feed_subscribers=len(catalogue.feed.subscribers),
        purge_epoch=catalogue.spaces.epoch,
        loop_step_max_s=counters.loop_step_max_s,
        loop_step_cpu_max_s=counters.loop_step_cpu_max_s,
        latencies=[
            Latency(
                operation=operation,
                stage=stage,
                space=number,
                batches=histogram.count,
                seconds=histogram.total,
                p50_s=histogram.quantile(0.5),
                p99_s=histogram.quantile(0.99),
            )
            for (operation, stage, number), histogram in counters.stages.items()
            if latencies
        ],
        options=config.settings(),
    )


def _oldest_pin(node: Node, now: float) -> OldestPin | None:
    holding = [session for session in node.roster.sessions.values() if session.pins]
    if not holding:
        return None
    oldest = min(holding, key=lambda session: session.pinned_since)
    return OldestPin(
        owner=oldest.name,
        session=oldest.number,
        pid=oldest.pid,
        objects=len(oldest.pins),
        age_s=now - oldest.pinned_since,
    )
