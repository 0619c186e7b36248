"""The checksum process: reads the pool at low priority, within a share of one core. Started by the node."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import xxhash

from moonpool.folder.mapping import Mapping
from moonpool.node.checksums import JOB, RESULT
from moonpool.node.scheduling import run_last

CHUNK_BYTES = 8 << 20
"""Hashed between two naps: 0.6 ms at 13 GB/s, so that the CPU share holds over short times too."""


def work(connection: socket.socket, pool: Mapping, share: float) -> None:
    """The process's loop: read jobs, hash, answer; ends at the connection's end. `share` is of one core."""
    run_last()
    pending = bytearray()
    while True:
        data = connection.recv(1 << 16)
        if not data:
            return
        pending += data
        whole = len(pending) // JOB.size * JOB.size
        jobs = sorted(JOB.iter_unpack(bytes(pending[:whole])), key=lambda job: not job[4])
        del pending[:whole]
        for slot, generation, offset, size, urgent in jobs:
            hasher = xxhash.xxh3_64()
            for start in range(offset, offset + size, CHUNK_BYTES):
                begun = time.perf_counter()
                hasher.update(pool.view[start : min(start + CHUNK_BYTES, offset + size)])
                if not urgent and share < 1:
                    time.sleep((time.perf_counter() - begun) * (1 / share - 1))
            connection.sendall(RESULT.pack(slot, generation, hasher.intdigest() or 1))


def main() -> None:
    """`python -m moonpool.node.checksum_process FD POOL SHARE`, started by the node."""
    fd, path, share = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    try:
        work(socket.socket(fileno=fd), Mapping.open(path, writable=False), share)
    except (ConnectionError, KeyboardInterrupt):
        pass


if __name__ == "__main__":
    main()
