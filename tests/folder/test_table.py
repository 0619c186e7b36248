"""The shared table: what the node writes, every reader finds, one by one or many at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import FolderError
from moonpool.folder.layout import BUCKET_WORDS, NO_WORD, Header
from moonpool.folder.mapping import Mapping
from moonpool.folder.table import TableReader, TableWriter, table_bytes
from moonpool.keys.fingerprints import fingerprint, fingerprints

SLOTS = 256


def fresh(slots: int = SLOTS) -> tuple[TableWriter, TableReader]:
    mapping = Mapping.anonymous(table_bytes(slots))
    writer = TableWriter(mapping, slots)
    writer.format(pool_id=b"p" * 16, incarnation=3, slots=slots, pool_bytes=1 << 20, mode=3)
    return writer, TableReader(mapping)


def test_the_header_says_what_it_was_given() -> None:
    _, reader = fresh()
    assert (reader.pool_id, reader.incarnation, reader.mode, reader.closed) == (b"p" * 16, 3, 3, False)


def test_a_table_of_another_kind_or_version_is_refused_by_name() -> None:
    writer, _ = fresh()
    writer.header[Header.LAYOUT] = 99
    with pytest.raises(FolderError, match="99"):
        TableReader(writer.mapping)
    writer.header[Header.MAGIC] = 5
    with pytest.raises(FolderError, match="isn't one of Moonpool's"):
        TableReader(writer.mapping)
    with pytest.raises(FolderError):
        TableReader(Mapping.anonymous(64))
    writer, _ = fresh()
    writer.header[Header.BUCKETS] = 1 << 20
    with pytest.raises(FolderError, match="truncated"):
        TableReader(writer.mapping)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=400), st.sampled_from([16, 48]))
def test_a_reader_finds_exactly_what_is_there(steps: list[tuple[bool, int]], length: int) -> None:
    writer, reader = fresh()
    places: dict[bytes, int] = {}
    for generation, (adding, number) in enumerate(steps, start=1):
        key = number.to_bytes(4, "little").ljust(length, b"k")
        if adding and key not in places and len(places) < SLOTS:
            places[key] = writer.insert(fingerprint(key), generation)
            assert places[key] == NO_WORD or reader.unchanged(places[key], generation)
        elif not adding and key in places:
            place = places.pop(key)
            writer.clear(place)
            writer.clear(place)  # a second time changes nothing
    keys = [number.to_bytes(4, "little").ljust(length, b"k") for number in range(301)]
    expected = [key in places and places[key] != NO_WORD for key in keys]
    assert [reader.contains(key) for key in keys] == expected
    assert reader.contains_many(keys).tolist() == expected
    assert reader.contains_many(keys[:2]).tolist() == expected[:2]
    assert reader.contains_many([]).tolist() == []


def test_a_key_whose_buckets_are_full_is_given_no_word() -> None:
    writer, reader = fresh(8)
    prints = [fingerprint(b"%d" % i) for i in range(200)]
    places = [writer.insert(print_, 1) for print_ in prints]
    words = writer.buckets * BUCKET_WORDS
    assert NO_WORD in places
    assert len({place for place in places if place != NO_WORD}) == sum(place != NO_WORD for place in places) <= words
    writer.clear(NO_WORD)
    assert reader.unchanged(NO_WORD, 7), "what has no word is never taken for changed"


def test_many_at_once_are_where_one_by_one_would_find_them() -> None:
    keys = [b"%048d" % i for i in range(1000)]
    writer, reader = fresh(1024)
    places = writer.insert_many(fingerprints(keys), np.arange(1, 1001, dtype=np.uint64))
    assert reader.contains_many(keys).all()
    assert len(set(places.tolist())) == 1000
    for place, generation in zip(places.tolist(), range(1, 1001), strict=True):
        assert reader.unchanged(place, generation)
        assert not reader.unchanged(place, generation + 1)
        writer.clear(place)
    assert not reader.contains_many(keys).any()
    assert writer.insert(fingerprint(keys[0]), 5) != NO_WORD
