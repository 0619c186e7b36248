"""Test doubles, plain models and suites that ship with Moonpool, for its own tests and for those who build on it.

`node`: a real daemon in a temporary folder. `values`: bytes that say themselves whether they are right.
`records`: who owns what in a pool, read from the node's own files. `conformance`: what every client keeps to.
`space_model`: the allocator as a plain list. Only `conformance` needs pytest.
"""
