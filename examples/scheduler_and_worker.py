"""A scheduler asks once and holds what a request needs; workers load that, without asking what is there.

The model has two kinds of layers: full attention needs every block of the prefix, a sliding window the last two.
"""

from __future__ import annotations

import multiprocessing
import os

import moonpool
from moonpool import Group

BLOCK_BYTES = 64 << 10


def worker(hold: str) -> None:
    """Another process of the host, such as one rank of an engine."""
    with moonpool.connect(name="worker") as client, client.adopt(hold) as views:
        for array in views:
            assert array is not None  # held, so that it can't be gone
            assert len(array) == BLOCK_BYTES
        print(f"worker: {len(views)} blocks adopted")
        del array


def main() -> None:
    request = f"request-{os.getpid()}"
    full = [f"{request}/full/{number}" for number in range(6)]
    window = [f"{request}/window/{number}" for number in range(6)]
    with moonpool.connect(name="scheduler") as client:
        client.put_many(full, [bytes([number]) * BLOCK_BYTES for number in range(6)], wait_s=5)
        # Of the window's blocks only some are left: a prefix of 4 is the longest whose last two are there.
        client.put_many(window[2:4], [bytes([number]) * BLOCK_BYTES for number in range(2)], wait_s=5)

        match = client.match([Group(full), Group(window, rule="window", window=2)], hold=request)
        print(f"scheduler: {match.length} blocks of the prefix are there")
        assert match.hold is not None

        process = multiprocessing.get_context("spawn").Process(target=worker, args=(match.hold,))
        process.start()
        process.join()
        assert process.exitcode == 0
        client.release_hold(match.hold)
        client.remove_many(full + window[2:4])


if __name__ == "__main__":
    main()
