"""Frames: a length of four bytes, little-endian, then one message. A state machine without sockets."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

import msgspec

from moonpool.errors import ProtocolError
from moonpool.wire.messages import FRAME_BYTES_MAX, Message, Reply, Request

_LENGTH = Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytearray:
    """One message as a frame, in a buffer of its own. Raises `ProtocolError` where it would be too long."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    length = len(buffer) - 4
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {length} bytes exceeds the limit of {FRAME_BYTES_MAX}; send fewer keys")
    _LENGTH.pack_into(buffer, 0, length)
    return buffer


def decode_request(body: memoryview | bytes) -> Request:
    """Raises `ProtocolError` where `body` is no request. Memoryviews in it point into `body`."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request of this protocol: {error}") from error


def decode_reply(body: memoryview | bytes) -> Reply:
    """Raises `ProtocolError` where `body` is no reply."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a reply of this protocol: {error}") from error


def frame_length(source: bytearray | memoryview, start: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> int:
    """Length of the body of the frame that begins there. Raises `ProtocolError` where it is too long."""
    length: int = _LENGTH.unpack_from(source, start)[0]
    if length > frame_bytes_max:
        raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {frame_bytes_max}")
    return length


class FrameReader:
    """Cuts a byte stream into frames. Feed it what arrives; it yields whole bodies.

    A body is valid until the next call of `feed`, unless a message that was decoded from it is kept (its
    memoryviews keep the bytes alive).
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._pending = bytearray()
        self._max = frame_bytes_max

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Yield the body of each frame that `data` completes. Raises `ProtocolError` for one that is too long."""
        if self._pending:
            self._pending += data
            if len(self._pending) < 4:
                return
            if len(self._pending) < 4 + frame_length(self._pending, 0, self._max):
                return
            source = memoryview(self._pending).toreadonly()
            self._pending = bytearray()
        else:
            source = memoryview(data)
        start, end = 0, len(source)
        while end - start >= 4:
            length = frame_length(source, start, self._max)
            if end - start < 4 + length:
                break
            yield source[start + 4 : start + 4 + length]
            start += 4 + length
        if start < end:
            self._pending += source[start:]
