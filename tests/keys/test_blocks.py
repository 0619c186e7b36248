"""A block's digest names its whole prefix and whatever conditioned it, on every host and in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.keys import MultimodalItem, block_digests, multimodal_extra

IMAGE = sha256(b"a picture").digest()

# docs/keys.md lists the same.
PLAIN = [
    "090073027167e92c2301ddba0b051c50251c7b013fb6d62d54b9d808ba660fa8",
    "a0433486ae74d20196ffdcfc25e5d57ce4fbb0d58e0d73c9785966e5aa9bc6c7",
    "7953edc3c03326c2607c4c35cd84ed91d5b8ce82f0d61bea018747ca0856256e",
]
SALTED = [
    "56c21b4e489e218ba96806f69f99da57ebaf879a5c1f648b5f7c9c0b9ec895a6",
    "92b9436cdb7cbc7c349efb241d6daa0cf5bc5a0fc131f55ceb3acef5a9cbdf34",
]
SECOND_CONDITIONED = [PLAIN[0], "0d6d38814c2bff660dfa53f7f19cca0237f205869a2f1e6c4c24a841c996e723"]

tokens = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70)
sizes = st.integers(1, 20)


def hexed(digests: list[bytes]) -> list[str]:
    return [digest.hex() for digest in digests]


def test_test_vectors() -> None:
    assert hexed(block_digests(range(48), 16)) == PLAIN
    assert hexed(block_digests(range(32), 16, extra=[b"salt"])) == SALTED
    assert hexed(block_digests(range(32), 16, block_extra={1: [b"image" * 8]})) == SECOND_CONDITIONED


def test_the_digests_are_what_the_documentation_says() -> None:
    root = sha256(b"moonpool blocks 1" + (2).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"salt").digest()
    first = sha256(root + (7).to_bytes(8, "little") + (-1).to_bytes(8, "little", signed=True)).digest()
    second = sha256(first + bytes(16) + (2).to_bytes(8, "little") + b"ab").digest()
    assert block_digests([7, -1, 0, 0], 2, extra=[b"salt"], block_extra={1: [b"ab"]}) == [first, second]


def test_another_process_with_another_hash_seed_gives_the_same() -> None:
    program = (
        "from moonpool.keys import block_digests, KeySpace\n"
        "for d in block_digests(range(48), 16): print(d.hex())\n"
        "s = KeySpace(weights='files1:' + '0' * 64, tokens_per_block=16, kv_dtype='bfloat16', layout='l',"
        " extra={'b': 1, 'a': 2})\n"
        "print(s.digest.hex())"
    )
    printed = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout)
        assert run.stdout.split()[:3] == PLAIN
    assert len(printed) == 1


@given(tokens, sizes)
def test_only_full_blocks_have_a_digest_of_32_bytes(ids: list[int], size: int) -> None:
    digests = block_digests(ids, size)
    assert len(digests) == len(ids) // size
    assert all(len(digest) == 32 for digest in digests)


@given(tokens, tokens, sizes)
def test_digests_are_equal_exactly_as_far_as_the_tokens_are(first: list[int], second: list[int], size: int) -> None:
    for ids in (second, first[: len(first) // 2] + second):
        pairs = zip(block_digests(first, size), block_digests(ids, size), strict=False)
        for index, (one, other) in enumerate(pairs):
            end = (index + 1) * size
            assert (one == other) == (first[:end] == ids[:end])


@given(tokens, sizes)
def test_a_chain_goes_on_from_a_parent(ids: list[int], size: int) -> None:
    whole = block_digests(ids, size, extra=[b"salt"])
    for cut in range(1, len(whole) + 1):
        assert block_digests(ids[cut * size :], size, parent=whole[cut - 1]) == whole[cut:]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), sizes)
def test_lists_and_arrays_of_every_width_give_the_same(ids: list[int], size: int) -> None:
    expected = block_digests(ids, size)
    for dtype in ("int32", "uint32", "int64", "uint64", ">i4"):
        assert block_digests(np.array(ids, dtype=dtype), size) == expected
    strided: Any = np.repeat(np.array(ids, dtype=np.int64), 2)[::2]
    assert block_digests(strided, size) == expected
    assert block_digests(tuple(ids), size) == expected


def test_tokens_per_block_is_part_of_the_chain() -> None:
    assert block_digests([5], 1)[0] != block_digests([5, 0], 2)[0]
    assert not set(block_digests(range(64), 16)) & set(block_digests(range(64), 32))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([], [b""]),
        ([b"ab"], [b"a", b"b"]),
        ([b"", b"a"], [b"a", b""]),
        ([b"salt"], [b"salt", b""]),
        ([b"a", b"b"], [b"b", b"a"]),
    ],
)
def test_conditioning_that_differs_in_any_way_gives_other_digests(one: list[bytes], other: list[bytes]) -> None:
    assert block_digests([1, 2], 2, extra=one) != block_digests([1, 2], 2, extra=other)
    assert block_digests([1, 2], 2, block_extra={0: one}) != block_digests([1, 2], 2, block_extra={0: other})


def test_conditioning_is_not_taken_for_tokens() -> None:
    """Eight bytes of conditioning behind their length look like two tokens; the chain must tell them apart."""
    as_tokens = block_digests([1, 2, 8, 3], 4)
    as_extra = block_digests([1, 2], 2, block_extra={0: [(3).to_bytes(8, "little")]})
    assert not set(as_tokens) & set(as_extra)


def test_conditioning_of_a_block_reaches_it_and_all_after_it() -> None:
    plain = block_digests(range(40), 8)
    conditioned = block_digests(range(40), 8, block_extra={2: [IMAGE], 9: [b"beyond the end"]})
    assert [one == other for one, other in zip(plain, conditioned, strict=True)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "ids",
    [[1.0, 2.0], [True, False], ["1", "2"], [[1, 2]], [2**63, 1], np.array([2**63], dtype=np.uint64), [None], [2**70]],
)
def test_token_ids_that_are_not_integers_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="token ids have to be"):
        block_digests(ids, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"tokens_per_block": 0}, "at least one token"),
        ({"tokens_per_block": 1, "parent": b"short"}, "32 bytes"),
        ({"tokens_per_block": 1, "parent": bytes(32), "extra": [b"salt"]}, "give it there"),
        ({"tokens_per_block": 1, "extra": b"salt"}, "wrap a single one in a list"),
        ({"tokens_per_block": 1, "extra": ["salt"]}, "byte strings"),
    ],
)
def test_arguments_that_would_be_misread_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        block_digests([1, 2, 3], **arguments)


def test_another_picture_under_the_same_placeholders_has_another_key() -> None:
    other = sha256(b"another picture").digest()
    ids = [1, 2, 3] + [99] * 10 + [4] * 7
    one, two = (
        block_digests(ids, 4, block_extra=multimodal_extra([MultimodalItem(digest, 3, 10)], 4))
        for digest in (IMAGE, other)
    )
    assert not set(one) & set(two)


def test_the_same_pictures_meeting_at_another_token_have_another_key() -> None:
    """The placeholders are the same tokens, so only the place of each item tells which of them a token belongs to."""
    other = sha256(b"another picture").digest()
    ids = [99] * 8
    halves, thirds = ([MultimodalItem(IMAGE, 0, meet), MultimodalItem(other, meet, 8 - meet)] for meet in (4, 2))
    one, two = (block_digests(ids, 8, block_extra=multimodal_extra(items, 8)) for items in (halves, thirds))
    assert one != two


def test_an_item_that_began_in_an_earlier_call_is_named_the_same() -> None:
    ids = [99] * 32
    whole = block_digests(ids, 8, block_extra=multimodal_extra([MultimodalItem(IMAGE, 3, 26)], 8))
    rest = multimodal_extra([MultimodalItem(IMAGE, 3 - 16, 26)], 8)
    assert block_digests(ids[16:], 8, block_extra=rest, parent=whole[1]) == whole[2:]


def test_shortened_content_digests_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        multimodal_extra([MultimodalItem(IMAGE[:8], 0, 4)], 4)
    with pytest.raises(ValueError, match="at least one token"):
        multimodal_extra([MultimodalItem(IMAGE, 0, 0)], 4)
