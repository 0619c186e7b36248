"""The node's counters: plain numbers, cheap enough for the fast path, read by metrics and statistics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from time import thread_time

LATENCY_BUCKETS_S = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 100e-3, 500e-3, 2.0, 10.0,
)  # fmt: skip
AGE_BUCKETS_S = (0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 6 * 3600.0, 86400.0)

SPACES_LABELLED_MAX = 32
"""Key spaces with series of their own; further ones share the label "other", so that scrapes stay small."""


class Histogram:
    """Counts per bucket (upper bounds in `bounds`, one more for the rest), and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket in which the `share` quantile lies; 0.0 without observations."""
        wanted, seen = share * self.count, 0
        if not wanted:
            return 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                return bound
        return float("inf")


class Counters:
    """What has happened since the node started. Written by the node's one thread.

    Per key space a batch of reads counts for the space of its first key: engines send one space a batch.
    """

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()
        self.misses: Counter[int] = Counter()
        self.bytes_read: Counter[int] = Counter()
        self.bytes_written: Counter[int] = Counter()
        self.reserved_bytes = 0
        self.evicted_bytes = 0
        self.removals: Counter[str] = Counter()
        self.no_space = 0
        self.stale_ids = 0
        self.bad_records = 0
        self.corrupt_objects = 0
        self.checksums = 0
        self.scrubbed_bytes = 0
        self.protocol_errors = 0
        self.sessions_ended: Counter[str] = Counter()
        self.victim_age_s = Histogram(AGE_BUCKETS_S)
        self.loop_step_s = Histogram(LATENCY_BUCKETS_S)
        self.loop_step_max_s = 0.0
        self.loop_step_cpu_max_s = 0.0
        self._cpu_s = thread_time()
        self.stages: dict[tuple[str, str, int], Histogram] = {}

    def stage(self, operation: str, stage: str, space: int, seconds: float) -> None:
        """One batch spent `seconds` in a stage (query, allocate, transfer, commit) of an operation."""
        if space > SPACES_LABELLED_MAX:
            space = -1
        found = self.stages.get((operation, stage, space))
        if found is None:
            found = self.stages[operation, stage, space] = Histogram(LATENCY_BUCKETS_S)
        found.observe(seconds)

    def step(self, seconds: float) -> None:
        """One step of the node's loop took this long, by the clock: what a client may have had to wait.

        The longest is kept by processor time too, which leaves out that the kernel ran somebody else.
        """
        self.loop_step_s.observe(seconds)
        if seconds > self.loop_step_max_s:
            self.loop_step_max_s = seconds
        now = thread_time()
        used, self._cpu_s = now - self._cpu_s, now
        # Processor time is read once a step, so it holds what the loop did since the last one as well: not more than
        # the step itself can be its own.
        self.loop_step_cpu_max_s = max(self.loop_step_cpu_max_s, min(used, seconds))
