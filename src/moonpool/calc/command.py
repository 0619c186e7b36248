"""The command `moonpool calc`, a plain function for the command line to mount."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moonpool.calc.architectures import read_model
from moonpool.calc.bandwidths import DEFAULT_BANDWIDTHS, parse_bandwidth
from moonpool.calc.objects import OBJECT_OVERHEAD_S
from moonpool.calc.render import render
from moonpool.calc.report import calculate
from moonpool.errors import ConfigError
from moonpool.sizes import parse_duration

EPILOG = """Examples:

  moonpool calc ~/models/Llama-3.1-8B-Instruct

  moonpool calc config.json --tokens 32000 --tp 8 --dtype fp8

  moonpool calc config.json --prefill-rate 36800 --bandwidth NIC=50GB/s --bandwidth 100Gb/s

  moonpool calc config.json --url unix:/dev/shm/moonpool

  moonpool calc config.json --json | jq .token_bytes
"""
"""Give it to typer as the command's `epilog`."""


def calc(
    config: Annotated[Path, typer.Argument(help="A model's config.json, or the folder that holds it.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a request.")] = 10_000,
    dtype: Annotated[
        str, typer.Option(help="KV element type: bf16, fp16, fp8, int8, fp32; auto: the model's.")
    ] = "auto",
    state_dtype: Annotated[str, typer.Option(help="Element type of hybrid models' recurrent states.")] = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens of the engine's KV block.")] = 16,
    prefill_rate: Annotated[float | None, typer.Option(help="Tokens a second that prefill computes.")] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(help="A wire: 55GB/s, 100Gb/s or NAME=25GB/s. Repeatable; replaces the usual ones."),
    ] = None,
    object_overhead: Annotated[
        str | None,
        typer.Option(help="What an object costs besides its bytes (by default 5us)."),
    ] = None,
    model_type: Annotated[str | None, typer.Option(help="Read the configuration as this known model type.")] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A node: tell how much its pool holds. Default: none is asked.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print how large a model's KV cache is, and whether moving it beats computing it.

    Reads the model's config.json alone; a node is asked only where --url names one. Where it
    doesn't know what a model keeps, it says so and gives no figure.
    """
    pool_bytes = None if url is None else _pool_bytes(url)
    try:
        report = calculate(
            read_model(config, model_type=model_type),
            tokens=tokens,
            kv_dtype=dtype,
            state_dtype=state_dtype,
            tp_size=tp,
            tokens_per_block=block_tokens,
            prefill_tokens_per_s=prefill_rate,
            bandwidths=[parse_bandwidth(text) for text in bandwidth] if bandwidth else DEFAULT_BANDWIDTHS,
            object_overhead_s=OBJECT_OVERHEAD_S if object_overhead is None else parse_duration(object_overhead),
            pool_bytes=pool_bytes,
        )
    except (ConfigError, ValueError) as error:
        typer.echo(f"moonpool calc: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(render(report))


def _pool_bytes(url: str) -> int:
    import moonpool

    with moonpool.connect(url, read_only=True, name="calc", prefault=False) as client:
        return client.pool_bytes
