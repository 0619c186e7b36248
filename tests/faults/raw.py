"""A client's side of the protocol by hand: any bytes, any message, one answer at a time."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from moonpool.folder.folder import Folder
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_reply, encode
from moonpool.wire.versions import FEATURES

ANSWER_S = 10.0


class Raw:
    """A connected socket. `hello` opens a session; before it the node takes nothing else."""

    def __init__(self, folder: Path, *, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(Folder(folder).socket))
        self._frames = FrameReader()
        self._bodies: list[bytes] = []
        if hello:
            welcome = self.ask(m.Hello(1, 1, 0, sorted(FEATURES), "", "raw"))
            assert isinstance(welcome, m.Welcome)
            self.welcome = welcome

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Else what the session holds stays quarantined for as long as this process lives.
        with suppress(OSError):
            self.send(m.Bye(0))
        self.sock.close()

    def send(self, message: m.Message) -> None:
        self.sock.sendall(encode(message))

    def send_body(self, body: bytes) -> None:
        """A frame of any content."""
        self.sock.sendall(len(body).to_bytes(4, "little") + body)

    def send_array(self, *fields: object) -> None:
        """A frame that holds a MessagePack array, which need not be a message."""
        self.send_body(msgspec.msgpack.encode(list(fields)))

    def answer(self) -> m.Message | None:
        """The next message, or None where the node has closed the connection."""
        body = self.body()
        return None if body is None else decode_reply(body)

    def body(self) -> bytes | None:
        """The next message as it came."""
        while not self._bodies:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._bodies += map(bytes, self._frames.feed(data))
        return self._bodies.pop(0)

    def ask(self, message: m.Message) -> m.Message:
        self.send(message)
        answer = self.answer()
        assert answer is not None, "the node closed the connection"
        return answer

    def close_reason(self) -> str:
        """What the node says before it closes the connection; "" where it says nothing."""
        text = ""
        while (answer := self.answer()) is not None:
            assert isinstance(answer, m.Refused), answer
            text = answer.text
        return text
