"""What one call of a `PrefixCache` did, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Report:
    """One `prefill` or `generate`: tokens, bytes and seconds. `str(report)` is one line for people."""

    tokens: int
    """Tokens of the prompt."""
    loaded: int = 0
    """Of these, the leading ones whose KV cache came from the store."""
    generated: int = 0
    """Tokens that `generate` added; 0 after `prefill`."""
    stored: int = 0
    """Tokens whose KV cache this call put into the store (those that were there already don't count)."""
    bytes_loaded: int = 0
    bytes_stored: int = 0
    query_s: float = 0.0
    """Seconds for keys and look-up."""
    load_s: float = 0.0
    """Seconds from the pool into the model's cache."""
    compute_s: float = 0.0
    """Seconds in the model."""
    store_s: float = 0.0
    """Seconds for reserving, filling and committing."""
    trouble: str = ""
    """Why the store wasn't used, or not wholly; empty when all went well. The result is right either way."""

    @property
    def computed(self) -> int:
        """Tokens of the prompt that the model had to compute."""
        return self.tokens - self.loaded

    @property
    def total_s(self) -> float:
        return self.query_s + self.load_s + self.compute_s + self.store_s

    def __str__(self) -> str:
        counts = f"{self.tokens} tokens: {self.loaded} loaded, {self.computed} computed, {self.stored} stored"
        if self.generated:
            counts += f", {self.generated} generated"
        stages = (
            f"query {self.query_s * 1e3:.2f} ms, load {self.load_s * 1e3:.2f} ms, "
            f"compute {self.compute_s * 1e3:.2f} ms, store {self.store_s * 1e3:.2f} ms"
        )
        return f"{counts}; {stages}" + (f" ({self.trouble})" if self.trouble else "")
