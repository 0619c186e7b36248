"""What all commands share: failing in one line, keys as text, progress on a terminal, the connection."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from moonpool.errors import ConfigError, MoonpoolError
from moonpool.options import LOG_LEVELS
from moonpool.sizes import parse_duration

if TYPE_CHECKING:
    from rich.console import Console

    from moonpool.client.client import Client

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="MOONPOOL_URL",
        help="The node: unix:PATH of its folder or socket, or embedded:SIZE. Default: this host's node.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

LAZY = {
    "calc": ("moonpool.calc.command", "KV-cache size of a model; the time to move it beside the time to compute it."),
    "demo": ("moonpool.demo.command", "A real transformer through the store: the same tokens, and how long it took."),
    "bench": ("moonpool.bench.command", "Measure this machine: copies, round trips, lookups, a storm of clients."),
}
"""Commands whose modules are loaded when they are called, so that all others start quickly: name → module, help."""


class CommandFailed(MoonpoolError):
    """A command can't do what was asked; its text is the line that the user reads."""


class Commands(TyperGroup):
    """The root command: loads the heavy ones lazily, and turns every failure into one line and an exit code.

    0 done; 1 an operating condition (no node, no such key, no space); 2 wrong usage; 130 interrupted.
    """

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, (_, text) in LAZY.items():  # stand-ins, for the list of commands
            self.add_command(TyperCommand(name=name, help=text))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in LAZY:
            return args[0], load(args[0]), args[1:]
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Any = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except typer.TyperException as error:
            fail(_usage(error), error.exit_code)
        except typer.Abort:
            fail("stopped; nothing was changed", 1)
        except MoonpoolError as error:
            fail(str(error), 1)
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read our output has gone, as `| head` does
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(1)
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
        if code == 130:
            fail("interrupted", 130)
        sys.exit(code if isinstance(code, int) else 0)


def load(name: str) -> Any:
    """A lazy command: its module's typer `app`, or its plain function with `EPILOG` for examples."""
    try:
        module = importlib.import_module(LAZY[name][0])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "moonpool":
            raise
        raise CommandFailed(f"'moonpool {name}' needs {error.name}, which isn't installed") from None
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command(epilog=module.EPILOG)(getattr(module, name))
    command = typer.main.get_command(app)
    command.name = name
    return command


def _usage(error: typer.TyperException) -> str:
    context, text = getattr(error, "ctx", None), error.format_message()
    return f"{text} (see '{context.command_path} --help')" if context and text else text


def fail(text: str, code: int) -> NoReturn:
    """End the process with `code`, having said why in one line on standard error (if there is a reason to say)."""
    if text:
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


def confirm(question: str) -> None:
    """Ask on standard error and read the answer; raises typer.Abort unless it is yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        if not sys.stdin.isatty():
            print(file=sys.stderr)
        raise typer.Abort


def connect(url: str | None, *, read_only: bool = False) -> Client:
    """Open a client for a command; a context manager. Raises `NodeUnavailable` where there is no node."""
    import moonpool

    # No prefault: most commands touch little of the pool, and end before that would pay.
    return moonpool.connect(url, read_only=read_only, name="cli", prefault=False)


def seconds_from(text: str, flag: str) -> float:
    """The seconds of a duration given for `flag`. Raises `ConfigError` that names it."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"option {flag}: {error}") from None


def set_up_logging(level: str) -> None:
    """Log to standard error from `level` on. An unknown level is the usual one, `warning`."""
    logging.basicConfig(
        level=(level if level in LOG_LEVELS else "warning").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )


def key_from(text: str) -> bytes:
    """The key that the user wrote: text as UTF-8, or `hex:` and its bytes. Raises BadParameter."""
    if not text.startswith("hex:"):
        return text.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(text[4:])
    except ValueError:
        raise typer.BadParameter(f"{text!r}: after 'hex:' an even number of hexadecimal digits is wanted") from None


_KEY_HELP = "Text, or hex: and the key's bytes."
Key = Annotated[bytes, typer.Argument(metavar="KEY", parser=key_from, help=_KEY_HELP)]
Keys = Annotated[list[bytes], typer.Argument(metavar="KEY", parser=key_from, help=_KEY_HELP)]


def key_text(key: bytes) -> str:
    """A key as the user may write it: `key_from` gives it back."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f"hex:{key.hex()}"
    return text if text.isprintable() and text == text.strip() and not text.startswith("hex:") else f"hex:{key.hex()}"


def console(*, stderr: bool = False) -> Console:
    """A rich console that leaves keys and paths as they are: no markup, no highlighting, no wrapping."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(label: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error while the block runs, fed by calling what it yields with a number of bytes.

    Quiet where standard error isn't a terminal. Without a total, a spinner.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    if total_bytes is not None:
        columns += [BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()]
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda count: bar.advance(task, count)


def print_json(value: object, *, indent: bool = True) -> None:
    """Print JSON on standard output: indented, or as one line."""
    print(json.dumps(value, indent=2 if indent else None, ensure_ascii=False))
