"""Commands on objects: put, get, exists, remove, stat, ls, clear."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from moonpool.cli.base import (
    CommandFailed,
    Json,
    Url,
    Yes,
    confirm,
    connect,
    console,
    key_from,
    key_text,
    print_json,
    progress,
    seconds_from,
)
from moonpool.cli.entries import as_json, listed, missing, pin_text, rows, time_text

if TYPE_CHECKING:
    from moonpool.client.client import Client
    from moonpool.client.reading import Views
    from moonpool.status import Status, Statuses

CHUNK_BYTES = 16 << 20  # between two steps of a progress bar: a few ms each
_INLINE_BYTES = 64 << 10

_KEY_HELP = "Text, or hex: and the key's bytes."
Key = Annotated[bytes, typer.Argument(metavar="KEY", parser=key_from, help=_KEY_HELP)]
Keys = Annotated[list[bytes], typer.Argument(metavar="KEY", parser=key_from, help=_KEY_HELP)]


def put(
    key: Key,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to store; - is standard input.")],
    url: Url = None,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="Never served after this time, such as 7d.")] = None,
    pin: Annotated[str | None, typer.Option(metavar="KIND", help="hard, or soft for --pin-ttl.")] = None,
    pin_ttl: Annotated[str | None, typer.Option(metavar="TIME", help="How long a soft pin lasts.")] = None,
    metadata: Annotated[str, typer.Option(metavar="TEXT", help="Up to 1 KiB kept beside the object.")] = "",
) -> None:
    """Store a file's bytes under a key.

    A key that is stored already is left as it is. A file over 64 KiB is read straight into the pool.

    Examples:
      moonpool put prompt-1 block.bin
      moonpool put hex:00ff17 block.bin --ttl 1h
      tar c cache | moonpool put backup -
    """
    if pin not in (None, "hard", "soft"):
        raise typer.BadParameter(f"{pin!r} is neither hard nor soft", param_hint="--pin")
    options: dict[str, Any] = {
        "ttl_s": None if ttl is None else seconds_from(ttl, "--ttl"),
        "pin": pin,
        "pin_ttl_s": None if pin_ttl is None else seconds_from(pin_ttl, "--pin-ttl"),
        "metadata": metadata.encode(),
    }
    if file == "-":
        value = sys.stdin.buffer.read()
        with connect(url) as client:
            _stored(key, client.put(key, value, **options))
        return
    with open(file, "rb") as source, connect(url) as client:
        size = os.fstat(source.fileno()).st_size
        if size <= _INLINE_BYTES:
            _stored(key, client.put(key, source.read(), **options))
        else:
            _put_large(client, key, source, size, options)


def get(
    key: Key,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="- is standard output.")] = "-",
    url: Url = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the bytes against their checksum.")] = False,
) -> None:
    """Write an object's bytes to standard output or a file.

    Exits with 1 where there is none. The file appears under its name only once it is whole.

    Examples:
      moonpool get prompt-1 -o block.bin
      moonpool get prompt-1 | sha256sum
      moonpool get hex:00ff17 --verify -o block.bin
    """
    with connect(url, read_only=True) as client, client.view(key, verify=verify) as views:
        _deliver(key, views, output)


def exists(keys: Keys, url: Url = None) -> None:
    """Say of each key whether an object is stored under it.

    Exits with 1 unless all are.

    Examples:
      moonpool exists prompt-1
      moonpool exists prompt-1 prompt-2 && echo both
    """
    with connect(url, read_only=True) as client:
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
            raise CommandFailed(f"{key_text(key)!r} was not removed: {_why(status, statuses.details.get(index))}")


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
    for command in (put, get, exists, remove, stat, ls, clear):
        app.command()(command)


def _put_large(client: Client, key: bytes, source: BinaryIO, size: int, options: dict[str, Any]) -> None:
    """Read the file straight into the pool, so that its bytes move once."""
    with client.reserve_many([key], [size], **options) as reservations:
        place = reservations[0]
        if place.buffer is not None:
            target, done = place.buffer.data, 0
            with progress(f"storing {key_text(key)}", size) as advance:
                while done < size:
                    count = source.readinto(target[done : done + CHUNK_BYTES])  # type: ignore[attr-defined]
                    if not count:
                        raise CommandFailed(f"{source.name} became shorter while it was read; nothing was stored")
                    done += count
                    advance(count)
    _stored(key, place.status, place.detail)


def _stored(key: bytes, status: Status, detail: str = "") -> None:
    if not status.stored:
        raise CommandFailed(f"{key_text(key)!r} was not stored: {_why(status, detail)}")
    if status.name == "EXISTS":
        print(f"{key_text(key)!r} is stored already; it was left as it is", file=sys.stderr)


def _deliver(key: bytes, views: Views, output: str) -> None:
    """Write out what was found. A function of its own, so that nothing holds the object when the client closes."""
    array = views[0]
    if array is None:
        raise CommandFailed(_not_read(key, views.statuses))
    if output != "-":
        _write_whole(Path(output), array)
        return
    if sys.stdout.isatty() and not _is_text(bytes(array[:4096])):
        raise CommandFailed(f"{key_text(key)!r} isn't text: name a file with -o, or pipe it")
    sys.stdout.buffer.write(array.data)
    sys.stdout.buffer.flush()


def _is_text(start: bytes) -> bool:
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(start)
    return all(character.isprintable() or character in "\n\r\t" for character in text) and "\ufffd" not in text


def _not_read(key: bytes, statuses: Statuses) -> str:
    if statuses[0].name == "MISS":
        return missing([key])
    if statuses[0].name == "DISABLED":
        return "reading is switched off; 'moonpool mode on' switches it on"
    return f"{key_text(key)!r} was not read: {_why(statuses[0], statuses.details.get(0))}"


def _write_whole(path: Path, array: Any) -> None:
    """Write a file that appears under its name only once it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as target, progress(f"writing {path.name}", len(array)) as advance:
            for start in range(0, len(array), CHUNK_BYTES):
                advance(target.write(array[start : start + CHUNK_BYTES]))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _why(status: Status, detail: str | None) -> str:
    return f"{status.name.lower().replace('_', ' ')}{f' ({detail})' if detail else ''}"
