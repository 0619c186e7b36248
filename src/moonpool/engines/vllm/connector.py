"""The class that vLLM loads: its calls, handed to the scheduler's side or to a worker's.

Used as `--kv-transfer-config '{"kv_connector": "MoonpoolConnector", "kv_role": "kv_both",
"kv_connector_module_path": "moonpool.engines.vllm"}'`. Each call is guarded: whatever goes wrong here, the engine
computes as if nothing were stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from moonpool.engines.vllm import compat, setup
from moonpool.engines.vllm.bystander import Bystander
from moonpool.engines.vllm.guard import guarded, note_fault
from moonpool.engines.vllm.metadata import Ended, StepMetadata
from moonpool.engines.vllm.metrics import MoonpoolPromMetrics, MoonpoolStats
from moonpool.engines.vllm.scheduler import Scheduler
from moonpool.engines.vllm.worker import Worker

log = logging.getLogger("moonpool.vllm")


class MoonpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's KV cache in the host's pool. See docs/engines/vllm.md."""

    _cache_hit_source = compat.HOST_HIT

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | Bystander | None = None
        self._failed_blocks: set[int] = set()
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = setup.scheduler(vllm_config, kv_cache_config)
            else:
                self._worker = Bystander("no KV cache has been registered")
        except Exception as error:  # the engine serves all the same
            _say_off(error)

    def faulty(self, error: Exception) -> None:
        """Something of ours raised: after several in a row the pool is left alone."""
        side = self._scheduler or self._worker
        if side is not None and side.pool is not None:
            side.pool.failed(error)

    # ---- scheduler -----------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what isn't stored is computed another time."""
        return False

    @guarded(lambda self, *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(
        lambda self, request, blocks, tokens: self._scheduler.load_nothing(request, blocks.get_block_ids(), tokens)
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(lambda self, output: self._scheduler.failed_step(), StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.step(scheduler_output)

    @guarded(lambda self, output: self._scheduler.let_go_of(output.finished_recving or ()))
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.reported(connector_output.finished_recving or (), connector_output.kv_connector_worker_meta)

    @guarded(lambda self, request, *_: (False, self._scheduler.forget(request)), lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None  # the engine may have the blocks back: see `reading`

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        finished: tuple[bool, dict[str, Any] | None] = self.request_finished(request, [])
        return finished

    @guarded(lambda self: ())
    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @guarded(lambda self: None)
    def get_kv_connector_stats(self) -> MoonpoolStats | None:
        # Workers have none of their own: what they count comes with their reports.
        figures = self._scheduler.take_figures() if self._scheduler is not None else None
        return None if figures is None else MoonpoolStats(figures)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoonpoolStats:
        return MoonpoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MoonpoolPromMetrics | None:
        try:
            return MoonpoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except Exception as error:  # the engine's own metrics go on
            note_fault("build_prom_metrics", error)
            return None

    @guarded(lambda self: False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else True

    # ---- worker --------------------------------------------------------------------------------------------------

    @guarded(lambda self, *_: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.role == KVConnectorRole.WORKER:
            try:
                self._worker = setup.worker(self._vllm_config, self._kv_cache_config, kv_caches)
            except Exception as error:
                _say_off(error)
                self._worker = Bystander(str(error))

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until this worker's copies run at full speed, which takes seconds where a large pool is registered with
        CUDA. Until then they are slower; nothing needs to wait but a measurement. False where it isn't in time."""
        return isinstance(self._worker, Worker) and self._worker.wait_ready(timeout_s)

    @guarded(lambda self, metadata: self._replaced().before_forward(metadata))
    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if self._worker is not None:
            self._worker.before_forward(kv_connector_metadata)

    @guarded(lambda self, *_, **__: self._replaced().start_loads(self._get_connector_metadata()))
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads are waited for by the request, not by a layer

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # stores begin when the step's forward has been submitted

    @guarded(lambda self: self._replaced().start_saves(self._get_connector_metadata()))
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._get_connector_metadata())

    @guarded(lambda self, *_: self._told(self._replaced().finished()), lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For versions that are told of failed loads by block."""
        return self._told(self._worker.finished()) if self._worker is not None else (None, None)

    @guarded(lambda self, *_: _results(self._replaced().finished()), lambda: _results(Ended(set(), set(), set())))
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """For versions that are told of failed loads by request: those that have this method."""
        assert self._worker is not None
        return _results(self._worker.finished())

    def _told(self, ended: Ended) -> tuple[set[str] | None, set[str] | None]:
        self._failed_blocks |= ended.failed_blocks
        return None, ended.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _replaced(self) -> Worker | Bystander:
        """In place of a worker that has failed, whose copies are stopped: somebody who says that all has failed."""
        if isinstance(self._worker, Worker):
            self._worker = self._worker.give_up()
        assert self._worker is not None
        return self._worker

    @guarded(lambda self: None)
    def build_connector_worker_meta(self) -> Any:
        return self._worker.report() if self._worker is not None else None

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                _close(side)


def _results(ended: Ended) -> Any:
    return compat.transfer_results(ended.received, ended.failed)


def _close(side: Scheduler | Worker | Bystander) -> None:
    try:
        side.close()
    except Exception as error:
        note_fault("shutdown", error)


def _say_off(error: Exception) -> None:
    log.error("moonpool is off, the engine goes on without it: %s", str(error) or type(error).__name__)


compat.register("MoonpoolConnector", "moonpool.engines.vllm.connector")
