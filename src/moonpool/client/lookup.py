"""Looking up: from shared memory, without asking the node, and holds on what was found."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.client.base import Base
from moonpool.client.buffers import encode_key, encode_keys
from moonpool.client.grants import Grant
from moonpool.client.reading import Reading, Views
from moonpool.errors import InvalidRequest, NodeUnavailable
from moonpool.folder.layout import Mode
from moonpool.matching import RULES, Extents, Group, Match, longest
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

    def match(self, groups: Sequence[Group], hold: str | None = None, *, extents: bool = False) -> Match:
        """The largest n (in units, see `Group`) for which every group has what a prefix of n needs.

        Without `hold`: from shared memory alone, advisory. With `hold`, a name of the caller's (a request id): the
        node looks as well, and keeps what that n needs in place until `release_hold`, or until this client ends.
        Asked again under the same name it answers the same, so that it may be repeated. Other clients of the host
        may `adopt` or release the hold. With `extents` the answer says where the held objects lie, for I/O of the
        caller's own. Raises `NodeUnavailable`, `InvalidRequest`.
        """
        asked = self._look(groups, hold, extents)
        if isinstance(asked, Match):
            return asked
        self.link.flush()  # what ends a hold of this name goes first
        reply, grant = self.link.exchange(asked)
        return self._matched(asked, reply, grant)

    def begin_match(self, groups: Sequence[Group], hold: str, *, extents: bool = False) -> Match | PendingMatch:
        """`match` without waiting for the node: the answer where shared memory has it, else one that is to come."""
        asked = self._look(groups, hold, extents)
        if isinstance(asked, Match):
            return asked
        self.link.flush()
        return PendingMatch(self, asked, self.link.begin(asked))

    def _look(self, groups: Sequence[Group], hold: str | None, extents: bool) -> Match | m.Match:
        """The answer from shared memory, or what the node is to be asked."""
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
        if not length and hold not in self.link.holds:
            return Match(0)
        asked = [
            m.GroupKeys(own[: length // group.step], RULES.index(group.rule), group.window, group.step)
            for group, own in zip(groups, keys, strict=True)
        ]
        return m.Match(0, asked, hold, extents)

    def _matched(self, asked: m.Match, reply: m.Message, grant: Grant) -> Match:
        assert isinstance(reply, m.Matched)
        pending, where = grant.pending, None
        if not reply.length or pending is None:
            self.link.give_back(grant)
            return Match(0)
        if asked.extents and not reply.ids:  # a node of the version before doesn't tell where objects lie
            self.drop_hold(asked.hold)
            return Match(0)
        if asked.extents:
            where = Extents(
                grant.attachment.pool_id, reply.epoch, reply.ids, reply.offsets, reply.sizes, reply.words,
                reply.checksums or [0] * len(reply.ids),  # a node of the version before doesn't tell
            )  # fmt: skip
        found = Match(reply.length, asked.hold, where)
        pending.settle_hold()  # last of all: whoever doesn't get the answer has no hold either
        return found

    def adopt(self, hold: str) -> Views:
        """Views of what a hold keeps, in the order of its groups' needed keys; the hold itself goes on.

        Empty where there is no such hold. Valid as any `Views`. Raises `NodeUnavailable`.
        """
        self.link.flush()
        reply, grant = self.link.exchange(m.Adopt(0, hold))
        assert isinstance(reply, m.Acquired)
        return self._as_views(reply, grant)

    def drop_hold(self, hold: str) -> None:
        """End a hold without waiting for the node to say that it has. Raises nothing: with the node gone, so is it."""
        self.link.holds.pop(hold, None)
        self.link.send(m.ReleaseHold(0, hold))

    def still_good(self, extents: Extents) -> bool:
        """Whether what was read from these extents is what was held: to be asked when the I/O has ended.

        From shared memory. False also where the node has gone or purged meanwhile: then it can't be told, and the
        bytes are to be taken for a miss.
        """
        try:
            attachment = self.link.attachment
        except NodeUnavailable:
            return False
        table = attachment.table
        same = attachment.pool_id == extents.pool_id and table.purge_epoch == extents.epoch
        return same and table.all_unchanged(extents.words, extents.ids)

    def release_hold(self, hold: str) -> bool:
        """End a hold, whoever made it. False where there is none of that name. Raises `NodeUnavailable`."""
        self.link.holds.pop(hold, None)
        reply = self.link.call(m.ReleaseHold(0, hold))
        assert isinstance(reply, m.Count)
        return bool(reply.count)


class PendingMatch:
    """A `match` that the node has been asked for. Let it end with `result`, or give it up with `cancel`, as one is that
    nobody refers to any more."""

    def __init__(self, client: Lookup, asked: m.Match, begun: Grant) -> None:
        self._client, self._asked, self._begun = client, asked, begun

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; True where `result` would return or raise at once."""
        return self._client.link.wait(self._begun, timeout_s)

    def result(self) -> Match:
        """The answer. Raises as `match` does, `NodeUnavailable` also where the connection broke meanwhile."""
        reply, grant = self._client.link.finish(self._begun)
        return self._client._matched(self._asked, reply, grant)

    def cancel(self) -> None:
        """Nobody asks any more: the hold ends as soon as it is there."""
        self._client.link.give_back(self._begun)
        self._client.drop_hold(self._asked.hold)
