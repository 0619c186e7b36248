"""Getting objects: into the caller's buffers with one copy, or as views of the pool with none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import overload

import numpy as np

from moonpool.client.attachment import Attachment
from moonpool.client.base import Base
from moonpool.client.buffers import Buffer, as_target, encode_key, encode_keys
from moonpool.client.copying import SMALL_BYTES, copy_out
from moonpool.client.grants import Array, Exported, Grant
from moonpool.errors import IntegrityError, InvalidRequest
from moonpool.folder.layout import KEY_BYTES_MAX
from moonpool.node.checksums import checksum
from moonpool.probes import ARMED, reach
from moonpool.status import Status, Statuses
from moonpool.wire import messages as m

log = logging.getLogger("moonpool.client")

_OK = int(Status.OK)
Prepared = memoryview | str

GET_KEYS_MAX = 1024
"""Keys that one get holds at a time; longer batches go in several round trips."""


class Views(Sequence["Array | None"]):
    """Read-only arrays over the pool, one a key, None for a miss; a context manager.

    The bytes of an array stay as they are for as long as it, or anything made from it without a copy (a slice,
    `torch.from_numpy`, a memoryview), is referenced, also after the context has ended and whatever happens to the
    key or the node meanwhile. The node can't evict the object until then, so let go soon. Not valid in a forked child.
    """

    def __init__(self, arrays: list[Array | None], statuses: Statuses, settle: _Settle) -> None:
        self._arrays = arrays
        self._settle = settle
        self.statuses = statuses
        """One status a key."""

    @overload
    def __getitem__(self, index: int) -> Array | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array | None]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array | None] | None:
        return self._arrays[index]

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[Array | None]:
        return iter(self._arrays)

    def __enter__(self) -> Views:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the context: arrays that nobody else refers to are given back now."""
        self._arrays = [None] * len(self._arrays)
        self._settle()


class _Settle:
    """Flushes a link's queue of dropped views."""

    __slots__ = ("_base",)

    def __init__(self, base: Base) -> None:
        self._base = base

    def __call__(self) -> None:
        self._base.link.flush()


