"""`moonpool bench storm`: what a scheduler's questions take while many clients fill a full pool and die."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from time import perf_counter
from typing import IO, Any, cast

import moonpool
from moonpool.bench.copies import expect_ok
from moonpool.bench.figures import spread_us, tidy
from moonpool.bench.keys import Keys
from moonpool.bench.local import Progress
from moonpool.bench.node import line_of, wait_until_settled
from moonpool.bench.roundtrips import PROBE_INTERVAL_S, Probe
from moonpool.errors import MoonpoolError

LOOKUP_KEYS = 40
FILL_BYTES = 1 << 20
STEP_LIMIT_S = 0.002
SETTLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Weather:
    """How heavy: `clients` processes doing `rate` batches a second together; seconds of calm and of storm."""

    clients: int = 64
    rate: float = 100.0
    calm_s: float = 5.0
    storm_s: float = 30.0
    seed: int = 1


class Storm:
    """One run against the node at `url`. With `metrics_url` the histogram of its loop's steps is read too."""

    def __init__(self, url: str, metrics_url: str | None, weather: Weather, progress: Progress) -> None:
        self.url, self.metrics_url, self.weather, self.progress = url, metrics_url, weather, progress

    def run(self) -> dict[str, Any]:
        """Measure; returns the flat result. Raises `MoonpoolError` where a client read a wrong byte."""
        weather = self.weather
        result: dict[str, Any] = {"clients": weather.clients, "rate_per_s": weather.rate, "storm_s": weather.storm_s}
        with moonpool.connect(self.url, name="bench storm", copy_threads=1, timeout_s=30.0) as client:
            self._fill(client)
            prober = Prober(client)
            with self.progress("calm", None):
                calm = prober.sample(weather.calm_s)
            steps_before, before = self._steps(), client.stats()
            with self.progress(f"storm of {weather.clients} clients", None), Clients(self.url, weather) as clients:
                clients.wait_ready()
                begun = perf_counter()
                started = client.stats()
                storm = prober.sample(weather.storm_s)
                taken_s = perf_counter() - begun
                after = client.stats()
                counted = clients.stop()
            steps_after = self._steps()
            for name in calm:
                result[f"{name}_us"] = {"idle": spread_us(calm[name]), "storm": spread_us(storm[name])}
            result["probes"] = len(storm["exists"])
            result |= {"killed": counted["killed"], "batches_per_s": tidy(counted["batches"] / taken_s)}
            evicted = after.removals.get("evicted", 0) - started.removals.get("evicted", 0)
            result["evicted_per_s"] = tidy(evicted / taken_s)
            result["evicted_per_reserved"] = tidy(
                (after.bytes_evicted - started.bytes_evicted) / max(1, after.bytes_reserved - started.bytes_reserved)
            )
            result |= step_figures(before.loop_step_max_s, after.loop_step_max_s, steps_before, steps_after)
            result["left"] = self._left(client)
            prober.close()
        if counted["wrong"]:
            raise MoonpoolError(f"{counted['wrong']} objects came back with wrong bytes: a bug, please report")
        if not evicted:
            raise MoonpoolError("nothing was evicted: the pool is too large for this rate; take a smaller one")
        return result

    def _fill(self, client: moonpool.Client) -> None:
        """Fill the pool, so that every put from now on evicts."""
        with self.progress("filling the pool", None):
            wait_until_settled(client, checksums=False)
            keys, value = Keys("bench-fill", 1), bytes(FILL_BYTES)
            for _ in range(client.pool_bytes // FILL_BYTES // 16 + 1):
                expect_ok(client.put_many(keys.take(16), [value] * 16), "put")
            wait_until_settled(client)

    def _steps(self) -> dict[float, int]:
        """Steps of the node's loop so far, by upper bound in seconds; empty without metrics."""
        if self.metrics_url is None:
            return {}
        text = urllib.request.urlopen(self.metrics_url, timeout=30).read().decode()
        found = re.findall(r'^moonpool_loop_step_s_bucket\{le="([^"]+)"\} ([0-9.e+]+)$', text, re.MULTILINE)
        return {float(bound): int(float(count)) for bound, count in found}

    def _left(self, client: moonpool.Client) -> dict[str, int]:
        """What the dead clients left behind, once their processes are gone: nothing, or pins would pile up."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            stats = client.stats()
            left = {
                "pins": stats.pins,
                "reservations": stats.reservations,
                "quarantined_bytes": stats.quarantined_bytes,
                "sessions_quarantined": stats.sessions_quarantined,
            }
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


class Prober:
    """Asks what a scheduler asks, of objects that are pinned and so outlast the storm."""

    def __init__(self, client: moonpool.Client) -> None:
        self._client = client
        self._acquire = Probe(client, "bench-probe")
        self._keys = Keys("bench-match", 2).take(LOOKUP_KEYS)
        expect_ok(client.put_many(self._keys, [b"\x11" * 4096] * LOOKUP_KEYS, pin="hard"), "put")

    def sample(self, duration_s: float) -> dict[str, list[float]]:
        """Seconds of `exists` (one key), `match` (40) and `acquire` (a round trip), each asked in turn, a pause
        between the rounds. Raises `MoonpoolError` where an answer is wrong."""
        client, group, key = self._client, [moonpool.Group(self._keys)], self._keys[0]
        samples: dict[str, list[float]] = {"exists": [], "match": [], "acquire": []}
        end = perf_counter() + duration_s
        while perf_counter() < end:
            begun = perf_counter()
            there = client.exists(key)
            asked = perf_counter()
            length = client.match(group).length
            matched = perf_counter()
            samples["exists"].append(asked - begun)
            samples["match"].append(matched - asked)
            samples["acquire"].append(self._acquire.once())
            if not there or length != LOOKUP_KEYS:
                raise MoonpoolError("a pinned object was not found during the storm: a bug, please report")
            time.sleep(PROBE_INTERVAL_S)
        return samples

    def close(self) -> None:
        self._acquire.close()
        self._client.remove_many(self._keys, force=True)


class Clients:
    """The storm's clients, behind one process that forks and kills them; a context manager."""

    def __init__(self, url: str, weather: Weather) -> None:
        arguments = [url, str(weather.clients), str(weather.rate), str(weather.seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moonpool.bench.storm_clients", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        line_of(self._process)

    def stop(self) -> dict[str, int]:
        """End them all; returns how many were killed before, batches done and wrong values."""
        cast("IO[str]", self._process.stdin).close()
        counted: dict[str, int] = json.loads(line_of(self._process))
        self._process.wait()
        return counted

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exc: object) -> None:
        cast("IO[str]", self._process.stdin).close()
        self._process.wait()
        cast("IO[str]", self._process.stdout).close()


def step_figures(
    max_before_s: float, max_after_s: float, before: dict[float, int], after: dict[float, int]
) -> dict[str, float]:
    """The longest step of the storm. The node tells its longest ever; where that is older, the bound of the highest
    bucket that the storm has added to."""
    grown = {bound: count - before.get(bound, 0) for bound, count in after.items()}
    figures: dict[str, float] = {}
    longest_s = max_after_s
    if grown:
        total = grown[float("inf")]
        figures["loop_steps"] = total
        figures["loop_steps_over_2ms"] = total - grown[STEP_LIMIT_S]
        if max_after_s <= max_before_s:
            longest_s = min(max_after_s, min(bound for bound, count in grown.items() if count == total))
    figures["loop_step_max_us"] = tidy(longest_s * 1e6)
    return figures
