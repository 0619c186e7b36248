"""A result for people (a table, a chart), for programs (JSON), and how far a run is, on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moonpool.bench.bars import Row, number
from moonpool.bench.local import Tell
from moonpool.errors import ConfigError

Result = dict[str, Any]


def show(rows: Iterable[Row], title: str) -> None:
    """Print the table on standard output: each figure, its bar beside it, and whether that is met."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("measure")
    table.add_column("figure", justify="right")
    table.add_column("", justify="left")
    table.add_column("bar", justify="right")
    table.add_column("met")
    for row in rows:
        verdict = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}[row.met]
        table.add_row(row.name, number(row.value), row.unit, row.bar, verdict)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(table)


def write_json(path: Path, result: Result) -> None:
    """Write the result with its machine. Raises OSError."""
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def check_plot(path: Path | None) -> None:
    """Raises `ConfigError` before anything is measured where a chart is wanted and can't be drawn."""
    if path is None:
        return
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'moonpool[plot]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}")


def check_json(path: Path | None) -> None:
    """Raises `ConfigError` before anything is measured where the result can't be written."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json: there is no folder {path.parent}")


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Tell]:
    """One stage, shown on standard error where that is a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns.insert(2, BarColumn())
    # Not refreshed by a thread of its own: that would take the interpreter lock in the middle of a sample.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as shown:
        task = shown.add_task(label, total=total)
        shown.refresh()

        def tell(amount: int) -> None:
            shown.advance(task, amount)
            shown.refresh()

        yield tell
