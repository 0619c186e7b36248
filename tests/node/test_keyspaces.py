"""The registry of key spaces: what it takes, and what outlives the node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import InvalidRequest, ReadOnly
from moonpool.folder.layout import Mode
from moonpool.keys.canonical import canonical_json, description_digest
from moonpool.node.keyspaces import KeySpaces
from moonpool.wire import messages as m
from moonpool.wire.frames import encode
from tests.node.desk import Desk, House


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def declared(**description: Any) -> m.Declare:
    text = canonical_json(description)
    return m.Declare(1, description_digest(text), text)


@pytest.mark.parametrize(
    "text",
    [b"[" * 16_000, b'{"a":' * 2500 + b"1" + b"}" * 2500, b"[]", b"x", b'{"b":1,"a":2}', b'{"a": 1}', b'{"a":1.5}'],
)
def test_a_description_is_the_canonical_json_of_an_object(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        KeySpaces().declare(description_digest(text), text)


def test_a_digest_is_the_descriptions_own() -> None:
    with pytest.raises(InvalidRequest, match="digest"):
        KeySpaces().declare(b"d" * 16, b'{"model":"m"}')


def test_all_spaces_fit_into_one_reply() -> None:
    desk = Desk()
    for i in range(60):
        desk.ask(declared(model=f"{i}", extra="x" * 15_000))
    for i in range(60, 100):
        with suppress(InvalidRequest):
            desk.ask(declared(model=f"{i}", extra="x" * 15_000))
    with pytest.raises(InvalidRequest, match="digest of long parts"):
        desk.ask(declared(model="m", extra="x" * 15_000))
    reply = desk.ask(m.Spaces(1))
    assert 60 < len(reply.spaces) < 100
    encode(reply)
    desk.ask(m.Purge(1, model="0"))


def test_a_read_only_session_finds_a_space_and_declares_none() -> None:
    desk = Desk()
    reader = desk.node.roster.open("reader", read_only=True)
    with pytest.raises(ReadOnly):
        desk.ask(declared(model="m"), reader)
    number = desk.ask(declared(model="m")).count
    assert desk.ask(declared(model="m"), reader).count == number


def test_the_switch_outlives_the_node_unless_the_next_one_is_told_a_mode(house: House) -> None:
    house.ask(m.SetMode(1, Mode.READ))
    assert house.restart().mode == Mode.READ
    assert house.restart(mode="on", origins={"mode": "flag --mode"}).mode == Mode.ON


def test_what_was_declared_and_purged_outlives_the_node(house: House) -> None:
    texts = [canonical_json({"model": f"m{i}", "extra": "x" * i}) for i in range(300)]
    for text in texts:
        house.ask(m.Declare(1, description_digest(text), text))
    house.ask(m.Purge(1, model="m7"))
    house.ask(m.Purge(1, tenant="nobody"))
    house.ask(m.Purge(1, model="m8", older_than_s=10.0))
    before = house.node.catalogue.spaces
    after = house.restart().catalogue.spaces
    assert [space.description for space in after.spaces] == [b"{}", *texts]
    assert after.spaces == before.spaces
    assert after.epoch == before.epoch == 4
    assert after.spaces[8].epoch == 2
    assert after.spaces[9].created_after > 0
    assert house.ask(m.Declare(1, description_digest(texts[5]), texts[5])).count == 6
    assert house.ask(declared(model="new")).count == 301


def test_a_node_killed_within_a_declaration_leaves_none_of_it(house: House) -> None:
    house.ask(declared(model="a"))
    before = house.folder.spaces.read_bytes()
    house.ask(declared(model="b"))
    after = house.folder.spaces.read_bytes()
    count = slice(16, 24)
    house.folder.spaces.write_bytes(after[: count.start] + before[count] + after[count.stop :])
    spaces = house.restart().catalogue.spaces.spaces
    assert [space.description for space in spaces] == [b"{}", b'{"model":"a"}']
    assert house.ask(declared(model="c")).count == 2
    assert house.restart().catalogue.spaces.spaces[2].description == b'{"model":"c"}'


@pytest.mark.parametrize("at", [0, 16, 64, 64 + 48, 64 + 48 + 16 + 16, 64 + 4096 * 48])
def test_of_a_damaged_registry_what_is_sound_is_kept(house: House, at: int) -> None:
    """At: the magic, the count, the first entry, a digest, a length, a description."""
    house.ask(declared(model="a"))
    house.ask(declared(model="b"))
    body = bytearray(house.folder.spaces.read_bytes())
    body[at : at + 8] = b"\xff" * 8
    house.folder.spaces.write_bytes(body)
    spaces = house.restart().catalogue.spaces
    assert spaces.spaces[0].description == b"{}"
    assert len(spaces.spaces) == (3 if at in (16, 64) else 1)
    number = house.ask(declared(model="b")).count
    assert house.restart().catalogue.spaces.spaces[number].description == b'{"model":"b"}'


def test_a_declaration_writes_itself_alone_however_many_there_are(house: House) -> None:
    path = house.folder.spaces
    for i in range(50):
        before, file = path.read_bytes(), path.stat().st_ino
        house.ask(declared(model=f"{i}"))
        after = path.read_bytes()
        assert path.stat().st_ino == file
        assert sum(a != b for a, b in zip(before, after, strict=True)) < 100
