"""`moonpool bench memcpy`: what copies cost by size, between the heap and the pool: numpy's, and the streaming one."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

import moonpool
from moonpool.bench.copies import expect_ok
from moonpool.bench.figures import gbps, size_label
from moonpool.bench.keys import Keys
from moonpool.bench.local import Progress
from moonpool.bench.node import wait_until_settled
from moonpool.bench.slices import Bytes
from moonpool.client.streaming import choose

SIZES = tuple(4096 << 2 * step for step in range(9))  # 4 KiB to 256 MiB
SAMPLES_MAX = 300
KINDS = ("heap_to_heap", "heap_to_pool", "pool_to_heap")


def measure(url: str, arena_bytes: int, sizes: tuple[int, ...], progress: Progress) -> dict[str, Any]:
    """GB/s of one `numpy.copyto` by size: the median of copies on slices of arenas of `arena_bytes`, walked in turn.
    The same of one native streaming copy, where that is what clients use; "copy" says which it is.

    The pool's two arenas are one extent that is being filled and one that is viewed, each of `arena_bytes`.
    """
    chosen = choose().copy
    copies: dict[str, Callable[[Bytes, Bytes], None]] = {"": np.copyto}
    if chosen.name == "native":
        copies["_streaming"] = chosen
    result: dict[str, Any] = {"copy": chosen.name}
    result |= {f"{kind}{suffix}_gbps": {} for suffix in copies for kind in KINDS}
    source, target = np.full(arena_bytes, 1, np.uint8), np.full(arena_bytes, 2, np.uint8)
    written, read = Keys("bench-memcpy", 13).take(2)
    with moonpool.connect(url, name="bench memcpy", copy_threads=1) as client:
        with progress("faulting the pool in", None):
            wait_until_settled(client, checksums=False)
        expect_ok(client.put_many([read], [source]), "put")
        wait_until_settled(client)
        with client.reserve_many([written], [arena_bytes]) as reservations, client.view(read) as views:
            pool_target, pool_source = reservations[0].buffer, views[0]
            expect_ok(reservations.statuses, "reserve")
            assert pool_target is not None
            assert pool_source is not None
            pairs: dict[str, tuple[Bytes, Bytes]] = {
                "heap_to_heap": (target, source),
                "heap_to_pool": (pool_target, source),
                "pool_to_heap": (target, pool_source),
            }
            with progress("copies by size", len(sizes)) as tell:
                for size in sizes:
                    for suffix, copy in copies.items():
                        for kind, samples in _copy_in_turn(pairs, copy, size, arena_bytes).items():
                            result[f"{kind}{suffix}_gbps"][size_label(size)] = gbps(size, samples)
                    tell(1)
            reservations[0].abort()
        client.remove(read)
    return result


def _copy_in_turn(
    pairs: dict[str, tuple[Bytes, Bytes]], copy: Callable[[Bytes, Bytes], None], size_bytes: int, arena_bytes: int
) -> dict[str, list[float]]:
    """All kinds in turn, each at a third of the arena's distance from the others, over slices spread evenly.

    One copy alone at a time: what it leaves in the caches to be written back, the copies after it pay for.
    """
    count = arena_bytes // size_bytes
    samples: dict[str, list[float]] = {kind: [] for kind in pairs}
    steps = min(max(count, 2 * len(pairs)), SAMPLES_MAX)
    stride = max(1, count // steps)
    for step in range(steps):
        for number, (kind, (target, source)) in enumerate(pairs.items()):
            start = (step * stride + number * count // len(pairs)) % count * size_bytes
            begun = perf_counter()
            copy(target[start : start + size_bytes], source[start : start + size_bytes])
            samples[kind].append(perf_counter() - begun)
    return samples
