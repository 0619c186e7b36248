"""`python -m moonpool.sim`: replays generated traces through allocation and eviction, beside an ideal LRU."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moonpool.sim.calls import measure
from moonpool.sim.replay import Replay, replay_ideal
from moonpool.sim.trace import SIZES, TRACES
from moonpool.sizes import parse_bytes

PROGRESS_OPERATIONS = 20_000


def simulate(name: str, operations: int, pool_bytes: int, seed: int) -> dict[str, float]:
    """Replay one trace; the figures that the project promises, and those behind them."""
    trace = TRACES[name](operations, seed)
    ideal = replay_ideal(trace, pool_bytes)
    replay = Replay(trace, pool_bytes)
    began = time.perf_counter()
    for done in replay.steps(PROGRESS_OPERATIONS):
        if sys.stderr.isatty():
            print(f"\r{name}: {done:,} of {operations:,} operations", end="", file=sys.stderr, flush=True)
    took_s = time.perf_counter() - began
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return {
        "hit_rate": round(replay.found.rate, 4),
        "hit_rate_ideal": round(ideal.rate, 4),
        "hit_rate_ratio": round(replay.found.rate / ideal.rate, 4),
        "byte_hit_rate_ratio": round(replay.found.byte_rate / ideal.byte_rate, 4),
        "live_share_at_eviction": round(replay.live_share, 4),
        "evicted_per_needed_p50": round(replay.evicted_percentile(50), 4),
        "evicted_per_needed_p99": round(replay.evicted_percentile(99), 4),
        "evicting_reservations": len(replay.evicted_per_needed),
        "evicted_objects": replay.evicted_objects,
        "refused": replay.refused,
        "replay_s": round(took_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moonpool.sim",
        description=f"{__doc__} Writes JSON.",
        epilog="example: python -m moonpool.sim --operations 100000 --trace even-counts",
    )
    parser.add_argument("--operations", type=int, default=1_000_000, help="operations of each trace (1,000,000)")
    parser.add_argument("--trace", action="append", choices=sorted(TRACES), help="which traces (all)")
    parser.add_argument("--pool", default=str(32 * SIZES[-1]), help='size of the pool ("9600MiB", 32 x the largest)')
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", action="store_true", help="measure the time of single calls too")
    parser.add_argument("--json", type=Path, help="where to write the result, besides standard output")
    options = parser.parse_args(arguments)
    pool_bytes = parse_bytes(options.pool)
    result: dict[str, object] = {
        "command": " ".join(["python -m moonpool.sim", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "operations": options.operations,
        "pool_bytes": pool_bytes,
        "seed": options.seed,
    }
    for name in options.trace or TRACES:
        result[name] = simulate(name, options.operations, pool_bytes, options.seed)
    if options.calls:
        result["calls"] = measure(options.seed)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
