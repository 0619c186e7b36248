"""Commands that move an object's bytes: put and get."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from moonpool.cli.base import CommandFailed, Key, Url, connect, key_text, progress, seconds_from
from moonpool.cli.entries import READING_OFF, missing, why

if TYPE_CHECKING:
    from moonpool.client.client import Client
    from moonpool.client.grants import Array
    from moonpool.client.reading import Views
    from moonpool.status import Status, Statuses

CHUNK_BYTES = 16 << 20  # between two steps of a progress bar: a few ms each
_INLINE_BYTES = 64 << 10


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


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command()(put)
    app.command()(get)


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
        raise CommandFailed(f"{key_text(key)!r} was not stored: {why(status, detail)}")
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
        return READING_OFF
    return f"{key_text(key)!r} was not read: {why(statuses[0], statuses.details.get(0))}"


def _write_whole(path: Path, array: Array) -> None:
    """Write a file that appears under its name only once it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as target, progress(f"writing {path.name}", len(array)) as advance:
            for start in range(0, len(array), CHUNK_BYTES):
                advance(target.write(array[start : start + CHUNK_BYTES].data))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
