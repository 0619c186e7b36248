"""Commands on stored objects: exists, remove, stat, ls, clear."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.base import (
    CommandFailed,
    Json,
    Keys,
    Url,
    Yes,
    confirm,
    connect,
    console,
    key_from,
    key_text,
    print_json,
    progress,
)
from moonpool.cli.entries import READING_OFF, as_json, listed, missing, pin_text, rows, time_text, why


def exists(keys: Keys, url: Url = None) -> None:
    """Say of each key whether an object is stored under it.

    Exits with 1 unless all are, and where reading is switched off.

    Examples:
      moonpool exists prompt-1
      moonpool exists prompt-1 prompt-2 && echo both
    """
    with connect(url, read_only=True) as client:
        if client.mode() not in ("read", "on"):  # where nothing is found, whatever is stored
            raise CommandFailed(READING_OFF)
        found = client.exists_many(keys)
    for key, there in zip(keys, found, strict=True):
        print(f"{'yes' if there else 'no'}\t{key_text(key)}")
    if not all(found):
        raise CommandFailed(missing([key for key, there in zip(keys, found, strict=True) if not there]))


def remove(
    keys: Keys,
    url: Url = None,
    force: Annotated[bool, typer.Option("--force", help="Hard-pinned objects too.")] = False,
) -> None:
    """Remove objects.

    Readers that hold one keep it until they let go. Exits with 1 unless all were there.

    Examples:
      moonpool remove prompt-1 prompt-2
      moonpool remove --force hex:00ff17
    """
    from moonpool.status import Status

    with connect(url) as client:
        statuses = client.remove_many(keys, force=force)
    pinned = [key for key, status in zip(keys, statuses, strict=True) if status is Status.PINNED]
    if pinned:
        raise CommandFailed(f"hard-pinned, removed only with --force: {listed(pinned)}")
    absent = [key for key, status in zip(keys, statuses, strict=True) if status is Status.MISS]
    if absent:
        raise CommandFailed(missing(absent))
    for index, (key, status) in enumerate(zip(keys, statuses, strict=True)):
        if status is not Status.OK:
            raise CommandFailed(f"{key_text(key)!r} was not removed: {why(status, statuses.details.get(index))}")


def stat(keys: Keys, url: Url = None, json: Json = False) -> None:
    """Show what the node knows of objects.

    Size, times, pins, checksum, writer and metadata. Exits with 1 unless all are there.

    Examples:
      moonpool stat prompt-1
      moonpool stat prompt-1 prompt-2 --json
    """
    with connect(url, read_only=True) as client:
        found = client.stat_many(keys)
    if json:
        print_json([None if entry is None else as_json(entry) for entry in found])
    else:
        out = console()
        for entry in found:
            for name, text in rows(entry) if entry is not None else ():
                out.print(f"{name:<10} {text}")
    absent = [key for key, entry in zip(keys, found, strict=True) if entry is None]
    if absent:
        raise CommandFailed(missing(absent))


def ls(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", show_default=False, help="Only keys that start so; text, or hex: …")
    ] = "",
    url: Url = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="With size, last use and pins.")] = False,
    json: Json = False,
) -> None:
    """List the keys of stored objects.

    One a line, in no order. A key that isn't plain text is written as hex: and its bytes.

    Examples:
      moonpool ls
      moonpool ls prompt- --long
      moonpool ls hex:00ff --json | jq .size
    """
    start = key_from(prefix)
    with connect(url, read_only=True) as client:
        for entry in client.list(start):
            if json:
                print_json(as_json(entry), indent=False)
            elif long:
                print(f"{entry.size}\t{time_text(entry.touched)}\t{pin_text(entry)}\t{key_text(entry.key)}")
            else:
                print(key_text(entry.key))


def clear(url: Url = None, yes: Yes = False) -> None:
    """Remove every object of the node.

    Asks first. Hard pins hold nothing back; readers keep what they hold until they let go.

    Examples:
      moonpool clear
      moonpool clear --yes
    """
    with connect(url) as client:
        if not yes:
            confirm("Remove every object of this node?")
        with progress("clearing", None):
            count = client.clear()
    print(f"removed {count:,} objects")


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    for command in (exists, remove, stat, ls, clear):
        app.command()(command)
