"""One round trip: acquire one present key, its release pipelined; alone, and beside everything that a node does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter

import moonpool
from moonpool.bench.keys import Keys
from moonpool.bench.node import line_of, worker
from moonpool.errors import MoonpoolError
from moonpool.wire import messages as m

PROBE_INTERVAL_S = 0.001
"""A loaded probe asks a thousand times a second, far more often than an engine's scheduler: back to back it would
take a core of its own, and measure how the system shares cores."""
BULK_CLIENTS = 2
SCRAPE_INTERVAL_S = 1.0
SETTLE_S = 1.5


class Probe:
    """Asks for one small hard-pinned object, over and over."""

    def __init__(self, client: moonpool.Client, name: str) -> None:
        self.client = client
        (self.key,) = Keys(name, 1).take(1)
        client.put(self.key, b"\x5a" * 4096, pin="hard")

    def once(self) -> float:
        """Seconds from asking to having the pinned extent; the release goes out afterwards, unwaited for."""
        link = self.client.link
        begun = perf_counter()
        _, grant = link.exchange(m.Acquire(0, [self.key], False))
        taken = perf_counter() - begun
        link.give_back(grant)
        return taken

    def sample(self, count: int, interval_s: float = 0.0) -> list[float]:
        """`count` samples, `interval_s` between the end of one and the start of the next."""
        samples = []
        for _ in range(count):
            samples.append(self.once())
            if interval_s:
                time.sleep(interval_s)
        return samples

    def close(self) -> None:
        self.client.remove(self.key, force=True)


@contextmanager
def load(url: str, metrics_url: str | None, pool_bytes: int) -> Iterator[None]:
    """Two clients that put and get 2 MB objects without a pause, and a scrape of the metrics a second."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker("bulk", url, str(pool_bytes // 8))) for _ in range(BULK_CLIENTS)]
        if metrics_url is not None:
            workers.append(stack.enter_context(worker("scrape", metrics_url, str(SCRAPE_INTERVAL_S))))
        for process in workers:
            line_of(process)
        time.sleep(SETTLE_S)
        yield
        for process in workers:
            if process.poll() is not None:
                raise MoonpoolError("a process of the load ended early; what it said stands above")
        for process in workers:  # they remove what they have put, then end
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
            process.wait(30)
