"""A rank that takes no part: it only tells the engine, which waits for an answer, that nothing came of it."""

from __future__ import annotations

from moonpool.engines.vllm.metadata import Checked, Ended, StepMetadata, WorkerReport
from moonpool.engines.vllm.pool import Pool


class Bystander:
    """In a worker's place where there can't be one, or after it has failed: every load has failed, every save's blocks
    are free. Its methods are a worker's."""

    def __init__(self, why: str, pool: Pool | None = None) -> None:
        self.why = why
        self.pool = pool
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport(off=why)

    def take_over(self, loading: dict[str, set[int]], saves: set[int]) -> None:
        """Answer for what a failed worker had under way: loads with their blocks, saves by number. All I/O of its has
        stopped."""
        self._ended |= set(loading)
        for request_id, blocks in loading.items():
            self._failed_blocks |= blocks
            self._report.failed[request_id] = self.why
        self._report.read.update(dict.fromkeys(saves, 1))

    def pass_on(self, report: WorkerReport) -> None:
        """Tell what a failed worker had not got to tell."""
        passed = report.aggregate(self._report)
        passed.read = dict.fromkeys(passed.read, 1)  # on this rank, however often it was noted
        self._report = passed

    def before_forward(self, metadata: StepMetadata) -> None:
        pass

    def start_loads(self, metadata: StepMetadata) -> None:
        self.take_over({load.request_id: load.blocks for load in metadata.loads}, set())

    def start_saves(self, metadata: StepMetadata) -> None:
        self.take_over({}, {save.number for save in metadata.saves})
        for check in metadata.checks:
            self._report.checks[check.number] = Checked(1, dropped=len(check.load.parts))

    def finished(self) -> Ended:
        ended = Ended(self._ended, self._ended, self._failed_blocks)
        self._ended, self._failed_blocks = set(), set()
        return ended

    def report(self) -> WorkerReport | None:
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
