"""The roster: who is connected, who is quarantined, who is gone, and what follows for what they held."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.errors import FolderError
from moonpool.folder.folder import Folder, open_file
from moonpool.folder.layout import RECORD_WORDS, Field, State
from moonpool.node.holds import Holds
from moonpool.node.sessions import TOKEN_BYTES, Session, Standing
from moonpool.node.steps import SLICE_MASK, Steps, finish
from moonpool.node.store import SLOT_MASK, Store
from moonpool.probes import ARMED, reach

LOCK_GRACE_S = 2.0
"""How long after a dead process's file lock has gone its DMA may still write. On an H200, a process killed amid
copies into a registered pool dropped its lock after 0.03 to 0.2 ms, and copies landed until its pidfd became
readable, 335 to 800 ms after the kill; never after that."""


SLICE_LIFTED = 8192
"""Slots that the barrier lets go of in one step, vectorised: some 200 us."""
PINS_MAX = 1 << 20
"""Pins of one session on one object that it may declare; each is a view of its own."""


def _slots_of(pins: dict[int, int]) -> Iterator[int]:
    """The slots that a session pins, each as often as it does."""
    return chain.from_iterable(repeat(number & SLOT_MASK, count) for number, count in pins.items())


@dataclass(slots=True)
class _Watch:
    """A session that can only be watched by its lock: `free_since` is when the lock was first seen free.

    While it is connected and holds nothing, a lock that was never `seen` taken says nothing: the client may be about
    to take it, which it does before its first request, or be a feed, which takes none.
    """

    session: Session
    free_since: float | None = None
    seen: bool = False


class Roster:
    """All sessions of a node. Single-threaded.

    After a restart, `barrier` is the set of slots that sessions of the earlier incarnation may hold: each has one
    extra pin, so that nothing of it is evicted or reused, until every such session has come back and told what it
    holds, or its process is gone.
    """

    def __init__(self, store: Store, holds: Holds, folder: Folder | None, clock: Callable[[], float]) -> None:
        self.store, self.holds, self.folder, self.clock = store, holds, folder, clock
        self.sessions: dict[int, Session] = {}
        self.barrier: npt.NDArray[np.int64] | None = None
        self.barrier_since = 0.0
        self._barrier_bytes = 0
        self._watches: dict[int, _Watch] = {}
        self._locks: dict[int, int] = {}
        self._next = 1
        self.on_end: list[Callable[[Session], None]] = []

    # ---- coming --------------------------------------------------------------------------------------------------

    def open(self, name: str, *, read_only: bool) -> Session:
        """A new session, with its file in the folder for the client to lock."""
        session = Session(self._next, name[:128], read_only)
        self._next += 1
        if self.folder is not None:
            self._locks[session.number] = self._session_file(self.folder.session(session.number), session)
        self.sessions[session.number] = session
        return session

    def _session_file(self, path: Path, session: Session) -> int:
        """Write a session's file afresh and return it open. Raises `FolderError`, and leaves none, where it can't."""
        path.unlink(missing_ok=True)
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.fchmod(fd, 0o644)
            if ARMED:
                reach("node-session-file")
            os.write(fd, session.token + session.name.encode())
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise FolderError(f"{path} can't be written: {error.strerror}") from error
        return fd

    def resume(
        self, number: int, token: bytes, pins: Iterable[tuple[int, int]], reservations: Iterable[int]
    ) -> Steps[tuple[Session, list[int]] | None]:
        """Take an earlier session up again. What the client doesn't declare is given back; the ids that it declares
        but can't have any more are returned. None where there is no such session: open a new one.

        In steps. Until the last one the session holds what it held, and what is declared besides.
        """
        session = self.sessions.get(number)
        if session is None or session.token != token:
            return None
        held: dict[int, int] = {}
        try:
            stale = yield from self._declared_pins(pins, held)
            kept = yield from self._declared_reservations(session, reservations, held, stale)
        except BaseException:  # the connection is gone
            self.store.give_back(_slots_of(held))
            raise
        if session.standing is Standing.ENDED:  # its process has gone meanwhile
            self.store.give_back(_slots_of(held))
            return None
        kept &= session.reservations
        earlier, session.pins = session.pins, held
        self.store.give_back(_slots_of(earlier), session.reservations - kept)
        session.reservations = kept
        session.standing = Standing.LIVE
        self._watches.pop(session.number, None)
        self._lift_barrier()
        return session, stale

    def _declared_pins(self, pins: Iterable[tuple[int, int]], held: dict[int, int]) -> Steps[list[int]]:
        """Pin what a client says it still reads, noted in `held`; returns the ids that it can't have any more."""
        catalogue, stale = self.store.catalogue, []
        for i, (number, count) in enumerate(pins, 1):
            slot, known = number & SLOT_MASK, held.get(number, 0)
            there = catalogue.has_id(slot, number >> 32) and catalogue.state(slot) != State.RESERVED
            if there and 0 < count <= PINS_MAX - known:
                held[number] = known + count
                self.store.pins[slot] += count
            else:
                stale.append(number)
            if i & SLICE_MASK == 0:
                yield None
        if ARMED:
            reach("node-resuming")
        return stale

    def _declared_reservations(
        self, session: Session, reservations: Iterable[int], held: dict[int, int], stale: list[int]
    ) -> Steps[set[int]]:
        """The slots of what a client says it still writes; the ids that it can't have any more go to `stale`."""
        catalogue, kept = self.store.catalogue, set()
        for i, number in enumerate(reservations, 1):
            slot = number & SLOT_MASK
            there = catalogue.has_id(slot, number >> 32)
            if there and slot in session.reservations:
                kept.add(slot)
            elif number not in held and not (there and catalogue.state(slot) == State.COMMITTED):
                stale.append(number)  # what is held as a pin is committed, whatever became of it since
            if i & SLICE_MASK == 0:
                yield None
        return kept

    # ---- going ---------------------------------------------------------------------------------------------------

    def quarantine(self, session: Session) -> None:
        """The connection is gone and the process may live: keep everything that it holds. One that holds nothing
        has no I/O under way, so it ends."""
        if session.idle:
            self.end(session, "idle")
        elif session.standing is Standing.LIVE:
            session.standing = Standing.QUARANTINED

    def watch(self, session: Session) -> None:
        """There is no pidfd for this session: learn of its process's end by its lock (see `tick`)."""
        self._watches.setdefault(session.number, _Watch(session))

    def end(self, session: Session, reason: str) -> None:
        """The client's I/O has stopped for good: give back all that it holds."""
        if session.standing is Standing.ENDED:
            return
        session.standing = Standing.ENDED
        catalogue = self.store.catalogue
        # Nobody else knows of what it held from here on, however long giving it back takes.
        holds, session.holds = session.holds, {}
        pins, session.pins = session.pins, {}
        reservations, session.reservations = session.reservations, set()
        del self.sessions[session.number]
        self._watches.pop(session.number, None)
        fd = self._locks.pop(session.number, None)
        if fd is not None:
            os.close(fd)
        if self.folder is not None:
            self.folder.session(session.number).unlink(missing_ok=True)
        catalogue.counters.sessions_ended[reason] += 1
        for call in self.on_end:
            call(session)
        self.store.give_back(chain(_slots_of(pins), self.holds.forget(holds.values())), reservations)
        self._lift_barrier()

    def tick(self) -> Steps[None]:
        """Look at the locks of sessions that have no pidfd; end those whose process is gone. Called a few times a
        second; cheap when there are none."""
        now = self.clock()
        for i, watch in enumerate(list(self._watches.values()), 1):
            if i & SLICE_MASK == 0:
                yield None
            if watch.session.standing is Standing.ENDED:  # meanwhile
                continue
            if self._locked(watch.session):
                watch.free_since, watch.seen = None, True
            elif watch.session.standing is Standing.LIVE and not watch.seen and watch.session.idle:
                continue
            elif watch.free_since is None:
                watch.free_since = now
            elif now - watch.free_since >= LOCK_GRACE_S:
                self.end(watch.session, "lock-gone")
                yield None

    def close(self) -> None:
        """Let go of the session files, where another node takes this one's place; the sessions are as they were."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    # ---- restart -------------------------------------------------------------------------------------------------

    def recover(self, held: npt.NDArray[np.int64], reservations: dict[int, set[int]]) -> None:
        """After a restart: find the earlier incarnation's sessions by their files, and put up the barrier.

        `held` are the slots of all records that were found; `reservations` the RESERVED ones by session.
        """
        orphans = dict(reservations)
        for path in sorted(self.folder.sessions.iterdir()) if self.folder is not None else ():
            session = self._read_session(path)
            if session is None:
                path.unlink(missing_ok=True)
                continue
            session.reservations = orphans.pop(session.number, set())
            self.sessions[session.number] = session
            self._next = max(self._next, session.number + 1)
            self._watches[session.number] = _Watch(session)
        catalogue = self.store.catalogue
        for slots in orphans.values():  # their session had ended: its I/O has stopped
            for slot in slots:
                catalogue.abort(slot)
        self._next = max([self._next, *(number + 1 for number in reservations)])
        if self.sessions and len(held):
            pins = np.frombuffer(self.store.pins, np.int32)
            self.barrier = held[(catalogue.records.table["state"][held] & 0xFF) != State.FREE]
            self.barrier_since = self.clock()
            self._barrier_bytes = int(catalogue.records.table["size"][self.barrier].sum())
            pins[self.barrier] += 1
        else:
            finish(self._free_doomed(held))

    @property
    def silent(self) -> list[Session]:
        """Sessions of an earlier incarnation that have not come back and may live."""
        return [session for session in self.sessions.values() if session.standing is Standing.SILENT]

    def count(self, standing: Standing) -> int:
        return sum(session.standing is standing for session in self.sessions.values())

    def quarantined_bytes(self) -> Steps[int]:
        """Bytes that can be neither evicted nor reused because a session without a connection may hold them."""
        if self.barrier is not None:
            return self._barrier_bytes
        seen: set[int] = set()
        total, words = 0, self.store.words
        for session in [session for session in self.sessions.values() if session.standing is not Standing.LIVE]:
            # Lists, as others may end what they stand for meanwhile.
            pins, holds = list(session.pins), list(session.holds.values())
            of_pins = (number & SLOT_MASK for number in pins)
            of_holds = (slot for hold in holds for slot in hold.slots)
            for i, slot in enumerate(chain(list(session.reservations), of_pins, of_holds)):
                if i & SLICE_MASK == SLICE_MASK:
                    yield None
                if slot not in seen:
                    seen.add(slot)
                    total += words[slot * RECORD_WORDS + Field.SIZE]
        return total

    def _lift_barrier(self) -> None:
        if self.barrier is None or self.silent:
            return
        slots, self.barrier = self.barrier, None
        self.store.begin(self._lifting(slots))

    def _lifting(self, slots: npt.NDArray[np.int64]) -> Steps[None]:
        """One pin less on each, a slice at a time: what isn't there yet is still held by its own."""
        catalogue, pins = self.store.catalogue, np.frombuffer(self.store.pins, np.int32)
        for start in range(0, len(slots), SLICE_LIFTED):
            if start:
                yield None
            part = slots[start : start + SLICE_LIFTED]
            doomed = (catalogue.records.table["state"][part] & 0xFF) == State.DOOMED
            pins[part[~doomed]] -= 1
            for i, slot in enumerate(part[doomed].tolist()):  # one by one, as they are freed
                if i & SLICE_MASK == SLICE_MASK:
                    yield None
                catalogue.unpin(slot)
            catalogue.wake()

    def _free_doomed(self, slots: npt.NDArray[np.int64]) -> Steps[None]:
        """Free what an earlier incarnation had made invisible and nobody holds any more."""
        catalogue = self.store.catalogue
        states = catalogue.records.table["state"][slots] & 0xFF
        for i, slot in enumerate(slots[states == State.DOOMED].tolist(), 1):
            if catalogue.state(slot) == State.DOOMED and not self.store.pins[slot]:
                catalogue.free_doomed(slot)
            if i & SLICE_MASK == SLICE_MASK:
                yield None

    def _read_session(self, path: Path) -> Session | None:
        try:
            fd = open_file(path, os.O_RDWR)
        except Exception:
            return None
        body = os.read(fd, TOKEN_BYTES + 512)
        if not path.name.isdigit() or len(body) < TOKEN_BYTES:
            os.close(fd)
            return None
        number = int(path.name)
        self._locks[number] = fd
        name = body[TOKEN_BYTES:].decode(errors="replace")
        return Session(number, name, token=body[:TOKEN_BYTES], standing=Standing.SILENT)

    def _locked(self, session: Session) -> bool:
        """Whether the client's process holds its lock. A lock that we could take is one that it doesn't hold."""
        fd = self._locks.get(session.number)
        if fd is None:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(fd, fcntl.LOCK_UN)
        return False
