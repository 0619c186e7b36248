"""Objects that are written where they will lie: no buffer of one's own, no copy."""

from __future__ import annotations

import os

import numpy as np

import moonpool

BLOCK_BYTES = 2 << 20


def main() -> None:
    keys = [f"fill-in-place/{os.getpid()}/{number}" for number in range(4)]
    with moonpool.connect(name="fill-in-place") as client:
        # The extents are this client's until the context ends: then all are committed, or aborted on an exception.
        with client.reserve_many(keys, [BLOCK_BYTES] * 4, ttl_s=600, metadata=b"layer 0", wait_s=5) as reservations:
            for number, reservation in enumerate(reservations):
                if reservation.buffer is None:
                    print(f"{keys[number]}: {reservation.status.name} {reservation.detail}")
                else:
                    reservation.buffer.view(np.float32)[:] = number
        print("stored:", [status.name for status in reservations.statuses])

        with client.view_many(keys) as views:
            print("sums:", [None if array is None else float(array.view(np.float32).sum()) for array in views])
        del views

        found = client.stat(keys[0])
        if found is not None:
            print(f"{found.size} bytes by {found.writer}, {found.metadata.decode()}, {found.pins} readers")
        client.remove_many(keys)


if __name__ == "__main__":
    main()
