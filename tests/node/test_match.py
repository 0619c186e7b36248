"""`match` with a hold: what would stall the node is refused, and what a purge covers is not held."""

from __future__ import annotations

import pytest

from moonpool.errors import InvalidRequest
from moonpool.folder.layout import RECORD_WORDS, Field
from moonpool.matching import GROUPS_MAX, STEP_MAX
from moonpool.node.holds import HOLD_KEYS_MAX, SLICE_KEYS
from moonpool.wire import messages as m
from tests.node.desk import Desk, steps_of

KEYS = [b"%d" % i for i in range(4 * SLICE_KEYS)]


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.put(*KEYS)
    return desk


@pytest.mark.parametrize(
    "groups",
    [
        [m.GroupKeys([b"k"], 0, 0, 3 + 2 * i) for i in range(GROUPS_MAX + 1)],
        [m.GroupKeys([b"k"] * (HOLD_KEYS_MAX // 2 + 1), 0, 0, 1)] * 2,
        [m.GroupKeys([b"k"], 0, 0, STEP_MAX + 1)],
        [m.GroupKeys([b"k"], 0, 0, 0)],
    ],
)
def test_what_would_take_the_node_too_long_is_refused(desk: Desk, groups: list[m.GroupKeys]) -> None:
    with pytest.raises(InvalidRequest):
        desk.ask(m.Match(1, groups, "hold"))


def test_a_window_of_any_length_will_do(desk: Desk) -> None:
    assert desk.ask(m.Match(1, [m.GroupKeys(KEYS, 1, 2**63, 1)], "hold")).length == len(KEYS)


def test_what_a_purge_covers_meanwhile_is_not_held(desk: Desk) -> None:
    match = desk.begin(m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold"))
    next(match)
    purge = desk.begin(m.Clear(2))
    next(purge)  # invisible from here on; nothing has been dropped yet
    assert desk.node.catalogue.forgotten == 0
    _, reply = steps_of(match)
    assert reply == m.Matched(1, 0, False)
    assert not desk.session.holds


def test_what_was_removed_and_stored_again_meanwhile_is_not_held_as_the_old_one(desk: Desk) -> None:
    match = desk.begin(m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold"))
    next(match)
    desk.ask(m.Remove(1, [KEYS[7]]))
    desk.put(KEYS[7])
    _, reply = steps_of(match)
    assert reply.length == 7


def test_a_hold_is_hot_at_its_head_wherever_its_slices_end(desk: Desk) -> None:
    pauses, reply = steps_of(desk.begin(m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold")))
    assert reply.length == len(KEYS)
    assert pauses >= 6, "found in four steps and touched in four"
    _, adopted = steps_of(desk.begin(m.Adopt(1, "hold")))
    assert [number & 0xFFFF_FFFF for number in adopted.ids] == list(desk.session.holds["hold"].slots)
    catalogue = desk.node.catalogue
    assert [catalogue.records.key(slot) for slot in catalogue.space.oldest()] == KEYS[::-1]
    touched = [catalogue.floats[slot * RECORD_WORDS + Field.TOUCHED] for slot in desk.session.holds["hold"].slots]
    assert touched == sorted(touched, reverse=True), "and so a restart finds them"
