"""Holds: what `match` keeps in place for a request, until it is released or its session ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.errors import InvalidRequest
from moonpool.matching import RULES, longest, needed
from moonpool.node.sessions import Hold, Session
from moonpool.node.steps import Steps
from moonpool.node.store import Store
from moonpool.wire import messages as m

HOLDS_MAX = 65_536
"""Holds at a time on a node: an engine has one a waiting request."""

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
        for group in request.groups:
            if not 0 <= group.rule < len(RULES) or group.step < 1 or group.window < (RULES[group.rule] == "window"):
                raise InvalidRequest(f"no group has rule {group.rule}, window {group.window} and step {group.step}")
        known = self.by_name.get(request.hold)
        if known is not None:
            return m.Matched(request.id, known.length, False)
        if len(self.by_name) >= HOLDS_MAX:
            raise InvalidRequest(f"{HOLDS_MAX} holds are taken already; release those that have ended")
        slots: list[list[int]] = []
        removals = self.store.catalogue.forgotten
        for group in request.groups:
            found: list[int] = []
            slots.append(found)
            for start in range(0, len(group.keys), SLICE_KEYS):
                if start:
                    yield None
                found += map(self.store.visible_slot, group.keys[start : start + SLICE_KEYS])
        return self._hold(session, request, slots, changed=self.store.catalogue.forgotten != removals)

    def _hold(self, session: Session, request: m.Match, slots: Sequence[list[int]], *, changed: bool) -> m.Matched:
        """The second half, in one step: where objects have gone since they were found, each is looked at again."""
        known = self.by_name.get(request.hold)
        if known is not None:
            return m.Matched(request.id, known.length, False)
        pins = self.store.pins
        rules = [(RULES[group.rule], group.window, group.step) for group in request.groups]
        present = []
        for group, found in zip(request.groups, slots, strict=True):
            if changed:
                for i, key in enumerate(group.keys):
                    if found[i] >= 0 and self.store.visible_slot(key) != found[i]:
                        found[i] = -1
            present.append(np.array(found, np.int64) >= 0)
        length = longest(rules, present)
        if not length:
            return m.Matched(request.id, 0, False)
        held: list[int] = []
        for rule, found in zip(rules, slots, strict=True):
            held += [found[i] for i in needed(*rule, length)]
        for slot in held:
            pins[slot] += 1
        hold = Hold(request.hold, session, length, held)
        session.holds[hold.name] = hold
        self.by_name[hold.name] = hold
        self.store.touch_chain(held)
        return m.Matched(request.id, length, True)

    def adopt(self, session: Session, request: m.Adopt) -> Steps[m.Acquired]:
        """Pin for `session` what a hold holds, in the hold's order; an unknown hold gives an empty answer.

        Where the hold ends in the middle of a long one, the rest are misses.
        """
        hold = self.by_name.get(request.hold)
        if hold is None:
            return self.store.acquire_slots(session, request.id, [])
        reply = self.store.acquire_slots(session, request.id, hold.slots[:SLICE_KEYS])
        try:
            for start in range(SLICE_KEYS, len(hold.slots), SLICE_KEYS):
                yield None
                slots = hold.slots[start : start + SLICE_KEYS]
                if self.by_name.get(request.hold) is not hold:
                    slots = [-1] * len(slots)
                more = self.store.acquire_slots(session, request.id, slots)
                for name in ("statuses", "ids", "offsets", "sizes", "words", "checksums"):
                    getattr(reply, name).extend(getattr(more, name))
        except BaseException:
            self.store.take_back(session, reply)
            raise
        return reply

    def release(self, name: str) -> bool:
        """End a hold, whoever made it. False where there is none of that name (it may have been released)."""
        hold = self.by_name.pop(name, None)
        if hold is None:
            return False
        del hold.session.holds[name]
        for slot in hold.slots:
            self.store.catalogue.unpin(slot)
        return True
