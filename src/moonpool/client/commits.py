"""Commits under way: sent at once, their answers taken when they come, sent anew where a connection breaks."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from moonpool.client.attachment import Attachment
from moonpool.client.interface import Begun, Link
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

    attachment: Attachment
    ids: list[int]
    checksums: list[int]
    transfer_s: float
    begun: Begun | None = None


class Commits:
    """The commits of one client. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._unanswered: deque[_Commit] = deque()

    def now(self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float) -> list[Status]:
        """Commit, and wait for the answer. Raises `NodeUnavailable` where none is to be had: the extents are then
        given back (committed ones stay what they are)."""
        return self._finish(_Commit(attachment, ids, checksums, transfer_s))

    def later(self, attachment: Attachment, ids: list[int], checksums: list[int], transfer_s: float) -> None:
        """Commit, and take the answer with a later call's. The node serves what this client, or anybody whom it tells,
        asks after that as if it had been waited for: messages are served in the order in which they are sent."""
        commit = _Commit(attachment, ids, checksums, transfer_s)
        try:
            self._send(commit)
        except BaseException:
            self._link.abort(attachment, ids)
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
            lost = [status for status in self._finish(commit) if status is not Status.OK]
        except MoonpoolError as error:
            log.warning("%d objects are not stored: %s", len(commit.ids), error)
            return
        if lost:
            log.info(
                "%d of %d objects are not stored: purged meanwhile, or the session was lost", len(lost), len(commit.ids)
            )

    def _send(self, commit: _Commit) -> None:
        try:
            commit.begun = self._link.begin_commit(commit.attachment, commit.ids, commit.checksums, commit.transfer_s)
        except NodeUnavailable:
            commit.begun = None  # sent anew when its answer is wanted

    def _finish(self, commit: _Commit) -> list[Status]:
        try:
            return self._answer(commit)
        except BaseException:
            self._link.abort(commit.attachment, commit.ids)
            raise

    def _answer(self, commit: _Commit) -> list[Status]:
        for left in reversed(range(TRIES_MAX)):
            try:
                if commit.begun is None:
                    commit.begun = self._link.begin_commit(
                        commit.attachment, commit.ids, commit.checksums, commit.transfer_s
                    )
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
            self._link.committed(commit.attachment, commit.ids)
            return list(map(Status, reply.statuses))
        raise AssertionError("the last try returns or raises")
