"""Results as charts; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moonpool.bench.bars import number

Result = dict[str, Any]
COLOURS = ("#8a8f98", "#1f6f8b", "#e07a3f", "#5aa469", "#a23b72")


def draw(kind: str, result: Result, path: Path) -> None:
    """Draw the chart of one kind of bench ("local", "memcpy", "threads" or "storm") into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    charts: dict[str, Callable[[Any, Result], Any]] = {
        "local": _local, "memcpy": _memcpy, "threads": _threads, "storm": _storm,
    }  # fmt: skip
    figure = charts[kind](pyplot, result)
    machine = result["machine"]
    figure.suptitle(f"moonpool bench {kind} · {machine['cpu']}, {machine['cores']} cores", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _local(pyplot: Any, result: Result) -> Any:
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    series = {
        "numpy.copyto": result["memcpy_gbps"],
        "get_into": result["get_into_gbps"],
        "put": result["put_gbps"],
        "get_into, first pass": result["get_first_gbps"],
        "put, first pass": result["put_first_gbps"],
    }
    peer = result.get("mooncake", {})
    if peer:
        series |= {"Mooncake get": peer.get("get_into_gbps", {}), "Mooncake put": peer.get("put_gbps", {})}
    _bars(rates, list(result["memcpy_gbps"]), series)
    rates.set_ylabel("GB/s")
    rates.set_title(f"copies in batches of 16, {result['threads']} thread(s)", fontsize=10)
    lookups = {f"exists {name.replace('_', ' ')}": taken for name, taken in result["exists_us"].items()}
    lookups["round trip p50"] = result["roundtrip_us"]["p50"]
    lookups["round trip p99"] = result["roundtrip_us"]["p99"]
    lookups["loaded p99"] = result["roundtrip_loaded_us"]["p99"]
    if peer.get("exists_us"):
        lookups["Mooncake exists 1"] = peer["exists_us"]["1"]
        lookups["Mooncake exists 625 new"] = peer["exists_us"]["625_new"]
    _horizontal(times, lookups)
    return figure


def _memcpy(pyplot: Any, result: Result) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for colour, kind in zip(COLOURS, ("heap_to_heap", "heap_to_pool", "pool_to_heap"), strict=False):
        rates = result[f"{kind}_gbps"]
        axes.plot(list(rates), list(rates.values()), marker="o", color=colour, label=kind.replace("_", " "))
        if streamed := result.get(f"{kind}_streaming_gbps"):
            label = f"{kind.replace('_', ' ')}, streaming"
            axes.plot(list(streamed), list(streamed.values()), marker="s", linestyle="--", color=colour, label=label)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", rotation=45)
    axes.legend(fontsize=8)
    return figure


def _threads(pyplot: Any, result: Result) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for colour, name in zip(COLOURS, ("memcpy", "get_into", "put"), strict=False):
        rates = result[f"{name}_gbps"]
        axes.plot(list(rates), list(rates.values()), marker="o", color=colour, label=name)
    axes.set_xlabel("client processes")
    axes.set_ylabel("GB/s, all together")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def _storm(pyplot: Any, result: Result) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    names = ("exists", "match", "acquire")
    series = {
        f"{quantile}, {when}": {name: result[f"{name}_us"][when][quantile] for name in names}
        for when in ("idle", "storm")
        for quantile in ("p50", "p999")
    }
    _bars(axes, list(names), series)
    axes.set_yscale("log")
    axes.set_ylabel("µs")
    return figure


def _bars(axes: Any, groups: list[str], series: dict[str, dict[str, float]]) -> None:
    width = 0.8 / len(series)
    palette = (*COLOURS, "#c9b458", "#6b4c9a")
    for place, (name, values) in enumerate(series.items()):
        places = [i + width * (place - (len(series) - 1) / 2) for i in range(len(groups))]
        heights = [values.get(group, 0.0) for group in groups]
        axes.bar(places, heights, width, label=name, color=palette[place % len(palette)])
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)


def _horizontal(axes: Any, values: dict[str, float]) -> None:
    names = list(values)[::-1]
    drawn = axes.barh(names, [values[name] for name in names], color=COLOURS[1])
    axes.bar_label(drawn, [number(values[name]) for name in names], fontsize=7, padding=2)
    axes.margins(x=0.15)
    axes.set_xscale("log")
    axes.set_xlabel("µs")
    axes.tick_params(axis="y", labelsize=8)
