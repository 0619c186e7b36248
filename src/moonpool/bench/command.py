"""`moonpool bench`: the command line of the measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.bench.bars import Row, local_rows, memcpy_rows, storm_rows, threads_rows
from moonpool.bench.gpu import gpu
from moonpool.bench.machine import machine, own_arguments
from moonpool.errors import ConfigError

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Measure this machine: copies, round trips, lookups, a storm of clients.",
)

JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write the figures and the machine as JSON.")
]
PlotPath = Annotated[
    Path | None, typer.Option("--plot", metavar="PATH", help="Draw a chart, such as chart.png (needs matplotlib).")
]
NodeUrl = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="A node that runs already, unix:PATH. Default: one of the bench's own."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Try every stage with little data: seconds, and no figure to rely on.")
]


@app.command()
def memcpy(json: JsonPath = None, plot: PlotPath = None, url: NodeUrl = None, quick: Quick = False) -> None:
    """Copy between heap and pool with one thread, from 4 KiB to 256 MB.

    One copy at a time, all kinds in turn, on touched memory that no cache still has: numpy.copyto, then the native
    streaming copy where there is one. Takes 3 GB of memory and a pool of 3 GiB.

    Examples:
      moonpool bench memcpy
      moonpool bench memcpy --json memcpy.json --plot memcpy.png
      moonpool bench memcpy --url unix:/dev/shm/moonpool
    """
    from moonpool.bench.memcpy import SIZES, measure
    from moonpool.bench.output import progress

    with _prepared(json, plot) as stack:
        arena_bytes = (64 << 20) if quick else (1280 << 20)
        sizes = tuple(size for size in SIZES if size <= arena_bytes // 4)
        node_url, _ = _node(stack, url, 2 * arena_bytes + (64 << 20))
        result = measure(node_url, arena_bytes, sizes, progress)
    _report("memcpy", result, memcpy_rows, json, plot)


@app.command()
def local(
    threads: Annotated[
        int, typer.Option("--threads", min=1, metavar="COUNT", help="Copying threads, of the client and of copyto.")
    ] = 1,
    peer: Annotated[
        str | None, typer.Option("--peer", metavar="NAME", help="Measure another store beside it: mooncake.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option("--peer-python", metavar="PATH", help="The interpreter that has the peer installed.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="NUMBER", help="Of data, keys and order.")] = 1,
    json: JsonPath = None,
    plot: PlotPath = None,
    url: NodeUrl = None,
    quick: Quick = False,
) -> None:
    """Measure all of one host's figures in one run, its data verified, beside their bars.

    put, get_into, view and numpy.copyto in turn for 2, 16 and 32 MB objects in batches of 16, on memory unused for
    1 GB of traffic; the first pass of a fresh process; round trips alone and under load; exists, small objects,
    memory and restart with 1,000,000 objects. A node of the bench's own is also killed and started again. Takes some
    two minutes, 10 GB of memory, and 15 GB where the restart over 10 GB is to be measured.

    Examples:
      moonpool bench local
      moonpool bench local --threads 4 --json local.json --plot local.png
      moonpool bench local --peer mooncake --peer-python /opt/mooncake/bin/python
      moonpool bench local --url unix:/dev/shm/moonpool
    """
    from moonpool.bench import local as stages
    from moonpool.bench.copies import Plan
    from moonpool.bench.output import progress

    _check_peer(peer, peer_python)
    with _prepared(json, plot):
        scale = stages.quick(threads) if quick else stages.Scale(plan=Plan(threads=threads))
        result = stages.Local(scale, url, seed, progress).run()
        if peer_python is not None:
            from moonpool.bench.mooncake import measure

            result["mooncake"] = measure(peer_python, scale, progress)
    _report("local", result, local_rows, json, plot)


@app.command()
def threads(
    most: Annotated[
        int | None, typer.Option("--max", min=1, metavar="COUNT", help="Up to so many clients. Default: the cores.")
    ] = None,
    json: JsonPath = None,
    plot: PlotPath = None,
    url: NodeUrl = None,
    quick: Quick = False,
) -> None:
    """Copy with 1 to N client processes at once, 2 MB objects in batches of 16.

    Beside numpy.copyto in as many processes. Takes 1.5 GB of memory a client.

    Examples:
      moonpool bench threads
      moonpool bench threads --max 8 --json threads.json --plot threads.png
      moonpool bench threads --url unix:/dev/shm/moonpool
    """
    from moonpool.bench.output import progress
    from moonpool.bench.threads import counts_up_to, measure

    most = most or len(os.sched_getaffinity(0))
    with _prepared(json, plot) as stack:
        node_url, _ = _node(stack, url, most * (512 << 20))
        result = measure(node_url, counts_up_to(most), 0.05 if quick else 0.5, progress)
    _report("threads", result, threads_rows, json, plot)


@app.command()
def storm(
    clients: Annotated[int, typer.Option("--clients", min=1, metavar="COUNT", help="Client processes.")] = 64,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.1, metavar="NUMBER", help="Batches a second of all clients. Default: 50 a core."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, metavar="NUMBER", help="How long it lasts.")] = 30.0,
    json: JsonPath = None,
    plot: PlotPath = None,
    url: NodeUrl = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="URL", help="With --url: the node's http://HOST:PORT/metrics.")
    ] = None,
    quick: Quick = False,
) -> None:
    """Ask what a scheduler asks while 64 clients fill a full pool and one a second is killed.

    Every put evicts, the scrub is on. exists, match and acquire are measured alone first, then in the storm, and the
    node's longest loop step is told. The clients are paced (--rate): with far more work than cores a probe measures
    how the system shares cores, not the store. With --url, what that node holds is evicted.

    Examples:
      moonpool bench storm
      moonpool bench storm --rate 500 --seconds 120 --json storm.json --plot storm.png
      moonpool bench storm --url unix:/dev/shm/moonpool --metrics http://127.0.0.1:9400/metrics
    """
    from moonpool.bench.output import progress
    from moonpool.bench.storm import Storm, Weather

    rate = rate or 50.0 * len(os.sched_getaffinity(0))
    weather = Weather(clients, rate, 5.0, seconds)
    pool_bytes = 1 << 30
    if quick:
        weather, pool_bytes = Weather(min(clients, 4), rate, 0.5, min(seconds, 2.5)), 128 << 20
    with _prepared(json, plot) as stack:
        node_url, metrics_url = _node(stack, url, pool_bytes, "--scrub-interval", "1s")
        result = Storm(node_url, metrics_url or metrics, weather, progress).run()
    _report("storm", result, storm_rows, json, plot)


app.command()(gpu)


def _prepared(json: Path | None, plot: Path | None) -> ExitStack:
    """Refuse what can't be written before anything is measured."""
    from moonpool.bench.output import check_json, check_plot

    check_json(json)
    check_plot(plot)
    return ExitStack()


