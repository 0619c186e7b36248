"""A key space is what makes KV bytes incompatible: any difference gives another digest, and nothing else does."""

from __future__ import annotations

import hashlib
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.keys import KeySpace, canonical_json, description_digest
from moonpool.keys.canonical import DESCRIPTION_BYTES_MAX

WEIGHTS = "files1:" + "0" * 64
OTHER = "files1:" + "1" * 64
REQUIRED: dict[str, Any] = {
    "weights": WEIGHTS,
    "tokens_per_block": 16,
    "kv_dtype": "bfloat16",
    "layout": "layer,kv,token,head,dim",
}
LLAMA = KeySpace(**REQUIRED, model="meta-llama/Llama-3.1-8B")

DIFFERENCES: list[dict[str, Any]] = [
    {"weights": OTHER},
    {"tokens_per_block": 32},
    {"kv_dtype": "fp8_e4m3"},
    {"layout": "layer,kv,head,token,dim"},
    {"layout_version": 2},
    {"inline_scales": True},
    {"quantization": "awq"},
    {"kv_scales": OTHER},
    {"lora": OTHER},
    {"speculative": "eagle3"},
    {"draft_weights": OTHER},
    {"context_parallel_interleave": 1},
    {"tenant": "blue"},
    {"model": "llama"},
    {"engine": "vllm"},
    {"layers": (0, 16, 32)},
    {"heads": (0, 4, 8)},
    {"context": (0, 2), "context_parallel_interleave": 1},
    {"extra": {"rope": "yarn"}},
]


def test_test_vector_of_a_space_and_of_a_shard() -> None:
    """docs/keys.md lists the same; a change of it makes every stored object unreachable."""
    assert LLAMA.canonical == (
        b'{"format":1,"kv_dtype":"bfloat16","layout":"layer,kv,token,head,dim","model":"meta-llama/Llama-3.1-8B",'
        b'"tokens_per_block":16,"weights":"files1:' + b"0" * 64 + b'"}'
    )
    assert LLAMA.digest.hex() == "3c9b02e5b8d696a1d62ffcee95b96a09"
    shard = LLAMA.shard(layers=(0, 16, 32), heads=(4, 8, 8))
    assert shard.digest.hex() == "108242ed34559b8112188db3c3c47510"


def test_the_digest_is_half_of_the_sha256_of_the_canonical_description() -> None:
    assert LLAMA.digest == hashlib.sha256(LLAMA.canonical).digest()[:16] == description_digest(LLAMA.canonical)


def test_every_difference_gives_another_digest() -> None:
    spaces = [KeySpace(**REQUIRED), *(KeySpace(**{**REQUIRED, **difference}) for difference in DIFFERENCES)]
    assert len({space.digest for space in spaces}) == len(DIFFERENCES) + 1
    assert len(set(spaces)) == len(DIFFERENCES) + 1


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_space_comes_back_from_its_description(difference: dict[str, Any]) -> None:
    space = KeySpace(**{**REQUIRED, **difference})
    for description in (space.description, space.canonical, json.dumps(space.description, indent=3)):
        again = KeySpace.from_description(description)
        assert again == space
        assert again.digest == space.digest


def test_a_space_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(LLAMA)) == LLAMA


def test_equal_texts_in_different_normal_forms_are_one_space() -> None:
    composed, decomposed = KeySpace(**REQUIRED, tenant="caf\u00e9"), KeySpace(**REQUIRED, tenant="cafe\u0301")
    assert composed == decomposed
    assert hash(composed) == hash(decomposed)
    assert composed.digest == decomposed.digest


