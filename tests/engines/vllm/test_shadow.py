from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool.engines.vllm.compat import Unsupported
from moonpool.engines.vllm.metadata import Check, Checked, Extent, Load, Part, WorkerReport
from moonpool.engines.vllm.shadow import (
    CHECK_BYTES,
    UNDER_WAY_MAX,
    Comparer,
    Shadows,
    difference,
    kinds,
    tolerated,
    unsupported,
)
from moonpool.engines.vllm.stats import Tally
from moonpool.gpu.mover import SKIP, Plane, Region
from moonpool.testing.node import eventually

torch = pytest.importorskip("torch")

FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


# ---- the scheduler's side --------------------------------------------------------------------------------------------


class Holds:
    def __init__(self) -> None:
        self.dropped: list[str] = []


def shadows(rate: float, ranks: int = 2) -> tuple[Shadows, Holds, Tally]:
    holds, tally = Holds(), Tally()
    return Shadows(rate, ranks, tally, holds.dropped.append, random.Random(1)), holds, tally


def test_as_large_a_share_of_hits_is_drawn_as_was_set() -> None:
    made, _, _ = shadows(0.1)
    drawn = sum(made.picks() for _ in range(10_000))
    assert 800 < drawn < 1200
    assert not any(shadows(0)[0].picks() for _ in range(1000))


def test_a_hold_lasts_until_the_last_rank_has_reported() -> None:
    made, holds, tally = shadows(1)
    made.began(1, "hold 1")
    made.reported(1, Checked(1, same=3))
    assert holds.dropped == []
    made.reported(1, Checked(1, same=2, different=1))
    assert holds.dropped == ["hold 1"]
    assert tally.compared == {"same": 5, "different": 1}
    made.reported(1, Checked(1, same=1))
    made.close()
    assert holds.dropped == ["hold 1"], "once"


def test_ranks_that_report_in_one_step_are_counted_together() -> None:
    made, holds, _ = shadows(1)
    made.began(7, "hold 7")
    one, other = WorkerReport(checks={7: Checked(1, same=1)}), WorkerReport(checks={7: Checked(1, dropped=1)})
    made.reported(7, one.aggregate(other).checks[7])
    assert holds.dropped == ["hold 7"]


def test_so_many_checks_are_under_way_and_no_more() -> None:
    made, holds, _ = shadows(1)
    for number in range(UNDER_WAY_MAX):
        assert made.picks()
        made.began(number, f"hold {number}")
    assert not made.picks()
    made.close()
    assert len(holds.dropped) == UNDER_WAY_MAX


