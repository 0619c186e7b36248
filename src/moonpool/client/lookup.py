"""Looking up: from shared memory, without asking the node, and holds on what was found."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.client.base import Base
from moonpool.client.buffers import encode_key, encode_keys
from moonpool.client.reading import Reading, Views
from moonpool.errors import InvalidRequest
from moonpool.folder.layout import Mode
from moonpool.matching import RULES, Group, Match, longest
from moonpool.wire import messages as m


class Lookup(Reading, Base):
    """The client's calls that ask what is there."""

    def exists(self, key: str | bytes) -> bool:
        """Whether the key seems to be stored: from shared memory, in microseconds. Pins nothing, renews nothing.

        Advisory: the object may be gone by the time that you get it. Raises `NodeUnavailable`.
        """
        self.commits.settle()
        attachment = self.link.attachment
        table = attachment.table
        return bool(table.mode & Mode.READ) and table.contains(encode_key(key))

    def exists_many(self, keys: Sequence[str | bytes]) -> list[bool]:
        """`exists` for a batch, vectorised."""
        self.commits.settle()
        attachment = self.link.attachment
        if not attachment.table.mode & Mode.READ:
            return [False] * len(keys)
        found: list[bool] = attachment.table.contains_many(encode_keys(keys)).tolist()
        return found

    def prefix_length(self, keys: Sequence[str | bytes]) -> int:
        """How many keys from the first on seem to be stored without a gap. Advisory, see `exists`."""
        return self.match([Group(keys)]).length

    def match(self, groups: Sequence[Group], hold: str | None = None) -> Match:
        """The largest n (in units, see `Group`) for which every group has what a prefix of n needs.

        Without `hold`: from shared memory alone, advisory. With `hold`, a name of the caller's (a request id): the
        node looks as well, and keeps what that n needs in place until `release_hold`, or until this client ends.
        Asked again under the same name it answers the same, so that it may be repeated. Other clients of the host
        may `adopt` or release the hold. Raises `NodeUnavailable`, `InvalidRequest`.
        """
        self.commits.settle()
        attachment = self.link.attachment
        if not attachment.table.mode & Mode.READ:
            return Match(0)
        table = attachment.table
        keys = [encode_keys(group.keys) for group in groups]
        rules = [(group.rule, group.window, group.step) for group in groups]
        length = longest(rules, [table.contains_many(own) for own in keys])
        if hold is None:
            return Match(length)
        if not 0 < len(hold) <= 256:
            raise InvalidRequest("a hold's name has 1 to 256 characters")
        if not length and hold not in self.holds:
            return Match(0)
        asked = [
            m.GroupKeys(own[: length // group.step], RULES.index(group.rule), group.window, group.step)
            for group, own in zip(groups, keys, strict=True)
        ]
        reply = self.link.call(m.Match(0, asked, hold))
        assert isinstance(reply, m.Matched)
        if not reply.length:
            return Match(0)
        self.holds.add(hold)
        return Match(reply.length, hold)

    def adopt(self, hold: str) -> Views:
        """Views of what a hold keeps, in the order of its groups' needed keys; the hold itself goes on.

        Empty where there is no such hold. Valid as any `Views`. Raises `NodeUnavailable`.
        """
        self.link.flush()
        reply, attachment = self.link.exchange(m.Adopt(0, hold))
        assert isinstance(reply, m.Acquired)
        return self._as_views(reply, attachment)

    def release_hold(self, hold: str) -> bool:
        """End a hold, whoever made it. False where there is none of that name. Raises `NodeUnavailable`."""
        self.holds.discard(hold)
        reply = self.link.call(m.ReleaseHold(0, hold))
        assert isinstance(reply, m.Count)
        return bool(reply.count)

    holds: set[str]
    """Names of holds that this client has made and not released."""
