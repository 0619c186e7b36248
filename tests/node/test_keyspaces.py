"""The registry of key spaces: what it takes, and what outlives the node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
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


def test_a_registry_without_a_mode_is_read_too(house: House) -> None:
    house.ask(declared(model="m"))
    saved = msgspec.json.decode(house.folder.spaces.read_bytes())
    del saved["mode"]
    house.folder.spaces.write_bytes(msgspec.json.encode(saved))
    assert len(house.restart().catalogue.spaces.spaces) == 2
    assert house.node.mode == Mode.ON
