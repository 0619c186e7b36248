"""An exception that comes in anywhere in a call, from outside it: nothing stays held, and nobody else notices.

What would break it: a reply between its decoding and the `try` that gives its pins back, a request that is sent and
whose caller is not yet waiting, a reader's part that nobody takes, a message of which half is sent, a wake-up of one
who doesn't wait yet.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest

import moonpool
from moonpool import Group, Status
from moonpool.client.link import SocketLink
from moonpool.testing.node import RunningNode, eventually
from moonpool.testing.values import generation_of, value_of

SEED = int(os.environ.get("TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
INTERRUPTS = int(os.environ.get("TEST_INTERRUPTS", "1000"))
CALLS_S = 0.002
"""Within so long after a call's begin the interrupt comes: most are over by then, and the next has begun."""
LARGE, HUGE = 300_000, 5 << 20
KEPT = [f"kept {i}" for i in range(8)]
pytestmark = pytest.mark.timeout(60, method="thread")  # the other method's signal is ours here


class Interrupt(BaseException):
    """Raised from outside, as Ctrl-C is."""


class Calls:
    """Calls of every kind on one client, one after the other at random. What each gives is let go of at once."""

    def __init__(self, client: moonpool.Client) -> None:
        self.client = client
        self.held: list[str] = []
        """The hold that the latest `match` has given: one that was interrupted has given none."""
        self.number = 0
        self.targets = [bytearray(LARGE) for _ in range(4)]
        self.kinds: list[Callable[[], object]] = [
            self.put_small, self.put_large, self.put_huge, self.get, self.get_small, self.get_large, self.view,
            self.reserve, self.reserve_and_drop, self.match, self.begin_match, self.exists, self.stat,
        ]  # fmt: skip

    def once(self) -> None:
        while self.held:
            self.client.release_hold(self.held[-1])
            self.held.pop()
        self.number += 1
        random.choice(self.kinds)()

    def new(self, count: int) -> list[str]:
        return [f"new {self.number % 50} {i}" for i in range(count)]

    def put_small(self) -> None:
        self.client.put_many(self.new(4), [value_of("small", 1, 3000)] * 4)

    def put_large(self) -> None:
        self.client.put_many(self.new(10), [value_of("large", 1, LARGE)] * 10, wait_s=0.01)

    def put_huge(self) -> None:
        self.client.put_many(self.new(2), [value_of("huge", 1, HUGE)] * 2, wait_s=0.01)

    def get(self) -> None:
        self.client.get(random.choice(KEPT))

    def get_small(self) -> None:
        self.client.get_many_into(KEPT[:4], self.targets)

    def get_large(self) -> None:
        self.client.get_many_into(KEPT[4:], self.targets)

    def view(self) -> None:
        with self.client.view_many([*KEPT, "absent"]) as views:
            assert len(views) == len(KEPT) + 1

    def reserve(self) -> None:
        with self.client.reserve_many(self.new(3), [LARGE] * 3, wait_s=0.01) as extents:
            extents[1].abort()

    def reserve_and_drop(self) -> None:
        self.client.reserve_many(self.new(3), [LARGE] * 3, wait_s=0.01)

    def match(self) -> None:
        name = f"hold {self.number}"
        if self.client.match([Group(KEPT)], hold=name).hold:
            self.held.append(name)
            self.client.adopt(name)

    def begin_match(self) -> None:
        self.client.begin_match([Group(KEPT)], hold=f"hold {self.number}", extents=True)

    def exists(self) -> None:
        assert self.client.exists_many(KEPT) == [True] * len(KEPT)

    def stat(self) -> None:
        assert self.client.stat_many(KEPT[:2])[0] is not None


@pytest.fixture
def calls(shared_node: RunningNode, client: moonpool.Client) -> Iterator[Calls]:
    """Calls on a client of its own, beside `client`."""
    print(f"TEST_SEED={SEED}")
    random.seed(SEED)
    # Other tools' calls at each garbage collection, in which an interrupt would get lost.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    values = [value_of(key, 1, 3000 if i < 4 else LARGE) for i, key in enumerate(KEPT)]
    assert client.put_many(KEPT, values, pin="hard").all_ok
    with shared_node.connect(name="interrupted", timeout_s=5, copy_threads=2) as own:
        yield Calls(own)
    gc.callbacks[:] = callbacks
    client.clear()


@contextmanager
def others_served(calls: Calls) -> Iterator[None]:
    """Another thread uses the same client meanwhile, and none of its calls fails or gets what isn't its own."""
    over, served, errors = threading.Event(), 0, []

    def use() -> None:
        nonlocal served
        try:
            while not over.is_set():
                key = KEPT[served % len(KEPT)]
                assert generation_of(key, calls.client.get(key)) == 1
                served += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not errors, errors
    assert served


def all_is_given_back(calls: Calls, other: moonpool.Client) -> None:
    """Nothing is held, whoever asks; and the client that was interrupted goes on."""
    while calls.held:
        calls.client.release_hold(calls.held.pop())

    def held() -> dict[str, int]:
        stats = other.stats()
        found = {name: getattr(stats, name) for name in ("pins", "reservations", "reservations_waiting", "holds")}
        return {name: count for name, count in found.items() if count}

    try:
        eventually(lambda: not held(), within_s=5)
    except AssertionError:
        pytest.fail(f"held after it all: {held()}")
    for client in (calls.client, other):
        assert client.put("after", b"value") in (Status.OK, Status.EXISTS)
        assert client.get("after") == b"value"
        with client.reserve("filled after", LARGE) as (extent,):
            assert extent.buffer is not None
            extent.buffer[:] = np.frombuffer(value_of("filled after", 2, LARGE), np.uint8)
        assert generation_of("filled after", client.get("filled after")) == 2
        client.remove_many(["after", "filled after"])


def test_an_asynchronous_exception_anywhere_in_a_thread(calls: Calls, client: moonpool.Client) -> None:
    raised, within = 0, False  # `within` the `try` that catches it

    def work() -> None:
        nonlocal raised, within
        while raised < INTERRUPTS:
            try:
                within = True
                while True:
                    calls.once()
            except Interrupt:
                within, raised = False, raised + 1

    link = calls.client.link
    assert isinstance(link, SocketLink)
    channel = link._channel
    thread = threading.Thread(target=work)
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else it would come only where the thread has let go of the interpreter lock
    try:
        with others_served(calls):
            thread.start()
            for number in range(INTERRUPTS):
                until(lambda: within, "the next call")
                time.sleep(random.uniform(0, CALLS_S))
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupt))
                until(lambda number=number: raised > number, "the interrupt")  # type: ignore[misc]
            thread.join()
    finally:
        sys.setswitchinterval(often)
    all_is_given_back(calls, client)
    assert link._channel is channel, "the connection has outlived it all"


def test_a_signal_anywhere_in_the_main_thread(calls: Calls, client: moonpool.Client) -> None:
    raised = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        raised += 1
        raise Interrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        with others_served(calls):
            for number in range(INTERRUPTS):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, CALLS_S))
                    while raised == number:
                        calls.once()
                    pytest.fail("an interrupt got lost")
                except Interrupt:
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    all_is_given_back(calls, client)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what takes microseconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come"
        time.sleep(0.0001)
