"""What the calls of a `Space` cost, with a million objects in it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import numpy as np

from moonpool.node.space import GRANULE_BYTES, Space

OBJECTS = 1_000_000
SAMPLE = 200_000
LARGE_BYTES = 300 << 20


def measure(seed: int) -> dict[str, float]:
    """Nanoseconds a call, the loop's own included, and how long the steps of a large reservation take."""
    rng = random.Random(seed)
    space = Space(OBJECTS * GRANULE_BYTES, OBJECTS + SAMPLE)
    space.grow(OBJECTS * GRANULE_BYTES)
    sample = rng.sample(range(OBJECTS), SAMPLE)
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[int], object], slots: Iterable[int], count: int) -> None:
        began = time.perf_counter()
        for slot in slots:
            call(slot)
        found[name] = round((time.perf_counter() - began) / count * 1e9)

    def allocate(slot: int) -> None:
        space.allocate(slot, GRANULE_BYTES)

    timed("allocate_fresh_ns", allocate, range(OBJECTS), OBJECTS)
    timed("touch_in_order_ns", space.touch, range(SAMPLE), SAMPLE)
    timed("touch_random_ns", space.touch, sample, SAMPLE)
    timed("free_random_ns", space.free, sample, SAMPLE)
    timed("allocate_scattered_ns", allocate, sample, SAMPLE)
    unused = list(range(OBJECTS, OBJECTS + SAMPLE))

    def make_room(slot: int) -> None:
        for _ in space.make_room(slot, GRANULE_BYTES, unused.append):
            pass

    timed("make_room_4KiB_ns", make_room, range(OBJECTS, OBJECTS + SAMPLE), SAMPLE)
    slots, rows = np.arange(OBJECTS), np.random.default_rng(seed)
    placed = Space(2 * OBJECTS * GRANULE_BYTES, OBJECTS + 1)
    placed.grow(2 * OBJECTS * GRANULE_BYTES)
    offsets = rows.permutation(2 * OBJECTS)[:OBJECTS] * GRANULE_BYTES
    last_used = time.monotonic() - 1 - rows.random(OBJECTS) * 1000
    began = time.perf_counter()
    placed.place_many(slots, offsets, np.full(OBJECTS, GRANULE_BYTES), last_used)
    found["place_million_ms"] = round((time.perf_counter() - began) * 1e3)
    began = time.perf_counter()
    placed.largest_available()
    found["largest_available_us"] = round((time.perf_counter() - began) * 1e6)
    steps = step_lengths(placed, OBJECTS)
    found["make_room_300MB_steps"] = len(steps)
    found["make_room_300MB_step_p50_us"] = round(float(np.percentile(steps, 50)) * 1e6)
    found["make_room_300MB_step_max_us"] = round(max(steps) * 1e6)
    return found


def step_lengths(space: Space, slot: int) -> list[float]:
    """How long each step takes to make room for 300 MB among objects of 4 KiB, in seconds."""
    steps = space.make_room(slot, LARGE_BYTES, lambda victim: None)
    lengths = []
    more = True
    while more:
        began = time.perf_counter()
        more = next(steps, "ended") is None
        lengths.append(time.perf_counter() - began)
    return lengths
