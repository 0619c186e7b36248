"""Putting objects: small ones with the message, large ones straight into the pool."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, overload

import numpy as np

from moonpool.client.attachment import Attachment
from moonpool.client.base import Base
from moonpool.client.buffers import Buffer, as_bytes, encode_keys
from moonpool.client.grants import Array, Exported, Grant
from moonpool.client.interface import Link
from moonpool.errors import InvalidRequest, NodeUnavailable
from moonpool.folder.layout import INLINE_VALUE_BYTES_MAX
from moonpool.probes import ARMED, reach
from moonpool.status import Status, Statuses
from moonpool.wire import messages as m

log = logging.getLogger("moonpool.client")

PinLevel = Literal["hard", "soft"] | None
_OK = int(Status.OK)
_REFUSED = (Status.EMPTY, Status.KEY_TOO_LONG, Status.INVALID, Status.TOO_LARGE)

BULK_KEYS_MAX = 128
BULK_BYTES_MAX = 512 << 20
"""What one reservation of `put_many` takes at a time (and at most an eighth of the pool, of which two are held)."""
LEAD_KEYS_MIN = 8
"""From this many values on, the first reservation is for a few alone: the rest are reserved while those are copied."""


class Reservation:
    """One extent that is the caller's to fill. `buffer` is None where `status` is not OK, and after commit or abort."""

    __slots__ = ("_grant", "_link", "_place", "buffer", "detail", "key", "number", "offset", "status")

    def __init__(
        self, link: Link, grant: Grant, place: int, key: bytes, status: Status, number: int, detail: str
    ) -> None:
        self._link, self._grant, self._place = link, grant, place
        self.key, self.status, self.number = key, status, number
        self.buffer: Array | None = None
        """A writable uint8 array over the pool: the caller's own until the context ends."""
        self.offset = 0
        """Where in the pool that is, in bytes: for I/O that isn't this process's own, such as DMA."""
        self.detail = detail
        """Why not, where `status` is not OK."""

    def abort(self) -> None:
        """Give this one back unfilled; the caller's I/O on it has stopped."""
        if self.number:
            self._link.give_back(self._grant, [self._place])
            self.number, self.buffer, self.status = 0, None, Status.STALE


class Reservations(Sequence[Reservation]):
    """Extents to be filled in place, one a key; a context manager.

    On leaving the context all that were not aborted are committed, and `statuses` says what became of each; on an
    exception all are aborted. Nothing is visible before. No I/O into a buffer may be under way any more by then. What
    is left without either is aborted when nobody refers to this any more, nor to any of its buffers or to what was made
    from one without a copy.
    """

    def __init__(
        self, writing: Writing, keys: list[bytes], sizes: Sequence[int], reply: m.Reserved, grant: Grant
    ) -> None:
        self._link, self._commits, self._grant = writing.link, writing.commits, grant
        pool, ended = grant.attachment.pool, self._link.ended
        self.statuses = Statuses(map(Status, reply.statuses), dict(reply.details))
        self._items = [
            Reservation(self._link, grant, i, key, Status(status), number, reply.details.get(i, ""))
            for i, (key, status, number) in enumerate(zip(keys, reply.statuses, reply.ids, strict=True))
        ]
        for item, offset, size in zip(self._items, reply.offsets, sizes, strict=True):
            if item.number:
                item.buffer, item.offset = pool.array(offset, size), offset
                Exported.keep(item.buffer, grant, -1, ended)
        self._started = perf_counter()

    @overload
    def __getitem__(self, index: int) -> Reservation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Reservation]: ...
    def __getitem__(self, index: int | slice) -> Reservation | Sequence[Reservation]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._items)

    def __enter__(self) -> Reservations:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def commit(self, checksums: Sequence[int] = ()) -> Statuses:
        """Make all that were not aborted visible, in one round trip. A second call does nothing."""
        open_ = [(i, item) for i, item in enumerate(self._items) if item.number]
        if open_:
            given = _checksums(checksums or None, len(self._items))
            sums = [given[i] for i, _ in open_] if given else []
            found = self._commits.now(
                [self._grant], [item.number for _, item in open_], sums, perf_counter() - self._started
            )
            for (i, item), status in zip(open_, found, strict=True):
                item.number, item.buffer = 0, None
                item.status = self.statuses[i] = status
        return self.statuses

    def abort(self) -> None:
        """Give all back unfilled. A second call does nothing."""
        self._link.give_back(self._grant)
        for item in self._items:
            if item.number:
                item.number, item.buffer, item.status = 0, None, Status.STALE


@dataclass(slots=True)
class _Batch:
    """Part of a `put_many`: places in the caller's batch and what goes there."""

    places: list[int]
    keys: list[bytes]
    values: list[memoryview]
    size: int = 0


