"""What names a KV-cache object: key spaces, shards, chained block digests, fingerprints.

`KeySpace` says what makes KV bytes incompatible, `block_digests` says which tokens a block holds, and
`KeySpace.key` joins the two into the 48-byte key that engines store under. All of it is deterministic on
every host and in every process.
"""

from __future__ import annotations

from moonpool.keys.blocks import MultimodalItem, block_digests, multimodal_extra
from moonpool.keys.canonical import SPACE_DIGEST_BYTES, canonical_json, description_digest
from moonpool.keys.fingerprints import fingerprint, fingerprints, fingerprints48
from moonpool.keys.shards import Shard, heads_of_rank, shard_of_rank
from moonpool.keys.space import BLOCK_DIGEST_BYTES, KeySpace
from moonpool.keys.weights import fingerprint_state, fingerprint_weights

__all__ = [
    "BLOCK_DIGEST_BYTES",
    "SPACE_DIGEST_BYTES",
    "KeySpace",
    "MultimodalItem",
    "Shard",
    "block_digests",
    "canonical_json",
    "description_digest",
    "fingerprint",
    "fingerprint_state",
    "fingerprint_weights",
    "fingerprints",
    "fingerprints48",
    "heads_of_rank",
    "multimodal_extra",
    "shard_of_rank",
]
