"""`moonpool.aio`: a cancelled call is over when it raises, and holds nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

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
