"""What the scheduler side knows of one request, from its first lookup until nothing of it is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moonpool import Match
from moonpool.client.lookup import PendingMatch
from moonpool.engines.vllm.metadata import NO_BYTES, Moved


@dataclass(slots=True, eq=False)
class Tracked:
    """One request. Owned by the scheduler's thread.

    The hold ends exactly once, through `Lookups.let_go`: when its load has ended, when the request is gone, or when
    nothing is to be loaded after all.
    """

    request: Any
    adapter: str = ""
    """Key space of its LoRA adapter as JSON, "" for the base model."""
    eligible: bool = True
    """False where what conditions its KV can't be told by content: it is neither stored nor loaded."""
    pending: PendingMatch | None = None
    asked_at: float = 0.0
    match: Match | None = None
    computed: int = 0
    """Tokens that the GPU had when the match was last used."""
    asked: bool = False
    """It has been counted as looked up."""
    declined: bool = False
    """It has been counted as a hit that was not used."""
    loading: bool = False
    load_tokens: int = 0
    load_began: float = 0.0
    moved: Moved = NO_BYTES
    """What its load has moved, as far as ranks have told."""
    load_error: str = ""
    """What went wrong with its load on some rank."""
    load_failed: bool = False
    """Its load went wrong once: it is computed, and not looked up again."""
    drawn: bool = False
    """Whether it is one of shadow mode's sample has been decided."""
    shadowed: bool = False
    """A hit that is computed all the same: what it has found stays held, to be compared when that is done."""
    blocks: tuple[list[int], ...] = ()
    """Per KV group, as far as told by the scheduler's output."""
    blocks_known: bool = True
    """False where they may be out of date, until it is computed anew."""
    saved: int = 0
    """Objects from the first on that are stored, or on their way."""
    storable: bool = True
    """False where its blocks aren't known, or hold KV of before a reset; until it is computed anew."""

    @property
    def id(self) -> str:
        return str(self.request.request_id)
