from __future__ import annotations

from moonpool.engines.vllm.bystander import Bystander
from moonpool.engines.vllm.metadata import Load, Piece, Save, StepMetadata, WorkerReport


def save(number: int) -> Save:
    return Save(number, "request", "", (Piece(b"d" * 32, ((1, 2),), b""),))


def test_every_load_has_failed_and_every_saves_blocks_are_free() -> None:
    bystander = Bystander("nothing to copy with")
    metadata = StepMetadata([Load.of_nothing("a", [3, 4], 64)], saves=[save(7)])
    bystander.before_forward(metadata)
    bystander.start_loads(metadata)
    bystander.start_saves(metadata)
    ended = bystander.finished()
    assert (ended.received, ended.failed, ended.failed_blocks) == ({"a"}, {"a"}, {3, 4})
    report = bystander.report()
    assert report is not None
    assert report.failed == {"a": "nothing to copy with"}
    assert report.read == {7: 1}
    assert report.off == "nothing to copy with"


def test_everything_is_told_once() -> None:
    bystander = Bystander("why")
    bystander.start_loads(StepMetadata([Load.of_nothing("a", [3], 64)]))
    assert bystander.finished().received == {"a"}
    assert bystander.report() is not None
    assert not any(bystander.finished())
    assert bystander.report() is None


def test_what_a_failed_worker_had_not_told_is_told_once_a_rank() -> None:
    bystander = Bystander("why")
    bystander.pass_on(WorkerReport(read={1: 1, 2: 1}, errors=["first"]))
    bystander.take_over({"a": {5}}, {2, 3})
    report = bystander.report()
    assert report is not None
    assert report.read == {1: 1, 2: 1, 3: 1}, "2 had been noted, and was taken over as well"
    assert report.errors == ["first"]
    assert report.failed == {"a": "why"}
