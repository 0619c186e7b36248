"""What the pool was good for: tokens asked for, found, loaded, computed again and why; seconds won and lost."""

from __future__ import annotations

from collections import Counter


class Tally:
    """Counters of one scheduler since they were last taken. For its thread."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        """By what became of them: asked, hit, loaded, stored."""
        self.recomputed: Counter[str] = Counter()
        """Tokens that the pool had, or should have had, and that were computed all the same, by reason."""
        self.seconds: Counter[str] = Counter()
        """saved: prefill that loads spared, less what they took; lost: by how much loads took longer than prefill."""
        self.requests: Counter[str] = Counter()

    def asked(self, tokens: int, hit: int) -> None:
        """A request was looked up: so many whole objects' tokens, of which so many are there."""
        self.requests["asked"] += 1
        self.tokens["asked"] += tokens
        self.tokens["hit"] += hit

    def skipped(self, reason: str, tokens: int = 0) -> None:
        """A hit was not used."""
        self.requests["skipped"] += 1
        self.recomputed[reason] += tokens

    def loaded(self, tokens: int, load_s: float, prefill_s: float) -> None:
        """A load has ended well, in `load_s`; computing would have taken `prefill_s`."""
        self.requests["loaded"] += 1
        self.tokens["loaded"] += tokens
        if prefill_s:
            self.seconds["saved" if prefill_s >= load_s else "lost"] += abs(prefill_s - load_s)

    def failed(self, tokens: int, reason: str) -> None:
        """A load has failed: its tokens are computed."""
        self.requests["failed"] += 1
        self.recomputed[reason] += tokens

    def stored(self, tokens: int) -> None:
        """So many tokens' objects were handed to the workers to be stored."""
        self.tokens["stored"] += tokens
