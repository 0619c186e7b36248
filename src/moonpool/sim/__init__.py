"""Replays traces against the allocation and eviction of a pool, beside an ideal LRU of the same size."""
