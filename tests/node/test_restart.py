"""What a node finds of its predecessor's: the same objects, in the same order, of no earlier generation or epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moonpool.config import NodeConfig
from moonpool.folder import records
from moonpool.folder.folder import Folder
from moonpool.node.dispatch import Dispatcher
from moonpool.node.node import Node, open_node
from moonpool.node.steps import finish
from moonpool.wire import messages as m

MIB = 1 << 20


class House:
    """A folder and the node over it; `restart` starts another as if the first had been killed."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path / "node")
        self.folder.create()
        self.restart()

    def restart(self, **changed: Any) -> Node:
        config = NodeConfig(dir=self.folder.path, pool_bytes=16 * MIB, slots=65_536, **changed)
        self.warnings: list[str] = []
        self.node = open_node(config, self.folder, self.warnings)
        self.node.grow(16 * MIB)
        self.dispatcher = Dispatcher(self.node, lambda steps: finish(steps))
        self.session = self.node.roster.open("test", read_only=False)
        return self.node

    def ask(self, request: m.Message) -> Any:
        reply = self.dispatcher.serve(self.session, request)
        return reply if isinstance(reply, m.Message | None) else finish(reply)

    def put(self, keys: list[bytes], size: int = 5000) -> None:
        assert not any(self.ask(m.PutInline(1, keys, [memoryview(bytes(size))] * len(keys))).statuses)

    def leave(self) -> None:
        """End the session, so that nothing is held at the restart."""
        self.node.roster.end(self.session, "bye")


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
