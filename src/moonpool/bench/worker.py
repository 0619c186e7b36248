"""Jobs that bench runs in fresh processes: `python -m moonpool.bench.worker JOB ARGUMENTS…`.

A worker prints one line when it is ready, works, and ends when its standard input does, or with one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from time import perf_counter
from typing import Any

import numpy as np

import moonpool
from moonpool.bench.copies import BATCH, expect_ok, verify
from moonpool.bench.keys import Keys
from moonpool.bench.slices import Ring, Traffic, checksum_of
from moonpool.errors import MoonpoolError

BULK_OBJECT_BYTES = 2 << 20


def first(url: str, size: str, total: str, threads: str) -> None:
    """The first pass over a fresh mapping: puts and gets of what this process has never touched, in turn; then a
    second one over the same, to hold it against.

    Reads from its standard input the keys (hex) and checksums of objects to get, writes seconds a batch.
    """
    size_bytes, traffic = int(size), Traffic()
    wanted = [(bytes.fromhex(key), int(checksum)) for key, checksum in json.loads(sys.stdin.readline())]
    source = Ring(traffic, int(total), size_bytes, 7)
    target = Ring(traffic, int(total), size_bytes, None)
    result: dict[str, list[float]] = {}
    with moonpool.connect(url, name="bench first pass", copy_threads=int(threads)) as client:
        client.wait_prefaulted()
        ours = Keys("bench-first", 7)
        for which in ("first", "second"):
            stored = []
            puts, gets = result.setdefault(f"put_{which}", []), result.setdefault(f"get_{which}", [])
            for start in range(0, len(wanted) - BATCH + 1, BATCH):
                keys, values = ours.take(BATCH), [source.piece(i) for i in source.take(BATCH)]
                begun = perf_counter()
                statuses = client.put_many(keys, values)
                puts.append(perf_counter() - begun)
                expect_ok(statuses, "put")
                stored += keys
                part = wanted[start : start + BATCH]
                targets = [target.piece(i) for i in target.take(BATCH)]
                asked = [key for key, _ in part]
                begun = perf_counter()
                statuses = client.get_many_into(asked, targets)
                gets.append(perf_counter() - begun)
                expect_ok(statuses, "get")
                verify([checksum_of(array) for array in targets], [checksum for _, checksum in part])
            client.remove_many(stored)  # the second pass is put where the first one was
    print(json.dumps(result), flush=True)


def bulk(url: str, most: str) -> None:
    """Put and get without a pause, keeping at most `most` bytes stored; each get is of what was put long before."""
    stopping = _until_input_ends()
    ring = Ring(Traffic(), 256 << 20, BULK_OBJECT_BYTES, 3)
    targets = [np.zeros(BULK_OBJECT_BYTES, np.uint8) for _ in range(BATCH)]
    keys = Keys("bench-bulk", time.time_ns())
    stored: list[list[bytes]] = []
    keep = max(2, int(most) // (BATCH * BULK_OBJECT_BYTES))
    with moonpool.connect(url, name="bench bulk", copy_threads=1) as client:
        client.wait_prefaulted()
        print("ready", flush=True)
        while not stopping.is_set():
            stored.append(keys.take(BATCH))
            client.put_many(stored[-1], [ring.piece(i) for i in ring.take(BATCH)])
            client.get_many_into(stored[0], targets)
            if len(stored) >= keep:
                client.remove_many(stored.pop(0))
        for left in stored:
            client.remove_many(left)


def scrape(metrics_url: str, interval: str) -> None:
    """Read the node's metrics now and then, as a monitor does."""
    stopping = _until_input_ends()
    urllib.request.urlopen(metrics_url, timeout=10).read()
    print("ready", flush=True)
    while not stopping.wait(float(interval)):
        urllib.request.urlopen(metrics_url, timeout=10).read()


def copies(url: str, duration: str) -> None:
    """One of several clients: for each line of its standard input (memcpy, put or get_into) it does just that for
    `duration` seconds, and prints GB/s."""
    size, seconds, traffic = BULK_OBJECT_BYTES, float(duration), Traffic()
    source, target = Ring(traffic, 512 << 20, size, 5), Ring(traffic, 512 << 20, size, None)
    keys = Keys("bench-thr", time.time_ns())
    with moonpool.connect(url, name="bench threads", copy_threads=1) as client:
        client.wait_prefaulted()
        stored: list[list[bytes]] = []

        def memcpy() -> None:
            for to, of in zip(target.take(BATCH), source.take(BATCH), strict=True):
                np.copyto(target.piece(to), source.piece(of))

        def put() -> None:
            stored.append(keys.take(BATCH))
            expect_ok(client.put_many(stored[-1], [source.piece(i) for i in source.take(BATCH)]), "put")

        def get_into() -> None:
            stored.append(stored.pop(0))
            expect_ok(client.get_many_into(stored[-1], [target.piece(i) for i in target.take(BATCH)]), "get")

        put()
        print("ready", flush=True)
        for name in map(str.strip, sys.stdin):
            work = {"memcpy": memcpy, "put": put, "get_into": get_into}[name]
            moved, taken, begun = 0, 0.0, perf_counter()
            while perf_counter() - begun < seconds:
                if name == "put" and len(stored) >= THREADS_BATCHES:
                    client.remove_many(stored.pop(0))
                started = perf_counter()
                work()
                taken += perf_counter() - started
                moved += BATCH * size
            print(moved / taken / 1e9, flush=True)
        for left in stored:
            client.remove_many(left)


THREADS_BATCHES = 12
"""Batches of 32 MB that each client of `bench threads` keeps stored."""


def _until_input_ends() -> threading.Event:
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    return ended


def main(arguments: list[str]) -> None:
    """Run the job that the arguments name."""
    jobs: dict[str, Any] = {job.__name__: job for job in (first, bulk, scrape, copies)}
    try:
        jobs[arguments[0]](*arguments[1:])
    except MoonpoolError as error:
        sys.exit(f"{arguments[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
