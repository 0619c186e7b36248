"""The loop of an engine around a store: match, load what is there, compute and store the rest.

The model is a stand-in whose KV block depends on all tokens up to its end, as a real one's does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import moonpool
from moonpool.keys import KeySpace, block_digests, fingerprint_state

TOKENS_PER_BLOCK = 16
SHAPE = (4, 2, 2, TOKENS_PER_BLOCK, 64)  # layer, key or value, head, token, dimension
Block = npt.NDArray[np.float16]

SPACE = KeySpace(
    weights=fingerprint_state({"weights": np.arange(64, dtype=np.float32)}),
    tokens_per_block=TOKENS_PER_BLOCK,
    kv_dtype="float16",
    layout="layer,kv,head,token,dim",
    model="stand-in",
)


def compute(prompt: Sequence[int], block: int) -> Block:
    """The KV of one block."""
    seed = sum(prompt[: (block + 1) * TOKENS_PER_BLOCK])
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float16)


def prefill(client: moonpool.Client, prompt: Sequence[int]) -> list[Block]:
    """All KV blocks of a prompt, from the store as far as they are there. A sick store is a miss."""
    keys = SPACE.keys(block_digests(prompt, TOKENS_PER_BLOCK))
    blocks: list[Block] = [np.empty(SHAPE, np.float16) for _ in keys]
    loaded = 0
    try:
        found = client.prefix_length(keys)  # advisory, from shared memory
        statuses = client.get_many_into(keys[:found], blocks[:found])  # says what is really there
        loaded = next((i for i, status in enumerate(statuses) if status is not moonpool.Status.OK), found)
    except moonpool.NodeUnavailable:
        pass
    for number in range(loaded, len(blocks)):
        blocks[number] = compute(prompt, number)
    try:
        client.put_many(keys[loaded:], blocks[loaded:])  # EXISTS where another engine was quicker; NO_SPACE is fine too
    except moonpool.NodeUnavailable:
        pass
    print(f"{len(blocks)} blocks: {loaded} loaded, {len(blocks) - loaded} computed")
    return blocks


def main() -> None:
    system = list(range(1000, 1000 + 8 * TOKENS_PER_BLOCK))
    with moonpool.connect(name="prefix-cache") as client:
        client.declare(SPACE)
        prefill(client, system + [1] * 2 * TOKENS_PER_BLOCK)
        prefill(client, system + [2] * 2 * TOKENS_PER_BLOCK)  # shares the system prompt's blocks
        again = prefill(client, system + [1] * 2 * TOKENS_PER_BLOCK)
        assert all(np.array_equal(block, compute(system + [1] * 32, i)) for i, block in enumerate(again))
        print("removed:", client.purge(space=SPACE))


if __name__ == "__main__":
    main()
