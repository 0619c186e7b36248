"""The client for asyncio: the same calls, awaited."""

from __future__ import annotations

import asyncio

import moonpool.aio


async def main() -> None:
    keys = [f"asyncio/{number}" for number in range(8)]
    async with await moonpool.aio.connect(name="with-asyncio") as client:
        await asyncio.gather(*(client.put(key, bytes(1 << 20), wait_s=5) for key in keys))
        targets = [bytearray(1 << 20) for _ in keys]
        statuses = await client.get_many_into(keys, targets)
        print(f"{statuses.count(moonpool.Status.OK)} of {len(keys)} loaded")
        async with client.view_many(keys) as views:
            print(f"{sum(len(array) for array in views if array is not None)} bytes without a copy")
        await client.remove_many(keys)


if __name__ == "__main__":
    asyncio.run(main())
