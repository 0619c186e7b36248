"""The node: pool, table, allocation, eviction, sessions, feed."""
