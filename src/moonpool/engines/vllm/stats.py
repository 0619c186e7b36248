"""What the pool was good for: tokens asked for, found, loaded, computed again and why; seconds won and lost."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

Figures = dict[str, dict[str, float]]
"""Metric → label value ("" where it has no label) → by how much it has grown. Plain data: it crosses processes."""

REASONS = (
    "prefill is faster",
    "too short",
    "lookup too slow",
    "shadow",
    "no checksum yet",
    "object gone",
    "node gone",
    "integrity",
    "load too slow",
    "copy failed",
)
"""Why tokens that the pool had, or should have had, were computed: all that there are, so that metrics stay few."""
UNSTORED = ("no room", "too much under way", "node gone", "copy failed")
"""Why objects weren't stored. What is stored already, or about to be by somebody else, isn't among them."""
_TELLTALES = (
    ("object gone", ("went away", "gone meanwhile", "purged")),
    ("integrity", ("checksum", "corrupt", "can't be trusted", "bytes where")),
    ("load too slow", ("longer than", "too long", "timed out")),
    ("node gone", ("no node", "not attached", "node closed", "node is gone", "session", "another pool")),
)
"""What the text of an error says about its kind. All else is a copy that failed."""


def reason_of(error: str) -> str:
    """The kind of an error whose text this is: one of `REASONS`."""
    if error in REASONS:
        return error
    text = error.lower()
    return next((reason for reason, words in _TELLTALES if any(word in text for word in words)), "copy failed")


class Metric(NamedTuple):
    """One counter as Prometheus shows it: `vllm:moonpool_<name>_total`."""

    name: str
    text: str
    label: str = ""


METRICS = (
    Metric("asked_tokens", "Prompt tokens, in whole objects, that the pool was asked for."),
    Metric("hit_tokens", "Tokens of those that were in the pool."),
    Metric("loaded_tokens", "Tokens whose KV cache was loaded from the pool instead of being computed."),
    Metric("stored_tokens", "Tokens whose KV cache this engine has put into the pool."),
    Metric("recomputed_tokens", "Tokens computed although the pool had them, or should have had.", "reason"),
    Metric("requests", "Requests by what became of their lookup.", "outcome"),
    Metric("saved_seconds", "Prefill that loads have spared, by the measured rate, less what the loads took."),
    Metric("lost_seconds", "By how much loads took longer than prefill would have."),
    Metric("load_bytes", "Bytes loaded, of all ranks together."),
    Metric("load_seconds", "Seconds in which something was being loaded."),
    Metric("store_bytes", "Bytes stored, of all ranks together."),
    Metric("store_seconds", "Seconds in which something was being stored, on the rank that took longest."),
    Metric("unstored_objects", "Objects that were not stored, over all ranks.", "reason"),
    Metric("shadow_objects", "Stored objects that were compared with what was computed.", "result"),
)


class Tally:
    """Counters of one scheduler, from its start on. For its thread."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        """By what became of them: asked, hit, loaded, stored."""
        self.recomputed: Counter[str] = Counter()
        """Tokens that the pool had, or should have had, and that were computed all the same, by reason."""
        self.seconds: dict[str, float] = {"saved": 0.0, "lost": 0.0, "load": 0.0, "store": 0.0}
        """saved: prefill that loads spared, less what they took; lost: by how much loads took longer than prefill;
        load, store: spent on it."""
        self.bytes: Counter[str] = Counter()
        """By direction: load, store."""
        self.requests: Counter[str] = Counter()
        """asked, skipped, loaded, failed."""
        self.unstored: Counter[str] = Counter()
        """Objects, by reason."""
        self.compared: Counter[str] = Counter()
        """Objects in shadow mode, by result: same, different, dropped."""
        self._dirty = False
        self._taken: Figures = {}

    def asked(self, tokens: int, hit: int) -> None:
        """A request was looked up: so many whole objects' tokens, of which so many are there."""
        self._dirty = True
        self.requests["asked"] += 1
        self.tokens["asked"] += tokens
        self.tokens["hit"] += hit

    def skipped(self, reason: str, tokens: int = 0) -> None:
        """A hit of so many tokens was not used."""
        self._dirty = True
        self.requests["skipped"] += 1
        self.recomputed[reason_of(reason)] += tokens

    def loaded(self, tokens: int, size: int, load_s: float, cost_s: float, prefill_s: float) -> None:
        """A load has ended well, in `load_s`; `cost_s` of that is its own doing. Computing would have taken
        `prefill_s`; 0: not known yet."""
        self._dirty = True
        self.requests["loaded"] += 1
        self.tokens["loaded"] += tokens
        self.bytes["load"] += size
        self.seconds["load"] += load_s
        if prefill_s:
            self.seconds["saved" if prefill_s >= cost_s else "lost"] += abs(prefill_s - cost_s)

    def failed(self, tokens: int, error: str) -> None:
        """A load has failed: its tokens are computed."""
        self._dirty = True
        self.requests["failed"] += 1
        self.recomputed[reason_of(error)] += tokens

    def stored(self, tokens: int, size: int, store_s: float) -> None:
        """Stores have become visible: so many bytes, of so many tokens."""
        self._dirty = True
        self.tokens["stored"] += tokens
        self.bytes["store"] += size
        self.seconds["store"] += store_s

    def not_stored(self, reason: str, objects: int) -> None:
        """So many objects were not stored."""
        self._dirty = True
        kind = reason if reason in UNSTORED else reason_of(reason)
        self.unstored[kind if kind in UNSTORED else "copy failed"] += objects

    def shadowed(self, result: str, objects: int) -> None:
        """So many objects were compared with what was computed, or were to be."""
        self._dirty = True
        self.compared[result] += objects

    def take(self) -> Figures | None:
        """By how much everything has grown since the last call; None where nothing has."""
        if not self._dirty:
            return None
        self._dirty = False
        now, before = self._figures(), self._taken
        self._taken = now
        grown = {
            name: {label: value - before.get(name, {}).get(label, 0) for label, value in values.items()}
            for name, values in now.items()
        }
        found = {name: {label: by for label, by in values.items() if by} for name, values in grown.items()}
        return {name: values for name, values in found.items() if values} or None

    def _figures(self) -> Figures:
        figures: Figures = {f"{what}_tokens": {"": count} for what, count in self.tokens.items()}
        figures |= {f"{what}_seconds": {"": time_s} for what, time_s in self.seconds.items()}
        figures |= {f"{what}_bytes": {"": size} for what, size in self.bytes.items()}
        figures["recomputed_tokens"] = dict(self.recomputed)
        figures["requests"] = dict(self.requests)
        figures["unstored_objects"] = dict(self.unstored)
        figures["shadow_objects"] = dict(self.compared)
        return figures
