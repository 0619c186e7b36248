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

from moonpool.demo.compare import TOLERANCE
from moonpool.demo.run import Result, Watch, run_demo
from moonpool.demo.settings import Settings
from moonpool.demo.table import show
from moonpool.errors import ConfigError

NEEDED = ("torch", "transformers")


def demo(
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="float32 or bfloat16.")] = "float32",
    url: Annotated[
        str,
        typer.Option(
            "--url", metavar="URL", help="A node that runs already. Default: one of the demo's own."
        ),
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

    Takes about a minute, 1 GB of memory and nothing from the network.

    Examples:
      moonpool demo
      moonpool demo --quick
      moonpool demo --dtype bfloat16 --json
      moonpool demo --url unix:/dev/shm/moonpool
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {' and '.join(missing)}: pip install 'moonpool[demo]'")
    if dtype not in TOLERANCE:
        raise ConfigError(f"option 'dtype': {dtype!r} is not one of {', '.join(TOLERANCE)}")
    settings = Settings(dtype=dtype)
    # So that the node and the worker go too, as they do on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _progress() as watch:
        result = run_demo(settings.quick() if quick else settings, url, watch)
    if json:
        print(as_json(result))
    else:
        from rich.console import Console

        show(result, Console(highlight=False, markup=False))
    result.check()


def as_json(result: Result) -> str:
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
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total or None
        )


app = typer.Typer(add_completion=False)
app.command()(demo)