def test_of_a_long_hit_as_much_is_compared_as_fits_and_of_any_one_object() -> None:
    made, _, _ = shadows(1)

    def parts(count: int, size: int) -> list[tuple[bytes, Part]]:
        return [(bytes([i]), Part(0, (i,), (Extent(0, size, i, 0),))) for i in range(count)]

    assert len(made.sample(parts(100, CHECK_BYTES // 10))) == 10
    assert len(made.sample(parts(3, CHECK_BYTES // 10))) == 3
    assert len(made.sample(parts(3, 2 * CHECK_BYTES))) == 1
    drawn = {digest for _ in range(200) for digest, _ in made.sample(parts(20, CHECK_BYTES // 2))}
    assert len(drawn) == 20, "any of them"


# ---- what is the same ------------------------------------------------------------------------------------------------


def rows(kind: str, values: list[list[float]]) -> Any:
    made = torch.tensor(values).to(getattr(torch, kind))
    return made.view(torch.uint8).reshape(len(values), -1)


@pytest.mark.parametrize("kind", FLOATS)
def test_the_difference_is_relative_to_a_blocks_largest_value(kind: str) -> None:
    dtype = getattr(torch, kind)
    right = rows(kind, [[8.0, -4.0, 0.5], [0.25, 0.125, 0.0]])
    assert difference(right, right.clone(), dtype) == 0
    assert difference(rows(kind, [[8.0, -4.0, 1.5], [0.25, 0.125, 0.0]]), right, dtype) == pytest.approx(1 / 8)
    assert difference(rows(kind, [[8.0, -4.0, 0.5], [0.25, 0.125, 0.25]]), right, dtype) == pytest.approx(1)


@pytest.mark.parametrize("kind", FLOATS)
def test_one_rounding_is_no_mismatch_and_another_block_is_one(kind: str) -> None:
    dtype = getattr(torch, kind)
    right = rows(kind, [[1.0, 0.5]])
    step = rows(kind, [[1.0 + float(torch.finfo(dtype).eps), 0.5]])
    assert 0 < difference(step, right, dtype) <= tolerated(dtype, 1e-9)
    assert difference(rows(kind, [[-1.0, 0.75]]), right, dtype) > tolerated(dtype, 0.05)


def test_with_tolerance_zero_not_one_bit_may_differ() -> None:
    assert tolerated(torch.bfloat16, 0) == 0
    assert difference(rows("bfloat16", [[0.0]]), rows("bfloat16", [[-0.0]]), torch.bfloat16) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_a_mismatch_unless_both_have_it(value: float) -> None:
    wrong, right = rows("float32", [[1.0, value]]), rows("float32", [[1.0, 1.0]])
    assert difference(wrong, right, torch.float32) == float("inf")
    assert difference(right, wrong, torch.float32) == float("inf")
    assert difference(wrong, wrong.clone(), torch.float32) == 0


def test_planes_know_their_types_by_the_tensors_that_lie_there() -> None:
    wide, narrow = torch.zeros(4, 64, dtype=torch.float32), torch.zeros(4, 64, dtype=torch.bfloat16)
    region = Region((Plane(wide.data_ptr(), 256, 256), Plane(narrow.data_ptr() + 64, 128, 64)), 1)
    caches = {"a": wide, "b": [narrow]}
    assert kinds([region], caches, "auto") == (("float32", "bfloat16"),)
    storage = torch.zeros(4, 192, dtype=torch.uint8)
    side_by_side = {"a": storage[:, :128].view(torch.float32), "b": storage[:, 128:].view(torch.bfloat16)}
    with pytest.raises(Unsupported, match="several types"):
        kinds([Region((Plane(storage.data_ptr(), 192, 192),), 1)], side_by_side, "auto")


def test_caches_of_bytes_are_what_the_engine_says_that_they_are() -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8)
    region = Region((Plane(cache.data_ptr(), 64, 64),), 1)
    assert kinds([region], {"a": cache}, "fp8") == (("float8_e4m3fn",),)
    assert kinds([region], {"a": cache}, "fp8_e5m2") == (("float8_e5m2",),)
    with pytest.raises(Unsupported):
        kinds([region], {"a": cache}, "fp8_ds_mla")
    assert unsupported("fp8_ds_mla")
    assert unsupported("int8_per_token_head")
    assert unsupported("fp8") is None


# ---- a worker's side, over a real node in this process ---------------------------------------------------------------

BLOCKS, PIECE = 4, 64
"""Blocks of an object, float32 values of a block in each of two planes."""


class Pool:
    def __init__(self, client: moonpool.Client) -> None:
        self.client = client


class Space:
    digest = b"s" * 16


class Spaces:
    def of(self, adapter: str) -> list[Space]:
        return [Space()]


class Rank:
    """A worker's KV cache, what is stored of it, and its comparer."""

    def __init__(self, client: moonpool.Client, device: str, tolerance: float = 0.05) -> None:
        self.client = client
        # Between two blocks of a plane lies something else, as with most layouts.
        self.cache = torch.randn(2, 16, 2 * PIECE, device=device, generator=torch.Generator(device).manual_seed(1))
        planes = tuple(Plane(plane.data_ptr(), 8 * PIECE, 4 * PIECE) for plane in self.cache)
        self.told: list[WorkerReport] = []
        region = Region(planes, BLOCKS)
        pool: Any = Pool(client)
        self.comparer = Comparer([region], (("float32", "float32"),), device, tolerance, pool, self.told.append)

    def store(self, digest: bytes, blocks: tuple[int, ...]) -> None:
        values = self.cache[:, list(blocks), :PIECE].cpu().numpy()
        self.client.put(Space.digest + digest, np.ascontiguousarray(values))

    def check(self, objects: dict[bytes, tuple[int, ...]]) -> Checked:
        keys = [Space.digest + digest for digest in objects]
        match = self.client.match([moonpool.Group(keys)], "a hold", extents=True)
        where = match.extents
        assert where is not None
        parts = tuple(
            Part(0, blocks, (Extent(where.offsets[i], where.sizes[i], where.ids[i], where.words[i]),))
            for i, blocks in enumerate(objects.values())
        )
        load = Load("a request", where.pool_id, where.epoch, parts, 0)
        self.comparer.begin(Check(1, load, "", tuple(objects)), 0, Spaces())  # type: ignore[arg-type]
        self.cache[:] = 0  # the engine may use its blocks for something else now
        eventually(lambda: bool(self.told), "a report")
        self.client.release_hold("a hold")
        return self.told.pop().checks[1]


@pytest.fixture
def client() -> Iterator[moonpool.Client]:
    with moonpool.connect("embedded:16MiB", name="the writer") as client:
        yield client


@pytest.fixture(params=["cpu", "cuda"])
def rank(client: moonpool.Client, request: pytest.FixtureRequest) -> Iterator[Rank]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = Rank(client, request.param)
    yield made
    made.comparer.close()


def test_blocks_that_are_stored_as_they_are_computed_pass(rank: Rank) -> None:
    rank.store(b"a" * 32, (3, 1, 7, 2))
    rank.store(b"b" * 32, (8, 9, 10, 11))
    assert rank.check({b"a" * 32: (3, 1, 7, 2), b"b" * 32: (8, 9, 10, 11)}) == Checked(1, same=2)


def test_swapped_blocks_are_found_and_removed_with_who_wrote_them(
    rank: Rank, client: moonpool.Client, caplog: pytest.LogCaptureFixture
) -> None:
    rank.store(b"a" * 32, (3, 1, 7, 2))
    rank.store(b"b" * 32, (8, 10, 9, 11))
    with caplog.at_level(logging.ERROR, "moonpool.vllm"):
        assert rank.check({b"a" * 32: (3, 1, 7, 2), b"b" * 32: (8, 9, 10, 11)}) == Checked(1, 1, 1)
    assert client.exists(Space.digest + b"a" * 32)
    assert not client.exists(Space.digest + b"b" * 32)
    assert "written by the writer at 20" in caplog.text


def test_a_pinned_object_that_differs_is_removed_too(rank: Rank, client: moonpool.Client) -> None:
    rank.store(b"a" * 32, (3, 1, 7, 2))
    client.pin_many([Space.digest + b"a" * 32])
    assert rank.check({b"a" * 32: (1, 3, 7, 2)}).different == 1
    assert not client.exists(Space.digest + b"a" * 32)


def test_blocks_that_were_not_computed_are_left_out(rank: Rank) -> None:
    rank.store(b"a" * 32, (3, 1, 7, 2))
    rank.cache[:, [3, 1]] = 9
    assert rank.check({b"a" * 32: (SKIP, SKIP, 7, 2)}) == Checked(1, same=1)


def test_what_is_purged_meanwhile_is_dropped(rank: Rank, client: moonpool.Client) -> None:
    rank.store(b"a" * 32, (3, 1, 7, 2))
    rank.cache[:] = 1
    held = client.still_good
    client.still_good = lambda extents: bool(client.clear() and held(extents))  # type: ignore[method-assign]
    assert rank.check({b"a" * 32: (3, 1, 7, 2)}) == Checked(1, dropped=1)


def test_closing_answers_for_what_is_left(rank: Rank) -> None:
    rank.comparer._under_way[5] = 3
    assert rank.comparer.close() == {5: Checked(1, dropped=3)}
    assert rank.comparer.close() == {}
