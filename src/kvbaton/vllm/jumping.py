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
        jumped: list[tuple[Request, int]] = []
        for request in self.running:
            before, to = request.num_computed_tokens, self.connector.jump(request)
            if to > before:
                request.num_computed_tokens = to
                jumped.append((request, before))
        output = super().schedule(*args, **kwargs)
        for request, before in jumped:
            if request.request_id not in output.num_scheduled_tokens and request.status == RequestStatus.RUNNING:
                request.num_computed_tokens = before
        return output
