"""The tally as vLLM wants it: stats that its log shows, and counters for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from moonpool.engines.vllm.stats import METRICS, Figures

PREFIX = "vllm:moonpool_"


class MoonpoolStats(KVConnectorStats):  # type: ignore[misc]
    """What has happened since the last step that something had; `data` is a `Figures`."""

    data: Figures

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> MoonpoolStats:
        """The sum of both, in this object."""
        for name, values in other.data.items():
            own = self.data.setdefault(name, {})
            for label, value in values.items():
                own[label] = own.get(label, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what has happened in the interval."""
        return {
            f"moonpool {name}{f' ({label})' if label else ''}": round(value, 3)
            for name, values in self.data.items()
            for label, value in values.items()
        }


class MoonpoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters of `METRICS`, for each engine of this process's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counters = {
            metric.name: make(
                name=PREFIX + metric.name,
                documentation=metric.text,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
            )
            for metric in METRICS
        }
        # Those without a label of their own are shown from the start, at zero.
        self._children: dict[tuple[int, str, str], Any] = {
            (engine, metric.name, ""): self._counters[metric.name].labels(*values)
            for engine, values in per_engine_labelvalues.items()
            for metric in METRICS
            if not metric.label
        }

    def observe(self, transfer_stats_data: Figures, engine_idx: int = 0) -> None:
        """Add what has happened in a step; what this version doesn't know is left out."""
        for name, values in transfer_stats_data.items():
            for label, value in values.items():
                child = self._children.get((engine_idx, name, label))
                if child is None:
                    counter = self._counters.get(name)
                    if counter is None:
                        continue
                    child = counter.labels(*self.per_engine_labelvalues[engine_idx], label)
                    self._children[engine_idx, name, label] = child
                child.inc(value)
