"""What the connector counts, in vLLM's own logs and at its ``/metrics``.

Counters are deltas since the last step, so that vLLM can add them up; gauges are the latest value.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbaton.vllm.scheduling import SchedulerRole

_PREFIX = "vllm:kvbaton_"
"""vLLM shows, and clears on a restart in one process, metrics of its own name space only."""

_COUNTERS = {
    "requests": "Requests that ran under KVBaton",
    "requests_refused": "Requests with wrong or impossible KVBaton parameters, served exactly",
    "segments_found": "Shared segments found in prompts",
    "segments_reused": "Shared segments reused or corrected",
    "texts_stored": "Texts whose KV was captured",
    "tokens_moved": "KV rows moved into requests",
    "tokens_prompt": "Prompt tokens of requests under KVBaton",
}
_GAUGES = {
    "texts": "Texts in the store",
    "store_bytes": "Bytes of KV in the store",
    "evicted": "Texts evicted so far",
    "edges": "Edges with learned state",
    "learned_texts": "Texts learned from",
    "learned_bytes": "Bytes of learned state",
}


class KVBatonStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: {"counts": {name: delta}, "gauges": {name: value}, "predicted": [nats a token]}."""

    @classmethod
    def of(cls, role: SchedulerRole) -> KVBatonStats:
        """What ``role`` counted since the last call."""
        counts, predicted = role.take_counts(), role.take_predicted()
        gauges = {"texts": len(role.books), "store_bytes": role.books.nbytes, "evicted": role.books.evicted,
                  "edges": sum(lane.edges for lane in role.lanes.values()),
                  "learned_texts": sum(lane.texts for lane in role.lanes.values()),
                  "learned_bytes": sum(lane.nbytes for lane in role.lanes.values())}
        return cls(data={"counts": counts, "gauges": gauges, "predicted": predicted})

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVBatonStats:
        counts: dict[str, int] = dict(self.data.get("counts", {}))
        for name, value in other.data.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + value
        return KVBatonStats(data={
            "counts": counts, "gauges": other.data.get("gauges") or self.data.get("gauges", {}),
            "predicted": [*self.data.get("predicted", ()), *other.data.get("predicted", ())]})

    def reduce(self) -> dict[str, int | float]:
        return {**self.data.get("counts", {}), **self.data.get("gauges", {})}

    def is_empty(self) -> bool:
        return not self.data.get("counts") and not self.data.get("predicted")


class KVBatonPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same numbers as Prometheus metrics named ``vllm:kvbaton_*``; rejected segments carry their reason."""

    def __init__(self, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {name: self._counter_cls(f"{_PREFIX}{name}", text, labelnames)
                          for name, text in _COUNTERS.items()}
        self._gauges = {name: self._gauge_cls(f"{_PREFIX}{name}", text, labelnames) for name, text in _GAUGES.items()}
        self._rejected = self._counter_cls(f"{_PREFIX}segments_rejected", "Shared segments computed, by reason",
                                           [*labelnames, "reason"])
        self._predicted = self._histogram_cls(
            f"{_PREFIX}predicted_divergence", "Predicted divergence of reused segments, nats a token", labelnames,
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.get("counts", {}).items():
            kind, _, reason = name.partition(":")
            if kind == "rejected":
                self._rejected.labels(*labels, reason).inc(value)
            elif name in self._counters:
                self._counters[name].labels(*labels).inc(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*labels).set(value)
        for value in transfer_stats_data.get("predicted", ()):
            self._predicted.labels(*labels).observe(value)


