"""What a node finds of its predecessor's: the same objects, in the same order, of no earlier generation or epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.folder import records
from moonpool.wire import messages as m
from tests.node.desk import House


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_chain_loses_its_tail_first_after_a_restart_too(house: House) -> None:
    chains = [[b"%d-%d" % (chain, i) for i in range(100)] for chain in range(3)]
    for chain in chains:
        house.put(chain)
    house.leave()
    catalogue = house.restart().catalogue
    assert house.node.recovered == 300
    coldest_first = [catalogue.records.key(slot) for slot in catalogue.space.oldest()]
    assert coldest_first == [key for chain in chains for key in reversed(chain)]


def test_a_purge_covers_all_that_was_there_although_the_registry_was_lost(house: House) -> None:
    for _ in range(5):
        house.ask(m.Purge(1, older_than_s=1000.0))
    house.put([b"a", b"b"])
    house.leave()
    house.folder.spaces.unlink()
    house.restart()
    assert house.node.recovered == 2
    assert house.ask(m.Clear(1)).count == 2
    assert house.node.catalogue.live == 0


def test_a_record_that_is_cut_short_leaves_the_generation(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between body and state word: else ids of the object before would be good for the one after."""
    house.put([b"k"])
    old = house.ask(m.Acquire(1, [b"k"])).ids[0]
    house.ask(m.Release(0, [old]))
    house.ask(m.Remove(1, [b"k"]))

    def killed(name: str) -> None:
        assert name != "node-record-body", "killed here"

    monkeypatch.setattr(records, "ARMED", True)
    monkeypatch.setattr(records, "reach", killed)
    with pytest.raises(AssertionError, match="killed here"):
        house.ask(m.Reserve(1, [b"other"], [5000]))
    monkeypatch.undo()
    house.leave()
    house.restart()
    house.put([b"new"])
    new = house.ask(m.Acquire(1, [b"new"])).ids[0]
    assert new & 0xFFFF_FFFF == old & 0xFFFF_FFFF, "the same place of the table"
    assert new != old


def test_a_priority_keeps_an_object_after_a_restart_too(house: House) -> None:
    preferred = [b"preferred %d" % i for i in range(20)]
    value = [memoryview(bytes(5000))]
    assert not any(house.ask(m.PutInline(1, preferred, value * 20, m.Options(priority=3))).statuses)
    house.leave()
    for restarts in range(2):
        house.restart()
        for batch in range(20):  # the pool has room for 2,048
            house.put([b"%d %d %d" % (restarts, batch, i) for i in range(200)])
        assert house.node.catalogue.counters.removals["evicted"] > 1500
        objects = house.ask(m.Stat(1, preferred)).objects
        assert [stat.priority for stat in objects] == [3] * 20, "older than all that were evicted"
        house.leave()
