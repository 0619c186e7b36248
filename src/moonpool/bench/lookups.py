"""A table of a million objects: filled, read, asked, and found again by a node that starts anew over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from time import perf_counter

import moonpool
from moonpool.bench.copies import expect_ok
from moonpool.bench.figures import median_us, tidy
from moonpool.bench.keys import Keys
from moonpool.bench.node import OwnNode
from moonpool.errors import MoonpoolError

SMALL_BYTES = 4096
SMALL_BATCH = 32
FEW, MANY = 40, 625
"""Keys of a short lookup, and those of a prompt of 10,000 tokens in blocks of 16."""


@dataclass(slots=True)
class Small:
    """A table full of 4 KiB objects, and what filling and reading it told."""

    keys: list[bytes]
    put_per_s: float
    get_per_s: float
    exists_us: dict[str, float] = field(default_factory=dict)


def value_of(key: bytes) -> bytes:
    """The 4 KiB that stand under `key`: another key's are other ones."""
    return key[-32:] * (SMALL_BYTES // 32)


def small_rates(client: moonpool.Client, batches: int, random: Random) -> tuple[float, float]:
    """4 KiB objects put and got a second, in batches of 32, one after the other without a pause.

    All keys, values and targets are made before, and what came back is compared afterwards, so that the time is the
    store's alone. Gets go through the batches in random order. The objects are removed at the end.
    """
    ours = Keys("bench-rates", random.getrandbits(64))
    parts = [ours.take(SMALL_BATCH) for _ in range(batches)]
    values = [[value_of(key) for key in part] for part in parts]
    targets = [[bytearray(SMALL_BYTES) for _ in part] for part in parts]
    begun = perf_counter()
    put = [client.put_many(part, own) for part, own in zip(parts, values, strict=True)]
    put_s = perf_counter() - begun
    order = random.sample(range(batches), batches)
    begun = perf_counter()
    got = [client.get_many_into(parts[at], targets[at]) for at in order]
    get_s = perf_counter() - begun
    for statuses in (*put, *got):
        expect_ok(statuses, "put or get")
    if values != targets:
        raise MoonpoolError("a small object came back with other bytes than were put: a bug, please report")
    for part in parts:
        client.remove_many(part)
    return tidy(batches * SMALL_BATCH / put_s), tidy(batches * SMALL_BATCH / get_s)


def fill_and_read(client: moonpool.Client, count: int, gets: int, tell: Callable[[int], None], random: Random) -> Small:
    """Put `count` objects of 4 KiB in batches of 32, then get `gets` of them at random, verified. Rates are of all
    batches together; making keys and values and verifying is left out of the time."""
    ours = Keys("bench-small", random.getrandbits(64))
    keys: list[bytes] = []
    taken_s = 0.0
    while len(keys) < count:
        part = ours.take(min(SMALL_BATCH, count - len(keys)))
        values = [value_of(key) for key in part]
        begun = perf_counter()
        statuses = client.put_many(part, values)
        taken_s += perf_counter() - begun
        expect_ok(statuses, "put")
        keys += part
        if len(keys) % (SMALL_BATCH * 256) == 0:
            tell(SMALL_BATCH * 256)
    put_per_s = count / taken_s
    targets = [bytearray(SMALL_BYTES) for _ in range(SMALL_BATCH)]
    taken_s, read = 0.0, 0
    while read < gets:
        part = random.sample(keys, SMALL_BATCH)
        begun = perf_counter()
        statuses = client.get_many_into(part, targets)
        taken_s += perf_counter() - begun
        expect_ok(statuses, "get")
        if any(target != value_of(key) for target, key in zip(targets, part, strict=True)):
            raise MoonpoolError("a small object came back with other bytes than were put: a bug, please report")
        read += SMALL_BATCH
    return Small(keys, tidy(put_per_s), tidy(read / taken_s))


def exists(client: moonpool.Client, keys: list[bytes], repeats: int, random: Random) -> dict[str, float]:
    """Microseconds of `exists`, medians of `repeats` calls: one key, 40 and 625 that were not asked for of late, and
    the same 625 again."""
    one: list[float] = []
    few: list[float] = []
    many: list[float] = []
    again: list[float] = []
    for _ in range(repeats):
        key = random.choice(keys)
        begun = perf_counter()
        found = client.exists(key)
        one.append(perf_counter() - begun)
        some, prompt = random.sample(keys, FEW), random.sample(keys, MANY)
        for part, samples in ((some, few), (prompt, many), (prompt, again)):
            begun = perf_counter()
            there = client.exists_many(part)
            samples.append(perf_counter() - begun)
            found = found and all(there)
        if not found:
            raise MoonpoolError("exists missed an object that was put: the pool is too small, or this is a bug")
    return {
        "1": median_us(one),
        f"{FEW}_new": median_us(few),
        f"{MANY}_new": median_us(many),
        f"{MANY}_again": median_us(again),
    }


def absent(client: moonpool.Client, repeats: int) -> int:
    """How many of `repeats` keys that were never put `exists` claims to be there: a table that says yes to all would
    be quick too."""
    return sum(client.exists_many(Keys("bench-absent", 9).take(repeats)))


def restart(node: OwnNode, key: bytes, expected: bytes) -> float:
    """Kill the node with -9 and start it again; seconds until it serves. Raises `MoonpoolError` where the object
    under `key` is lost."""
    node.kill()
    taken_s = node.start()
    with moonpool.connect(node.url, prefault=False) as client:
        if client.get(key) != expected:
            raise MoonpoolError("an object was lost over the restart: a bug, please report")
    return taken_s
