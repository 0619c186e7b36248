"""The node's figures as Prometheus metrics. `docs/operations.md` lists them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from moonpool.observe.counters import SPACES_LABELLED_MAX, Histogram
from moonpool.observe.stats import node_stats

if TYPE_CHECKING:
    from moonpool.node.node import Node

_GAUGES = {
    "pool_bytes": "Size of the pool",
    "reserved_bytes": "Pool memory that the system has set aside so far",
    "touched_bytes": "Pool memory faulted in ahead of use",
    "live_bytes": "Bytes of all objects, in whole granules",
    "free_bytes": "Bytes that nobody owns",
    "largest_free_bytes": "Longest contiguous free run",
    "objects": "Visible objects",
    "slots": "Objects that the table has room for",
    "doomed": "Invisible objects whose extent somebody still holds",
    "protected_bytes": "Bytes under soft and hard pins",
    "sessions": "Sessions",
    "sessions_quarantined": "Sessions whose connection is gone and whose process may live",
    "sessions_silent": "Sessions of an earlier incarnation that have not come back",
    "reservations": "Extents that writers hold",
    "reservations_waiting": "Reservations that wait for space or another writer",
    "pins": "Objects that readers hold, summed over sessions",
    "holds": "Holds of match",
    "quarantined_bytes": "Bytes held by sessions without a connection",
    "checksums_waiting": "Objects that wait for their checksum",
    "feed_subscribers": "Readers of the feed",
    "purge_epoch": "Purges so far, plus one",
    "loop_step_max_s": "Longest step of the node's loop so far, seconds",
    "loop_step_cpu_max_s": "Longest step of the node's loop so far in processor time, seconds",
    "uptime_s": "Seconds since the node started",
}
_COUNTERS = {
    "bytes_reserved": "Bytes reserved by writers",
    "bytes_evicted": "Bytes evicted",
    "no_space": "Keys answered NO_SPACE",
    "stale_ids": "Ids that were not the session's to use",
    "bad_records": "Records dropped as unsound at the restart",
    "corrupt_objects": "Objects dropped because their bytes had changed",
    "checksums": "Checksums computed",
    "scrubbed_bytes": "Bytes read for checksums",
    "protocol_errors": "Connections closed for speaking something else",
    "feed_sequence": "Changes numbered by the feed",
}


SERIES_PER_PART = 8
"""Histograms rendered in one step: some 100 us each."""


class OneFamily(CollectorRegistry):
    """A registry of one family that is there already, so that families can be rendered one at a time."""

    def __init__(self, family: Metric) -> None:
        super().__init__(auto_describe=False)
        self._family = family

    def collect(self) -> Iterable[Metric]:
        yield self._family


def families(node: Node, quarantined_bytes: int = 0) -> Iterator[Metric]:
    """All metrics of a node at this moment, one family after the other, a long one in several parts."""
    stats = node_stats(node, quarantined_bytes, latencies=False)
    counters = node.catalogue.counters
    info = InfoMetricFamily("moonpool_node", "The node")
    info.add_metric([], {"name": stats.name, "pool": stats.pool_id, "incarnation": str(stats.incarnation)})
    yield info
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(f"moonpool_{name}", text, getattr(stats, name))
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"moonpool_{name}", text, getattr(stats, name))
    yield GaugeMetricFamily("moonpool_mode", "Mode word: 0 off, 1 read, 2 write, 3 on", node.mode)
    yield GaugeMetricFamily(
        "moonpool_evicted_per_reserved", "Bytes evicted per byte reserved", stats.evicted_per_reserved
    )
    for name, text, labelled in (
        ("removals", "Objects removed, by cause", stats.removals),
        ("sessions_ended", "Sessions ended, by cause", stats.sessions_ended),
    ):
        family = CounterMetricFamily(f"moonpool_{name}", text, labels=["cause"])
        for cause, count in labelled.items():
            family.add_metric([cause], count)
        yield family
    oldest = GaugeMetricFamily("moonpool_oldest_pin_s", "Age of the oldest pin", labels=["owner"])
    if stats.oldest_pin is not None:
        oldest.add_metric([stats.oldest_pin.owner], stats.oldest_pin.age_s)
    yield oldest
    yield from _per_space(node)
    yield _histogram(
        "moonpool_victim_age_s", "Age of evicted objects since their last use", [([], counters.victim_age_s)]
    )
    yield _histogram("moonpool_loop_step_s", "Steps of the node's loop", [([], counters.loop_step_s)])
    stages = [
        ([operation, stage, _space_label(node, number)], histogram)
        for (operation, stage, number), histogram in counters.stages.items()
    ]
    for start in range(0, max(1, len(stages)), SERIES_PER_PART):
        yield _histogram(
            "moonpool_stage_s",
            "Time of a batch in a stage of an operation",
            stages[start : start + SERIES_PER_PART],
            labels=["operation", "stage", "space"],
        )


def exposition(node: Node) -> Iterator[bytes]:
    """The metrics as Prometheus reads them, in parts that take some 1 ms at most each; some may be empty. Changes
    nothing."""
    quarantined_bytes = yield from _quarantined_bytes(node)
    name = ""
    for family in families(node, quarantined_bytes):
        text = generate_latest(OneFamily(family))
        if family.name == name:  # its HELP and TYPE lines have been said
            text = b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(b"#"))
        name = family.name
        yield text


def _quarantined_bytes(node: Node) -> Generator[bytes, None, int]:
    counting = node.roster.quarantined_bytes()
    while True:
        try:
            next(counting)
        except StopIteration as end:
            return int(end.value)
        yield b""


def _per_space(node: Node) -> Iterator[Metric]:
    """Series by key space: as many as are bounded, the rest together under "other"."""
    counters = node.catalogue.counters
    for name, text, counter in (
        ("hits", "Keys found", counters.hits),
        ("misses", "Keys not found", counters.misses),
        ("bytes_read", "Bytes handed to readers", counters.bytes_read),
        ("bytes_written", "Bytes committed by writers", counters.bytes_written),
    ):
        family = CounterMetricFamily(f"moonpool_{name}", text, labels=["space"])
        other = 0
        for number, value in counter.items():
            if number <= SPACES_LABELLED_MAX:
                family.add_metric([_space_label(node, number)], value)
            else:
                other += value
        if other:
            family.add_metric(["other"], other)
        yield family
    spaces = node.catalogue.spaces.spaces
    labelled, others = spaces[: SPACES_LABELLED_MAX + 1], spaces[SPACES_LABELLED_MAX + 1 :]
    for name, text, attribute in (
        ("space_objects", "Objects by key space", "objects"),
        ("space_bytes", "Bytes by key space", "live_bytes"),
    ):
        of = attrgetter(attribute)
        gauge = GaugeMetricFamily(f"moonpool_{name}", text, labels=["space"])
        for space in labelled:
            gauge.add_metric([_space_label(node, space.number)], of(space))
        if others:
            gauge.add_metric(["other"], sum(map(of, others)))
        yield gauge


def _space_label(node: Node, number: int) -> str:
    if number == 0:
        return "none"
    if not 0 < number <= SPACES_LABELLED_MAX:
        return "other"
    return node.catalogue.spaces.spaces[number].digest.hex()


def _histogram(
    name: str, text: str, series: list[tuple[list[str], Histogram]], labels: list[str] | None = None
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels or [])
    for values, histogram in series:
        total, buckets = 0, []
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(values, buckets, histogram.total)
    return family
