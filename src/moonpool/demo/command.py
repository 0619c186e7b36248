"""`moonpool demo`."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from moonpool.demo import run, table
from moonpool.demo.compare import TOLERANCE
from moonpool.demo.run import Watch
from moonpool.demo.settings import Settings
from moonpool.demo.vllm import run as vllm_run
from moonpool.demo.vllm import table as vllm_table
from moonpool.errors import ConfigError

ENGINES = {
    "transformers": ("torch", "transformers"),
    "vllm": ("vllm",),
}
"""Engines, and the packages that each of them needs."""


def demo(
    engine: Annotated[str, typer.Option("--engine", metavar="ENGINE", help="transformers or vllm.")] = "transformers",
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="float32 or bfloat16.")] = "float32",
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", help="A node that runs already. Default: one of the demo's own."),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A model a tenth the size.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Put a real transformer's KV cache through the store: the same tokens, and how long it took.

    A Llama with seeded random weights prefills prompts of real text that
    share prefixes, on the CPU, and stores its KV cache in a node; another
    fresh process loads it and goes on generating.

    Fails unless every generated token is the same as without the store, and
    the logits are equal within the dtype's tolerance; and unless wrong blocks,
    tried on purpose, show.

    With --engine vllm: three vLLM engines, each a fresh process. One without
    the pool says what is right; one stores; one loads, and answers more. Wants
    vLLM's build for CPUs (make demo-vllm sets it up), and float32.

    Takes about a minute, 1 GB of memory and nothing from the network.

    Examples:
      moonpool demo
      moonpool demo --engine vllm
      moonpool demo --quick
      moonpool demo --dtype bfloat16 --json
      moonpool demo --url unix:/dev/shm/moonpool
    """
    if engine not in ENGINES:
        raise ConfigError(f"option 'engine': {engine!r} is not one of {', '.join(ENGINES)}")
    missing = [name for name in ENGINES[engine] if importlib.util.find_spec(name) is None]
    if missing:
        advice = "pip install 'moonpool[demo]'" if engine == "transformers" else "make demo-vllm sets it up"
        raise ConfigError(f"the demo needs {' and '.join(missing)}: {advice}")
    if dtype not in TOLERANCE:
        raise ConfigError(f"option 'dtype': {dtype!r} is not one of {', '.join(TOLERANCE)}")
    if engine == "vllm" and dtype != "float32":
        raise ConfigError("option 'dtype': with vLLM the demo runs in float32, where equal means equal tokens")
    settings = Settings(dtype=dtype)
    # So that the node and the worker go too, as they do on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if quick:
        settings = settings.quick()
    result: run.Result | vllm_run.Result
    with _progress() as watch:
        result = (vllm_run if engine == "vllm" else run).run_demo(settings, url, watch)
    console = Console(highlight=False, markup=False)
    if json:
        print(as_json(result))
    elif isinstance(result, vllm_run.Result):
        vllm_table.show(result, console)
    else:
        table.show(result, console)
    result.check()


def as_json(result: run.Result | vllm_run.Result) -> str:
    """Return `result` as JSON text, with `ratio` and each verdict's `same` beside what they come from."""
    members = msgspec.to_builtins(result)
    members["ratio"] = result.ratio
    for name, verdict in result.verdicts.items():
        members["verdicts"][name]["same"] = verdict.same
    return msgspec.json.format(msgspec.json.encode(members), indent=2).decode()


@contextmanager
def _progress() -> Iterator[Watch]:
    """Show on a terminal's standard error what the demo is at; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


app = typer.Typer(add_completion=False)
app.command()(demo)
