"""The command line: `moonpool COMMAND`. Each module here holds the commands of one noun."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from moonpool.cli import admin, objects, serve, transfer
from moonpool.cli.base import Commands, set_up_logging

__all__ = ["app", "main"]

app = typer.Typer(
    cls=Commands,
    name="moonpool",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"moonpool {version('moonpool')}")
        except PackageNotFoundError:
            print("moonpool, not installed as a package")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """One pool of KV cache for every LLM inference engine on a host.

    A node (serve) owns the pool; engines and these commands are its clients.

    Examples:
      moonpool serve --pool 48GiB
      moonpool status --watch
      moonpool demo
    """
    set_up_logging(os.environ.get("MOONPOOL_LOG", "warning").lower())


for module in (serve, transfer, objects, admin):
    module.register(app)


def main() -> None:
    """Run the command that the process's arguments name, and exit with its code."""
    app(args=sys.argv[1:], prog_name="moonpool")
