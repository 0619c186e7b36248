"""The client: what `moonpool.connect` returns."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from pathlib import Path
from types import TracebackType

from moonpool.client.administration import Administration
from moonpool.client.commits import Commits
from moonpool.client.copying import Copier
from moonpool.client.embedded import EmbeddedLink
from moonpool.client.feed import EmbeddedSubscription, SocketSubscription, Subscription
from moonpool.client.interface import Link
from moonpool.client.link import SocketLink
from moonpool.client.lookup import Lookup
from moonpool.client.writing import Writing
from moonpool.errors import ConfigError, InvalidRequest, MoonpoolError
from moonpool.folder.folder import Folder, default_folder
from moonpool.sizes import parse_bytes

EMBEDDED_POOL_BYTES = 256 << 20
TIMEOUT_S = 10.0


class Client(Lookup, Writing, Administration):
    """One session with a node. Thread-safe, a context manager, reconnects by itself.

    After `close` calls raise `Closed`; views stay valid until their last array is gone. A forked child connects afresh
    at its first call; views, reservations and holds that it inherited are not its own.
    """

    def __init__(self, link: Link, *, url: str, name: str, read_only: bool, copier: Copier) -> None:
        self.link = link
        self.url, self.name, self.read_only = url, name, read_only
        self.copier = copier
        self.commits = Commits(link)
        link.every_round(self.commits.collect)
        _clients.add(self)

    def subscribe(self, snapshot: bool = False) -> Subscription:
        """Every change on the node from now on, in order, as an iterator of `Event`.

        With `snapshot`, first an event of kind "snapshot" for each object that is there, then "snapshot-end" (changes
        that happen meanwhile may come twice: once in either form). A reader that falls behind gets "lagged" and no
        more. Takes a connection of its own. Raises `NodeUnavailable`.
        """
        if isinstance(self.link, EmbeddedLink):
            return EmbeddedSubscription(self.link.node, self.link.lock, snapshot=snapshot)
        assert isinstance(self.link, SocketLink)
        return SocketSubscription(
            self.link.folder, name=f"{self.name} (feed)", timeout_s=self.link.timeout_s, snapshot=snapshot
        )

    def wait_prefaulted(self, timeout_s: float | None = None) -> bool:
        """Wait until this process's mapping of the pool is faulted in; until then first passes are slower."""
        return self.link.prefaulted(timeout_s)

    def close(self) -> None:
        """End the session, giving back all that it holds: at once, or when the last view is gone."""
        self.commits.settle()
        self.link.close()
        self.copier.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At the interpreter's end modules are half gone; the process's end then ends the session.
        if not sys.is_finalizing() and hasattr(self, "copier"):
            # Without waiting for the node: this runs wherever the last reference happens to go.
            with contextlib.suppress(Exception):
                self.link.close(wait=False)
                self.copier.close()

    def __repr__(self) -> str:
        return f"<moonpool.Client {self.name!r} at {self.url}>"


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _at_exit() -> None:
    """A process that ends without closing its client: what it has put is to stay."""
    for client in list(_clients):
        with contextlib.suppress(MoonpoolError):
            client.commits.settle()


atexit.register(_at_exit)


def connect(
    url: str | None = None,
    *,
    read_only: bool = False,
    name: str | None = None,
    copy_threads: int | None = None,
    timeout_s: float = TIMEOUT_S,
    prefault: bool = True,
    required: bool = True,
) -> Client:
    """Connect to a node.

    `url`: None for the host's node (`MOONPOOL_URL`, else the user's folder under /dev/shm); `unix:PATH` of a node's
    folder or socket; `embedded:` or `embedded:1GiB` for a store in this process's own memory. `read_only` maps the
    pool read-only. `copy_threads` for large batches (default: the cores, at most 4). `timeout_s` bounds each answer.
    `prefault` faults the pool into this process in the background. With `required=False` it returns also while there is
    no node: calls raise `NodeUnavailable` until one is there, which the client looks for by itself.

    Raises `NodeUnavailable` where there is no node, `ConfigError` for a URL that is none, or a `MOONPOOL_COPY` that
    can't be had.
    """
    copier = Copier(copy_threads)  # first, so that no session is left behind where it can't be
    named = url or os.environ.get("MOONPOOL_URL")
    url = named or f"unix:{default_folder()}"
    name = name or f"{Path(sys.argv[0]).name or 'python'}:{os.getpid()}"
    if not timeout_s > 0:
        raise InvalidRequest(f"timeout_s={timeout_s} is not a positive time in seconds")
    kind, separator, rest = url.partition(":")
    link: Link
    if kind == "embedded" and separator:
        try:
            pool_bytes = parse_bytes(rest) if rest else EMBEDDED_POOL_BYTES
        except ValueError as error:
            raise ConfigError(f"url {url!r}: {error}") from None
        link = EmbeddedLink(pool_bytes, read_only=read_only, name=name)
    elif kind == "unix" and rest:
        path = Path(rest)
        folder = Folder(path.parent if path.name == "node.sock" else path)
        link = SocketLink(
            folder,
            name=name,
            read_only=read_only,
            timeout_s=timeout_s,
            prefault=prefault,
            required=required,
            own_folder=not named,
        )
    else:
        raise ConfigError(f"url {url!r} is none of unix:PATH, embedded: or embedded:SIZE")
    return Client(link, url=url, name=name, read_only=read_only, copier=copier)
