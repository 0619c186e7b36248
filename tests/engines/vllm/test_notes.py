from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.engines.vllm.notes import NOTE_BYTES_MAX, Note, decode_note, encode_note

PARENT = b"p" * 32


@given(st.lists(st.integers(0, (1 << 24) - 1), max_size=298), st.text(max_size=80))
def test_a_note_tells_parent_tokens_and_adapter(tokens: list[int], adapter: str) -> None:
    note = encode_note(PARENT, tokens, adapter)
    assert len(note) <= NOTE_BYTES_MAX
    found = decode_note(note)
    assert found is not None
    assert found.parent == PARENT
    if found.packed or not tokens:
        assert (found.tokens, found.adapter) == (tokens, adapter[:64])


def test_256_tokens_of_the_largest_ids_fit() -> None:
    tokens = [(1 << 24) - 1 - i for i in range(256)]
    found = decode_note(encode_note(PARENT, tokens, "an adapter of some name"))
    assert found is not None
    assert found.tokens == tokens


def test_tokens_that_do_not_fit_are_left_out() -> None:
    for tokens in ([1] * 1000, [1 << 24], [5, 1 << 31]):
        assert decode_note(encode_note(PARENT, tokens)) == Note(PARENT, b"")


@given(st.binary(max_size=40))
def test_anything_else_is_no_note(data: bytes) -> None:
    found = decode_note(data)
    assert found is None or isinstance(found, Note)
    assert decode_note(b"") is None
    assert decode_note(b"metadata of somebody else's") is None
