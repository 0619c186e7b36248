"""Frames: whatever way a stream is cut, the same messages come out; whatever the bytes, an error or a message."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import ProtocolError
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_reply, decode_request, encode

bodies = st.lists(st.binary(max_size=300), max_size=8)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@given(bodies, st.lists(st.integers(0, 2000), max_size=12))
def test_a_stream_cut_anywhere_gives_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, bodies))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = FrameReader()
    found = [bytes(body) for start, end in pairwise(places) for body in list(reader.feed(stream[start:end]))]
    assert found == bodies
    assert reader.pending_bytes == 0


@given(st.binary(max_size=100))
def test_any_bytes_are_frames_a_beginning_or_an_error(data: bytes) -> None:
    reader = FrameReader(frame_bytes_max=50)
    try:
        length = sum(4 + len(body) for body in reader.feed(data))
    except ProtocolError:
        return
    assert length + reader.pending_bytes == len(data)


@given(st.binary(max_size=200))
def test_any_body_is_a_message_or_a_protocol_error(body: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            assert isinstance(decode(body), m.Message)
        except ProtocolError:
            pass


things = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)


@given(st.integers(0, 80), things, st.lists(things, max_size=6))
def test_messagepack_of_any_shape_is_a_message_or_a_protocol_error(tag: int, first: object, rest: list[object]) -> None:
    body = msgspec.msgpack.encode([tag, first, *rest])
    for decode in (decode_request, decode_reply):
        try:
            assert isinstance(decode(body), m.Message)
        except ProtocolError:
            pass


@given(
    st.lists(st.binary(max_size=20), max_size=5),
    st.integers(0, 2**63),
    st.floats(allow_nan=False),
    st.integers(0, 2),
    st.lists(st.binary(max_size=9), max_size=5),
)
def test_what_is_encoded_decodes_to_the_same(
    keys: list[bytes], number: int, ttl_s: float, pin: int, metadata: list[bytes]
) -> None:
    for message in (
        m.Reserve(number, keys, [number] * len(keys), m.Options(ttl_s=ttl_s, pin=pin), metadata),
        m.Acquire(number, keys, bool(pin)),
        m.Match(number, [m.GroupKeys(keys, pin, 3, 4)], "hold"),
        m.Hello(number, 1, 0, ["a"], "boot", "name", True, 5, b"t" * 16, b"p", [(number, 2)], [number]),
    ):
        assert decode_request(bytes(encode(message)[4:])) == message
    reply = m.Acquired(number, [0], [number], [4096], [number], [7], [number], 3)
    assert decode_reply(bytes(encode(reply)[4:])) == reply


def test_a_message_longer_than_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=str(m.FRAME_BYTES_MAX)):
        encode(m.Acquire(1, [bytes(250)] * 20_000))


def test_a_length_beyond_the_limit_is_an_error_before_any_of_it_has_come() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        list(reader.feed((m.FRAME_BYTES_MAX + 1).to_bytes(4, "little")))
    reader = FrameReader()
    assert list(reader.feed(b"\xff\xff")) == []
    with pytest.raises(ProtocolError):
        list(reader.feed(b"\xff\xff"))


def test_values_in_a_request_are_not_copied() -> None:
    body = bytes(encode(m.PutInline(1, [b"key"], [memoryview(b"x" * 1000)])))[4:]
    message = decode_request(body)
    assert isinstance(message, m.PutInline)
    assert message.values[0].obj is body
