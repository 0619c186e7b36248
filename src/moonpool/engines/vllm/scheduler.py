"""The scheduler's side: what is in the pool for a request, what is held for it, what its steps leave to be stored.

In the engine's scheduling thread: only a lookup waits (`lookups`), and that for 2 ms at most.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from moonpool import Match
from moonpool.engines.vllm import compat
from moonpool.engines.vllm.admission import Admission
from moonpool.engines.vllm.events import Events, Format, Watcher
from moonpool.engines.vllm.guard import note_fault
from moonpool.engines.vllm.lookups import Lookups
from moonpool.engines.vllm.metadata import (
    NO_BYTES,
    Check,
    Extent,
    Load,
    Moved,
    Part,
    Piece,
    Save,
    StepMetadata,
    WorkerReport,
)
from moonpool.engines.vllm.notes import encode_note
from moonpool.engines.vllm.plan import NULL_BLOCK, Plan
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.reading import Reading
from moonpool.engines.vllm.requests import Tracked
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.shadow import Shadows
from moonpool.engines.vllm.spaces import Spaces
from moonpool.engines.vllm.stats import Figures, Tally
from moonpool.errors import MoonpoolError
from moonpool.matching import needed

log = logging.getLogger("moonpool.vllm")

REPORTS_PATIENCE_S = 1.0
"""Workers report with the first step, even one without work; one that hasn't by then won't soon."""


class Scheduler:
    """Decides; the workers move the bytes. Single-threaded."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        spaces: Spaces,
        pool: Pool,
        *,
        loads: bool,
        saves: bool,
        shadow_rate: float = 0.0,
        event_format: Format | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.plan, self.spaces, self.pool = settings, plan, spaces, pool
        self.tally = Tally()
        self.admission = Admission(settings, self.tally)
        self._shadows = Shadows(shadow_rate, plan.ranks, self.tally, pool.client.drop_hold)
        self._events = None if event_format is None else Events(event_format, Watcher(pool.client, pool.usable))
        self._loads_wanted, self._saves_wanted = loads, saves
        self._clock = clock
        self._lookups = Lookups(settings, plan, spaces, pool, self.tally, self.admission, clock)
        self._numbers = itertools.count(1)
        self._tracked: dict[str, Tracked] = {}
        self._ending: dict[str, Tracked] = {}
        """Gone for the engine, but a worker may still be loading into its blocks."""
        self._unread: dict[int, int] = {}
        """Per save whose blocks some rank hasn't read yet: how many ranks are missing."""
        self._loads_due: list[Load] = []
        self._reading = Reading()
        self._told_space = ""
        self._waiting_since = 0.0

    # ---- looking up ----------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` the pool has, and that they are loaded asynchronously; (None, False): not
        known yet, ask again. Idempotent: a waiting request is asked for every step."""
        tracked = self._track(request)
        tracked.computed = computed
        if not self._loads_wanted or not tracked.eligible or tracked.loading or tracked.load_failed:
            return 0, False
        if tracked.shadowed:
            return 0, False
        if tracked.match is None:
            if not self.pool.usable():
                return 0, False
            if not self.spaces.complete:
                return (None, False) if self._workers_may_come() else (0, False)
            groups = self._lookups.groups(tracked)
            if groups is None or not self._lookups.worth_asking(tracked, groups, computed):
                return 0, False
            found = self._lookups.ask(tracked, groups)
            if found is None:
                return None, False
            tracked.match = found
            if self.settings.verify and found.extents is not None and not all(found.extents.checksums):
                self._lookups.decline(tracked, "no checksum yet", found.length - computed)
                return 0, False
        length = min(tracked.match.length, request.num_tokens)
        tokens = length - computed
        if tokens < max(1, self.settings.load_min_tokens):
            self._lookups.decline(tracked, "too short", tokens)
            return 0, False
        if not self.admission.admits(tokens):
            self._lookups.decline(tracked, "prefill is faster", tokens)
            return 0, False
        if not tracked.drawn:
            tracked.drawn, tracked.shadowed = True, self._shadows.picks()
            if tracked.shadowed:
                self.tally.skipped("shadow", tokens)
                return 0, False
        return tokens, True

    def _workers_may_come(self) -> bool:
        """Whether to have a request wait for the workers' first reports, which come with the first step's output."""
        self._waiting_since = self._waiting_since or self._clock()
        return self._clock() - self._waiting_since < REPORTS_PATIENCE_S

    # ---- loading -------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has given the request blocks, for `tokens` tokens from the pool; 0: for none."""
        tracked = self._track(request)
        self._writes(block_ids, tracked.computed)  # also where another connector loads into them
        if tracked.loading or tracked.shadowed:
            return
        match = tracked.match
        if tokens <= 0:
            self._lookups.let_go(tracked)
            return
        assert match is not None
        assert match.extents is not None
        until = tracked.computed + tokens
        load = Load(
            tracked.id,
            match.extents.pool_id,
            match.extents.epoch,
            tuple(part for _, part in self._parts(tracked, match, block_ids, until)),
            tokens,
        )
        tracked.loading = True
        tracked.saved = until // self.plan.tokens_per_object
        self._loads_due.append(load)
        tracked.load_tokens, tracked.load_began = tokens, self._clock()
        tracked.moved, tracked.load_error = NO_BYTES, ""

    def load_nothing(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """In place of `allocated`, where that has failed: the load that the engine waits for now is to fail."""
        tracked = self._track(request)
        self._reading.writes_anywhere()
        if not tracked.loading and tokens > 0:
            tracked.load_failed = True
            blocks = [block for table in block_ids for block in table if block != NULL_BLOCK]
            self._loads_due.append(Load.of_nothing(tracked.id, blocks, tokens))
        if not tracked.loading:
            self._lookups.let_go(tracked)

    def _parts(
        self, tracked: Tracked, match: Match, block_ids: Sequence[Sequence[int]], until: int
    ) -> Iterator[tuple[int, Part]]:
        """Each object that is to be loaded: its place in the prompt, where it lies for each rank, and the blocks that
        it fills."""
        where = match.extents
        assert where is not None
        columns = where.offsets, where.sizes, where.ids, where.words, where.checksums
        size, at = self.plan.tokens_per_object, 0
        for group in self.plan.groups:
            wanted = needed(group.rule, group.window_objects, size, match.length)
            shards = self.spaces.shard_of_rank(group.index)
            for place in wanted:
                if place * size >= until or (place + 1) * size <= tracked.computed:
                    continue
                blocks = group.blocks_of(block_ids[group.index], place, tracked.computed, until)
                if all(block < 0 for block in blocks):
                    continue
                entries = [at + shard * len(wanted) + place - wanted.start for shard in shards]
                extents = tuple(Extent(*(column[e] for column in columns)) for e in entries)
                yield place, Part(group.index, blocks, extents)
            at += len(wanted) * (max(shards) + 1)

    # ---- storing -------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """What this step's workers are to do."""
        self.admission.step_began(output.total_num_scheduled_tokens, self._clock())
        metadata = self._bare_step()
        try:
            self._fill(metadata, output)
        except Exception as error:  # what the engine waits for goes out all the same
            note_fault("step", error)
            self.pool.failed(error)
            self._distrust_blocks()
        metadata.unread = self._reading.take_due()
        return metadata

    def failed_step(self) -> StepMetadata:
        """In place of `step`, where that has failed: nothing but what the engine waits for."""
        self._distrust_blocks()
        metadata = self._bare_step()
        metadata.unread = self._reading.take_due()
        return metadata

    def _bare_step(self) -> StepMetadata:
        loads, self._loads_due = self._loads_due, []
        return StepMetadata(loads)

    def _fill(self, metadata: StepMetadata, output: Any) -> None:
        for request_id in output.preempted_req_ids or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saved, tracked.blocks, tracked.blocks_known, tracked.storable = 0, (), True, True
                self._lookups.let_go(tracked)
        tables = compat.BlockTables(output)
        for request_id in tables.changed():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.blocks = tables.updated(request_id, tracked.blocks)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.blocks_known:
                self._reading.writes_anywhere()
                continue
            self._writes(tracked.blocks, tables.computed(request_id))
            if tracked.shadowed:
                metadata.checks += self._due_check(tracked, tables.computed(request_id) + scheduled)
        if self._saves_wanted and output.total_num_scheduled_tokens and self.spaces.complete and self.pool.usable():
            for save in self._due_saves(output, tables):  # each is either told or not begun, also where one fails
                metadata.saves.append(save)
        if self.spaces.told != self._told_space:
            self._told_space = metadata.space = self.spaces.told

    def _due_check(self, tracked: Tracked, computed: int) -> list[Check]:
        """The check of a hit that is computed all the same, once that is complete. Its hold is the check's then."""
        match = tracked.match
        if match is None or match.extents is None or match.hold is None or not tracked.storable:
            self._lookups.let_go(tracked)
            return []
        until = min(match.length, tracked.request.num_tokens)
        if computed < until:
            return []
        digests = self._lookups.digests(tracked)
        parts = [(digests[place], part) for place, part in self._parts(tracked, match, tracked.blocks, until)]
        if not parts:
            self._lookups.let_go(tracked)
            return []
        found, compared = zip(*self._shadows.sample(parts), strict=True)
        number = next(self._numbers)
        self._shadows.began(number, match.hold)
        tracked.match, tracked.shadowed = None, False
        load = Load(tracked.id, match.extents.pool_id, match.extents.epoch, compared, 0)
        return [Check(number, load, tracked.adapter, found)]

    def _writes(self, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Blocks behind the first `computed` tokens are written to: by a forward, or by whoever loads."""
        for group, table in zip(self.plan.groups, tables, strict=True):
            self._reading.writes(table[computed // group.block_tokens :])

    def _distrust_blocks(self) -> None:
        """What is known of the block tables may be out of date: no request that has one is stored any more."""
        self._reading.writes_anywhere()
        for tracked in self._tracked.values():
            tracked.blocks_known = tracked.storable = False

    def _due_saves(self, output: Any, tables: compat.BlockTables) -> Iterator[Save]:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.eligible or not tracked.storable:
                continue
            last = self._storable(tracked, tables.computed(request_id) + scheduled)
            if last > tracked.saved:
                pieces = self._pieces(tracked, tracked.saved, last)
                tracked.saved = last
                if pieces:
                    number = next(self._numbers)
                    self._unread[number] = self.plan.ranks
                    self._reading.began(number, (b for p in pieces for blocks in p.blocks for b in blocks or ()))
                    yield Save(number, request_id, tracked.adapter, tuple(pieces))

    def _storable(self, tracked: Tracked, computed: int) -> int:
        """How many of the request's objects are whole once this step's forward has run."""
        request = tracked.request
        tokens: int = min(computed, request.num_prompt_tokens if self.settings.save != "all" else request.num_tokens)
        hashed = len(request.block_hashes) // self.plan.hashes_per_object
        return min(tokens // self.plan.tokens_per_object, hashed)

    def _pieces(self, tracked: Tracked, first: int, last: int) -> list[Piece]:
        """What the pool lacks of objects `first` to `last`."""
        digests = self._lookups.digests(tracked)
        due = self.admission.worth_storing(digests, range(first, last))
        if not due:
            return []
        prefixes = [p for group in self.plan.groups for p in self.spaces.prefixes(tracked.adapter, group.index)]
        try:
            there = self.pool.client.exists_many([prefix + digests[i] for i in due for prefix in prefixes])
        except MoonpoolError as error:
            self.pool.failed(error)
            return []
        pieces = []
        for n, i in enumerate(due):
            if all(there[n * len(prefixes) : (n + 1) * len(prefixes)]):
                continue
            blocks = tuple(group.whole_blocks_of(tracked.blocks[group.index], i) for group in self.plan.groups)
            if any(part is not None for part in blocks):
                pieces.append(Piece(digests[i], blocks, self._note(tracked, digests, i)))
        return pieces

    def _note(self, tracked: Tracked, digests: list[bytes], place: int) -> bytes:
        size, request = self.plan.tokens_per_object, tracked.request
        tokens = request.all_token_ids[place * size : (place + 1) * size]
        lora = request.lora_request
        return encode_note(digests[place - 1] if place else b"", list(tokens), lora.lora_name if lora else "")

    # ---- what workers report -------------------------------------------------------------------------------------

    def reported(self, finished_loads: Sequence[str], report: WorkerReport | None) -> None:
        """Take in what the workers have done."""
        if report is not None:
            self._note_loads(report)
        for request_id in finished_loads:
            if (tracked := self._loaded(request_id)) is not None:
                self._load_ended(tracked)
        if report is None:
            return
        if report.off:
            self.pool.turn_off(report.off)
        if report.ranks:
            why = self.spaces.reported(report.ranks)
            if why is not None:
                self.pool.turn_off(why)
            elif self.spaces.complete:
                self.admission.bytes_per_token = self.spaces.object_bytes / self.plan.tokens_per_object
        if report.stored.size:
            shards = len(self.spaces.prefixes("", 0))
            tokens = report.stored_objects * self.plan.tokens_per_object // shards
            self.tally.stored(tokens, *report.stored)
        for reason, objects in report.unstored.items():
            self.tally.not_stored(reason, objects)
        for number, checked in report.checks.items():
            self._shadows.reported(number, checked)
        for error in report.errors:
            self.pool.failed(error)
        for number, ranks in report.read.items():
            self._unread[number] = self._unread.get(number, 0) - ranks
            if self._unread[number] <= 0:
                del self._unread[number]
                self._reading.ended(number)

    def let_go_of(self, finished_loads: Iterable[str]) -> None:
        """In place of `reported`, where that has failed: of these loads it isn't known how they went."""
        for request_id in finished_loads:
            if (tracked := self._loaded(request_id)) is not None:
                tracked.loading, tracked.load_failed, tracked.saved = False, True, 0
                self._lookups.let_go(tracked)

    def _note_loads(self, report: WorkerReport) -> None:
        """What ranks say of loads: of one request maybe in several steps' reports, before the last rank is done."""
        for request_id, moved in report.loaded.items():
            if (tracked := self._known(request_id)) is not None:
                before = tracked.moved
                tracked.moved = Moved(before.size + moved.size, max(before.time_s, moved.time_s))
        for request_id, why in report.failed.items():
            if (tracked := self._known(request_id)) is not None:
                tracked.load_error = why

    def _known(self, request_id: str) -> Tracked | None:
        """A request that something may be under way for, also where the engine is done with it."""
        return self._ending.get(request_id) or self._tracked.get(request_id)

    def _loaded(self, request_id: str) -> Tracked | None:
        """A request whose load has ended on all ranks; it is forgotten where the engine is done with it."""
        tracked = self._ending.pop(request_id, None) or self._tracked.get(request_id)
        return tracked if tracked is not None and tracked.loading else None

    def _load_ended(self, tracked: Tracked) -> None:
        """On all ranks."""
        tracked.loading = False
        tokens, (size, load_s) = tracked.load_tokens, tracked.moved
        if not tracked.load_error:
            cost_s = self.admission.loaded(size, load_s, tracked.load_began, self._clock())
            self.tally.loaded(tokens, size, load_s, cost_s, self.admission.prefill_s(tokens))
            self.pool.succeeded()
        else:
            self.tally.failed(tokens, tracked.load_error)
            tracked.load_failed, tracked.saved = True, 0
            self.pool.failed(tracked.load_error)
        self._lookups.let_go(tracked)

    def take_figures(self) -> Figures | None:
        """What is to be counted since the last call; None for nothing. Called once each time that a step's output has
        been taken in, so it also tells that the step has ended."""
        self.admission.step_ended(self._clock())
        return self.tally.take()

    def finished(self, request: Any) -> None:
        """The request is gone for the engine, which takes its blocks back."""
        self.forget(request)

    def forget(self, request: Any) -> None:
        """All that there is to `finished`, and in its place where that has failed."""
        tracked = self._tracked.pop(str(request.request_id), None)
        if tracked is None:
            return
        if tracked.loading:
            # The workers load it all the same, and the engine's blocks wait for that.
            self._ending[tracked.id] = tracked
        else:
            self._lookups.let_go(tracked)

    def take_events(self) -> Iterable[Any]:
        """What the pool has stored and removed since the last call, in vLLM's own types, whoever has done it."""
        return self._events.take(self.spaces) if self._events is not None else ()

    def reset(self) -> bool:
        """The engine's cache no longer holds what its keys say (new weights): from now on this engine has keys of its
        own. Nobody else's objects are touched.

        What requests have computed so far isn't stored, and what they are loading isn't used (`StepMetadata.space`).
        """
        self.spaces.new_epoch()
        for tracked in self._tracked.values():
            adapter = self.spaces.adapter_of(tracked.request)
            tracked.adapter, tracked.eligible = adapter or "", adapter is not None
            tracked.saved, tracked.storable = 0, not tracked.blocks
            if not tracked.loading:
                self._lookups.let_go(tracked)
        return True

    def close(self) -> None:
        """End everything that is held."""
        if self._events is not None:
            self._events.close()
        self._shadows.close()
        for tracked in [*self._tracked.values(), *self._ending.values()]:
            self._lookups.let_go(tracked)
        self._tracked.clear()
        self._ending.clear()
        self.pool.close()

    # ---- within --------------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            adapter = self.spaces.adapter_of(request)
            tracked = Tracked(request, adapter=adapter or "", eligible=adapter is not None)
            self._tracked[request.request_id] = tracked
        return tracked
