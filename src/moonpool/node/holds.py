"""Holds: what `match` keeps in place for a request, until it is released or its session ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.errors import InvalidRequest
from moonpool.folder.layout import RECORD_WORDS, Field
from moonpool.matching import GROUPS_MAX, RULES, STEP_MAX, longest, needed
from moonpool.node.sessions import Hold, Session, Standing
from moonpool.node.slices import Whole
from moonpool.node.steps import Steps
from moonpool.node.store import Store
from moonpool.wire import messages as m

HOLDS_MAX = 65_536
"""Holds at a time on a node: an engine has one a waiting request."""

HOLD_KEYS_MAX = 65_536
"""Keys of one match, all groups together: a million tokens in blocks of 16. Who adopts them is told in one message.

So many are the one thing for which a step of the node's loop is longer than planned: 3 ms to decode their message, 3 ms
to encode what adopts them; 2,500, a prompt of 40,000 tokens, take 0.1 ms.
"""
SLICE_KEYS = 512
"""Keys looked up in one step: some 200 us."""


class Holds:
    """All holds of a node by name. A held object is pinned: neither evicted nor overwritten. Single-threaded."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.by_name: dict[str, Hold] = {}

    def match(self, session: Session, request: m.Match) -> Steps[m.Matched]:
        """Find the longest prefix that is there and hold what it needs. Asked again under the same name: the same
        answer, nothing changed."""
        if not request.hold or len(request.hold) > 256:
            raise InvalidRequest("a hold's name has 1 to 256 characters")
        if len(request.groups) > GROUPS_MAX:
            raise InvalidRequest(f"{len(request.groups)} groups exceed the {GROUPS_MAX} of one match")
        if sum(len(group.keys) for group in request.groups) > HOLD_KEYS_MAX:
            raise InvalidRequest(f"a match has at most {HOLD_KEYS_MAX} keys, all groups together")
        for group in request.groups:
            good = 0 <= group.rule < len(RULES) and 1 <= group.step <= STEP_MAX
            if not good or group.window < (RULES[group.rule] == "window"):
                raise InvalidRequest(f"no group has rule {group.rule}, window {group.window} and step {group.step}")
        known = self._known(request.hold)
        if known is not None:
            return (yield from self._answer(request, known, created=False))
        if len(self.by_name) >= HOLDS_MAX:
            raise InvalidRequest(f"{HOLDS_MAX} holds are taken already; release those that have ended")
        catalogue = self.store.catalogue
        slots = [np.empty(len(group.keys), np.int64) for group in request.groups]
        generations = [np.empty(len(group.keys), np.uint64) for group in request.groups]
        before, looked = (catalogue.forgotten, catalogue.spaces.epoch), 0
        for group, found, known_as in zip(request.groups, slots, generations, strict=True):
            for start in range(0, len(group.keys), SLICE_KEYS):
                if looked >= SLICE_KEYS:
                    looked = 0
                    yield None
                part = list(map(self.store.visible_slot, group.keys[start : start + SLICE_KEYS]))
                looked += len(part)
                found[start : start + len(part)] = part
                known_as[start : start + len(part)] = list(map(catalogue.generation, part))
        present = [found >= 0 for found in slots]
        if before != (catalogue.forgotten, catalogue.spaces.epoch):  # some may have gone since they were found
            purged = before[1] != catalogue.spaces.epoch
            for there, found, known_as in zip(present, slots, generations, strict=True):
                there &= catalogue.still_visible(found, known_as, purged=purged)
        known = self._known(request.hold)
        if known is not None:  # another has asked the same meanwhile
            return (yield from self._answer(request, known, created=False))
        hold = self._hold(session, request, slots, present)
        if hold is None:
            return m.Matched(request.id, 0, False)
        for end in range(len(hold.slots), 0, -SLICE_KEYS):  # tail to head
            start = max(0, end - SLICE_KEYS)
            self.store.touch_chain(hold.slots[start:end], start)
            if start:
                yield None
                if self._known(hold.name) is not hold:
                    break
        return (yield from self._answer(request, hold, created=True))

    def _answer(self, request: m.Match, hold: Hold, *, created: bool) -> Steps[m.Matched]:
        """What `match` answers with; nothing where the hold ends while a long one is being told."""
        epoch = self.store.catalogue.spaces.epoch
        answer = m.Matched(request.id, hold.length, created, [], [], [], [], epoch, [])
        if not request.extents:
            return answer
        catalogue, words = self.store.catalogue, self.store.words
        for start in range(0, len(hold.slots), SLICE_KEYS):
            if start:
                yield None
                if self._known(hold.name) is not hold:
                    return m.Matched(request.id, 0, False)
            for slot in hold.slots[start : start + SLICE_KEYS]:
                base = slot * RECORD_WORDS
                answer.ids.append(catalogue.id_of(slot))
                answer.offsets.append(words[base + Field.OFFSET])
                answer.sizes.append(words[base + Field.SIZE])
                answer.words.append(words[base + Field.WORD_AND_SPACE] >> 32)
                answer.checksums.append(words[base + Field.CHECKSUM] if catalogue.summed(slot) else 0)
        return answer

    def _hold(
        self,
        session: Session,
        request: m.Match,
        slots: list[npt.NDArray[np.int64]],
        present: list[npt.NDArray[np.bool_]],
    ) -> Hold | None:
        """Pin what the longest prefix needs, in one step from when `present` was known; None where there is none."""
        rules = [(RULES[group.rule], group.window, group.step) for group in request.groups]
        length = longest(rules, present)
        if not length:
            return None
        wanted = [needed(*rule, length) for rule in rules]
        held = np.concatenate([found[part.start : part.stop] for part, found in zip(wanted, slots, strict=True)])
        np.add.at(np.frombuffer(self.store.pins, np.int32), held, np.int32(1))  # of a plain 1 it takes 20 times as long
        hold = Hold(request.hold, session, length, held.data)
        session.holds[hold.name] = hold
        self.by_name[hold.name] = hold
        return hold

    def adopt(self, session: Session, request: m.Adopt) -> Steps[m.Acquired]:
        """Pin for `session` what a hold holds, in the hold's order; an unknown hold gives an empty answer.

        Where the hold ends in the middle of a long one, those not pinned yet are misses.
        """
        hold = self._known(request.hold)
        if hold is None or not hold.slots:
            return self.store.acquire_slots(session, request.id, [])
        whole, pins = Whole(len(hold.slots)), session.pins
        try:
            for start in reversed(range(0, len(hold.slots), SLICE_KEYS)):  # tail to head
                slots: Sequence[int] = hold.slots[start : start + SLICE_KEYS]
                if self._known(request.hold) is not hold:
                    slots = [-1] * len(slots)
                whole.add(start, self.store.acquire_slots(session, request.id, slots, start))
                if start:
                    yield None
        except BaseException:  # also where the one who asked is gone
            self.store.take_back(session, whole.reply(), pins)
            raise
        reply = whole.reply()
        assert isinstance(reply, m.Acquired)
        return reply

    def release(self, name: str) -> bool:
        """End a hold, whoever made it. False where there is none of that name (it may have been released)."""
        hold = self._known(name)
        if hold is None:
            return False
        del hold.session.holds[name]
        self.store.give_back(self.forget([hold]))
        return True

    def forget(self, holds: Iterable[Hold]) -> Iterator[int]:
        """End holds, one after the other, but for their pins, which are the caller's to give back: one on each slot
        that comes. Those of a session that has ended are nobody's already."""
        for hold in holds:
            if self.by_name.get(hold.name) is hold:
                del self.by_name[hold.name]
            yield from hold.slots

    def _known(self, name: str) -> Hold | None:
        hold = self.by_name.get(name)
        return hold if hold is not None and hold.session.standing is not Standing.ENDED else None
