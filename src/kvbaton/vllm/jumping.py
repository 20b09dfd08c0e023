"""GapJumpScheduler: reuse behind a gap. Opt in with ``--scheduler-cls kvbaton.vllm.jumping.GapJumpScheduler``.

    position      0        38                    238      255
    stock         compute  compute (the claim ended at 0)  compute
    gap-jump      compute  jump, load             compute

vLLM asks a connector only once, for a contiguous prefix. The V1 model runner takes ``num_computed_tokens`` from the
scheduler in every step, so a running prefill may be moved forward over rows that the connector brings in that step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvbaton.errors import Unsupported
from kvbaton.vllm.connector import KVBatonConnector


class GapJumpScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which ends a prefill chunk where reusable rows start and jumps over them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.connector, KVBatonConnector):
            raise Unsupported("GapJumpScheduler works with the KVBaton connector alone: set "
                              '--kv-transfer-config \'{"kv_connector": "KVBaton", "kv_role": "kv_both"}\'')
        if self.use_v2_model_runner:
            raise Unsupported("GapJumpScheduler needs the V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0, "
                              "or leave --scheduler-cls out (reuse then ends at the first gap)")
        if self.scheduler_config.async_scheduling:
            raise Unsupported("GapJumpScheduler needs --no-async-scheduling")

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self.connector.chunk(request, num_computed_tokens, tokens) if tokens else tokens

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        jumped: list[tuple[Request, int, int]] = []
        for request in self.running:
            before, to = request.num_computed_tokens, self.connector.jump(request)
            if to > before:
                request.num_computed_tokens = to
                jumped.append((request, before, to))
        output = super().schedule(*args, **kwargs)
        for request, before, to in jumped:
            if request.request_id in output.num_scheduled_tokens:
                _count(request, to - before)
            elif request.status == RequestStatus.RUNNING:
                request.num_computed_tokens = before
        return output


def _count(request: Request, tokens: int) -> None:
    """Let vLLM's own numbers know of rows that were jumped over, as it knows of claimed ones."""
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions == 0:
        stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.num_external_cached_tokens + tokens)
