"""Commits under way: sent at once, their answers taken when they come, sent anew where a connection breaks."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from moonpool.client.grants import Grant
from moonpool.client.interface import Link
from moonpool.client.link import TRIES_MAX
from moonpool.errors import MoonpoolError, NodeUnavailable
from moonpool.probes import ARMED, reach
from moonpool.status import Status
from moonpool.wire import messages as m

log = logging.getLogger("moonpool.client")

UNANSWERED_MAX = 8
"""Commits that may be without an answer at a time; a further one waits for the oldest."""


@dataclass(slots=True)
class _Commit:
    """Filled extents on their way to being visible. They stay declared as reservations until the node has answered."""

    grants: list[Grant]
    """What has given the extents, all of one attachment."""
    ids: list[int]
    checksums: list[int]
    transfer_s: float
    begun: Grant | None = None


class Commits:
    """The commits of one client. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._unanswered: deque[_Commit] = deque()

    def now(self, grants: list[Grant], ids: list[int], checksums: list[int], transfer_s: float) -> list[Status]:
        """Commit, and wait for the answer. Raises `NodeUnavailable` where none is to be had: the extents are then
        given back (committed ones stay what they are)."""
        commit = _Commit(grants, ids, checksums, transfer_s)
        try:
            return self._answer(commit)
        except BaseException:
            self._give_back(commit)
            raise

    def later(self, grants: list[Grant], ids: list[int], checksums: list[int], transfer_s: float) -> None:
        """Commit, and take the answer with a later call's. The node serves what this client, or anybody whom it tells,
        asks after that as if it had been waited for: messages are served in the order in which they are sent."""
        commit = _Commit(grants, ids, checksums, transfer_s)
        try:
            commit.begun = self._begin(commit)
        except NodeUnavailable:
            pass  # sent anew when its answer is wanted
        except BaseException:
            self._give_back(commit)
            raise
        if ARMED:
            reach("client-commit-sent")
        self._unanswered.append(commit)
        if len(self._unanswered) > UNANSWERED_MAX:
            self._conclude()

    def collect(self) -> None:
        """Take the answers that have come. Doesn't wait, but where a connection broke and a commit is sent anew."""
        unanswered = self._unanswered
        while unanswered and self._link.answered(unanswered[0].begun):
            self._conclude()

    def settle(self) -> None:
        """Wait for all answers."""
        while self._unanswered:
            self._conclude()

    def _conclude(self) -> None:
        try:
            commit = self._unanswered.popleft()
        except IndexError:  # another thread was quicker
            return
        try:
            lost = [status for status in self._answer(commit) if status is not Status.OK]
        except MoonpoolError as error:
            self._give_back(commit)
            log.warning("%d objects are not stored: %s", len(commit.ids), error)
            return
        except BaseException:  # which has to do with who waits, and not with what was put before
            commit.begun = None
            self._unanswered.appendleft(commit)
            raise
        if lost:
            log.info(
                "%d of %d objects are not stored: purged meanwhile, or the session was lost", len(lost), len(commit.ids)
            )

    def _begin(self, commit: _Commit) -> Grant | None:
        attachment = commit.grants[0].attachment
        return self._link.begin_commit(attachment, commit.ids, commit.checksums, commit.transfer_s)

    def _give_back(self, commit: _Commit) -> None:
        for grant in commit.grants:
            self._link.give_back(grant)

    def _answer(self, commit: _Commit) -> list[Status]:
        for left in reversed(range(TRIES_MAX)):
            try:
                if commit.begun is None:
                    commit.begun = self._begin(commit)
                if commit.begun is None:
                    return [Status.STALE] * len(commit.ids)
                if ARMED:
                    reach("client-commit-sent")
                reply, _ = self._link.finish(commit.begun)
            except NodeUnavailable:
                commit.begun = None
                if not left:
                    raise
                continue
            assert isinstance(reply, m.StatusReply)
            self._link.settled(commit.grants)
            return list(map(Status, reply.statuses))
        raise AssertionError("the last try returns or raises")
