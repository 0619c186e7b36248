"""Commands for operators: status, mode, spaces, purge."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from moonpool.cli.base import Json, Url, Yes, connect, console, print_json, progress, seconds_from
from moonpool.options import MODES
from moonpool.sizes import format_bytes, format_duration


def status(
    url: Url = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often with --watch.")] = "1s",
) -> None:
    """Show the node's figures.

    Pool, objects, traffic, evictions, pins and quarantine; with --json all of them, for programs.

    Examples:
      moonpool status
      moonpool status --watch --every 500ms
      moonpool status --json | jq .hits
    """
    import msgspec

    interval_s = seconds_from(every, "--every")
    with connect(url, read_only=True) as client:

        def read() -> dict[str, Any]:
            found: dict[str, Any] = msgspec.to_builtins(client.stats(), str_keys=True)
            return found

        if not watch:
            _show(read(), json)
        elif json or not sys.stdout.isatty():
            while True:
                _show(read(), json)
                sys.stdout.flush()
                time.sleep(interval_s)
        else:
            from rich.live import Live
            from rich.text import Text

            with Live(console=console(), auto_refresh=False, screen=False) as live:
                while True:
                    live.update(Text("\n".join(lines(read()))), refresh=True)
                    time.sleep(interval_s)


def mode(
    word: Annotated[str | None, typer.Argument(metavar="MODE", help="off, read, write or on; none to ask.")] = None,
    url: Url = None,
) -> None:
    """Show or set the operator's switch: what clients may do.

    Running clients follow within a second: off is neither read nor write, on is both.

    Examples:
      moonpool mode
      moonpool mode read
      moonpool mode on
    """
    if word is not None and word not in MODES:
        raise typer.BadParameter(f"{word!r} is none of {', '.join(MODES)}", param_hint="MODE")
    with connect(url, read_only=word is None) as client:
        if word is not None:
            client.set_mode(word)
        else:
            print(client.mode())


def spaces(url: Url = None, json: Json = False) -> None:
    """List the declared key spaces.

    Each with its digest, live objects, live bytes, model and tenant; with --json the whole description.

    Examples:
      moonpool spaces
      moonpool spaces --json | jq .digest
    """
    with connect(url, read_only=True) as client:
        found = client.spaces()
    for space in found:
        description = jsonlib.loads(space.description or b"{}")
        if json:
            fields = {"number": space.number, "digest": space.digest.hex(), "description": description}
            print_json(fields | {"objects": space.live_objects, "bytes": space.live_bytes}, indent=False)
        else:
            labels = " ".join(f"{name}={description[name]}" for name in ("model", "tenant") if description.get(name))
            size = format_bytes(space.live_bytes)
            print(f"{space.digest.hex() or '-'}\t{space.live_objects}\t{size}\t{labels or '-'}")


def purge(
    url: Url = None,
    space: Annotated[str | None, typer.Option(metavar="DIGEST", help="A key space, by its 32 hex digits.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="All key spaces of a model.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="All key spaces of a tenant.")] = None,
    older_than: Annotated[str | None, typer.Option(metavar="TIME", help="Not used for this long, such as 7d.")] = None,
    yes: Yes = False,
) -> None:
    """Remove objects by key space, model, tenant or age.

    They are invisible at once; their memory is freed in the background. Asks first.

    Examples:
      moonpool purge --model Llama-3.1-8B
      moonpool purge --tenant acme --older-than 7d --yes
      moonpool purge --space 0123456789abcdef0123456789abcdef
    """
    wanted = {"space": space, "model": model, "tenant": tenant, "older than": older_than}
    named = ", ".join(f"{name} {text}" for name, text in wanted.items() if text)
    if not named:
        raise typer.BadParameter("say what to purge; 'moonpool clear' removes everything", param_hint="purge")
    try:
        digest = None if space is None else bytes.fromhex(space)
    except ValueError:
        raise typer.BadParameter(f"{space!r} is not a digest", param_hint="--space") from None
    age_s = None if older_than is None else seconds_from(older_than, "--older-than")
    with connect(url) as client:
        if not yes:
            typer.confirm(f"Purge {named}?", abort=True, err=True)
        with progress("purging", None):
            count = client.purge(space=digest, model=model, tenant=tenant, older_than_s=age_s)
    print(f"purged {count:,} objects")


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (status, mode, spaces, purge):
        app.command()(command)


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """A node's figures as text, one a line, units as the names' last words say."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield f"{name.replace('_', ' ')}"
            yield from (f"  {line}" for line in lines(value))
        elif isinstance(value, list):
            yield f"{name.replace('_', ' ')}"
            for entry in value:
                yield f"  {'  '.join(lines(entry)) if isinstance(entry, dict) else entry}"
        else:
            yield f"{name.replace('_', ' '):<24} {_figure(name, value)}"


def _figure(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value, binary=True)
    if name.endswith("_s") and isinstance(value, int | float):
        return format_duration(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _show(figures: dict[str, Any], json: bool) -> None:
    if json:
        print_json(figures, indent=sys.stdout.isatty())
    else:
        print("\n".join(lines(figures)))

