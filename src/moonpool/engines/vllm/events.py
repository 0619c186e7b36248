"""KV events: what comes into the pool and goes, of this engine's key spaces, whoever stores it, for vLLM's subscribers.

Objects are told by KV group. One counts as stored when every rank's shard of it is there, and as removed when the
first of them goes. What is told is always the difference between what subscribers know and what is there: so each
change is told once, one that was undone before anybody asked not at all, and a lost feed costs a comparison.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from moonpool.client.feed import Event, Subscription
from moonpool.engines.vllm.notes import decode_note
from moonpool.engines.vllm.spaces import Spaces
from moonpool.errors import MoonpoolError
from moonpool.keys import KeySpace

log = logging.getLogger("moonpool.vllm")

SPACE_BYTES = 16
"""A key is the digest of its key space and that of its tokens."""
EVENTS_PER_STEP = 4096
"""Told in one step of the engine; the rest in the next."""
EVENTS_PER_LOCK = 64
"""Taken in at a time, so that the engine's thread never waits long."""
PAUSE_S = 0.25
"""How long the thread waits for an event, and for a node, before it looks whether it is to end."""


class Scope(NamedTuple):
    """One KV group of one adapter: objects are the same thing to subscribers within one."""

    adapter: str
    group: int


class Object(NamedTuple):
    """What one event is about."""

    scope: Scope
    digest: bytes


class Change(NamedTuple):
    """One object that has come, with the note that lies beside it, or gone."""

    object: Object
    stored: bool
    note: bytes = b""


class Residents:
    """Which objects are whole in the pool, and which of them have been told. Pure; for one thread at a time."""

    def __init__(self) -> None:
        self._shards: dict[bytes, tuple[Scope, int]] = {}
        """Key space → what it is a shard of, and which one, as a bit."""
        self._whole: dict[Scope, int] = {}
        """Per scope all its bits."""
        self._there: dict[Object, int] = {}
        """Per object the shards that are there."""
        self._told: set[Object] = set()
        self._changed: OrderedDict[Object, bytes] = OrderedDict()
        """Objects that may be other than told, in the order of their changes, with their notes."""
        self._fresh: Residents | None = None
        """What a snapshot has told so far."""

    def watch(self, scopes: Mapping[Scope, list[bytes]]) -> None:
        """From now on the objects of these scopes are looked at: per scope the key spaces of its shards. What is there
        of them a snapshot has to tell; what had been told of others is gone."""
        self._shards = {space: (scope, 1 << at) for scope, spaces in scopes.items() for at, space in enumerate(spaces)}
        self._whole = {scope: (1 << len(spaces)) - 1 for scope, spaces in scopes.items()}
        for known in [known for known in self._there if known.scope not in self._whole]:
            del self._there[known]
        self._changed.update((known, b"") for known in self._told if known.scope not in self._whole)

    def apply(self, event: Event) -> None:
        """Take in one event of the node's feed."""
        if event.kind == "stored":
            self._came(event)
        elif event.kind == "removed":
            self._went(event)
        elif event.kind == "snapshot":
            if self._fresh is None:
                self._fresh = Residents()
                self._fresh._shards, self._fresh._whole = self._shards, self._whole
            self._fresh._came(event)
        elif event.kind == "snapshot-end":
            fresh, self._fresh = self._fresh or Residents(), None
            self._there = fresh._there
            self._changed = OrderedDict((known, b"") for known in self._told if not self._is_whole(known))
            self._changed.update((known, note) for known, note in fresh._changed.items() if known not in self._told)
        # "cleared" comes with a removal of each object

    def lose(self) -> None:
        """The pool is out of reach, and with it all that was there."""
        self._there.clear()
        self._changed = OrderedDict.fromkeys(self._told, b"")

    def begin(self) -> None:
        """The feed begins anew: what is there will be told by a snapshot."""
        self._fresh = None

    def take(self, most: int) -> list[Change]:
        """What has changed since it was told, at most so many changes; a chain's objects in its order."""
        changes: list[Change] = []
        while self._changed and len(changes) < most:
            for known, note in self._chain(next(iter(self._changed))):
                whole = self._is_whole(known)
                if whole == (known in self._told):
                    continue
                (self._told.add if whole else self._told.discard)(known)
                changes.append(Change(known, whole, note if whole else b""))
        return changes

    # ---- within --------------------------------------------------------------------------------------------------

    def _of(self, event: Event) -> tuple[Object, int] | None:
        shard = self._shards.get(event.key[:SPACE_BYTES])
        return None if shard is None else (Object(shard[0], event.key[SPACE_BYTES:]), shard[1])

    def _came(self, event: Event) -> None:
        if (found := self._of(event)) is not None:
            known, bit = found
            self._there[known] = self._there.get(known, 0) | bit
            if self._is_whole(known):
                self._changed[known] = event.metadata

    def _went(self, event: Event) -> None:
        if (found := self._of(event)) is not None:
            known, bit = found
            if left := self._there.pop(known, 0) & ~bit:
                self._there[known] = left
            if known in self._told:
                self._changed[known] = b""
            else:
                self._changed.pop(known, None)

    def _is_whole(self, known: Object) -> bool:
        return self._there.get(known, 0) == self._whole.get(known.scope, -1)

    def _chain(self, known: Object) -> Iterator[tuple[Object, bytes]]:
        """This change, after those of the objects before it in its chain, which subscribers have to know first."""
        chain = [(known, self._changed.pop(known))]
        while (note := decode_note(chain[-1][1])) is not None and note.parent:
            parent = Object(known.scope, note.parent)
            if parent not in self._changed:
                break
            chain.append((parent, self._changed.pop(parent)))
        yield from reversed(chain)


