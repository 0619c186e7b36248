"""What names a KV-cache object: key spaces, shards, chained block digests, fingerprints.

`KeySpace` says what makes KV bytes incompatible, `block_digests` says which tokens a block holds, and
`KeySpace.key` joins the two into the 48-byte key that engines store under. All of it is deterministic on every host and
in every process.
"""

from __future__ import annotations

from moonpool.keys.fingerprints import fingerprint, fingerprints, fingerprints48

__all__ = ["fingerprint", "fingerprints", "fingerprints48"]
