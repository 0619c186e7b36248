"""The bars: what the project holds its own figures to, as data beside the way to read them from a result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `limit` None: a figure without a bar."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def bar(self) -> str:
        """The bar as text."""
        if self.limit is None:
            return ""
        return f"{'≥' if self.at_least else '≤'} {number(self.limit)}"


def number(value: float) -> str:
    """A figure for people: thousands grouped, three digits that matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


GET_RATIO = {"2MB": 0.90, "16MB": 0.95, "32MB": 0.95}
PUT_RATIO = {"2MB": 0.85, "16MB": 0.92, "32MB": 0.92}
FIRST_RATIO = 0.7
PEER_RATIO = 6.0
STORM_FACTOR, STORM_MAX_US, STEP_MAX_US = 10.0, 5000.0, 2000.0


def local_rows(result: Result) -> Iterator[Row]:
    """The lines of `bench local`; those whose figures the result lacks are left out."""
    memcpy = result["memcpy_gbps"]
    for size, rate in memcpy.items():
        yield Row(f"numpy.copyto, {size}", rate, "GB/s")
    for name, bars in (("get_into", GET_RATIO), ("put", PUT_RATIO)):
        for size, rate in result[f"{name}_gbps"].items():
            yield Row(f"{name}, {size}", rate, "GB/s")
            yield Row(f"{name} / copyto, {size}", rate / memcpy[size], "", bars.get(size), at_least=True)
    for short, name in (("get", "get_into"), ("put", "put")):
        for size, rate in result[f"{short}_first_gbps"].items():
            ratio = rate / result[f"{short}_second_gbps"][size]
            yield Row(f"{name}, first pass / second, {size}", ratio, "", FIRST_RATIO, at_least=True)
    yield from _views(result)
    yield Row("round trip p50, idle", result["roundtrip_us"]["p50"], "µs", 50)
    yield Row("round trip p99, idle", result["roundtrip_us"]["p99"], "µs")
    yield Row("round trip p50, loaded", result["roundtrip_loaded_us"]["p50"], "µs")
    yield Row("round trip p99, loaded", result["roundtrip_loaded_us"]["p99"], "µs", 2000)
    for name, limit in (("1", 5), ("40_new", 30), ("625_new", 250), ("625_again", 80)):
        yield Row(f"exists, {name.replace('_', ' ')}", result["exists_us"][name], "µs", limit)
    yield Row("4 KiB puts, batches of 32", result["small_put_per_s"], "/s", 90_000, at_least=True)
    yield Row("4 KiB gets, batches of 32", result["small_get_per_s"], "/s", 200_000, at_least=True)
    yield Row("4 KiB puts until the table is full", result["table_put_per_s"], "/s")
    yield Row("4 KiB gets at random from a full table", result["table_get_per_s"], "/s")
    if "node_heap_bytes_per_object" in result:
        yield Row("node heap an object", result["node_heap_bytes_per_object"], "B", 500)
    for label, seconds in result.get("restart_s", {}).items():
        yield Row(f"restart, {label.replace('_', ' ')}", seconds, "s", 2 if "GB" in label else 10)
    if "mooncake" in result:
        yield from _beside(result, result["mooncake"])


def _views(result: Result) -> Iterator[Row]:
    for batch, taken in result["view_us"].items():
        yield Row(f"view, {batch}", taken, "µs")
    for name, taken in result.items():
        if name.startswith("view_us_"):
            yield Row(f"view, {name.removeprefix('view_us_')}", taken, "µs", 300)


def _beside(result: Result, peer: Result) -> Iterator[Row]:
    for name in ("get_into", "put"):
        for size, rate in peer.get(f"{name}_gbps", {}).items():
            ours = result[f"{name}_gbps"].get(size)
            if ours is not None:
                yield Row(f"{name} / Mooncake's, {size}", ours / rate, "×", PEER_RATIO, at_least=True)
    theirs = peer.get("exists_us", {}).get("625_new")
    if theirs is not None:
        yield Row("exists of 625 new / Mooncake's", result["exists_us"]["625_new"] / theirs, "×", 0.5)


def storm_rows(result: Result) -> Iterator[Row]:
    """The lines of `bench storm`."""
    yield Row("clients", result["clients"], "")
    yield Row("batches put and got", result["batches_per_s"], "/s")
    yield Row("evicted", result["evicted_per_s"], "/s")
    yield Row("killed and replaced", result["killed"], "")
    for name in ("exists", "match", "acquire"):
        idle, storm = result[f"{name}_us"]["idle"], result[f"{name}_us"]["storm"]
        limit = min(STORM_FACTOR * idle["p50"], STORM_MAX_US)
        yield Row(f"{name} p50, idle", idle["p50"], "µs")
        yield Row(f"{name} p50, storm", storm["p50"], "µs")
        yield Row(f"{name} p99, storm", storm["p99"], "µs")
        yield Row(f"{name} p99.9, storm", storm["p999"], "µs", limit)
        yield Row(f"{name} max, storm", storm["max"], "µs")
    yield Row("longest loop step", result["loop_step_max_us"], "µs", STEP_MAX_US)
    if "loop_steps_over_2ms" in result:
        yield Row("loop steps", result["loop_steps"], "")
        yield Row("loop steps over 2 ms", result["loop_steps_over_2ms"], "", 0)
    for name in ("pins", "reservations", "quarantined_bytes"):
        yield Row(f"{name.replace('_', ' ')} left", result["left"][name], "", 0)


def memcpy_rows(result: Result) -> Iterator[Row]:
    """The lines of `bench memcpy`."""
    for kind in ("heap_to_heap", "heap_to_pool", "pool_to_heap"):
        streaming = result.get(f"{kind}_streaming_gbps", {})
        for size, rate in result[f"{kind}_gbps"].items():
            yield Row(f"{kind.replace('_', ' ')}, {size}", rate, "GB/s")
            if size in streaming:
                yield Row(f"{kind.replace('_', ' ')}, streaming, {size}", streaming[size], "GB/s")


def threads_rows(result: Result) -> Iterator[Row]:
    """The lines of `bench threads`."""
    for count, memcpy in result["memcpy_gbps"].items():
        yield Row(f"numpy.copyto, {count} clients", memcpy, "GB/s")
        for name in ("get_into", "put"):
            rate = result[f"{name}_gbps"][count]
            yield Row(f"{name}, {count} clients", rate, "GB/s")
            yield Row(f"{name} / copyto, {count} clients", rate / memcpy, "")
