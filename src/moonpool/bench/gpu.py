"""`moonpool bench gpu`: the command, and what it holds its figures to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.bench.bars import Row
from moonpool.errors import MoonpoolError

BAR_PIECES = ("2MB", "256KB", "64KB")
BAR = 0.9
"""Of what CUDA's own copies of pinned memory reach in the same run."""

Result = dict[str, Any]


def gpu(
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the figures and the machine as JSON.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="A node that runs already. Default: one of its own.")
    ] = None,
    device: Annotated[int, typer.Option("--device", min=0, metavar="NUMBER", help="Which GPU.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try every stage with little data: no figure to rely on.")
    ] = False,
) -> None:
    """Move objects of 32 MB between the pool and a GPU, in blocks of 2 MB to 32 KB.

    Beside CUDA's own copies of pinned memory, pass by pass; in both directions at once, across the borders of
    registered chunks, while the registration is still under way, and without it. Every stage's bytes are verified.
    Takes a GPU with 10 GB of free memory, a pool of 4.5 GiB and 2 GB of memory besides, for a minute.

    Examples:
      moonpool bench gpu
      moonpool bench gpu --json gpu.json
      moonpool bench gpu --url unix:/dev/shm/moonpool
    """
    from moonpool.bench.gpu_run import Scale, measure
    from moonpool.bench.machine import machine, own_arguments
    from moonpool.bench.node import OwnNode
    from moonpool.bench.output import check_json, progress, show, write_json

    check_json(json)
    check_gpu(device)
    scale = Scale(objects=32, passes=4) if quick else Scale()
    if url is not None:
        result = measure(url, device, scale, progress)
    else:
        with OwnNode(scale.pool_bytes) as node:
            result = measure(node.url, device, scale, progress)
    result["machine"] = machine(own_arguments())
    show(gpu_rows(result), f"moonpool bench gpu: {result['gpu']}")
    if json is not None:
        write_json(json, result)


def check_gpu(device: int) -> None:
    """Raises `MoonpoolError` where there is no such GPU, or nothing to use it with."""
    try:
        import torch
    except ImportError as error:
        raise MoonpoolError("bench gpu needs torch, built for CUDA, and it isn't installed") from error
    if not torch.cuda.is_available():
        raise MoonpoolError("bench gpu needs a GPU, and torch sees none on this machine")
    if device >= torch.cuda.device_count():
        raise MoonpoolError(f"there is no GPU {device}: this machine has {torch.cuda.device_count()}")


def gpu_rows(result: Result) -> Iterator[Row]:
    """The lines of `bench gpu`."""
    for way in ("to", "from"):
        pinned = result[f"pinned_{way}_gpu_gbps"]
        yield Row(f"pinned memory, {way} the GPU", pinned, "GB/s")
        for size, rate in result[f"{way}_gpu_gbps"].items():
            bar = BAR if size in BAR_PIECES else None
            yield Row(f"pool {way} GPU, {size}", rate, "GB/s")
            yield Row(f"pool {way} GPU / pinned, {size}", rate / pinned, "", bar, at_least=True)
    for way in ("to", "from"):
        yield Row(f"pinned memory, {way} the GPU, both ways at once", result[f"pinned_both_{way}_gpu_gbps"], "GB/s")
        for size, rate in result[f"both_{way}_gpu_gbps"].items():
            yield Row(f"pool {way} GPU, both ways at once, {size}", rate, "GB/s")
    for way in ("to", "from"):
        rate, pinned = result[f"border_{way}_gpu_gbps"], result[f"pinned_{way}_gpu_gbps"]
        yield Row(f"across a chunk's border, {way} the GPU / pinned, 64KB", rate / pinned, "", BAR, at_least=True)
    yield Row("to the GPU while registration is under way, 64KB", result["frontier_to_gpu_gbps"], "GB/s")
    for way in ("to", "from"):
        yield Row(f"not registered, {way} the GPU, 64KB", result[f"unregistered_{way}_gpu_gbps"], "GB/s")
    yield Row("registration", result["registration_s"], "s")
    yield Row("registration, GB a second", result["registration_gbps"], "GB/s")
    for name in ("load", "store"):
        for size, taken in result[f"{name}_submit_us"].items():
            yield Row(f"host time of a {name}, an object, {size}", taken, "µs")
    yield Row("host time of asking a ticket", result["poll_us"], "µs")
    for name, rate in result["kernel_gbps"].items():
        yield Row(f"kernel: {name.replace('_', ' ')}", rate, "GB/s")
    for name, ratio in result["forward_slowdown"].items():
        yield Row(f"matrix products beside {name}: time / alone", ratio, "×")
