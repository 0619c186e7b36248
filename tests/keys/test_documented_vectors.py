"""docs/keys.md lists the vectors that the tests hold the code to."""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.keys import KeySpace, block_digests, fingerprint

TEXT = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()


def test_the_documentation_lists_the_vectors_that_the_code_gives() -> None:
    space = KeySpace(
        weights="files1:" + "0" * 64,
        tokens_per_block=16,
        kv_dtype="bfloat16",
        layout="layer,kv,token,head,dim",
        model="meta-llama/Llama-3.1-8B",
    )
    blocks = [
        *block_digests(range(48), 16),
        *block_digests(range(32), 16, extra=[b"salt"]),
        block_digests(range(32), 16, block_extra={1: [b"image" * 8]})[1],
    ]
    keys = [bytes(48), bytes(range(48)), b"\xff" * 48, b"", b"hello", bytes(256)]
    expected = [space.digest.hex(), space.shard(layers=(0, 16, 32), heads=(4, 8, 8)).digest.hex()]
    expected += [block.hex() for block in blocks]
    expected += [f"0x{fingerprint(key):016x}" for key in keys]
    assert re.findall(r"`((?:0x)?[0-9a-f]{16,64})`", TEXT) == expected
