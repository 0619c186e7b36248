"""KV cache between the pool and where an engine keeps it: a GPU's memory, or the host's."""
