"""Nothing is granted to nobody: what a client can't learn of, or asked for beyond its end, is given back.

What would break it: requests that are served after their session has ended, or refused with what they were granted.
"""

from __future__ import annotations

import moonpool
from moonpool import Status
from moonpool.node.connection import INFLIGHT_MAX
from moonpool.testing.node import RunningNode, eventually
from moonpool.wire import messages as m
from moonpool.wire.frames import encode
from tests.faults.raw import Raw

MIB = 1 << 20


def test_what_stands_behind_a_bye_is_not_served(client: moonpool.Client, shared_node: RunningNode) -> None:
    client.put("kept", b"value")
    with Raw(shared_node.folder) as raw:
        raw.sock.sendall(encode(m.Bye(2)) + encode(m.Acquire(3, [b"kept"])) + encode(m.Reserve(4, [b"new"], [5000])))
        assert raw.answer() == m.Count(2, 0)
        assert raw.answer() is None, "the connection has ended"
    stats = client.stats()
    assert (stats.pins, stats.reservations) == (0, 0)
    assert client.remove("kept") is Status.OK
    assert client.stats().doomed == 0, "nobody holds it"
    assert client.put("new", b"another's") is Status.OK


def test_a_refusal_for_too_many_waiting_requests_grants_nothing(
    client: moonpool.Client, shared_node: RunningNode
) -> None:
    with Raw(shared_node.folder) as raw:
        count = INFLIGHT_MAX + 44
        options = m.Options(wait_s=1.0)
        for i in range(count):
            raw.send(m.Reserve(2 + i, [b"small %d" % i, b"large %d" % i], [4096, 30 * MIB], options))
        answers = [raw.answer() for _ in range(count)]
        granted = sum(len([n for n in a.ids if n]) for a in answers if isinstance(a, m.Reserved))
        assert any(isinstance(answer, m.Refused) for answer in answers)
        assert client.stats().reservations == granted
    eventually(lambda: client.stats().reservations == 0)
