"""How large the demo is, and what its processes are told to do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

CONTROL_PROMPT = 0
"""The prompt that the negative controls are done to; the one about the next document lends its blocks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The demo's model, prompts and length. The defaults take under a minute on two cores."""

    dtype: str = "float32"
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    document_tokens: int = 1150
    questions: int = 3
    """Questions asked about each document."""
    generated: int = 12
    """Tokens generated from each prompt, the one that prefill gives included."""
    tokens_per_object: int = 64
    seed: int = 0

    @property
    def pool_bytes(self) -> int:
        """A pool with room for every prompt as if none shared anything, and half as much again."""
        token_bytes = 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 4
        return max(64 << 20, 3 * self.questions * (self.document_tokens + 600) * token_bytes * 3 // 2)

    def quick(self) -> Settings:
        """The same with a model a tenth the size: seconds instead of a minute."""
        return replace(
            self, layers=4, hidden=256, heads=4, kv_heads=2, document_tokens=500, questions=2, generated=6
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over all prompts."""

    name: str
    """Names the pass in the results: `recompute 1`, `moonpool 2`, or a control of `tamper.CONTROLS`."""
    url: str = ""
    """The store; empty for none at all."""
    control: str = ""
    """What is done to the blocks on their way from the store, for a negative control over one prompt."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one fresh process does: its passes in order, each writing `<folder>/<name>.npz`."""

    settings: Settings
    folder: str
    tenant: str
    passes: list[Pass] = field(default_factory=list)
    purge: bool = False
    """Whether to remove what the demo stored at the end: a node that was there before gets its room back."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Where one pass spent its time, over all prompts, and what it moved."""

    name: str
    seconds: float
    """Until all prompts had their first token: all stages together."""
    query_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    store_s: float = 0.0
    tokens: int = 0
    loaded: int = 0
    loadable: int = 0
    """Tokens that could be loaded if all were stored: full objects, short of each prompt's last token."""
    stored: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """What a worker tells its parent, a line of JSON each."""

    working: str = ""
    """The pass that it is at; empty while it loads."""
    prompts_done: int = 0
    finished: Stages | None = None
    failed: str = ""
