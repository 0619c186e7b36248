"""What an engine's process of the demo is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.demo.settings import Settings

ALONE = "no pool"
FIRST = "A, storing"
SECOND = "B, loading"
ENGINES = (ALONE, FIRST, SECOND)
"""Their names, in the order in which they run."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one fresh process does: start an engine, answer prompts, then one of them again under each control."""

    name: str
    """One of `ENGINES`."""
    settings: Settings
    folder: str
    """Holds the model, which the first engine writes; the answers go there as `answers.json`."""
    prompts: list[int]
    """Which of the demo's prompts, in this order."""
    url: str = ""
    """The node; empty for no pool."""
    tenant: str = ""
    controls: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine answered, how soon, and where the prompts' KV cache came from. Lists are in the prompts' order."""

    tokens: list[list[int]]
    """Generated, greedily."""
    logprobs: list[list[float]]
    """Of each of them."""
    first_token_s: list[float]
    """Since all prompts were handed in, at once."""
    seconds: float
    """Until the last answer."""
    computed: int
    """Tokens of prompts whose KV cache this engine has computed."""
    shared: int
    """Tokens whose KV cache it had from another of these prompts (vLLM's own prefix caching)."""
    loaded: int
    """Tokens whose KV cache it loaded from the pool."""
    stored_bytes: int = 0
    """What the pool has been given meanwhile."""
    started_s: float = 0.0
    """How long the engine took to start."""


def prompts_of(settings: Settings, name: str) -> list[int]:
    """Which prompts an engine answers: all, but for engine A, which leaves the last question about each document to
    engine B."""
    asked = range(3 * settings.questions)
    return [number for number in asked if name != FIRST or number % settings.questions < settings.questions - 1]