class Writing(Base):
    """The client's calls that store bytes."""

    def put(
        self,
        key: str | bytes,
        value: Buffer,
        *,
        ttl_s: float | None = None,
        metadata: bytes = b"",
        pin: PinLevel = None,
        pin_ttl_s: float | None = None,
        priority: int = 0,
        checksum: int | None = None,
        wait_s: float | None = None,
    ) -> Status:
        """Store one value; visible to everybody when it returns OK.

        EXISTS: the key is stored already and was left as it is. Also IN_PROGRESS, NO_SPACE, STALE (purged meanwhile)
        and DISABLED, see `Status`. Raises `InvalidRequest` for a key or value that can't be stored, with the limit;
        `NodeUnavailable`; `ReadOnly`.
        """
        statuses = self.put_many(
            [key], [value], ttl_s=ttl_s, metadata=metadata, pin=pin, pin_ttl_s=pin_ttl_s, priority=priority,
            checksums=None if checksum is None else [checksum], wait_s=wait_s,
        )  # fmt: skip
        if statuses[0] in _REFUSED:
            raise InvalidRequest(statuses.details.get(0, statuses[0].name))
        return statuses[0]

    def put_many(
        self,
        keys: Sequence[str | bytes],
        values: Sequence[Buffer],
        *,
        ttl_s: float | None = None,
        metadata: bytes | Sequence[bytes] = b"",
        pin: PinLevel = None,
        pin_ttl_s: float | None = None,
        priority: int = 0,
        checksums: Sequence[int] | None = None,
        wait_s: float | None = None,
    ) -> Statuses:
        """Store values in chain order (heads first: of a chain, tails are evicted first).

        Values up to 64 KiB travel with the message, in one round trip; larger ones are copied into the pool once, and
        their commit is on its way when this returns: any get that is sent after it, by whomever, finds them, and
        so does this client's `exists`; another process's `exists`, which reads shared memory, some 0.1 ms later. (OK is
        then revised by a purge or the node's death within that time alone; it is logged.)
        `ttl_s`: never served after that. `pin`: "soft" (evicted last, until `pin_ttl_s` has passed) or "hard" (never
        evicted). `checksums`: xxh3-64 of each value, where the caller has them. `wait_s`: how long to wait for space
        (the node's default, at most 5 s). `priority`: 0 to 255; an object of 1, 2, or 3 and more counts as idle for a
        half, a quarter, an eighth of the time, where objects are to be evicted. One status a key, with `.details`. The
        values are only read, and not any more once this has returned or raised. Raises `NodeUnavailable`, `ReadOnly`.
        """
        self._writable()
        if len(keys) != len(values):
            raise InvalidRequest(f"{len(keys)} keys and {len(values)} values; one value a key")
        wanted = encode_keys(keys)
        options = _options(ttl_s, pin, pin_ttl_s, priority, wait_s)
        metadatas = _metadatas(metadata, len(wanted))
        result = Statuses([Status.OK] * len(wanted))
        inline: list[_Batch] = []
        bulk: list[_Batch] = []
        bulk_bytes_max = min(BULK_BYTES_MAX, self.pool_bytes // 8)
        seen: set[bytes] = set()
        for i, value in enumerate(values):
            if wanted[i] in seen:
                result[i] = Status.DUPLICATE
                result.details[i] = "the key stands earlier in the batch"
                continue
            seen.add(wanted[i])
            try:
                view = as_bytes(value)
            except InvalidRequest as error:
                result[i] = Status.INVALID
                result.details[i] = str(error)
                continue
            size = len(view)
            if size <= INLINE_VALUE_BYTES_MAX:
                _append(inline, i, wanted[i], view, size, m.INLINE_KEYS_MAX, m.INLINE_BATCH_BYTES_MAX)
            else:
                lead = len(bulk) == 1 and len(values) >= LEAD_KEYS_MIN
                _append(
                    bulk, i, wanted[i], view, size, 1 + len(values) // 16 if lead else BULK_KEYS_MAX, bulk_bytes_max
                )
        sums = _checksums(checksums, len(wanted))
        for batch in inline:
            self._put_inline(batch, options, metadatas, sums, result)
        if bulk:
            self._put_bulk(bulk, options, metadatas, sums, result)
        if len(inline) + len(bulk) > (2 if not inline else 1):
            # Each part was marked as used when it came; of the whole chain the tail is to be the coldest.
            stored = [key for key, status in zip(wanted, result, strict=True) if status is Status.OK]
            for start in reversed(range(0, len(stored), m.KEYS_MAX)):
                self.link.send(m.Touch(0, stored[start : start + m.KEYS_MAX]))
        return result

    def reserve(self, key: str | bytes, size: int, **options: object) -> Reservations:
        """`reserve_many` for one key: `with client.reserve(key, size) as (extent,): extent.buffer[:] = …`."""
        return self.reserve_many([key], [size], **options)  # type: ignore[arg-type]

    def reserve_many(
        self,
        keys: Sequence[str | bytes],
        sizes: Sequence[int],
        *,
        wait_s: float | None = None,
        metadata: bytes | Sequence[bytes] = b"",
        ttl_s: float | None = None,
        pin: PinLevel = None,
        pin_ttl_s: float | None = None,
        priority: int = 0,
        wait_for_others: bool = False,
    ) -> Reservations:
        """Extents of `sizes` bytes in the pool, for the caller to fill in place (memcpy, DMA), in one round trip.

        See `Reservations`: commit on leaving the context, abort on an exception. `wait_for_others`: where another
        writer has reserved a key, wait for it (at most `wait_s`) and become the writer if it gives up. At most 4,096
        keys. Raises `NodeUnavailable`, `ReadOnly`, `InvalidRequest`.
        """
        self._writable()
        if len(keys) != len(sizes):
            raise InvalidRequest(f"{len(keys)} keys and {len(sizes)} sizes; one size a key")
        if len(keys) > m.KEYS_MAX:
            raise InvalidRequest(f"{len(keys)} keys exceed the {m.KEYS_MAX} of one reservation; split the batch")
        if any(size < 0 for size in sizes):
            raise InvalidRequest("a size is negative")
        wanted = encode_keys(keys)
        options = _options(ttl_s, pin, pin_ttl_s, priority, wait_s, wait_for_others)
        request = m.Reserve(0, wanted, [int(size) for size in sizes], options, _metadatas(metadata, len(wanted)))
        self.link.flush()
        reply, grant = self.link.exchange(request)
        assert isinstance(reply, m.Reserved)
        if ARMED:
            reach("client-reserved")
        return Reservations(self, wanted, request.sizes, reply, grant)

    # ---- within --------------------------------------------------------------------------------------------------

    def _put_inline(
        self, batch: _Batch, options: m.Options, metadatas: list[bytes], sums: list[int], result: Statuses
    ) -> None:
        self.link.flush()
        begun = perf_counter()
        reply = self.link.call(
            m.PutInline(
                0,
                batch.keys,
                batch.values,
                options,
                [metadatas[i] for i in batch.places] if metadatas else [],
                [sums[i] for i in batch.places] if sums else [],
            )
        )
        assert isinstance(reply, m.StatusReply)
        _note(result, batch.places, reply.statuses, reply.details)
        if log.isEnabledFor(logging.DEBUG):
            _log_put("put inline", batch, 0.0, perf_counter() - begun, 0.0)

    def _put_bulk(
        self, batches: list[_Batch], options: m.Options, metadatas: list[bytes], sums: list[int], result: Statuses
    ) -> None:
        """Reserve, copy, commit, batch by batch. The next batch is reserved while this one is copied, and commits are
        not waited for: a client that has just moved tens of MB, and its node, take 0.1 to 0.3 ms for a round trip,
        since no cache holds anything of theirs any more. Messages that belong together go out together for the same
        reason.
        """
        self.link.flush()
        self.commits.collect()
        requests: list[m.Message] = [
            m.Reserve(
                0,
                batch.keys,
                [len(value) for value in batch.values],
                options,
                [metadatas[i] for i in batch.places] if metadatas else [],
            )
            for batch in batches
        ]
        ahead = deque(self._begin_quietly(requests[:2]))
        held: list[Grant] = []  # what is reserved and not committed yet
        ids_held: list[int] = []
        sums_held: list[int] = []
        try:
            for at, batch in enumerate(batches):
                asked = perf_counter()
                reply, grant = self._finish_reserve(ahead.popleft() if ahead else None, requests[at])
                if held and held[0].attachment is not grant.attachment:
                    self.commits.later(held, ids_held, sums_held, 0.0)
                    held, ids_held, sums_held = [], [], []
                held.append(grant)
                ids_held += filter(None, reply.ids)
                if 0 < at < len(batches) - 1:
                    ahead.extend(self._begin_quietly(requests[at + 1 : at + 2]))
                reserved = perf_counter()
                _note(result, batch.places, reply.statuses, reply.details)
                self._fill(batch, reply, grant.attachment)
                copied = perf_counter()
                if sums:
                    sums_held += [sums[i] for i, number in zip(batch.places, reply.ids, strict=True) if number]
                # The few of the first batch are committed with the second.
                if ids_held and (at or len(batches) == 1):
                    self.commits.later(held, ids_held, sums_held, copied - reserved)
                    held, ids_held, sums_held = [], [], []
                if log.isEnabledFor(logging.DEBUG):
                    _log_put("put", batch, reserved - asked, copied - reserved, perf_counter() - copied)
        finally:
            for grant in (*ahead, *held):  # what is left of them: no copy of ours is running any more
                self.link.give_back(grant)

    def _fill(self, batch: _Batch, reply: m.Reserved, attachment: Attachment) -> None:
        """Copy a batch's values into their extents."""
        if ARMED:
            reach("client-reserved")
        pool = attachment.pool.bytes
        self.copier.copy(
            [
                (pool[offset : offset + len(value)], np.frombuffer(value, np.uint8))
                for number, offset, value in zip(reply.ids, reply.offsets, batch.values, strict=True)
                if number
            ]
        )
        if ARMED:
            reach("client-filled")

    def _begin_quietly(self, requests: Sequence[m.Message]) -> list[Grant]:
        """Send ahead; where that fails, a request is sent again when its reply is wanted."""
        try:
            return self.link.begin_many(requests)
        except NodeUnavailable:
            return []

    def _finish_reserve(self, begun: Grant | None, request: m.Message) -> tuple[m.Reserved, Grant]:
        try:
            reply, grant = self.link.finish(begun) if begun is not None else self.link.exchange(request)
        except NodeUnavailable:
            reply, grant = self.link.exchange(request)
        assert isinstance(reply, m.Reserved)
        return reply, grant


def _append(
    batches: list[_Batch], place: int, key: bytes, value: memoryview, size: int, keys_max: int, bytes_max: int
) -> None:
    if not batches or len(batches[-1].keys) >= keys_max or batches[-1].size + size > bytes_max:
        batches.append(_Batch([], [], []))
    batch = batches[-1]
    batch.places.append(place)
    batch.keys.append(key)
    batch.values.append(value)
    batch.size += size


def _note(result: Statuses, places: list[int], statuses: Sequence[int], details: dict[int, str]) -> None:
    for place, status in zip(places, statuses, strict=True):
        if status != _OK:
            result[place] = Status(status)
    for i, text in details.items():
        result.details[places[i]] = text


def _options(
    ttl_s: float | None,
    pin: PinLevel,
    pin_ttl_s: float | None,
    priority: int,
    wait_s: float | None,
    wait_for_others: bool = False,
) -> m.Options:
    if (ttl_s, pin, pin_ttl_s, priority, wait_s, wait_for_others) == (None, None, None, 0, None, False):
        return m.DEFAULT_OPTIONS
    if pin not in (None, "soft", "hard"):
        raise InvalidRequest(f"pin={pin!r} is none of None, 'soft', 'hard'")
    if pin == "soft" and pin_ttl_s is None:
        raise InvalidRequest("a soft pin needs pin_ttl_s: how long the object is evicted last, in seconds")
    if not 0 <= priority <= 255:
        raise InvalidRequest(f"priority {priority} is not within 0 and 255")
    for name, value in (("ttl_s", ttl_s), ("pin_ttl_s", pin_ttl_s), ("wait_s", wait_s)):
        if value is not None and not (value > 0 or (value == 0 and name == "wait_s")):
            raise InvalidRequest(f"{name}={value} is not a positive time in seconds")
    return m.Options(
        ttl_s=ttl_s or 0.0,
        pin=2 if pin == "hard" else 1 if pin == "soft" else 0,
        pin_ttl_s=pin_ttl_s or 0.0,
        priority=priority,
        wait_s=-1.0 if wait_s is None else wait_s,
        wait_for_others=wait_for_others,
    )


def _metadatas(metadata: bytes | Sequence[bytes], count: int) -> list[bytes]:
    if isinstance(metadata, bytes):
        return [metadata] * count if metadata else []
    if len(metadata) != count:
        raise InvalidRequest(f"{count} keys and {len(metadata)} pieces of metadata; one each, or one for all")
    return list(metadata)


def _checksums(checksums: Sequence[int] | None, count: int) -> list[int]:
    if checksums is None:
        return []
    if len(checksums) != count:
        raise InvalidRequest(f"{count} keys and {len(checksums)} checksums; one a key, 0 where there is none")
    found = list(map(int, checksums))
    if any(not 0 <= value < 1 << 64 for value in found):
        raise InvalidRequest("a checksum has 64 bits: xxh3_64_intdigest gives one")
    return found


def _log_put(what: str, batch: _Batch, allocate_s: float, transfer_s: float, commit_s: float) -> None:
    log.debug(
        "%s: %d keys, %d bytes; allocate %.0f us, transfer %.0f us, commit %.0f us, %.2f GB/s",
        what, len(batch.keys), batch.size, allocate_s * 1e6, transfer_s * 1e6, commit_s * 1e6,
        batch.size / max(transfer_s, 1e-9) / 1e9,
    )  # fmt: skip
