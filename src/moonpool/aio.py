"""The client for asyncio: a thin bridge to the same code, which runs in threads.

    async with await moonpool.aio.connect() as client:
        await client.put_many(keys, values)
        async with client.view_many(keys) as views: …

A call that is cancelled is awaited to its end before the cancellation goes on, since a copy into or out of the
caller's buffers may be under way: when it raises `CancelledError`, nothing touches them any more. What it waits for in
the node (space, another writer, a checksum) it gives up at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from moonpool.client import client as _client
from moonpool.client.buffers import Buffer
from moonpool.client.cancelling import Scope
from moonpool.client.reading import Views
from moonpool.client.writing import Reservations
from moonpool.keys import KeySpace
from moonpool.matching import Group, Match
from moonpool.observe.stats import NodeStats
from moonpool.status import Status, Statuses
from moonpool.wire.messages import Event, ObjectStat, SpaceInfo

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", Views, Reservations)

__all__ = ["AsyncClient", "connect"]


async def connect(url: str | None = None, **options: Any) -> AsyncClient:
    """Connect to a node; takes what `moonpool.connect` takes, and raises what it raises."""
    return AsyncClient(await _in_thread(_client.connect, url, **options))


class AsyncClient:
    """A `moonpool.Client` whose calls are awaited. Calls may run at the same time; `sync` is the client itself.

    Each call does, returns and raises what the method of the same name on `Client` does.
    """

    def __init__(self, sync: _client.Client) -> None:
        self.sync = sync

    # From shared memory, in microseconds: no thread, no await.

    def exists(self, key: str | bytes) -> bool:
        return self.sync.exists(key)

    def exists_many(self, keys: Sequence[str | bytes]) -> list[bool]:
        return self.sync.exists_many(keys)

    # Awaited.

    async def put(self, key: str | bytes, value: Buffer, **options: Any) -> Status:
        return await _in_thread(self.sync.put, key, value, **options)

    async def put_many(self, keys: Sequence[str | bytes], values: Sequence[Buffer], **options: Any) -> Statuses:
        return await _in_thread(self.sync.put_many, keys, values, **options)

    async def get(self, key: str | bytes, *, verify: bool = False) -> bytes | None:
        return await _in_thread(self.sync.get, key, verify=verify)

    async def get_into(self, key: str | bytes, target: Buffer, *, verify: bool = False) -> int | None:
        return await _in_thread(self.sync.get_into, key, target, verify=verify)

    async def get_many_into(
        self, keys: Sequence[str | bytes], targets: Sequence[Buffer], *, verify: bool = False
    ) -> Statuses:
        return await _in_thread(self.sync.get_many_into, keys, targets, verify=verify)

    def view_many(self, keys: Sequence[str | bytes], *, verify: bool = False) -> _Context[Views]:
        return _Context(lambda: self.sync.view_many(keys, verify=verify))

    def reserve_many(self, keys: Sequence[str | bytes], sizes: Sequence[int], **options: Any) -> _Context[Reservations]:
        return _Context(lambda: self.sync.reserve_many(keys, sizes, **options))

    async def match(self, groups: Sequence[Group], hold: str | None = None) -> Match:
        return await _in_thread(self.sync.match, groups, hold)

    def adopt(self, hold: str) -> _Context[Views]:
        return _Context(lambda: self.sync.adopt(hold))

    async def release_hold(self, hold: str) -> bool:
        return await _in_thread(self.sync.release_hold, hold)

    async def prefix_length(self, keys: Sequence[str | bytes]) -> int:
        return await _in_thread(self.sync.prefix_length, keys)

    async def remove(self, key: str | bytes, force: bool = False) -> Status:
        return await _in_thread(self.sync.remove, key, force)

    async def touch(self, key: str | bytes) -> Status:
        return await _in_thread(self.sync.touch, key)

    async def stat(self, key: str | bytes) -> ObjectStat | None:
        return await _in_thread(self.sync.stat, key)

    async def remove_many(self, keys: Sequence[str | bytes], force: bool = False) -> Statuses:
        return await _in_thread(self.sync.remove_many, keys, force)

    async def touch_many(self, keys: Sequence[str | bytes]) -> Statuses:
        return await _in_thread(self.sync.touch_many, keys)

    async def stat_many(self, keys: Sequence[str | bytes]) -> list[ObjectStat | None]:
        return await _in_thread(self.sync.stat_many, keys)

    async def pin_many(self, keys: Sequence[str | bytes], ttl_s: float | None = None) -> Statuses:
        return await _in_thread(self.sync.pin_many, keys, ttl_s)

    async def unpin_many(self, keys: Sequence[str | bytes]) -> Statuses:
        return await _in_thread(self.sync.unpin_many, keys)

    async def list(self, prefix: str | bytes = b"") -> AsyncIterator[ObjectStat]:
        pages = self.sync.list(prefix)
        while (found := await _in_thread(next, pages, None)) is not None:
            yield found

    async def subscribe(self, snapshot: bool = False) -> AsyncIterator[Event]:
        """All changes from now on, as `Client.subscribe` gives them; ends after "lagged"."""
        with await _in_thread(self.sync.subscribe, snapshot) as events:
            while (event := await _in_thread(next, events, None)) is not None:
                yield event

    async def declare(self, space: KeySpace) -> bytes:
        return await _in_thread(self.sync.declare, space)

    async def set_mode(self, mode: str) -> None:
        await _in_thread(self.sync.set_mode, mode)

    async def clear(self) -> int:
        return await _in_thread(self.sync.clear)

    async def purge(self, **what: Any) -> int:
        return await _in_thread(self.sync.purge, **what)

    async def spaces(self) -> Sequence[SpaceInfo]:
        return await _in_thread(self.sync.spaces)

    async def stats(self) -> NodeStats:
        return await _in_thread(self.sync.stats)

    async def close(self) -> None:
        await _in_thread(self.sync.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Context(Generic[C]):
    """An async context over a synchronous one; awaiting it instead gives the synchronous one itself."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make: Callable[[], C] = make
        self._made: C | None = None

    def __await__(self) -> Any:
        return _in_thread(self._make).__await__()

    async def __aenter__(self) -> C:
        self._made = made = await _in_thread(self._make)
        return made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._made is not None
        await _in_thread(self._made.__exit__, kind, error, trace)


CALLS_MAX = 64
"""Calls that may be under way at a time in a process. Threads of their own: calls that wait for space must not keep the
application's executor from its work, nor from the commits that they wait for."""

_executor = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="moonpool-aio")


async def _in_thread(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run a call in a thread; a cancellation ends what it waits for, and waits for its end."""
    scope = Scope()
    work: Awaitable[T] = asyncio.get_running_loop().run_in_executor(
        _executor, lambda: scope.run(lambda: call(*args, **options))
    )
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
            scope.cancel()
        except BaseException:
            break
    if cancelled is not None:
        if not future.cancelled() and future.exception() is None:
            _give_up(future.result())
        raise cancelled
    return future.result()


def _give_up(result: object) -> None:
    """What a cancelled call had got and nobody will use."""
    if isinstance(result, Views):
        result.close()
    elif isinstance(result, Reservations):
        result.abort()
