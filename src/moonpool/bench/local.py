"""`moonpool bench local`: all of one host's figures, in one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import moonpool
from moonpool.bench import lookups, roundtrips
from moonpool.bench.copies import Copying, Plan, expect_ok, view_40
from moonpool.bench.figures import gbps, median_us, size_label, spread_us, tidy
from moonpool.bench.keys import Keys
from moonpool.bench.node import OwnNode, line_of, wait_until_settled, worker
from moonpool.bench.slices import Ring, Traffic
from moonpool.client.streaming import choose
from moonpool.errors import MoonpoolError

Result = dict[str, Any]
Tell = Callable[[int], None]


PASSES = ("put_first", "get_first", "put_second", "get_second")
"""What a fresh process measures: every batch of the first pass is on pages that it has not used before."""
SCRUB_INTERVAL = "1s"
"""Shorter than a pass can take within the checksum share: the scrub is at work all the time."""


class Progress(Protocol):
    """Shows how far a stage is: a context that gives a function to be fed with amounts."""

    def __call__(self, label: str, total: int | None) -> AbstractContextManager[Tell]: ...


RATES_POOL_BYTES = 1 << 30
"""For 64,000 objects of 4 KiB: much more than any cache holds, far from full."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much `bench local` measures."""

    sizes: tuple[int, ...] = (2 << 20, 16 << 20, 32 << 20)
    plan: Plan = field(default_factory=Plan)
    pool_bytes: int = 5 << 30
    load_pool_bytes: int = 2 << 30
    view_bytes: int = 32 << 20
    view_count: int = 40
    view_repeats: int = 200
    roundtrips: int = 50_000
    loaded_roundtrips: int = 10_000
    objects: int = 1_000_000
    small_gets: int = 500_000
    small_batches: int = 2_000
    lookups: int = 2000
    large_count: int = 5000
    large_bytes: int = 2_000_000

    @property
    def small_pool_bytes(self) -> int:
        """Room for all small objects, with a little over."""
        return (self.objects * lookups.SMALL_BYTES * 21 // 20 | 0xFFFFFFF) + 1

    @property
    def large_pool_bytes(self) -> int:
        return (self.large_count * self.large_bytes * 21 // 20 | 0xFFFFFFF) + 1


def quick(threads: int) -> Scale:
    """A smoke run: every stage, too little of each for a figure that means anything."""
    return Scale(
        sizes=(1 << 20, 2 << 20),
        plan=Plan(total_bytes=64 << 20, passes=3, threads=threads, unused_bytes=32 << 20),
        pool_bytes=512 << 20,
        load_pool_bytes=512 << 20,
        view_bytes=2 << 20,
        view_repeats=5,
        roundtrips=200,
        loaded_roundtrips=100,
        objects=4000,
        small_gets=640,
        small_batches=20,
        lookups=20,
        large_count=20,
    )


class Local:
    """One run. With `url`, everything that a node of the user's can be measured for: it is not killed, and its heap
    not looked at."""

    def __init__(self, scale: Scale, url: str | None, seed: int, progress: Progress) -> None:
        self.scale, self.url, self.progress = scale, url, progress
        self.random = Random(seed)
        self.result: Result = {"threads": scale.plan.threads, "copy": choose().copy.name}

    def run(self) -> Result:
        """Measure it all; returns the flat result."""
        if self.url is not None:
            self._bulk(self.url)
            self._roundtrips(self.url, None)
            with self._connect(self.url) as client:
                self._rates(client)
                self._small(client)
            return self.result
        with OwnNode(self.scale.pool_bytes) as node:
            self._bulk(node.url)
        with OwnNode(self.scale.load_pool_bytes, "--scrub-interval", SCRUB_INTERVAL) as node:
            self._roundtrips(node.url, node.metrics_url)
        with OwnNode(RATES_POOL_BYTES) as node, self._connect(node.url) as client:
            wait_until_settled(client)
            self._rates(client)
        with OwnNode(self.scale.small_pool_bytes, "--slots", str(self.scale.objects * 5 // 4)) as node:
            self._many(node)
        self._restart_large()
        return self.result

    # ---- stages --------------------------------------------------------------------------------------------------

    def _bulk(self, url: str) -> None:
        scale, result, traffic = self.scale, self.result, Traffic()
        with self._connect(url) as client:
            with self.progress("faulting the pool in", None):
                wait_until_settled(client)
            for name in ("memcpy", "put", "get_into", *PASSES):
                result[f"{name}_gbps"] = {}
            result["view_us"] = {}
            for size in scale.sizes:
                self._copies(client, size, traffic)
            result["slices_unused_for_bytes"] = traffic.least_gap_bytes
            samples = view_40(client, scale.view_bytes, scale.view_count, scale.view_repeats, traffic)
            result[f"view_us_{scale.view_count}x{size_label(scale.view_bytes)}"] = median_us(samples)
        for size in scale.sizes:
            self._first_pass(url, size)

    def _copies(self, client: moonpool.Client, size: int, traffic: Traffic) -> None:
        plan, label, result = self.scale.plan, size_label(size), self.result
        total = plan.batches(size) * size * 16
        with self.progress(f"put, get, view and memcpy of {label}", total) as tell:
            copies = Copying(client, size, plan, traffic, self.random).run(tell)
        result["memcpy_gbps"][label] = copies.rate(copies.memcpy_s)
        result["put_gbps"][label] = copies.rate(copies.put_s)
        result["get_into_gbps"][label] = copies.rate(copies.get_s)
        result["view_us"][f"16x{label}"] = median_us(copies.view_s)

    def _first_pass(self, url: str, size: int) -> None:
        """A fresh process for each size; what it gets is put here beforehand."""
        plan, label = self.scale.plan, size_label(size)
        ring = Ring(Traffic(), plan.total_bytes, size, size + 1).sum_up()
        keys = Keys("bench-fresh", self.random.getrandbits(64)).take(ring.count)
        with self.progress(f"first pass over a fresh mapping, {label}", None), self._connect(url) as client:
            for start in range(0, ring.count, 16):
                part = keys[start : start + 16]
                expect_ok(client.put_many(part, [ring.piece(start + i) for i in range(len(part))]), "put")
            wanted = json.dumps([(key.hex(), sum_) for key, sum_ in zip(keys, ring.checksums, strict=True)])
            with worker("first", url, str(size), str(plan.total_bytes), str(plan.threads)) as fresh:
                print(wanted, file=fresh.stdin, flush=True)
                samples = json.loads(line_of(fresh))
            client.remove_many(keys)
        for name in PASSES:
            self.result[f"{name}_gbps"][label] = gbps(16 * size, samples[name])

    def _roundtrips(self, url: str, metrics_url: str | None) -> None:
        scale, result = self.scale, self.result
        with self._connect(url) as client:
            wait_until_settled(client)
            probe = roundtrips.Probe(client, "bench-probe")
            with self.progress("round trips", None):
                probe.sample(max(100, scale.roundtrips // 20))
                result["roundtrip_us"] = spread_us(probe.sample(scale.roundtrips))
            with (
                self.progress("round trips beside two bulk clients, scrub and scrape", None),
                roundtrips.load(url, metrics_url, client.pool_bytes),
            ):
                samples = probe.sample(scale.loaded_roundtrips, roundtrips.PROBE_INTERVAL_S)
            result["roundtrip_loaded_us"] = spread_us(samples)
            probe.close()
            result["loop_step_max_us"] = tidy(client.stats().loop_step_max_s * 1e6)

    def _rates(self, client: moonpool.Client) -> None:
        with self.progress("4 KiB objects in batches of 32", None):
            rates = lookups.small_rates(client, self.scale.small_batches, self.random)
        self.result["small_put_per_s"], self.result["small_get_per_s"] = rates

    def _small(self, client: moonpool.Client) -> lookups.Small:
        scale = self.scale
        with self.progress(f"{scale.objects:,} objects of 4 KiB", scale.objects) as tell:
            small = lookups.fill_and_read(client, scale.objects, scale.small_gets, tell, self.random)
        if lookups.absent(client, 10_000) > 1:
            raise MoonpoolError("exists claims objects that were never put: a bug, please report")
        self.result["table_put_per_s"], self.result["table_get_per_s"] = small.put_per_s, small.get_per_s
        self.result["objects"] = scale.objects
        self.result["exists_us"] = lookups.exists(client, small.keys, scale.lookups, self.random)
        if self.url is not None:
            with self.progress("removing them", None):
                for start in range(0, len(small.keys), 1024):
                    client.remove_many(small.keys[start : start + 1024])
        return small

    def _many(self, node: OwnNode) -> None:
        """What needs a table full of small objects and a node of our own: its memory, and its restart."""
        with self._connect(node.url) as client:
            wait_until_settled(client)
            before = node.anonymous_bytes()
            small = self._small(client)
            grown = node.anonymous_bytes() - before
        self.result["node_heap_bytes_per_object"] = tidy(grown / self.scale.objects)
        last = small.keys[-1]
        taken_s = lookups.restart(node, last, lookups.value_of(last))
        self.result["restart_s"] = {f"{self.scale.objects}_objects": tidy(taken_s)}

    def _restart_large(self) -> None:
        """Left out, and said so, where the machine lacks the memory."""
        scale = self.scale
        try:
            node = OwnNode(scale.large_pool_bytes)
        except MoonpoolError as error:
            self.result["left_out"] = [f"restart of {scale.large_count} objects: {error}"]
            return
        label = f"{scale.large_count}_objects_{tidy(scale.large_count * scale.large_bytes / 1e9):g}GB"
        ring = Ring(Traffic(), 64 * scale.large_bytes, scale.large_bytes, 11)
        keys = Keys("bench-large", 11).take(scale.large_count)
        with node, self.progress(f"{scale.large_count:,} objects of 2 MB, and a restart", None):
            with self._connect(node.url) as client:
                wait_until_settled(client)
                for start in range(0, len(keys), 16):
                    part = keys[start : start + 16]
                    expect_ok(client.put_many(part, [ring.piece(i) for i in ring.take(len(part))]), "put")
            expected = ring.piece((scale.large_count - 1) % ring.count).tobytes()
            self.result.setdefault("restart_s", {})[label] = tidy(lookups.restart(node, keys[-1], expected))

    def _connect(self, url: str) -> moonpool.Client:
        return moonpool.connect(url, name="bench", copy_threads=self.scale.plan.threads, timeout_s=30.0)
