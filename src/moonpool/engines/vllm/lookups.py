"""What is in the pool for a request, and the holds that keep it there.

In the engine's scheduling thread: nothing waits but for a lookup's answer, and that for 2 ms at most.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable

from moonpool import Group, Match
from moonpool.client.lookup import PendingMatch
from moonpool.engines.vllm.admission import Admission
from moonpool.engines.vllm.plan import Plan
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.requests import Tracked
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.spaces import Spaces
from moonpool.engines.vllm.stats import Tally
from moonpool.errors import MoonpoolError

log = logging.getLogger("moonpool.vllm")

LOOKUP_PATIENCE_S = 0.1
"""A lookup that the node hasn't answered by then is a miss: prefill beats waiting on a node that is that busy."""


class Lookups:
    """Asks the pool. Each hold ends exactly once, through `let_go`."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        spaces: Spaces,
        pool: Pool,
        tally: Tally,
        admission: Admission,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._plan, self._spaces, self._pool = settings, plan, spaces, pool
        self._tally, self._admission, self._clock = tally, admission, clock
        self._engine = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)

    def groups(self, tracked: Tracked) -> list[Group] | None:
        """What the request's prefix needs in the pool, over all KV groups and shards. None where that is nothing."""
        digests = self.digests(tracked)
        if not digests:
            return None
        step = self._plan.tokens_per_object
        return [
            Group([prefix + digest for digest in digests], group.rule, group.window_objects, step)
            for group in self._plan.groups
            for prefix in self._spaces.prefixes(tracked.adapter, group.index)
        ]

    def digests(self, tracked: Tracked) -> list[bytes]:
        """The digest of each whole object of the request's tokens, as far as the engine has hashed them."""
        every = self._plan.hashes_per_object
        hashes = tracked.request.block_hashes
        return [bytes(hashes[end - 1]) for end in range(every, len(hashes) + 1, every)]

    def worth_asking(self, tracked: Tracked, groups: list[Group], computed: int) -> bool:
        """A first look at shared memory alone: most requests find nothing, or what the GPU has already."""
        if len(groups[0].keys) * self._plan.tokens_per_object - computed < self._settings.load_min_tokens:
            return False
        if tracked.pending is not None:
            return True
        try:
            found = self._pool.client.match(groups).length
        except MoonpoolError as error:
            self._pool.failed(error)
            return False
        if not tracked.asked:
            tracked.asked = True
            self._tally.asked(len(groups[0].keys) * self._plan.tokens_per_object, found)
            self._admission.asked_for(self.digests(tracked))
        if found - computed < max(1, self._settings.load_min_tokens):
            self.decline(tracked, "too short", found - computed)
            return False
        return True

    def ask(self, tracked: Tracked, groups: list[Group]) -> Match | None:
        """The match, with its hold; None while the node hasn't answered, a miss where it takes too long."""
        try:
            if tracked.pending is None:
                hold = f"vllm {self._engine} {next(self._numbers)} {tracked.id}"[:256]
                tracked.asked_at = self._clock()
                begun = self._pool.client.begin_match(groups, hold, extents=True)
                if isinstance(begun, Match):
                    return begun
                tracked.pending = begun
            pending: PendingMatch = tracked.pending
            if pending.wait(self._settings.lookup_timeout_s):
                found = pending.result()
                tracked.pending = None
                self._pool.succeeded()
                if log.isEnabledFor(logging.DEBUG):
                    took_us = (self._clock() - tracked.asked_at) * 1e6
                    log.debug("lookup of %s: %d tokens held in %.0f us", tracked.id, found.length, took_us)
                return found
            if self._clock() - tracked.asked_at < LOOKUP_PATIENCE_S:
                return None
            self._tally.skipped("lookup too slow")
            self._pool.failed("the node takes too long to answer a lookup")
        except MoonpoolError as error:
            self._pool.failed(error)
        self.let_go(tracked)
        return Match(0)

    def decline(self, tracked: Tracked, reason: str, tokens: int) -> None:
        """A hit of so many tokens isn't used. Counted once a request, however often it is asked."""
        self.let_go(tracked)
        if tokens > 0 and not tracked.declined:
            tracked.declined = True
            self._tally.skipped(reason, tokens)

    def let_go(self, tracked: Tracked) -> None:
        """End the request's hold, if there is one."""
        if tracked.pending is not None:
            tracked.pending.cancel()
            tracked.pending = None
        elif tracked.match is not None and tracked.match.hold is not None:
            self._pool.client.drop_hold(tracked.match.hold)
        tracked.match, tracked.shadowed = None, False
