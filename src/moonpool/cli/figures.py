"""A node's figures for people: `moonpool status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moonpool.sizes import format_bytes, format_duration

if TYPE_CHECKING:
    from moonpool.observe.stats import Latency, NodeStats

_LABEL_WIDTH = 12


def lines(stats: NodeStats) -> Iterator[str]:
    """The figures as lines of text: what an operator asks first stands first; what is zero and normal is left out."""
    yield _line(
        "node",
        f"{stats.name}, mode {stats.mode}, up {format_duration(stats.uptime_s)}, incarnation {stats.incarnation}",
        stats.recovered and f"{stats.recovered:,} objects recovered at the start",
        stats.bad_records and f"{stats.bad_records:,} bad records dropped",
    )
    yield _line(
        "pool",
        f"{_memory(stats.pool_bytes)}, {_share(stats.live_bytes, stats.pool_bytes)} live",
        f"{_memory(stats.free_bytes)} free, the largest run {_memory(stats.largest_free_bytes)}",
        stats.reserved_bytes < stats.pool_bytes and f"{_memory(stats.reserved_bytes)} reserved so far",
        stats.touched_bytes < stats.pool_bytes and f"{_memory(stats.touched_bytes)} touched so far",
    )
    yield _line(
        "objects",
        f"{stats.objects:,} of {stats.slots:,} slots",
        stats.protected_bytes and f"{_memory(stats.protected_bytes)} pinned by request",
        stats.doomed and f"{stats.doomed:,} removed but still held",
        stats.checksums_waiting and f"{stats.checksums_waiting:,} wait for a checksum",
    )
    yield _line(
        "reads",
        f"{stats.hits:,} hits, {stats.misses:,} misses ({_share(stats.hits, stats.hits + stats.misses)} hits)",
        format_bytes(stats.bytes_read),
    )
    yield _line(
        "writes",
        format_bytes(stats.bytes_written),
        f"{stats.evicted_per_reserved:.2f} bytes evicted per byte reserved",
        stats.no_space and f"{stats.no_space:,} found no space",
    )
    if stats.removals:
        yield _line("removals", _counts(stats.removals))
    yield _line(
        "sessions",
        f"{stats.sessions:,}",
        f"{stats.pins:,} pins, {stats.reservations:,} reservations, {stats.holds:,} holds",
        stats.reservations_waiting and f"{stats.reservations_waiting:,} wait for space",
        stats.sessions_quarantined and f"{stats.sessions_quarantined:,} quarantined",
        stats.sessions_silent and f"{stats.sessions_silent:,} silent since the restart",
        stats.quarantined_bytes and f"{_memory(stats.quarantined_bytes)} in quarantine",
        stats.sessions_ended and f"ended: {_counts(stats.sessions_ended)}",
    )
    if stats.oldest_pin is not None:
        pin = stats.oldest_pin
        owner = f"{pin.owner or 'unnamed'} (pid {pin.pid})"
        yield _line("oldest pin", f"{format_duration(pin.age_s)}, {pin.objects:,} objects, held by {owner}")
    yield _line(
        "health",
        f"longest step {format_duration(stats.loop_step_max_s)}",
        f"{stats.checksums:,} checksums, {format_bytes(stats.scrubbed_bytes)} scrubbed",
        stats.corrupt_objects and f"{stats.corrupt_objects:,} CORRUPT",
        stats.stale_ids and f"{stats.stale_ids:,} stale ids",
        stats.protocol_errors and f"{stats.protocol_errors:,} protocol errors",
    )
    chosen = {name: found for name, found in stats.options.items() if found.origin != "default"}
    for number, (name, found) in enumerate(chosen.items()):
        yield _line("" if number else "options", f"{name} = {found.value}  ({found.origin})")
    yield from _latency_lines(stats.latencies)


def _latency_lines(latencies: list[Latency]) -> Iterator[str]:
    """One line per operation and stage, over all key spaces: the slowest space's quantiles count."""
    stages: dict[tuple[str, str], list[Latency]] = {}
    for latency in latencies:
        stages.setdefault((latency.operation, latency.stage), []).append(latency)
    for (operation, stage), found in sorted(stages.items()):
        p50_s, p99_s = max(entry.p50_s for entry in found), max(entry.p99_s for entry in found)
        yield _line(
            "latency" if (operation, stage) == min(stages) else "",
            f"{f'{operation} {stage}':<20} p50 {format_duration(p50_s):>8}  p99 {format_duration(p99_s):>8}  "
            f"{sum(entry.batches for entry in found):,} batches",
        )


def _line(label: str, *parts: object) -> str:
    """A label and what there is to say; a part that is false or zero is left out."""
    return f"{label:<{_LABEL_WIDTH}}{'; '.join(str(part) for part in parts if part)}"


def _memory(count: int) -> str:
    return format_bytes(count, binary=True)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {cause.replace('_', ' ')}" for cause, count in sorted(counts.items()))
