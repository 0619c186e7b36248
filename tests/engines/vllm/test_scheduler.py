"""The scheduler's side against a real node; engine and workers are played."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import moonpool
from moonpool.client.channel import Channel
from moonpool.engines.vllm import identity
from moonpool.engines.vllm.compat import Kind, KvGroup, Layer, Parallel
from moonpool.engines.vllm.identity import RankReport
from moonpool.engines.vllm.lookups import LOOKUP_PATIENCE_S
from moonpool.engines.vllm.metadata import Extent, Moved, StepMetadata, WorkerReport
from moonpool.engines.vllm.notes import decode_note
from moonpool.engines.vllm.plan import GroupPlan, Plan, window_objects
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.scheduler import REPORTS_PATIENCE_S, Scheduler
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.spaces import Spaces
from moonpool.gpu.mover import SKIP
from moonpool.keys import KeySpace
from moonpool.testing.node import RunningNode, eventually
from moonpool.wire import messages as m

BLOCK, OBJECT, WINDOW = 16, 32, 40
BASE = KeySpace(
    weights="sha256:" + "1" * 64, tokens_per_block=OBJECT, kv_dtype="bfloat16", layout="plane,block,bytes",
    layout_version=1, model="model", engine="vllm",
)  # fmt: skip
SIZES = {(0, 0): 1000, (0, 1): 2000, (1, 0): 3000, (1, 1): 4000}
"""Bytes of an object of (KV group, rank): all different, so that it shows which is which."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """As much of vLLM as the scheduler's side sees. One KV group, or two with a window; `ranks` workers."""

    def __init__(self, url: str, *, ranks: int = 1, groups: int = 1, report: bool = True, **settings: Any) -> None:
        layer = Layer("layer", 4096, 4 // ranks, False, "text")
        self.groups = tuple(
            KvGroup(i, (Kind.FULL, Kind.WINDOW)[i], BLOCK, (0, WINDOW)[i], (layer,)) for i in range(groups)
        )
        self.parallel = Parallel(ranks, 1, ((0, 2),), 2, 4)
        plans = [
            GroupPlan(0, BLOCK, OBJECT),
            GroupPlan(1, BLOCK, OBJECT, "window", window_objects(WINDOW, OBJECT)),
        ][:groups]
        self.spaces = Spaces(BASE, self.groups, self.parallel)
        self.clock = Clock()
        self.pool = Pool(url, "test", failures_max=3, retry_s=5.0, prefault=False, clock=self.clock)
        self.scheduler = Scheduler(
            Settings(**{"tokens_per_object": OBJECT, "load_min_tokens": OBJECT, "admission": "always", **settings}),
            Plan(OBJECT, BLOCK, tuple(plans), ranks), self.spaces, self.pool,
            loads=True, saves=True, clock=self.clock,
        )  # fmt: skip
        self.reports = tuple(
            RankReport(
                (0, rank), identity.common_digest(BASE), tuple(f"group {g}" for g in range(groups)),
                tuple(SIZES[g, rank] for g in range(groups)), (4 // ranks,) * groups, (False,) * groups,
            )
            for rank in range(ranks)
        )  # fmt: skip
        if report:
            self.scheduler.reported((), WorkerReport(ranks=self.reports))

    def store(
        self, client: moonpool.Client, request: Any, places: Sequence[int], *, groups: Sequence[int] = (0, 1)
    ) -> None:
        """Put what workers would have stored of a request."""
        for place in places:
            digest = request.block_hashes[(place + 1) * (OBJECT // BLOCK) - 1]
            for group in groups:
                if group < len(self.groups):
                    for rank, prefix in enumerate(self.spaces.prefixes("", group)):
                        client.put(prefix + digest, bytes(SIZES[group, rank]))

    def lookup(self, request: Any, computed: int = 0) -> int:
        """Ask as the engine does, each step, until there is an answer."""

        def answer() -> tuple[int, bool] | None:
            tokens, asynchronous = self.scheduler.matched_tokens(request, computed)
            return None if tokens is None else (tokens, asynchronous)

        tokens, asynchronous = eventually(answer, "an answer")
        assert asynchronous == (tokens > 0)
        return int(tokens)

    def step(
        self,
        scheduled: dict[str, int] | None = None,
        *,
        new: dict[str, tuple[list[list[int]], int]] | None = None,
        old: dict[str, tuple[list[list[int]] | None, int]] | None = None,
        preempted: Sequence[str] = (),
    ) -> StepMetadata:
        """A step: tokens by request, and block tables and computed tokens of new ones and of those known already (whose
        tables say what is added)."""
        old = old or {}
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=tuple(tables), num_computed_tokens=computed)
                for name, (tables, computed) in (new or {}).items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(old),
                new_block_ids=[None if tables is None else tuple(tables) for tables, _ in old.values()],
                num_computed_tokens=[computed for _, computed in old.values()],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=scheduled or {},
            total_num_scheduled_tokens=sum((scheduled or {}).values()),
        )
        return self.scheduler.step(output)

    def hit(self, request: Any, tables: list[list[int]], computed: int = 0) -> Any:
        """Look a request up, allocate what it is to load into, and return the load that the workers get."""
        tokens = self.lookup(request, computed)
        assert tokens
        self.scheduler.allocated(request, tables, tokens)
        (load,) = self.step().loads
        return load


def request_of(name: str, tokens: int, *, prompt: int | None = None, seed: int = 1) -> Any:
    hashes, chained = [], b""
    for i in range(tokens // BLOCK):
        chained = hashlib.sha256(chained + bytes([seed]) + i.to_bytes(4, "little")).digest()
        hashes.append(chained)
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, num_tokens=tokens, num_prompt_tokens=tokens if prompt is None else prompt,
        all_token_ids=list(range(tokens)), lora_request=None, mm_features=None,
    )  # fmt: skip


@pytest.fixture
def client(shared_node: RunningNode) -> Iterator[moonpool.Client]:
    """A client of the module's node, which is empty."""
    with shared_node.connect() as client:
        client.clear()
        eventually(lambda: (s := client.stats()).reserved_bytes == s.pool_bytes, "the pool is reserved")
        yield client


@pytest.fixture
def engine(shared_node: RunningNode, client: moonpool.Client) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(shared_node.url, **options))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.close()
    assert client.stats().holds == 0, "whatever a test leaves behind, the end takes"


def nothing_is_held(client: moonpool.Client) -> None:
    eventually(lambda: client.stats().holds == 0, "no hold is left")


# ---- looking up ------------------------------------------------------------------------------------------------------


def test_nothing_is_looked_up_before_all_workers_have_said_what_they_hold(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine(ranks=2, report=False)
    request = request_of("a", 96)
    assert made.scheduler.matched_tokens(request, 0) == (None, False)
    made.scheduler.reported((), WorkerReport(ranks=made.reports[:1]))
    assert made.scheduler.matched_tokens(request, 0) == (None, False)
    made.scheduler.reported((), WorkerReport(ranks=made.reports[1:]))
    made.store(client, request, [0, 1])
    assert made.lookup(request) == 64


def test_workers_that_never_say_are_not_waited_for_longer_than_a_second(engine: Any) -> None:
    made: Engine = engine(report=False)
    assert made.scheduler.matched_tokens(request_of("a", 96), 0) == (None, False)
    made.clock.now += REPORTS_PATIENCE_S
    assert made.scheduler.matched_tokens(request_of("a", 96), 0) == (0, False)
    assert made.scheduler.matched_tokens(request_of("b", 96), 0) == (0, False), "nor anew for each request"


def test_a_hit_is_as_long_as_all_ranks_and_groups_have_it(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine(ranks=2, groups=2)
    request = request_of("a", 32 * 8 + 5)
    assert made.lookup(request) == 0
    made.store(client, request, range(8), groups=[0])
    made.store(client, request, range(3, 6), groups=[1])  # the window's, but for the last two and the first three
    assert made.lookup(request) == 6 * OBJECT, "objects 4 and 5 are all that the window needs"
    digest = request.block_hashes[2 * 3 - 1]
    client.remove(made.spaces.prefixes("", 0)[1] + digest, force=True)
    assert made.lookup(request_of("b", 32 * 8 + 5)) == 0, "rank 1 lacks object 2, and the window has nothing before it"


def test_every_rank_is_told_where_its_own_objects_lie(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine(ranks=2, groups=2)
    request = request_of("a", 32 * 4)
    made.store(client, request, range(4))
    tables = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 15, 16, 17, 18]]
    load = made.hit(request, tables)
    assert load.tokens == 128
    assert [(part.group, part.blocks) for part in load.parts] == [
        (0, (1, 2)), (0, (3, 4)), (0, (5, 6)), (0, (7, 8)), (1, (15, 16)), (1, (17, 18)),
    ]  # fmt: skip
    pool = client.link.attachment.pool.bytes
    for part, place in zip(load.parts, [0, 1, 2, 3, 2, 3], strict=True):
        for rank, extent in enumerate(part.extents):
            key = made.spaces.prefixes("", part.group)[rank] + request.block_hashes[2 * place + 1]
            (where,) = [stat for stat in client.list() if stat.key == key]
            assert (extent.size, extent.id >> 32) == (SIZES[part.group, rank], where.generation)
            assert extent.offset + extent.size <= len(pool)


def test_what_the_gpu_has_is_not_loaded(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 32 * 4)
    made.store(client, request, range(4))
    load = made.hit(request, [[1, 2, 3, 4, 5, 6, 7, 8]], computed=48)
    assert load.tokens == 80
    assert [part.blocks for part in load.parts] == [(SKIP, 4), (5, 6), (7, 8)]
    assert load.blocks == {4, 5, 6, 7, 8}


@pytest.mark.parametrize(("tokens", "hit"), [(31, 0), (32, 32), (33, 32), (63, 32)])
def test_only_whole_objects_are_looked_up(engine: Any, client: moonpool.Client, tokens: int, hit: int) -> None:
    made: Engine = engine()
    request = request_of("a", tokens)
    made.store(client, request, range(tokens // OBJECT))
    assert made.lookup(request) == hit


def test_hits_too_short_to_be_worth_it_are_computed(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine(load_min_tokens=64)
    request = request_of("a", 160)
    made.store(client, request, range(3))
    assert made.lookup(request, computed=48) == 0
    assert made.scheduler.tally.recomputed == {"too short": 48}
    for _ in range(5):
        assert made.lookup(request, computed=48) == 0
    assert made.scheduler.tally.recomputed == {"too short": 48}, "counted once"
    nothing_is_held(client)
    assert made.lookup(request, computed=32) == 64


class NoAnswer:
    """A lookup that the node doesn't answer."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.cancelled = 0

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return False

    def cancel(self) -> None:
        self.cancelled += 1


def test_a_lookup_waits_for_two_milliseconds_a_step_and_is_given_up_in_the_end(
    engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Engine = engine()
    request = request_of("a", 96)
    made.store(client, request, range(3))
    pending = NoAnswer()
    monkeypatch.setattr(made.pool.client, "begin_match", lambda *_, **__: pending)
    for _ in range(4):
        assert made.scheduler.matched_tokens(request, 0) == (None, False)
    assert pending.waits == [0.002] * 4
    made.clock.now += LOOKUP_PATIENCE_S
    assert made.scheduler.matched_tokens(request, 0) == (0, False)
    assert pending.cancelled == 1
    assert made.scheduler.tally.requests["skipped"] == 1


def test_a_node_that_is_too_slow_several_times_in_a_row_is_left_alone_for_a_while(
    engine: Any, client: moonpool.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Engine = engine()
    made.store(client, request_of("", 96), range(3))
    asked: list[NoAnswer] = []

    def no_answer(*_: Any, **__: Any) -> NoAnswer:
        asked.append(NoAnswer())
        return asked[-1]

    with monkeypatch.context() as patch:
        patch.setattr(made.pool.client, "begin_match", no_answer)
        for n in range(10):
            request = request_of(f"request {n}", 96)
            while made.scheduler.matched_tokens(request, 0)[0] is None:
                made.clock.now += LOOKUP_PATIENCE_S
            made.scheduler.finished(request)
    assert len(asked) == 3
    assert made.scheduler.matched_tokens(request_of("a", 96), 0) == (0, False)
    made.clock.now += 5.0
    assert made.lookup(request_of("a", 96)) == 96


# ---- the hold --------------------------------------------------------------------------------------------------------


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of holds that were released."""
    names: list[str] = []
    send = Channel.send

    def noted(self: Channel, *messages: m.Message) -> None:
        names.extend(message.hold for message in messages if isinstance(message, m.ReleaseHold))
        send(self, *messages)

    monkeypatch.setattr(Channel, "send", noted)
    return names


TABLE = [[1, 2, 3, 4, 5, 6]]


def _done(made: Engine, request: Any) -> None:
    made.scheduler.allocated(request, TABLE, 96)
    made.step()
    made.scheduler.reported(["a"], WorkerReport(loaded={"a": Moved(3000, 0.1)}))
    made.scheduler.allocated(request, TABLE, 0)


def _failed(made: Engine, request: Any) -> None:
    made.scheduler.allocated(request, TABLE, 96)
    made.step()
    made.scheduler.reported(["a"], WorkerReport(failed={"a": "the object went away meanwhile"}))


def _aborted_before(made: Engine, request: Any) -> None:
    made.scheduler.finished(request)


def _aborted_after(made: Engine, request: Any) -> None:
    made.scheduler.allocated(request, TABLE, 96)
    made.step()
    made.scheduler.finished(request)
    made.scheduler.reported(["a"], WorkerReport(loaded={"a": Moved(3000, 0.1)}))


def _on_the_gpu(made: Engine, request: Any) -> None:
    assert made.scheduler.matched_tokens(request, 96) == (0, False)
    made.scheduler.allocated(request, TABLE, 0)


def _not_taken(made: Engine, request: Any) -> None:
    made.scheduler.allocated(request, TABLE, 0)  # another connector's load, or none


def _preempted(made: Engine, request: Any) -> None:
    made.step(preempted=["a"])


def _reset(made: Engine, request: Any) -> None:
    made.scheduler.reset()


def _report_lost(made: Engine, request: Any) -> None:
    made.scheduler.allocated(request, TABLE, 96)
    made.step()
    made.scheduler.let_go_of(["a"])


def _closed(made: Engine, request: Any) -> None:
    made.scheduler.close()


@pytest.mark.parametrize(
    "end",
    [
        _done,
        _failed,
        _aborted_before,
        _aborted_after,
        _on_the_gpu,
        _not_taken,
        _preempted,
        _reset,
        _report_lost,
        _closed,
    ],
)
def test_a_hold_ends_once(
    engine: Any, client: moonpool.Client, released: list[str], end: Callable[[Engine, Any], None]
) -> None:
    made: Engine = engine()
    request = request_of("a", 96)
    made.store(client, request, range(3))
    for _ in range(3):
        assert made.lookup(request) == 96
    assert client.stats().holds == 1, "however often it is asked"
    end(made, request)
    nothing_is_held(client)
    assert len(released) == 1
    made.scheduler.finished(request)
    assert len(released) == 1


def test_it_lasts_while_any_rank_may_be_loading(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 96)
    made.store(client, request, range(3))
    made.hit(request, TABLE)
    made.scheduler.finished(request)
    made.step(preempted=["a"])
    assert client.stats().holds == 1
    made.scheduler.reported(["a"], None)
    nothing_is_held(client)


def test_a_thousand_requests_aborted_between_lookup_and_allocation(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    made.store(client, request_of("", 96), range(3))
    for n in range(1000):
        request = request_of(f"request {n}", 96)
        if n % 2:
            assert made.lookup(request) == 96
        else:
            made.scheduler.matched_tokens(request, 0)  # with the answer still to come, as often as not
        made.scheduler.finished(request)
    nothing_is_held(client)
    assert client.stats().pins == 0
    assert not made.scheduler._tracked


# ---- loads -----------------------------------------------------------------------------------------------------------


def test_a_load_that_failed_is_not_tried_again_and_its_tokens_are_stored(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 96)
    made.store(client, request, range(3))
    made.hit(request, TABLE)
    _failed_report = WorkerReport(failed={"a": "copy failed"})
    made.scheduler.reported(["a"], _failed_report)
    assert made.scheduler.matched_tokens(request, 0) == (0, False)
    client.clear()
    metadata = made.step({"a": 96}, new={"a": (TABLE, 0)})
    assert len(metadata.saves[0].pieces) == 3
    assert made.scheduler.tally.requests["failed"] == 1


def test_what_was_loaded_is_not_stored_again_but_what_follows_is(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 160)
    made.store(client, request, range(3))
    made.hit(request, TABLE)
    made.scheduler.reported(["a"], WorkerReport(loaded={"a": Moved(3000, 0.1)}))
    metadata = made.step({"a": 64}, new={"a": ([[*TABLE[0], 7, 8, 9, 10]], 96)})
    (save,) = metadata.saves
    assert [piece.blocks for piece in save.pieces] == [((7, 8),), ((9, 10),)]


def test_where_allocation_failed_here_the_engine_gets_a_load_that_fails(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 96)
    made.store(client, request, range(3))
    assert made.lookup(request) == 96
    made.scheduler.load_nothing(request, [[0, 2, 3, 4, 5, 6]], 96)
    (load,) = made.step().loads
    assert load.pool_id != client.link.attachment.pool_id
    assert load.blocks == {2, 3, 4, 5, 6}, "all but the null block"
    made.scheduler.reported(["a"], WorkerReport(failed={"a": "not attached"}))
    assert made.scheduler.matched_tokens(request, 0) == (0, False)
    nothing_is_held(client)


def test_a_step_that_failed_tells_loads_all_the_same_and_stores_no_request_whose_blocks_it_missed(
    engine: Any, client: moonpool.Client
) -> None:
    made: Engine = engine()
    loaded, running = request_of("a", 96), request_of("b", 128, seed=2)
    made.store(client, loaded, range(3))
    assert made.lookup(loaded) == 96
    made.scheduler.allocated(loaded, TABLE, 96)
    made.lookup(running)
    made.step({"b": 32}, new={"b": ([[7, 8]], 0)})
    assert made.lookup(running) == 0
    made.scheduler.failed_step()
    assert not made.step({"b": 64}, old={"b": ([[11, 12]], 64)}).saves, "blocks 9 and 10 came with the lost step"


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_objects_are_stored_as_they_become_whole_if_the_pool_lacks_them(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 150)
    made.store(client, request, [2])
    made.lookup(request)
    first = made.step({"a": 40}, new={"a": ([[1, 2, 3]], 0)})
    second = made.step({"a": 30}, old={"a": ([[4, 5]], 40)})
    third = made.step({"a": 80}, old={"a": ([[6, 7, 8, 9, 10]], 70)})
    stored = [[piece.blocks for save in metadata.saves for piece in save.pieces] for metadata in (first, second, third)]
    assert stored == [[((1, 2),)], [((3, 4),)], [((7, 8),)]], "without the third object, which is there"
    digests = [piece.digest for metadata in (first, second, third) for save in metadata.saves for piece in save.pieces]
    assert digests == [request.block_hashes[i] for i in (1, 3, 7)]
    note = decode_note(third.saves[0].pieces[0].note)
    assert note is not None
    assert (note.tokens, note.parent) == (list(range(96, 128)), request.block_hashes[5])


@pytest.mark.parametrize(("save", "objects"), [("prompt", 2), ("all", 4)])
def test_generated_tokens_are_stored_where_that_is_set(engine: Any, save: str, objects: int) -> None:
    made: Engine = engine(save=save)
    request = request_of("a", 140, prompt=70)
    made.lookup(request)
    metadata = made.step({"a": 140}, new={"a": ([list(range(1, 10))], 0)})
    assert sum(len(save.pieces) for save in metadata.saves) == objects


def test_a_windows_blocks_that_are_gone_are_not_stored(engine: Any) -> None:
    made: Engine = engine(groups=2)
    request = request_of("a", 96)
    made.lookup(request)
    (save,) = made.step({"a": 96}, new={"a": ([[1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16]], 0)}).saves
    assert [piece.blocks for piece in save.pieces] == [((1, 2), None), ((3, 4), None), ((5, 6), (15, 16))]


def test_nothing_is_stored_of_what_cannot_be_told_by_content(engine: Any) -> None:
    made: Engine = engine()
    request = request_of("a", 96)
    request.mm_features = [SimpleNamespace(mm_hash="a name of the client's own", identifier="")]
    assert made.lookup(request) == 0
    assert not made.step({"a": 96}, new={"a": (TABLE, 0)}).saves


def test_a_step_that_writes_to_blocks_that_are_still_read_waits_for_just_those_stores(engine: Any) -> None:
    made: Engine = engine(ranks=2)
    one, other = request_of("a", 64), request_of("b", 64, seed=2)
    for request in (one, other):
        made.lookup(request)
    metadata = made.step({"a": 64, "b": 64}, new={"a": ([[1, 2, 3, 4]], 0), "b": ([[5, 6, 7, 8]], 0)})
    numbers = {save.request_id: save.number for save in metadata.saves}
    made.scheduler.finished(one)
    made.scheduler.finished(other)
    third = request_of("c", 64, seed=3)
    made.lookup(third)
    # Blocks 5 and 9 are given to another request, of which block 5 is in use already: shared, and not written to.
    assert made.step({"c": 16}, new={"c": ([[5, 9]], 16)}).unread == set()
    assert made.step({"c": 16}, old={"c": ([[2]], 32)}).unread == {numbers["a"]}
    made.scheduler.reported((), WorkerReport(read={numbers["b"]: 1}))
    assert made.step({"c": 16}, old={"c": ([[8]], 48)}).unread == {numbers["b"]}, "one of two ranks reads it still"
    made.scheduler.reported((), WorkerReport(read={numbers["b"]: 1}))
    assert made.step({"c": 1}, old={"c": ([[7]], 64)}).unread == set()


def test_so_does_a_load_into_such_blocks(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    stored, loaded = request_of("a", 64), request_of("b", 64, seed=2)
    made.store(client, loaded, range(2))
    made.lookup(stored)
    (save,) = made.step({"a": 64}, new={"a": ([[1, 2, 3, 4]], 0)}).saves
    made.scheduler.finished(stored)
    assert made.lookup(loaded) == 64
    made.scheduler.allocated(loaded, [[4, 7, 8, 9]], 64)
    metadata = made.step()
    assert metadata.loads
    assert metadata.unread == {save.number}


# ---- resets, refusals ------------------------------------------------------------------------------------------------


def test_after_a_reset_keys_are_new_and_what_was_computed_before_is_not_stored(
    engine: Any, client: moonpool.Client
) -> None:
    made: Engine = engine()
    request = request_of("a", 128)
    made.store(client, request, range(4))
    assert made.step().space, "told with the first step"
    made.lookup(request_of("b", 128, seed=2))
    made.step({"b": 32}, new={"b": ([[1, 2]], 0)})
    before = made.spaces.prefixes("", 0)
    made.scheduler.reset()
    assert made.spaces.prefixes("", 0) != before
    assert made.lookup(request) == 0
    metadata = made.step(
        {"a": 128, "b": 96}, new={"a": ([list(range(11, 19))], 0)}, old={"b": ([[3, 4, 5, 6, 7, 8]], 32)}
    )
    assert metadata.space == made.spaces.told
    assert {save.request_id for save in metadata.saves} == {"a"}
    # Preempted, it is computed from its first token on, with whatever weights there are now.
    made.step(preempted=["b"])
    metadata = made.step({"b": 128}, new={"b": ([list(range(21, 29))], 0)})
    assert len(metadata.saves[0].pieces) == 4


def test_workers_that_cannot_be_served_together_turn_the_pool_off(engine: Any) -> None:
    made: Engine = engine(ranks=2, report=False)
    one, other = made.reports
    strange = RankReport(other.rank, b"another's", other.texts, other.object_bytes, other.kv_heads, other.replicated)
    made.scheduler.reported((), WorkerReport(ranks=(one, strange)))
    assert "worker 1 of pipeline stage 0 runs another model" in made.pool.off
    assert made.scheduler.matched_tokens(request_of("a", 96), 0) == (0, False)


def test_a_worker_that_is_off_turns_the_pool_off(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    made.store(client, request_of("a", 96), range(3))
    made.scheduler.reported((), WorkerReport(off="no copies any more"))
    assert made.pool.off == "no copies any more"
    assert made.lookup(request_of("a", 96)) == 0


def test_an_extent_tells_the_checksum_where_it_is_known(engine: Any, client: moonpool.Client) -> None:
    made: Engine = engine()
    request = request_of("a", 32)
    client.put(made.spaces.prefixes("", 0)[0] + request.block_hashes[1], bytes(1000), checksum=77)
    load = made.hit(request, TABLE)
    extent: Extent = load.parts[0].extents[0]
    assert extent.checksum == 77
