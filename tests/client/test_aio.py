"""`moonpool.aio`: a cancelled call is over when it raises, and holds nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import moonpool
import moonpool.aio
from moonpool.testing.node import RunningNode, eventually
from moonpool.testing.values import generation_of, value_of

MIB = 1 << 20
SIZE = 24 * MIB


def test_the_calls_do_what_those_of_a_client_do(shared_node: RunningNode, client: moonpool.Client) -> None:
    async def use() -> None:
        async with await moonpool.aio.connect(shared_node.url) as ours:
            assert (await ours.put_many(["a", "b"], [b"1", bytes(100_000)])).all_ok
            assert await ours.get("a") == b"1"
            assert ours.exists_many(["a", "no"]) == [True, False]
            async with ours.view_many(["a"]) as views:
                assert views[0] is not None
                assert views[0].tobytes() == b"1"
                views = None  # type: ignore[assignment]
            async with ours.reserve_many(["c"], [5000]) as (extent,):
                assert extent.buffer is not None
                extent.buffer[:] = value_of("c", 1, 5000)
            targets = [bytearray(5000) for _ in range(8)]
            await asyncio.gather(*(ours.get_into("c", target) for target in targets))
            assert [generation_of("c", target) for target in targets] == [1] * 8
            assert (await ours.stats()).objects == 3
            assert await ours.clear() == 3

    asyncio.run(use())


def test_a_get_cancelled_in_mid_copy_writes_nothing_afterwards(
    shared_node: RunningNode, client: moonpool.Client
) -> None:
    client.put("key", value_of("key", 1, SIZE))
    target: Any = np.zeros(SIZE, np.uint8)

    async def cancel() -> int:
        hits = 0
        async with await moonpool.aio.connect(shared_node.url) as ours:
            for attempt in range(40):
                target[:] = 0
                task = asyncio.create_task(ours.get_into("key", target))
                await asyncio.sleep(0.0003 * (attempt % 15))
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    hits += 1
                copied = target.copy()
                time.sleep(0.001)
                assert np.array_equal(copied, target), "something still wrote to the target"
        return hits

    assert asyncio.run(cancel()) > 3
    assert client.stats().pins == 0


def test_cancelled_views_reservations_and_puts_hold_nothing(shared_node: RunningNode, client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, MIB))

    async def cancel() -> None:
        async with await moonpool.aio.connect(shared_node.url) as ours:

            async def view() -> None:
                async with ours.view_many(["key"]):
                    await asyncio.sleep(10)

            async def reserve() -> None:
                async with ours.reserve_many(["new"], [MIB]):
                    await asyncio.sleep(10)

            async def put() -> None:
                await ours.put("put", np.ones(8 * MIB, np.uint8))

            for attempt in range(30):
                for call in (view, reserve, put):
                    task = asyncio.create_task(call())
                    await asyncio.sleep(0.0002 * (attempt % 10))
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            assert ours.exists("new") is False

    asyncio.run(cancel())
    eventually(lambda: (client.stats().pins, client.stats().reservations) == (0, 0))


def test_a_cancelled_call_waits_no_longer_in_the_node(shared_node: RunningNode, client: moonpool.Client) -> None:
    refused = client.stats().no_space

    async def cancel(ours: moonpool.aio.AsyncClient, call: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.ensure_future(call())
        while not client.stats().reservations_waiting:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.stats().reservations_waiting == 0

    async def run() -> None:
        async with await moonpool.aio.connect(shared_node.url) as ours:
            size = ours.sync.pool_bytes
            await cancel(ours, lambda: _enter(ours.reserve_many(["had", "wanted"], [5000, size], wait_s=5)))
            # Several requests, of which each would wait.
            await cancel(ours, lambda: ours.put_many(["a", "b"], [np.ones(size // 2, np.uint8)] * 2, wait_s=5))
            assert await ours.put("had", b"value") is moonpool.Status.OK

    with client.reserve("all", client.pool_bytes - MIB):
        asyncio.run(run())
    assert client.stats().no_space == refused, "no wait has lasted as long as it might have"


def test_an_embedded_clients_wait_is_cancelled_as_well() -> None:
    async def run() -> None:
        async with await moonpool.aio.connect("embedded:16MiB") as ours:
            with ours.sync.reserve("all", 15 * MIB):
                task = asyncio.ensure_future(_enter(ours.reserve_many(["wanted"], [15 * MIB], wait_s=5)))
                while not (await ours.stats()).reservations_waiting:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                found = await ours.stats()
                assert (found.reservations, found.reservations_waiting, found.no_space) == (1, 0, 0)

    asyncio.run(run())


async def _enter(context: Any) -> None:
    async with context:
        await asyncio.sleep(10)
