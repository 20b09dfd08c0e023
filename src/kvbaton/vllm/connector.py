"""KVBatonConnector: vLLM's connector interface, handed on to `SchedulerRole` and `WorkerRole`. It decides nothing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from kvbaton.errors import Unsupported
from kvbaton.kv import Geometry
from kvbaton.memory import ModelIdentity
from kvbaton.rope import Rope
from kvbaton.vllm import check_version
from kvbaton.vllm.metrics import KVBatonPromMetrics, KVBatonStats
from kvbaton.vllm.options import ServerOptions
from kvbaton.vllm.paging import PageCodec, Writer
from kvbaton.vllm.salting import check_can_salt
from kvbaton.vllm.scheduling import SchedulerRole
from kvbaton.vllm.wire import StepOrders, StepReport
from kvbaton.vllm.working import PagedCache, WorkerRole


class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, as vLLM carries them to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One worker's report, as vLLM carries it back."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        return Report(self.report.merged(other.report))


class KVBatonConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both roles of the connector. Raises Unsupported at start for what it cannot do right."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse(vllm_config, kv_cache_config)
        self._options = ServerOptions.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._report: StepReport | None = None
        self._failed_blocks: set[int] = set()
        self._caches: dict[str, Tensor] = {}
        geometry = _geometry(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
            if prefix_cache:
                check_can_salt(Request)
            ranks = vllm_config.parallel_config.tensor_parallel_size
            whole = Geometry(geometry.layers, geometry.kv_heads * ranks, geometry.head_dim, geometry.dtype)
            self._scheduler = SchedulerRole(self._options, whole, _spec(kv_cache_config).block_size, prefix_cache)
        else:
            rope = _rope(vllm_config, geometry.layers)
            state_dir = None if self._options.state_dir is None else Path(self._options.state_dir)
            self._worker = WorkerRole(geometry, rope, _identity(vllm_config, rope), self._options.memory_bytes,
                                      state_dir)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost capture is a later recompute, nothing worse."""
        return False

    @property
    def scheduler(self) -> SchedulerRole:
        assert self._scheduler is not None, "asked in a worker"
        return self._scheduler

    @property
    def worker(self) -> WorkerRole:
        assert self._worker is not None, "asked in the scheduler"
        return self._worker

    # --- scheduler role ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self.scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.claim(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, num_external_tokens)

    def chunk(self, request: Request, computed: int, tokens: int) -> int:
        """For `GapJumpScheduler`: rows to compute before the next reusable one."""
        return self.scheduler.chunk(request, computed, tokens)

    def jump(self, request: Request) -> int:
        """For `GapJumpScheduler`: where a running prefill may jump to in the coming step."""
        return self.scheduler.jump(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        manager = self._kv_cache_manager
        orders = self.scheduler.orders(scheduler_output.num_scheduled_tokens, lambda r: manager.get_block_ids(r)[0])
        if orders.loads or orders.captures or orders.teaches:
            scheduler_output.has_sync_kv_loads = True
        return Orders(orders)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finish(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Report):
            self.scheduler.report(meta.report)

    def reset_cache(self) -> bool:
        for text in self.scheduler.books.all_ids():
            self.scheduler.books.forget(text)
        return True

    def get_kv_connector_stats(self) -> KVBatonStats | None:
        return None if self._scheduler is None else KVBatonStats.of(self._scheduler)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVBatonStats:
        return KVBatonStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVBatonPromMetrics:
        return KVBatonPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker role ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self.worker.layers:
            self.worker.layers = _paged(self._caches, forward_context.no_compile_layers)
        self._report, self._failed_blocks = self.worker.run(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the forward pass starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are captured in the step after the one that computed them."""

    def wait_for_save(self) -> None:
        """Captures are copies, done when `start_load_kv` returns."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(self._orders().finished) or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Report | None:
        report, self._report = self._report, None
        return Report(report) if report else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Orders)
        return metadata.orders


def _refuse(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise Unsupported for set-ups in which reuse would be wrong, or was never checked."""
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    parallel, model = config.parallel_config, config.model_config
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    reasons = {
        "sliding-window, hybrid, Mamba or MLA models: their caches do not keep every row":
            len(groups) != 1 or type(spec) is not FullAttentionSpec or window is not None,
        "a quantised KV cache (--kv-cache-dtype): keys cannot be rotated in it":
            spec is not None and getattr(spec, "dtype", model.dtype) != model.dtype,
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
    }
    wrong = [reason for reason, found in reasons.items() if found]
    if wrong:
        raise Unsupported(f"KVBaton's vLLM connector does not support: {'; '.join(wrong)}")


def _spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec


def _geometry(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """Shape of one worker's share of the cache."""
    spec, layers = _spec(kv_cache_config), len(kv_cache_config.kv_cache_groups[0].layer_names)
    return Geometry(layers, spec.num_kv_heads, spec.head_size, config.model_config.dtype)


def _rope(config: VllmConfig, layers: int) -> Rope:
    """The model's rotation, from transformers' own code for this config; weights are not made."""
    hf_config = config.model_config.hf_text_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    module = getattr(model.base_model, "rotary_emb", None)
    if module is None:
        raise Unsupported(f"{type(model).__name__} has no rotary module: its keys cannot be moved")
    return Rope.from_module(type(module)(hf_config), hf_config, layers)


def _identity(config: VllmConfig, rope: Rope) -> ModelIdentity:
    """Which model learned state belongs to: vLLM shows no weights, so the config's hash stands for them."""
    text = json.dumps(config.model_config.hf_text_config.to_dict(), sort_keys=True, default=str)
    return ModelIdentity(str(config.model_config.model), "config-" + hashlib.sha256(text.encode()).hexdigest()[:32],
                         rope.fingerprint())


def _paged(caches: dict[str, Tensor], attention: dict[str, Any]) -> list[PagedCache]:
    """Every layer's pages in layer order; layers of one shape share what was learned about the packing."""
    codecs: dict[tuple[Any, ...], PageCodec] = {}
    layers = []
    for name in sorted(caches, key=_layer_number):
        cache, write = caches[name], _writer(attention[name])
        shape = (tuple(cache.shape[1:]), cache.stride(), cache.dtype)
        if shape not in codecs:
            codecs[shape] = PageCodec.learn(write, cache)
        layers.append(PagedCache(cache, write, codecs[shape]))
    return layers


def _writer(layer: Any) -> Writer:
    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

    return write


def _layer_number(name: str) -> int:
    numbers: Iterable[str] = re.findall(r"\.(\d+)\.", name)
    return int(next(iter(numbers)))
