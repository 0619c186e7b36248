"""Chained block digests: what a block's KV depends on, in 32 bytes.

The digest of a block is SHA-256 over its predecessor's digest, its token ids and what else conditions it. So
it names the whole prefix up to its end, is the same on every host and in every process, and can't be made to
collide:

    root    = SHA-256("moonpool blocks 1" · tokens per block as 8 bytes · each of `extra` behind its length)
    block i = SHA-256(block i-1, or root · each token id as 8 bytes, signed ·
                      each of `block_extra[i]` behind its length)

Integers and lengths are little-endian; lengths take 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.keys.space import BLOCK_DIGEST_BYTES

_ROOT = b"moonpool blocks 1"
_TOKEN_BYTES = 8


def block_digests(
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    tokens_per_block: int,
    *,
    extra: Sequence[bytes] = (),
    block_extra: Mapping[int, Sequence[bytes]] | None = None,
    parent: bytes | None = None,
) -> list[bytes]:
    """Return the 32-byte digests of the full blocks of `token_ids`, in order; a last block that isn't full
    has none.

    `extra` conditions the whole chain, such as a cache salt; `block_extra` conditions block i and thereby all
    after it, such as the hashes of the images whose tokens it holds (see `multimodal_extra`). With `parent`,
    the last digest of an earlier call with the same `tokens_per_block`, the chain goes on from there; `extra`
    is in it already, and `block_extra` counts from the first block given. Raises ValueError for token ids
    that aren't integers of 64 bits and for `extra` beside `parent`.
    """
    if tokens_per_block < 1:
        raise ValueError(f"tokens_per_block is {tokens_per_block}: a block holds at least one token")
    tokens = _token_bytes(token_ids)
    stride = tokens_per_block * _TOKEN_BYTES
    blocks = len(tokens) // stride
    tails = {index: _joined(parts) for index, parts in (block_extra or {}).items()}
    digest = _root(tokens_per_block, extra) if parent is None else _parent(parent, extra)
    digests: list[bytes] = []
    for index in range(blocks):
        preimage = digest + tokens[index * stride : (index + 1) * stride]
        if index in tails:
            preimage += tails[index]
        digest = sha256(preimage).digest()
        digests.append(digest)
    return digests


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, clip or sound in a prompt: the digest of its content and its placeholder tokens."""

    content_digest: bytes
    """Full-width digest (at least 16 bytes) of the content as the model sees it, preprocessing included."""
    first_token: int
    """Its first token's place among the token ids given; negative if it began in blocks before them."""
    tokens: int


def multimodal_extra(items: Iterable[MultimodalItem], tokens_per_block: int) -> dict[int, list[bytes]]:
    """Return `block_extra` for `block_digests`: each block's items, and where in the block each begins.

    Placeholder ids are the same for every image: without this, prompts with different images share keys.
    Raises ValueError for digests under 16 bytes: engines shorten them to ids of 30 bits, which do collide.
    """
    by_block: dict[int, list[bytes]] = {}
    for item in sorted(items, key=lambda item: item.first_token):
        if len(item.content_digest) < 16:
            raise ValueError(f"a content digest of {len(item.content_digest)} bytes is too short: give at least 16")
        if item.tokens < 1:
            raise ValueError(f"an item occupies at least one token, not {item.tokens}")
        last_block = (item.first_token + item.tokens - 1) // tokens_per_block
        for block in range(max(0, item.first_token // tokens_per_block), last_block + 1):
            start = item.first_token - block * tokens_per_block
            place = start.to_bytes(8, "little", signed=True) + item.tokens.to_bytes(8, "little")
            by_block.setdefault(block, []).append(place + item.content_digest)
    return by_block


def _token_bytes(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Return the token ids as 8 bytes each, little-endian, signed."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise ValueError(f"token ids have to be one sequence, not an array of shape {ids.shape}")
    if not ids.size:
        return b""
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token ids have to be integers of 64 bits, not {ids.dtype}")
    if ids.dtype == np.uint64 and int(ids.max()) >= 2**63:
        raise ValueError("token ids have to be integers of 64 bits, signed: one is 2**63 or more")
    return ids.astype("<i8", copy=False).tobytes()


def _root(tokens_per_block: int, extra: Sequence[bytes]) -> bytes:
    return sha256(_ROOT + tokens_per_block.to_bytes(8, "little") + _joined(extra)).digest()


def _parent(parent: bytes, extra: Sequence[bytes]) -> bytes:
    if extra:
        raise ValueError("extra conditions a chain from its root: it is in `parent` already, give it there")
    if len(parent) != BLOCK_DIGEST_BYTES:
        raise ValueError(f"parent is a block digest of {BLOCK_DIGEST_BYTES} bytes, not {len(parent)}")
    return parent


def _joined(parts: Sequence[bytes]) -> bytes:
    """Return `parts` behind their lengths, so that no two sequences of parts read the same."""
    if not all(isinstance(part, bytes) for part in parts):
        raise ValueError("extra is a sequence of byte strings: wrap a single one in a list")
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
