"""put, get_into, view and plain numpy.copyto in turn, batch by batch, with the data verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from time import perf_counter

import numpy as np

import moonpool
from moonpool.bench.figures import gbps
from moonpool.bench.keys import Keys
from moonpool.bench.slices import UNUSED_BYTES, Ring, Traffic, checksum_of
from moonpool.errors import MoonpoolError
from moonpool.status import Status, Statuses

BATCH = 16
Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is copied: `total_bytes` of objects a pass, `passes` passes; `unused_bytes` of traffic between uses."""

    total_bytes: int = 1536 << 20
    passes: int = 6
    threads: int = 1
    unused_bytes: int = UNUSED_BYTES

    def batches(self, size_bytes: int) -> int:
        return max(2, self.passes * self.total_bytes // (size_bytes * BATCH))


@dataclass(slots=True)
class Copies:
    """Seconds a batch of 16 took, one sample a batch."""

    size_bytes: int
    memcpy_s: list[float] = field(default_factory=list)
    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    view_s: list[float] = field(default_factory=list)

    def rate(self, samples_s: Sequence[float]) -> float:
        """GB/s of the median batch."""
        return gbps(BATCH * self.size_bytes, samples_s)


@dataclass(slots=True)
class _Stored:
    """A batch in the pool, and the traffic so far when its bytes were last used."""

    keys: list[bytes]
    checksums: list[int]
    used_at_bytes: int


class Copying:
    """One measurement of one object size through `client`, whose `copy_threads` are the plan's threads.

    Stores objects under keys of its own and removes them again.
    """

    def __init__(self, client: moonpool.Client, size_bytes: int, plan: Plan, traffic: Traffic, random: Random) -> None:
        self.client, self.plan, self.traffic = client, plan, traffic
        self.result = Copies(size_bytes)
        self._random = random
        self._source = Ring(traffic, plan.total_bytes, size_bytes, size_bytes).sum_up()
        self._target = Ring(traffic, plan.total_bytes, size_bytes, None)
        self._keys = Keys("bench-copies", random.getrandbits(64))
        self._written: deque[_Stored] = deque()
        self._read: deque[_Stored] = deque()

    def run(self, tell: Tell) -> Copies:
        """Measure; `tell` is called with each batch's bytes. Raises `MoonpoolError` where a byte is wrong."""
        kinds = [self._put, self._get, self._view]
        with ThreadPoolExecutor(self.plan.threads) as threads:
            kinds.append(lambda: self._memcpy(threads))
            self._memcpy(threads)  # threads are started by the first use, which no kind should pay for
            self.result.memcpy_s.clear()
            for _ in range(self.plan.batches(self.result.size_bytes)):
                self._random.shuffle(kinds)
                for measure in kinds:
                    measure()
                tell(BATCH * self.result.size_bytes)
        while self._written and not self._drain():
            pass
        for batch in self._read:
            self.client.remove_many(batch.keys)
        return self.result

    def _drain(self) -> bool:
        """Read what is still unread, without a sample: every stored byte is verified once."""
        self._read_batch(self._written.popleft(), sample=False)
        return not self._written

    def _put(self) -> None:
        self._forget_old()
        keys, places = self._keys.take(BATCH), self._source.take(BATCH)
        values = [self._source.piece(place) for place in places]
        begun = perf_counter()
        statuses = self.client.put_many(keys, values)
        self.result.put_s.append(perf_counter() - begun)
        expect_ok(statuses, "put")
        self._count()
        sums = [self._source.checksums[place] for place in places]
        self._written.append(_Stored(keys, sums, self.traffic.copied_bytes))

    def _get(self) -> None:
        """Read the batch that was written longest ago, unless that is too recent."""
        if self._written and self._unused(self._written[0]):
            self._read_batch(self._written.popleft(), sample=True)

    def _read_batch(self, batch: _Stored, *, sample: bool) -> None:
        targets = [self._target.piece(place) for place in self._target.take(len(batch.keys))]
        begun = perf_counter()
        statuses = self.client.get_many_into(batch.keys, targets)
        taken = perf_counter() - begun
        expect_ok(statuses, "get")
        self._count()
        if sample:
            self.result.get_s.append(taken)
        verify([checksum_of(target) for target in targets], batch.checksums)
        batch.used_at_bytes = self.traffic.copied_bytes
        self._read.append(batch)

    def _view(self) -> None:
        """View the newest batch: that touches none of its bytes, so it may be read or written as planned."""
        if self._written:
            begun = perf_counter()
            with self.client.view_many(self._written[-1].keys) as views:
                self.result.view_s.append(perf_counter() - begun)
            expect_ok(views.statuses, "view")

    def _memcpy(self, threads: ThreadPoolExecutor) -> None:
        sources = [self._source.piece(place) for place in self._source.take(BATCH)]
        targets = [self._target.piece(place) for place in self._target.take(BATCH)]
        count = self.plan.threads

        def share(first: int) -> None:
            for target, source in zip(targets[first::count], sources[first::count], strict=True):
                np.copyto(target, source)

        begun = perf_counter()
        if count == 1:
            share(0)
        else:
            list(threads.map(share, range(count)))
        self.result.memcpy_s.append(perf_counter() - begun)
        self._count()

    def _count(self) -> None:
        self.traffic.add(BATCH * self.result.size_bytes)

    def _unused(self, batch: _Stored) -> bool:
        return self.traffic.copied_bytes - batch.used_at_bytes >= self.plan.unused_bytes

    def _forget_old(self) -> None:
        """Give memory back to the pool once it is unused for long enough to be written afresh."""
        while self._read and self._unused(self._read[0]):
            self.client.remove_many(self._read.popleft().keys)


def expect_ok(statuses: Statuses, what: str) -> None:
    """Raises `MoonpoolError` unless all went well: a figure of a half-failed batch is no figure."""
    if all(status is Status.OK for status in statuses):
        return
    place = next(i for i, status in enumerate(statuses) if status is not Status.OK)
    detail = statuses.details.get(place, "")
    raise MoonpoolError(
        f"{what}: key {place} of {len(statuses)} got {statuses[place].name} {detail}; "
        "the measurement needs a pool of 4 GiB that nobody else fills meanwhile"
    )


def verify(found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises `MoonpoolError` where bytes are not those that were put."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            raise MoonpoolError(f"object {i} of a batch came back with other bytes than were put: a bug, please report")


def view_40(client: moonpool.Client, size_bytes: int, count: int, repeats: int, traffic: Traffic) -> list[float]:
    """Seconds to get views of `count` objects of `size_bytes`, one sample a repeat; the views' bytes are verified."""
    ring = Ring(traffic, min(count, BATCH) * size_bytes, size_bytes, 40).sum_up()
    keys = Keys("bench-view", 40).take(count)
    for start in range(0, count, ring.count):
        part = keys[start : start + ring.count]
        expect_ok(client.put_many(part, [ring.piece(i) for i in range(len(part))]), "put")
    samples = []
    for repeat in range(repeats):
        begun = perf_counter()
        with client.view_many(keys) as views:
            samples.append(perf_counter() - begun)
            expect_ok(views.statuses, "view")
            if repeat == 0:
                found = [checksum_of(array) for array in views if array is not None]
                verify(found, [ring.checksums[i % ring.count] for i in range(count)])
    client.remove_many(keys)
    return samples
