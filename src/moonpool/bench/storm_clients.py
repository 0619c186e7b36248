"""The storm's clients: forked from one process that has everything imported, and killed and replaced one a second.

`python -m moonpool.bench.storm_clients URL CLIENTS RATE SEED`: prints "ready" once all are connected, stops when its
standard input ends, and then prints one line of JSON with what happened.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
from collections import deque
from random import Random

import numpy as np

import moonpool
from moonpool.bench.keys import Keys
from moonpool.bench.slices import Bytes
from moonpool.errors import MoonpoolError
from moonpool.status import Status

BATCH = 4
SIZES = (16 << 10, 256 << 10, 1 << 20, 2 << 20)
SOURCE_BYTES = 16 << 20
KILL_INTERVAL_S = 1.0
VIEWS_HELD = 2
"""Batches of views that a client holds at a time: a killed one dies with them."""
RECONNECT_S = 0.5


class Counts:
    """Batches done, wrong values and clients ready, in memory that forked clients share with their parent."""

    def __init__(self, clients: int) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 8 * 3 * clients), np.int64).reshape(3, clients)
        self.batches, self.wrong, self.ready = self._words


class Client:
    """One client: at random moments, `rate` a second on average, it puts a batch, gets an earlier one and checks it,
    and views another, keeping the views for a while."""

    def __init__(self, url: str, place: int, rate: float, seed: int, source: Bytes, counts: Counts) -> None:
        self._random = Random(seed)
        self._keys = Keys("bench-storm", seed)
        self._place, self._rate, self._source, self._counts = place, rate, source, counts
        self._targets = [np.empty(SIZES[-1], np.uint8) for _ in range(BATCH)]
        self._stored: deque[list[tuple[bytes, int]]] = deque(maxlen=16)
        self._views: deque[moonpool.Views] = deque()
        # Its accesses are few: faulting the whole pool in for each of many clients would be the storm itself.
        self._client = moonpool.connect(url, name=f"storm {place}", copy_threads=1, prefault=False)
        counts.ready[place] = 1

    def run(self) -> None:
        """Until killed, or until the parent is gone."""
        due, parent = time.monotonic(), os.getppid()
        while os.getppid() == parent:
            due += self._random.expovariate(self._rate)
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                self._once()
            except MoonpoolError:
                time.sleep(RECONNECT_S)
            self._counts.batches[self._place] += 1

    def _once(self) -> None:
        batch = [(key, self._random.choice(SIZES)) for key in self._keys.take(BATCH)]
        self._client.put_many([key for key, _ in batch], [self._value(key, size) for key, size in batch])
        self._stored.append(batch)
        earlier = self._random.choice(self._stored)
        statuses = self._client.get_many_into([key for key, _ in earlier], self._targets)
        for (key, size), status, target in zip(earlier, statuses, self._targets, strict=True):
            if status is Status.OK and not np.array_equal(target[:size], self._value(key, size)):
                self._counts.wrong[self._place] += 1
        self._views.append(self._client.view_many([key for key, _ in self._random.choice(self._stored)]))
        if len(self._views) > VIEWS_HELD:
            self._views.popleft().close()

    def _value(self, key: bytes, size: int) -> Bytes:
        start = int.from_bytes(key[-4:], "little") % (SOURCE_BYTES - SIZES[-1])
        return self._source[start : start + size]


class Herd:
    """The parent: forks clients, kills one now and then, and reaps them all at the end."""

    def __init__(self, url: str, clients: int, rate: float, seed: int) -> None:
        self._url, self._clients, self._rate = url, clients, rate
        self._random = Random(seed)
        self._source = np.frombuffer(Random(seed).randbytes(SOURCE_BYTES), np.uint8)
        self._counts = Counts(clients)
        self._pids = [self._fork(place) for place in range(clients)]

    def run(self) -> dict[str, int]:
        """Until standard input ends; returns what happened."""
        killed = 0
        try:
            while not all(self._counts.ready):
                time.sleep(0.05)
            self._counts.batches[:] = 0
            print("ready", flush=True)
            while not select.select([sys.stdin], [], [], KILL_INTERVAL_S)[0]:
                place = self._random.randrange(self._clients)
                self._end(place)
                self._pids[place] = self._fork(place)
                killed += 1
        finally:
            for place in range(self._clients):
                self._end(place)
        return {"killed": killed, "batches": int(self._counts.batches.sum()), "wrong": int(self._counts.wrong.sum())}

    def _fork(self, place: int) -> int:
        seed = self._random.getrandbits(64)
        pid = os.fork()
        if pid:
            return pid
        try:
            Client(self._url, place, self._rate / self._clients, seed, self._source, self._counts).run()
        finally:
            os._exit(1)

    def _end(self, place: int) -> None:
        os.kill(self._pids[place], signal.SIGKILL)
        os.waitpid(self._pids[place], 0)


def leave_first_core() -> None:
    """Keep this process, and what it forks, off the first core: there the prober asks, so that its tail is the store's
    and not the time that a core takes to change hands."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])


def main(arguments: list[str]) -> None:
    """Run the clients that the arguments describe."""
    url, clients, rate, seed = arguments
    leave_first_core()
    print(json.dumps(Herd(url, int(clients), float(rate), int(seed)).run()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