def _node(stack: ExitStack, url: str | None, pool_bytes: int, *options: str) -> tuple[str, str | None]:
    """The user's node, or one of our own until `stack` ends: its URL and where its metrics are, if that is known."""
    if url is not None:
        return url, None
    from moonpool.bench.node import OwnNode

    node = stack.enter_context(OwnNode(pool_bytes, *options))
    return node.url, node.metrics_url


def _check_peer(peer: str | None, peer_python: Path | None) -> None:
    if (peer is None) != (peer_python is None):
        raise ConfigError("--peer and --peer-python belong together: --peer mooncake --peer-python PATH")
    if peer is not None and peer != "mooncake":
        raise ConfigError(f"option --peer: {peer!r} is not known; known is mooncake")
    if peer_python is not None and not os.access(peer_python, os.X_OK):
        raise ConfigError(f"option --peer-python: {peer_python} is no interpreter")


def _report(
    kind: str,
    result: dict[str, Any],
    rows: Callable[[dict[str, Any]], Iterable[Row]],
    json: Path | None,
    plot: Path | None,
) -> None:
    from moonpool.bench.output import show, write_json

    result["machine"] = machine(own_arguments())
    show(rows(result), f"moonpool bench {kind}: {result['machine']['cpu']}, {result['machine']['cores']} cores")
    for line in result.get("left_out", ()):
        print(f"left out: {line}")
    if json is not None:
        write_json(json, result)
    if plot is not None:
        from moonpool.bench.charts import draw

        draw(kind, result, plot)
