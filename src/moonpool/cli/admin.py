"""Commands for operators: status, mode, spaces, purge."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.base import Json, Url, Yes, confirm, connect, console, print_json, progress, seconds_from
from moonpool.cli.figures import lines
from moonpool.folder.layout import MODE_NAMES
from moonpool.sizes import format_bytes

if TYPE_CHECKING:
    from moonpool.client.client import Client
    from moonpool.observe.stats import NodeStats


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
    interval_s = seconds_from(every, "--every")
    with connect(url, read_only=True) as client:
        if not watch:
            _show(client.stats(), json)
            return
        try:
            _watch(client, interval_s, json)
        except KeyboardInterrupt:
            return  # the way to end it


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
    if word is not None and word not in MODE_NAMES:
        raise typer.BadParameter(f"{word!r} is none of {', '.join(MODE_NAMES)}", param_hint="MODE")
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
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stored longer ago than this, such as 7d.")
    ] = None,
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
            confirm(f"Purge {named}?")
        with progress("purging", None):
            count = client.purge(space=digest, model=model, tenant=tenant, older_than_s=age_s)
    print(f"purged {count:,} objects")


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (status, mode, spaces, purge):
        app.command()(command)


def _watch(client: Client, interval_s: float, json: bool) -> None:
    """Show the figures again and again: in place on a terminal, one after the other in a pipe."""
    if json or not sys.stdout.isatty():
        while True:
            _show(client.stats(), json, indent=False)
            sys.stdout.flush()
            time.sleep(interval_s)
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(Text("\n".join(lines(client.stats()))), refresh=True)
            time.sleep(interval_s)


def _show(stats: NodeStats, json: bool, *, indent: bool = True) -> None:
    if json:
        print_json(_figures(stats), indent=indent)
    else:
        print("\n".join(lines(stats)))


def _figures(stats: NodeStats) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(stats)
    return found