def test_a_later_change_to_the_callers_mapping_changes_nothing() -> None:
    extra: dict[str, Any] = {"rope": ["yarn"]}
    space = KeySpace(**REQUIRED, extra=extra)
    extra["rope"].append("longer")
    assert space.description["extra"] == space.extra == {"rope": ["yarn"]}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"weights": "meta-llama/Llama-3.1-8B"}, "weights .* has to be a fingerprint of the content"),
        ({"weights": ""}, "weights"),
        ({"lora": "my-adapter"}, "lora"),
        ({"draft_weights": "eagle"}, "draft_weights"),
        ({"kv_dtype": ""}, "kv_dtype is empty"),
        ({"kv_dtype": None}, "kv_dtype"),
        ({"tokens_per_block": 0}, "tokens_per_block"),
        ({"tokens_per_block": True}, "tokens_per_block"),
        ({"tokens_per_block": 16.0}, "tokens_per_block"),
        ({"inline_scales": 1}, "inline_scales"),
        ({"tenant": 3}, "tenant"),
        ({"extra": {"scale": 0.5}}, r"extra|floating-point number 0\.5"),
        ({"extra": {"scale": {1: 2}}}, "not a string"),
        ({"extra": {"many": 2**53}}, "write it as a string"),
        ({"extra": {"x": "\ud800"}}, "surrogate"),
        ({"extra": {"e\u0301": 1, "\u00e9": 2}}, "two keys"),
        ({"extra": {"x": b"bytes"}}, "bytes"),
        ({"extra": {"long": "x" * DESCRIPTION_BYTES_MAX}}, f"more than {DESCRIPTION_BYTES_MAX}"),
        ({"layers": (4, 4, 8)}, "layers"),
        ({"heads": (0, 9, 8)}, "heads"),
        ({"heads": (0, 8)}, "3 integers"),
        ({"context": (2, 2), "context_parallel_interleave": 1}, "context"),
        ({"context": (0, 2)}, "context_parallel_interleave"),
    ],
)
def test_what_cannot_be_right_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        KeySpace(**{**REQUIRED, **fields})


@pytest.mark.parametrize(
    ("description", "complaint"),
    [
        ({**LLAMA.description, "colour": 1}, "doesn't know: colour"),
        ({**LLAMA.description, "format": 2}, "format 1, not 2"),
        ({**LLAMA.description, "digest": "x"}, "digest"),
        ({"format": 1, "weights": WEIGHTS}, "lacks kv_dtype, layout, tokens_per_block"),
        ("[]", "JSON object"),
        ("{", "Expecting"),
    ],
)
def test_a_description_that_is_not_understood_is_refused(description: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        KeySpace.from_description(description)


def test_a_shard_is_named_by_what_it_holds() -> None:
    half = LLAMA.shard(heads=(0, 4, 8))
    assert half.description["heads"] == [0, 4, 8]
    assert (
        len({LLAMA.digest, half.digest, LLAMA.shard(heads=(4, 8, 8)).digest, LLAMA.shard(layers=(0, 4, 8)).digest}) == 4
    )
    assert half == LLAMA.shard(heads=(0, 4, 8))


def test_a_shard_that_holds_everything_is_the_space_itself() -> None:
    assert LLAMA.shard(layers=(0, 32, 32), heads=(0, 8, 8), context=(0, 1)) == LLAMA
    assert LLAMA.shard() == LLAMA


def test_a_shard_is_not_sharded_again() -> None:
    with pytest.raises(ValueError, match="a shard already"):
        LLAMA.shard(heads=(0, 4, 8)).shard(layers=(0, 16, 32))


def test_a_key_is_the_spaces_digest_and_the_blocks() -> None:
    blocks = [bytes([i]) * 32 for i in range(3)]
    assert LLAMA.keys(blocks) == [LLAMA.digest + block for block in blocks]
    assert LLAMA.key(blocks[1]) == LLAMA.keys(blocks)[1]
    assert len(LLAMA.key(blocks[0])) == 48
    assert LLAMA.keys([]) == []


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_block_digest_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        LLAMA.key(bytes(length))
    with pytest.raises(ValueError, match="32 bytes"):
        LLAMA.keys([bytes(32), bytes(length)])


scalars = (
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(st.characters(codec="utf-8"), max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz", max_size=3), inner, max_size=4),
)


@given(st.dictionaries(st.text("abcxyz", max_size=4), values, max_size=6))
def test_canonical_json_is_one_text_whatever_the_order(value: dict[str, Any]) -> None:
    text = canonical_json(value)
    assert canonical_json(dict(reversed(value.items()))) == text
    assert canonical_json(json.loads(text)) == text


def test_canonical_json_has_no_spare_bytes() -> None:
    assert canonical_json({"b": [1, None, True], "a": "é\n\u2028"}) == '{"a":"é\\n\u2028","b":[1,null,true]}'.encode()


def test_too_deep_a_description_is_refused_before_the_stack_is() -> None:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        canonical_json(deep)