class Reading(Base):
    """The client's calls that bring bytes."""

    def get(self, key: str | bytes, *, verify: bool = False) -> bytes | None:
        """The object's bytes as a copy of its own; None for a miss.

        With `verify`, raises `IntegrityError` where they differ from their checksum, or could not be compared with it
        in time. Raises `NodeUnavailable`.
        """
        self.link.flush()
        reply, grant = self._acquire(encode_keys([key]), verify)
        attachment = grant.attachment
        statuses = Statuses(map(Status, reply.statuses), sizes=reply.sizes)
        try:
            found = b""
            if reply.ids[0]:
                found = copy_out(attachment.pool.array(reply.offsets[0], reply.sizes[0]))
                if verify:
                    self._check_bytes(encode_key(key), memoryview(found), reply.checksums[0], 0, statuses)
                if not self._still_good(reply, attachment):
                    self._recheck(reply, attachment, 0, statuses)
        finally:
            self.link.give_back(grant)
        self._raise_corrupt(statuses, key)
        return found if statuses[0] is Status.OK else None

    def get_into(self, key: str | bytes, target: Buffer, *, verify: bool = False) -> int | None:
        """Copy the object into `target`; returns its size in bytes, None for a miss.

        `target` is not written to where it is too small (`InvalidRequest`). A miss may leave part of an object in it
        that went away meanwhile; the return value alone says what is good. Raises `NodeUnavailable`, and with
        `verify` `IntegrityError`.
        """
        statuses = self.get_many_into([key], [target], verify=verify)
        self._raise_corrupt(statuses, key)
        if statuses[0] in (Status.BUFFER_TOO_SMALL, Status.INVALID, Status.KEY_TOO_LONG, Status.EMPTY):
            raise InvalidRequest(statuses.details.get(0, statuses[0].name))
        return statuses.sizes[0] if statuses[0] is Status.OK else None

    def get_many_into(
        self, keys: Sequence[str | bytes], targets: Sequence[Buffer], *, verify: bool = False
    ) -> Statuses:
        """Copy each key's object into its target: one round trip for the batch, one copy an object.

        Returns one status a key: OK, MISS, BUFFER_TOO_SMALL (target untouched), INVALID (no writable contiguous
        buffer), CORRUPT or IN_PROGRESS (only with `verify`: no checksum was to be had in time), DISABLED (see
        `moonpool mode`); `.sizes` has the objects' sizes in bytes.
        Only targets with OK hold good bytes. When it returns or raises, nothing writes to the targets any more.
        Raises `NodeUnavailable`.
        """
        if len(keys) != len(targets):
            raise InvalidRequest(f"{len(keys)} keys and {len(targets)} targets; one target a key")
        wanted = encode_keys(keys)
        result = Statuses([Status.OK] * len(wanted), sizes=[0] * len(wanted))
        # Of a long chain the last part first: what is asked for last counts as used last, and tails are to go first.
        for start in reversed(range(0, len(wanted), GET_KEYS_MAX)):
            part = wanted[start : start + GET_KEYS_MAX]
            self._get_part(part, targets[start : start + GET_KEYS_MAX], start, result, verify)
        return result

    def view(self, key: str | bytes, *, verify: bool = False) -> Views:
        """`view_many` for one key."""
        return self.view_many([key], verify=verify)

    def view_many(self, keys: Sequence[str | bytes], *, verify: bool = False) -> Views:
        """Read-only uint8 arrays straight over the pool, without a copy, in one round trip a 1,024 keys.

        Use it as a context: `with client.view_many(keys) as views`. See `Views` for how long they are valid. With
        `verify`, an object that differs from its checksum is None with status CORRUPT, one whose checksum was not to be
        had in time None with IN_PROGRESS. Raises `NodeUnavailable`.
        """
        self.link.flush()
        arrays: list[Array | None] = []
        expected: list[int] = []
        statuses = Statuses()
        wanted = encode_keys(keys)
        for start in range(0, len(wanted), GET_KEYS_MAX):
            reply, grant = self._acquire(wanted[start : start + GET_KEYS_MAX], verify)
            self._wrap(reply, grant, arrays, statuses)
            expected += reply.checksums
        if verify:
            self._verify_views(wanted, expected, arrays, statuses)
        return Views(arrays, statuses, _Settle(self))

    # ---- within --------------------------------------------------------------------------------------------------

    def _as_views(self, reply: m.Acquired, grant: Grant) -> Views:
        arrays: list[Array | None] = []
        statuses = Statuses()
        self._wrap(reply, grant, arrays, statuses)
        return Views(arrays, statuses, _Settle(self))

    def _acquire(
        self, keys: list[bytes], verify: bool, meanwhile: Callable[[], None] | None = None
    ) -> tuple[m.Acquired, Grant]:
        reply, grant = self.link.exchange(m.Acquire(0, keys, verify), meanwhile)
        assert isinstance(reply, m.Acquired)
        if ARMED:
            reach("client-acquired")
        return reply, grant

    def _wrap(self, reply: m.Acquired, grant: Grant, arrays: list[Array | None], statuses: Statuses) -> None:
        """Arrays that keep their objects pinned: the pin is given back when the array, which all that is derived
        from it refers to, is gone."""
        source, keep, ended = grant.attachment.readonly_view, Exported.keep, self.link.ended
        for place, (status, offset, size) in enumerate(zip(reply.statuses, reply.offsets, reply.sizes, strict=True)):
            statuses.append(Status(status))
            if status != _OK:
                arrays.append(None)
                continue
            array = np.frombuffer(source, np.uint8, size, offset)
            arrays.append(array)
            keep(array, grant, place, ended)
        statuses.sizes += reply.sizes

    def _verify_views(
        self, keys: list[bytes], expected: list[int], arrays: list[Array | None], statuses: Statuses
    ) -> None:
        for i, array in enumerate(arrays):
            if array is not None and not self._check_bytes(keys[i], array.data, expected[i], i, statuses):
                arrays[i] = None

    def _get_part(
        self, keys: list[bytes], targets: Sequence[Buffer], start: int, result: Statuses, verify: bool
    ) -> None:
        self.link.flush()
        begun = perf_counter()
        prepared: list[Prepared] = []
        # The targets are looked at while the node is at work.
        reply, grant = self._acquire(keys, verify, lambda: prepared.extend(map(_prepare, targets)))
        queried = perf_counter()
        attachment = grant.attachment
        copied = 0
        try:
            copied = self._copy_out(reply, attachment, prepared, start, result)
            if verify:
                self._check_copies(keys, reply, targets, start, result)
            moved = perf_counter() - queried
            if ARMED:
                reach("client-copied")
            if grant.pending is not None and not self._still_good(reply, attachment):
                self._recheck(reply, attachment, start, result)
        finally:
            # Whatever happened, no copy of ours is running any more (see `Copier.copy`).
            self.link.give_back(grant, transfer_s=perf_counter() - queried)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "get: %d keys, %d hits, %d bytes; query %.0f us, transfer %.0f us, %.2f GB/s",
                len(keys), len(keys) - reply.ids.count(0), copied, (queried - begun) * 1e6, moved * 1e6,
                copied / max(moved, 1e-9) / 1e9,
            )  # fmt: skip

    def _copy_out(
        self, reply: m.Acquired, attachment: Attachment, targets: Sequence[Prepared], start: int, result: Statuses
    ) -> int:
        """Copy what was found; returns the number of bytes."""
        source, view = attachment.pool.bytes, attachment.pool.view
        large: list[tuple[Array, Array]] = []
        copied = 0
        result.sizes[start : start + len(reply.sizes)] = reply.sizes
        for i, (status, size, offset, target) in enumerate(
            zip(reply.statuses, reply.sizes, reply.offsets, targets, strict=True)
        ):
            if status != _OK:
                result[start + i] = Status(status)
            elif isinstance(target, str):
                result[start + i] = Status.INVALID
                result.details[start + i] = target
            elif len(target) < size:
                result[start + i] = Status.BUFFER_TOO_SMALL
                result.details[start + i] = f"the object has {size} bytes, the target {len(target)}"
            elif size <= SMALL_BYTES:
                copied += size
                target[:size] = view[offset : offset + size]
            else:
                copied += size
                large.append((np.frombuffer(target, np.uint8, size), source[offset : offset + size]))
        if large:
            self.copier.copy(large)
        return copied

    def _still_good(self, reply: m.Acquired, attachment: Attachment) -> bool:
        """The look after the copy: no purge came in between, and every word still is of its generation."""
        table = attachment.table
        if table.purge_epoch != reply.epoch or not attachment.live:  # a dead node's table says nothing any more
            return False
        return table.all_unchanged(reply.words, reply.ids)

    def _recheck(self, reply: m.Acquired, attachment: Attachment, start: int, result: Statuses) -> None:
        """Something changed under the copy: what isn't there any more is a miss."""
        places = [i for i, number in enumerate(reply.ids) if number]
        answer, now = self.link.exchange(m.Check(0, [reply.ids[i] for i in places]))
        assert isinstance(answer, m.StatusReply)
        same = now.attachment.token == attachment.token
        for i, status in zip(places, answer.statuses, strict=True):
            if (status != _OK or not same) and result[start + i] is Status.OK:
                result[start + i] = Status.MISS

    def _check_copies(
        self, keys: list[bytes], reply: m.Acquired, targets: Sequence[Buffer], start: int, result: Statuses
    ) -> None:
        for i, expected in enumerate(reply.checksums):
            if result[start + i] is Status.OK:
                data = as_target(targets[i])[: reply.sizes[i]]
                self._check_bytes(keys[i], data, expected, start + i, result)

    def _check_bytes(self, key: bytes, data: memoryview, expected: int, place: int, statuses: Statuses) -> bool:
        """Compare bytes with the node's checksum of them; `statuses` says where they differ or can't be compared."""
        if not expected:
            statuses[place] = Status.IN_PROGRESS
            statuses.details[place] = "the node could not compute the checksum within its bounded wait; try again"
        elif checksum(data) != expected:
            statuses[place] = Status.CORRUPT
            statuses.details[place] = "the bytes differ from their checksum"
            self.link.call(m.Verify(0, [key]))  # the node looks at its own bytes, and drops them if it is they
        else:
            return True
        return False

    @staticmethod
    def _raise_corrupt(statuses: Statuses, key: str | bytes) -> None:
        if statuses[0] is Status.IN_PROGRESS:
            raise IntegrityError(statuses.details[0])
        if statuses[0] is Status.CORRUPT:
            raise IntegrityError(f"the bytes of {encode_key(key)[:64]!r} differ from their checksum")
        if len(encode_key(key)) > KEY_BYTES_MAX:
            raise InvalidRequest(f"a key of {len(encode_key(key))} bytes exceeds the limit of {KEY_BYTES_MAX}")
        if not key:
            raise InvalidRequest("a key has at least 1 byte")


def _prepare(target: Buffer) -> Prepared:
    """A target as a flat writable view, or why it can't be one."""
    if type(target) is bytearray:
        return memoryview(target)
    try:
        return as_target(target)
    except InvalidRequest as error:
        return str(error)
