"""An interrupt in mid-copy (Ctrl-C): when it is raised, no copy is running any more and nothing is held.

What would break it: a helper thread that copies on after the call has raised, an extent that is given back while one
does, or never.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

import moonpool
from moonpool import Status
from moonpool.testing.node import eventually
from moonpool.testing.values import generation_of, value_of

SIZE = 15 << 20
ROUNDS = 40
SEED = int(os.environ.get("TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
pytestmark = pytest.mark.timeout(60, method="thread")  # the other method's signal is ours here


def interrupted(call: Callable[[], object], after_s: float) -> bool:
    """Run `call`, interrupted as by Ctrl-C after so long; False where it had ended by then."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    return False


def in_mid_copy(call: Callable[[], object]) -> float:
    """A moment, in seconds from the call's begin, at which it copies: it does little else."""
    return random.uniform(0.35, 0.65) * min(timed(call) for _ in range(3))


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@pytest.fixture(autouse=True)
def seeded() -> None:
    print(f"TEST_SEED={SEED}")
    random.seed(SEED)


def test_an_interrupted_get_writes_nothing_afterwards_and_holds_nothing(client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, SIZE))
    target = np.zeros(SIZE, np.uint8)
    hits = 0
    for _ in range(ROUNDS):
        moment = in_mid_copy(lambda: client.get_into("key", target))
        target[:] = 0
        if interrupted(lambda: client.get_into("key", target), moment):
            hits += 1
            copied = target.copy()
            time.sleep(0.001)
            assert np.array_equal(copied, target), "something still wrote to the target"
    assert hits > ROUNDS // 4
    eventually(lambda: client.stats().pins == 0)
    assert generation_of("key", client.get("key")) == 1


def test_an_interrupted_put_is_aborted_once_its_copies_have_stopped(client: moonpool.Client) -> None:
    value = value_of("key", 1, SIZE)
    hits = 0

    def put() -> None:
        client.remove("key")
        assert client.put("key", value) is Status.OK

    for _ in range(ROUNDS):
        moment = in_mid_copy(put)
        client.remove("key")
        if interrupted(lambda: client.put("key", value), moment):
            hits += 1
            eventually(lambda: client.stats().reservations == 0)
            # The extent is another's now: a copy that still ran would write over it.
            with client.reserve("other", client.pool_bytes, wait_s=1) as (extent,):
                assert extent.buffer is not None
                extent.buffer[:] = 255
                time.sleep(0.001)
                assert extent.buffer.min() == 255, "something still wrote to the extent"
        got = client.get("key")
        assert got is None or generation_of("key", got) == 1
        client.clear()
    assert hits > ROUNDS // 4


def test_an_interrupt_while_a_reservation_waits_gives_it_up(client: moonpool.Client) -> None:
    with client.reserve("all", client.pool_bytes):
        for key in "abcde":
            assert interrupted(lambda key=key: client.reserve(key, client.pool_bytes, wait_s=5), 0.05)  # type: ignore[misc]
    # The node still waits on their behalf: what they get now goes back.
    eventually(lambda: (client.stats().reservations, client.stats().reservations_waiting) == (0, 0))
    assert client.put_many(list("abcde"), [b"value"] * 5).all_ok
