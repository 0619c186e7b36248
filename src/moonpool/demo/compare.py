"""Whether a run with the store came out as one without: tokens, logits, and the KV cache itself.

The KV cache is compared beside the outputs because the outputs can't show everything. Cached keys carry their positions
and attention sums over a set, so two whole blocks of a prefix that have changed places change no logit of that prompt,
yet they are wrong for every prompt that shares only the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""How far a logit, or a projection of KV cache, may be off, as a share of the largest one there is.

A prompt computed in pieces may add up in another order than in one. Measured with the demo's model: another order of
the keys changes its logits by 1e-6 of the largest in float32, by 1e-2 in bfloat16; a wrong block by 7e-2 and more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run over one prompt came to."""

    tokens: list[int]
    """Generated, greedily."""
    logits: npt.NDArray[np.float32]
    """`[generated, vocabulary]`: what each token was chosen from."""
    kv: npt.NDArray[np.float32]
    """`[layers, 2, tokens]`: of each token's keys and values a seeded random projection, one number each."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far outcomes are from the reference; each difference as a multiple of the tolerance."""

    tokens_differing: int
    tokens_compared: int
    ties: int
    """Prompts whose tokens part where the reference's two best logits are closer than bfloat16 can tell."""
    logits_off: float
    kv_off: float

    @property
    def same(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """What is not the same, in words; empty when all is."""
        found = []
        if self.tokens_differing:
            found.append(f"{self.tokens_differing} of {self.tokens_compared} tokens differ")
        if self.logits_off > 1:
            found.append(f"logits off by {self.logits_off:.3g} times the tolerance")
        if self.kv_off > 1:
            found.append(f"KV cache off by {self.kv_off:.3g} times the tolerance")
        return found


def compare(outcomes: Sequence[Outcome], reference: Sequence[Outcome], dtype: str) -> Verdict:
    """Return how `outcomes` compare to `reference`, prompt by prompt, at the tolerance of `dtype`.

    Every token has to be the same. In bfloat16 alone the two best logits can be equal to within rounding: a prompt
    whose tokens part there is compared up to that token and counted as a tie.
    """
    tolerance = TOLERANCE[dtype]
    differing = compared = ties = 0
    logits_off = kv_off = 0.0
    for outcome, expected in zip(outcomes, reference, strict=True):
        scale = float(np.abs(expected.logits).max())
        count = len(expected.tokens)
        until = next(
            (i for i in range(count) if outcome.tokens[i : i + 1] != expected.tokens[i : i + 1]), count
        )
        if until < count and dtype != "float32" and _gap(expected.logits[until]) <= tolerance * scale:
            ties += 1
            count = until
        differing += sum(a != b for a, b in zip(outcome.tokens[:count], expected.tokens[:count], strict=True))
        compared += count
        # Behind the first token that differs the logits are those of another text.
        steps = min(until + 1, len(expected.tokens))
        logits_off = max(logits_off, _off(outcome.logits[:steps], expected.logits[:steps], tolerance))
        kv_off = max(kv_off, _off(outcome.kv, expected.kv, tolerance))
    return Verdict(differing, compared, ties, logits_off, kv_off)


def save(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write `outcomes` to `path`, an .npz file."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for index, outcome in enumerate(outcomes):
        arrays[f"tokens{index}"] = np.array(outcome.tokens, dtype=np.int64)
        arrays[f"logits{index}"] = outcome.logits
        arrays[f"kv{index}"] = outcome.kv
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> list[Outcome]:
    """Return the outcomes that `save` wrote to `path`."""
    with np.load(path) as arrays:
        return [
            Outcome(arrays[f"tokens{index}"].tolist(), arrays[f"logits{index}"], arrays[f"kv{index}"])
            for index in range(len(arrays.files) // 3)
        ]


def _gap(logits: npt.NDArray[np.float32]) -> float:
    second, first = np.sort(logits)[-2:]
    return float(first - second)


def _off(values: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], tolerance: float) -> float:
    """Return the largest difference as a multiple of what is tolerated; infinity where a value isn't a number."""
    off = float(np.abs(values - expected).max() / (tolerance * np.abs(expected).max()))
    # `max` would drop a NaN without a word.
    return off if np.isfinite(off) else np.inf
