"""The demo's comparison calls the same the same, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.demo.compare import TOLERANCE, Outcome, compare, load, save


def outcome(seed: int = 0) -> Outcome:
    draw = np.random.default_rng(seed)
    logits = draw.standard_normal((5, 16), dtype=np.float32)
    return Outcome(logits.argmax(axis=1).tolist(), logits, draw.standard_normal((2, 2, 9), dtype=np.float32))


def with_gap(gap: float) -> Outcome:
    """An outcome whose two best logits of step 2 are `gap` apart, as a share of the largest logit."""
    made = outcome()
    made.logits[2, 1] = 3.0
    made.logits[2, 4] = 3.0 - gap * 3.0
    made.logits[0, 0] = 3.0
    return replace(made, tokens=made.logits.argmax(axis=1).tolist())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equal_outcomes_are_the_same(dtype: str) -> None:
    verdict = compare([outcome(), outcome(1)], [outcome(), outcome(1)], dtype)
    assert verdict.same
    assert (verdict.tokens_compared, verdict.ties, verdict.logits_off, verdict.kv_off) == (10, 0, 0.0, 0.0)


@pytest.mark.parametrize(("share", "same"), [(0.5, True), (1.5, False)])
def test_a_logit_may_be_off_by_the_tolerance_and_no_more(share: float, same: bool) -> None:
    reference = outcome()
    logits = reference.logits.copy()
    logits[4, 7] -= share * TOLERANCE["float32"] * np.abs(logits).max()
    verdict = compare([replace(reference, logits=logits)], [reference], "float32")
    assert verdict.same is same
    assert verdict.logits_off == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(("share", "same"), [(0.5, True), (1.5, False)])
def test_the_kv_cache_may_be_off_by_the_tolerance_and_no_more(share: float, same: bool) -> None:
    reference = outcome()
    kv = reference.kv.copy()
    kv[1, 0, 3] += share * TOLERANCE["float32"] * np.abs(kv).max()
    assert compare([replace(reference, kv=kv)], [reference], "float32").same is same


def test_one_other_token_is_a_difference_though_the_logits_agree() -> None:
    reference = outcome()
    tokens = [*reference.tokens[:4], (reference.tokens[4] + 1) % 16]
    verdict = compare([replace(reference, tokens=tokens)], [reference], "float32")
    assert verdict.reasons == ["1 of 5 tokens differ"]


def test_a_missing_token_is_a_difference() -> None:
    reference = outcome()
    with pytest.raises(ValueError):
        compare([replace(reference, tokens=reference.tokens[:4])], [reference], "float32")


def test_values_that_are_no_numbers_are_a_difference() -> None:
    reference = outcome()
    kv = reference.kv.copy()
    kv[0, 0, 0] = np.nan
    assert not compare([replace(reference, kv=kv)], [reference], "float32").same


@pytest.mark.parametrize(
    ("dtype", "gap", "same"),
    [("bfloat16", 0.01, True), ("bfloat16", 0.1, False), ("float32", 0.01, False), ("float32", 1e-6, False)],
)
def test_only_bfloat16_and_only_at_a_tie_may_tokens_part(dtype: str, gap: float, same: bool) -> None:
    reference = with_gap(gap)
    assert reference.tokens[2] == 1
    parted = replace(reference, tokens=[*reference.tokens[:2], 4, 0, 0])
    verdict = compare([parted], [reference], dtype)
    assert (verdict.same, verdict.ties) == (same, int(same))
    assert verdict.tokens_compared == (2 if same else 5)


def test_outcomes_come_back_from_their_file(tmp_path: Path) -> None:
    save(tmp_path / "pass 1.npz", [outcome(), outcome(1)])
    for read, written in zip(load(tmp_path / "pass 1.npz"), [outcome(), outcome(1)], strict=True):
        assert read.tokens == written.tokens
        assert np.array_equal(read.logits, written.logits)
        assert np.array_equal(read.kv, written.kv)
