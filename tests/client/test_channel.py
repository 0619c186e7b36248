"""The channel's own promises, with a socket played by the test: what is sent goes out once, whole and in order, and
a reply finds its caller, whatever comes in between.

What would break it: a part of a frame that is sent again after an interrupt, bytes that were received and are lost with
one, a wake-up that comes before its caller waits.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import deque
from typing import Any

import pytest

from moonpool.client.channel import Channel
from moonpool.client.grants import Grant, Pending
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_request, encode


class Interrupt(BaseException):
    pass


class Played:
    """A socket whose other end answers each `Stat` with as many objects, in pieces of any size, and which is
    interrupted now and then: before anything was sent or received, as a system call is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.heard: list[int] = []
        self._frames = FrameReader()
        self._coming = bytearray()

    def setsockopt(self, *options: Any) -> None:
        pass

    def send(self, data: bytes) -> int:
        if self.random.random() < 0.05:
            raise Interrupt
        count = self.random.randint(1, len(data))
        for body in self._frames.feed(bytes(data[:count])):
            request = decode_request(body)
            assert isinstance(request, m.Stat)
            self.heard.append(request.id)
            self._coming += encode(m.Stats(request.id, [None] * len(request.keys)))
        return count

    def recv(self, most: int, flags: int = 0) -> bytes:
        if self.random.random() < 0.05:
            raise Interrupt
        if not self._coming:
            raise BlockingIOError
        count = self.random.randint(1, len(self._coming))
        data = bytes(self._coming[:count])
        del self._coming[:count]
        return data


@pytest.mark.parametrize("seed", range(20))
def test_frames_go_out_once_and_in_order_whatever_interrupts_them(seed: int) -> None:
    played = Played(seed)
    ended: deque[Pending] = deque()
    channel = Channel(played, 5.0, ended=ended.append)  # type: ignore[arg-type]
    waiting: list[Grant] = []
    for number in range(1, 200):
        try:
            waiting.append(channel.begin(m.Stat(number, [b"k"] * number)))
        except Interrupt:  # its caller has gone, and it goes out all the same
            continue
    while channel._outbox or channel._sent or channel._waiting:
        try:
            channel.collect()
        except Interrupt:
            pass
    assert played.heard == list(range(1, 200))
    assert len(waiting) > 100
    for grant in waiting:
        reply = channel.finish(grant)
        assert isinstance(reply, m.Stats)
        assert len(reply.objects) == grant.pending.number
    assert channel.broken is None


def test_a_reply_that_comes_before_its_caller_waits_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the caller has seen that there is none, and before the gate at which it would be woken is there."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, 5.0)
        late, quick = channel.begin(m.Stat(1, [b"k"])), channel.begin(m.Stat(2, [b"k"]))
        reader = threading.Thread(target=channel.finish, args=(late,))
        reader.start()
        while channel._reader is None:
            pass
        lock = threading.Lock

        def slow() -> Any:
            theirs.sendall(encode(m.Stats(2, [None])))
            while quick.pending.reply is None:
                pass
            return lock()

        monkeypatch.setattr("moonpool.client.channel.threading.Lock", slow)
        assert channel.finish(quick) == m.Stats(2, [None])
        assert reader.is_alive(), "the other still waits for its own"
        theirs.sendall(encode(m.Stats(1, [None])))
        reader.join()


@pytest.mark.parametrize("how", ["gone", "left"])
def test_a_readers_part_that_nobody_handed_on_is_taken_up(how: str) -> None:
    """The reader was interrupted in the moment of leaving: nobody is told that its part is free."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, 5.0)
        reading, waiting = channel.begin(m.Stat(1, [b"k"])), channel.begin(m.Stat(2, [b"k"]))
        assert channel._lead(reading.pending)
        found: list[m.Message] = []
        follower = threading.Thread(target=lambda: found.append(channel.finish(waiting)))
        follower.start()
        while waiting.pending.gate is None:
            pass
        if how == "left":
            channel._reader = None
        else:
            del reading
        theirs.sendall(encode(m.Stats(2, [None])))
        follower.join()
        assert found == [m.Stats(2, [None])]