class Source(Protocol):
    """What a watcher needs of a client."""

    def subscribe(self, snapshot: bool = False) -> Subscription: ...


class Watcher:
    """A thread that follows the node's feed, and finds it again. `watch` and `take` are for the engine's thread."""

    def __init__(self, source: Source, reachable: Callable[[], bool]) -> None:
        self._source, self._reachable = source, reachable
        self._residents = Residents()
        self._scopes: dict[Scope, list[bytes]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._renew = False
        """The scopes have changed: another snapshot has to be asked for."""

    def watch(self, scopes: dict[Scope, list[bytes]]) -> None:
        """Look at these scopes from now on; the same again changes nothing."""
        if scopes == self._scopes:
            return
        self._scopes = dict(scopes)
        with self._lock:
            self._residents.watch(scopes)
            self._renew = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moonpool-events", daemon=True)
            self._thread.start()

    def take(self) -> list[Change]:
        """What is to be told, in order."""
        with self._lock:
            return self._residents.take(EVENTS_PER_STEP)

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(4 * PAUSE_S)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._reachable():
                    with self._lock:
                        self._residents.begin()
                        self._renew = False
                    with self._source.subscribe(snapshot=True) as feed:
                        self._follow(feed)
                    continue
            except MoonpoolError as error:
                log.info("the pool's events are lost for now: %s", error)
                with self._lock:
                    self._residents.lose()
            except Exception:  # a thread that ends would leave subscribers with what they know now
                log.exception("the pool's events are lost for now")
            self._stopping.wait(PAUSE_S)

    def _follow(self, feed: Subscription) -> None:
        """Until the feed ends, or another snapshot is needed. Raises `NodeUnavailable`."""
        while not self._stopping.is_set():
            events = [feed.poll(PAUSE_S)]
            while events[-1] is not None and len(events) < EVENTS_PER_LOCK:
                events.append(feed.poll())
            with self._lock:
                for event in events:
                    if self._renew or (event is not None and event.kind == "lagged"):
                        return  # what is left out here the next snapshot will tell
                    if event is not None:
                        self._residents.apply(event)


class Format(NamedTuple):
    """What vLLM's events say of this engine's objects beside what they are."""

    tokens_per_object: int
    kinds: tuple[tuple[str, int | None], ...]
    """Per KV group: vLLM's word for its kind, and its sliding window in tokens."""


class Events:
    """What a scheduler tells. For its thread."""

    def __init__(self, form: Format, watcher: Watcher) -> None:
        self._form, self._watcher = form, watcher
        self._watched: tuple[KeySpace, int] | None = None
        """The engine's key space, and how many adapters of it."""

    def take(self, spaces: Spaces) -> list[Any]:
        """What has come and gone of these spaces since the last call, in vLLM's own types."""
        if not spaces.complete:
            return []
        watched = spaces.base, len(spaces.known)
        if watched != self._watched:
            self._watched = watched
            groups = range(len(self._form.kinds))
            scopes = {
                Scope(adapter, group): spaces.prefixes(adapter, group) for adapter in spaces.known for group in groups
            }
            self._watcher.watch(scopes)
        changes = self._watcher.take()
        return vllm_events(changes, self._form) if changes else []

    def close(self) -> None:
        self._watcher.close()


def vllm_events(changes: Iterable[Change], form: Format) -> list[Any]:
    """The changes in vLLM's own types; removals that follow each other in one event.

    The pool is this host's memory, in vLLM's words medium "CPU" and locality "LOCAL". Token ids are empty where they
    didn't fit into a note.
    """
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as external

    events: list[Any] = []
    for (scope, digest), stored, data in changes:
        if not stored:
            last = events[-1] if events else None
            if isinstance(last, BlockRemoved) and last.group_idx == scope.group:
                last.block_hashes.append(external(digest))
            else:
                events.append(BlockRemoved([external(digest)], MEDIUM_CPU, group_idx=scope.group, locality="LOCAL"))
            continue
        note = decode_note(data)
        kind, window = form.kinds[scope.group]
        events.append(
            BlockStored(
                block_hashes=[external(digest)],
                parent_block_hash=external(note.parent) if note is not None and note.parent else None,
                token_ids=note.tokens if note is not None else [],
                block_size=form.tokens_per_object,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=(note.adapter or None) if note is not None else None,
                group_idx=scope.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality="LOCAL",
            )
        )
    return events


def event_format(kv_cache_config: Any, tokens_per_object: int) -> Format:
    """What events say of an engine with these KV groups."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = tuple((str(get_kv_cache_spec_kind(s).value), get_kv_cache_spec_sliding_window(s)) for s in specs)
    return Format(tokens_per_object, kinds)
