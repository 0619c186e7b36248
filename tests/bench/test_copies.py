from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool.bench.copies import Copying, Plan, expect_ok, view_40
from moonpool.bench.lookups import exists, fill_and_read
from moonpool.bench.slices import Ring, Traffic
from moonpool.errors import MoonpoolError
from moonpool.status import Status, Statuses

OBJECT_BYTES = 256 << 10
PLAN = Plan(total_bytes=16 << 20, passes=3, unused_bytes=8 << 20)


@pytest.fixture
def client() -> Iterator[moonpool.Client]:
    with moonpool.connect("embedded:96MiB", copy_threads=1) as client:
        yield client


def test_a_slice_comes_back_only_after_all_others() -> None:
    traffic = Traffic()
    ring = Ring(traffic, 8 * 4096, 4096, seed=1)
    for _ in range(3):
        taken = [place for _ in range(4) for place in _use(ring, traffic, 2)]
        assert taken == list(range(8))
    assert traffic.least_gap_bytes == 6 * 4096  # all other slices, between two uses of one


def _use(ring: Ring, traffic: Traffic, count: int) -> list[int]:
    found = ring.take(count)
    traffic.add(count * ring.piece_bytes)
    return found


def test_every_kind_is_sampled_and_nothing_is_left_behind(client: moonpool.Client) -> None:
    told: list[int] = []
    traffic = Traffic()
    found = Copying(client, OBJECT_BYTES, PLAN, traffic, Random(1)).run(told.append)
    batches = PLAN.batches(OBJECT_BYTES)
    assert batches == 12
    assert len(found.put_s) == len(found.memcpy_s) == batches == len(told)
    assert len(found.get_s) >= batches // 2
    assert len(found.view_s) >= batches // 2
    assert traffic.least_gap_bytes >= PLAN.unused_bytes
    assert client.stats().objects == 0


def test_a_byte_that_comes_back_wrong_fails_the_run(client: moonpool.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real = client.get_many_into

    def flipping(keys: Any, targets: Any, **options: Any) -> Statuses:
        statuses = real(keys, targets, **options)
        targets[3][OBJECT_BYTES // 2] ^= 1
        return statuses

    monkeypatch.setattr(client, "get_many_into", flipping)
    with pytest.raises(MoonpoolError, match="object 3 of a batch came back with other bytes"):
        Copying(client, OBJECT_BYTES, PLAN, Traffic(), Random(1)).run(lambda _: None)


def test_a_batch_that_did_not_fit_gives_no_figure(client: moonpool.Client) -> None:
    with pytest.raises(MoonpoolError, match="put: key 1 of 2 got NO_SPACE"):
        expect_ok(Statuses([Status.OK, Status.NO_SPACE]), "put")
    expect_ok(Statuses([Status.OK, Status.OK]), "put")


def test_views_are_verified(client: moonpool.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(view_40(client, OBJECT_BYTES, 40, 3, Traffic())) == 3
    put = client.put_many

    def swapped(keys: Any, values: Any, **options: Any) -> Statuses:
        return put(keys, [np.zeros(OBJECT_BYTES, np.uint8) for _ in values], **options)

    monkeypatch.setattr(client, "put_many", swapped)
    with pytest.raises(MoonpoolError, match="other bytes"):
        view_40(client, OBJECT_BYTES, 40, 3, Traffic())


def test_small_objects_and_lookups(client: moonpool.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    small = fill_and_read(client, 1000, 320, lambda _: None, Random(3))
    assert len(set(small.keys)) == 1000 == client.stats().objects
    assert {len(key) for key in small.keys} == {48}
    assert list(exists(client, small.keys, 3, Random(3))) == ["1", "40_new", "625_new", "625_again"]
    client.remove(small.keys[0])
    with pytest.raises(MoonpoolError, match="exists missed"):
        exists(client, small.keys[:700], 50, Random(3))
