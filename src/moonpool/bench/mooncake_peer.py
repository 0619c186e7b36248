"""Runs under the peer's interpreter, as a script: nothing but numpy, the standard library and Mooncake is imported.

`provide PORT PLAN` lends memory to the store until standard input ends; `measure PORT PLAN` reads and writes over it
from a process without memory of its own in the store, and prints figures under Moonpool's names.
"""

from __future__ import annotations

import json
import os
import random
import sys
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

BATCH, SMALL_BATCH, SMALL_BYTES = 16, 32, 4096
LOCAL_BUFFER_BYTES = 64 << 20


def main(arguments: list[str]) -> None:
    """Play the part that the arguments name."""
    part, port, plan = arguments[0], int(arguments[1]), json.loads(arguments[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not stand between our lines
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    segment = plan["segment_bytes"] if part == "provide" else 0
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, LOCAL_BUFFER_BYTES, "tcp", "", f"127.0.0.1:{port}")
    if code:
        raise SystemExit(f"setup gave {code}")
    if part == "provide":
        print("ready", file=answers, flush=True)
        sys.stdin.read()
        return
    result = {}
    result.update(copies(store, plan))
    result.update(small(store, plan))
    print(json.dumps(result), file=answers, flush=True)


def copies(store: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """batch_put_from and batch_get_into of 16 objects in turn, from and to registered buffers; data verified."""
    total = plan["total_bytes"]
    source = np.random.default_rng(1).integers(0, 1 << 64, total // 8, np.uint64).view(np.uint8)
    target = np.full(total, 1, np.uint8)
    for array in (source, target):
        if store.register_buffer(array.ctypes.data, total):
            raise SystemExit("a buffer could not be registered")
    rates: dict[str, dict[str, float]] = {
        "put_gbps": {},
        "get_into_gbps": {},
        "put_first_gbps": {},
        "get_first_gbps": {},
    }
    for size in plan["sizes"]:
        label = f"{size >> 20}MB"
        passes: list[tuple[list[float], list[float]]] = []
        for number in range(plan["passes"]):
            puts: list[float] = []
            gets: list[float] = []
            passes.append((puts, gets))
            for start in range(0, total - BATCH * size + 1, BATCH * size):
                keys = [f"copy-{size}-{number}-{start + i * size}" for i in range(BATCH)]
                froms = [source.ctypes.data + start + i * size for i in range(BATCH)]
                intos = [target.ctypes.data + start + i * size for i in range(BATCH)]
                begun = perf_counter()
                codes = store.batch_put_from(keys, froms, [size] * BATCH)
                puts.append(perf_counter() - begun)
                if any(codes):
                    raise SystemExit(f"batch_put_from gave {codes}")
                begun = perf_counter()
                counts = store.batch_get_into(keys, intos, [size] * BATCH)
                gets.append(perf_counter() - begun)
                if counts != [size] * BATCH:
                    raise SystemExit(f"batch_get_into gave {counts}")
                end = start + BATCH * size
                if not np.array_equal(source[start:end], target[start:end]):
                    raise SystemExit("other bytes came back than were put")
                for key in keys:
                    store.remove(key, True)
        for at, (name, short) in enumerate((("put", "put"), ("get_into", "get"))):
            rates[f"{short}_first_gbps"][label] = BATCH * size * len(passes[0][at]) / sum(passes[0][at]) / 1e9
            rates[f"{name}_gbps"][label] = BATCH * size / median(passes[-1][at]) / 1e9
    return {name: {label: round(rate, 3) for label, rate in found.items()} for name, found in rates.items()}


def small(store: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """4 KiB objects in batches of 32, then lookups among them."""
    drawn = random.Random(1)
    keys = [drawn.randbytes(24).hex() for _ in range(plan["objects"])]  # 48 characters: its keys are text
    value = bytes(SMALL_BYTES)
    taken = 0.0
    for start in range(0, len(keys), SMALL_BATCH):
        part = keys[start : start + SMALL_BATCH]
        begun = perf_counter()
        code = store.put_batch(part, [value] * len(part))
        taken += perf_counter() - begun
        if code:
            raise SystemExit(f"put_batch gave {code}")
    put_per_s = len(keys) / taken
    buffer = np.ones(SMALL_BATCH * SMALL_BYTES, np.uint8)
    store.register_buffer(buffer.ctypes.data, buffer.nbytes)
    places = [buffer.ctypes.data + i * SMALL_BYTES for i in range(SMALL_BATCH)]
    taken, read = 0.0, 0
    while read < plan["small"]:
        part = drawn.sample(keys, SMALL_BATCH)
        begun = perf_counter()
        counts = store.batch_get_into(part, places, [SMALL_BYTES] * SMALL_BATCH)
        taken += perf_counter() - begun
        if counts != [SMALL_BYTES] * SMALL_BATCH:
            raise SystemExit(f"batch_get_into gave {counts}")
        read += SMALL_BATCH
    samples: dict[str, list[float]] = {"1": [], "40_new": [], "625_new": [], "625_again": []}
    for _ in range(min(plan["lookups"], 500)):
        key = drawn.choice(keys)
        begun = perf_counter()
        found = store.is_exist(key) == 1
        samples["1"].append(perf_counter() - begun)
        few, many = drawn.sample(keys, 40), drawn.sample(keys, 625)
        for name, part in (("40_new", few), ("625_new", many), ("625_again", many)):
            begun = perf_counter()
            codes = store.batch_is_exist(part)
            samples[name].append(perf_counter() - begun)
            found = found and all(code == 1 for code in codes)
        if not found:
            raise SystemExit("is_exist missed an object that was put")
    return {
        "objects": len(keys),
        "small_put_per_s": round(put_per_s),
        "small_get_per_s": round(read / taken),
        "exists_us": {name: round(median(taken) * 1e6, 1) for name, taken in samples.items()},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
