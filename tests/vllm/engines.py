"""Engines for the tests: a tiny random Llama in float32, everything in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                  HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")

import torch
from scenario import VOCABULARY, Scenario


def save_model(path: str, kv_heads: int = 2, dtype: torch.dtype = torch.float32, **config: Any) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
             "num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 32, "initializer_range": 0.15,
             "max_position_embeddings": 8192, "tie_word_embeddings": False, **config}
    LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).save_pretrained(path)
    return path


@dataclass
class Served:
    """One request's end: its answer, top log-probabilities a position, and what the connector said about it."""

    ids: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    params: dict[str, Any]

    def difference(self, other: Served) -> float:
        """Largest difference of log-probabilities over the positions in which both followed the same tokens.

        A token that only one of them lists is at most as likely to the other as the least likely one that it lists.
        """
        worst = 0.0
        for mine, theirs, a, b in zip(self.logprobs, other.logprobs, self.ids, other.ids, strict=False):
            for one, two in ((mine, theirs), (theirs, mine)):
                floor = min(two.values())
                worst = max([worst, *(abs(v - two[t]) if t in two else v - floor for t, v in one.items())])
            if a != b:
                break
        return worst


class Engine:
    """An in-process engine; ``kvbaton`` None: vLLM as it is."""

    def __init__(self, model: str, kvbaton: dict[str, Any] | None, gap_jump: bool = True, **config: Any) -> None:
        from vllm.config import KVTransferConfig

        from kvbaton.vllm import CONNECTOR, SCHEDULER
        from vllm import LLM

        if kvbaton is not None:
            config["kv_transfer_config"] = KVTransferConfig(
                kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_extra_config={"log_requests": False, **kvbaton})
            if gap_jump:
                config["scheduler_cls"] = SCHEDULER
        defaults = {"dtype": "float32", "block_size": 32, "max_model_len": 4096, "max_num_batched_tokens": 4096}
        self.llm = LLM(model, skip_tokenizer_init=True, enforce_eager=True, **{**defaults, **config})
        self.core = self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def role(self) -> Any:
        return self.scheduler.connector.scheduler

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def params(self, answer: int = 6, kvbaton: dict[str, Any] | None = None, **sampling: Any) -> Any:
        from vllm import SamplingParams

        extra = None if kvbaton is None else {"kv_transfer_params": {"kvbaton": kvbaton}}
        return SamplingParams(**{"temperature": 0.0, "max_tokens": answer, "logprobs": 20, "detokenize": False,
                                 "ignore_eos": True, "extra_args": extra, **sampling})

    def serve(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Served]:
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        out = []
        for result in self.llm.generate(inputs, params, use_tqdm=False):
            answer = result.outputs[0]
            logprobs = [{t: p.logprob for t, p in position.items()} for position in answer.logprobs]
            out.append(Served(list(answer.token_ids), logprobs, result.num_cached_tokens,
                              (result.kv_transfer_params or {}).get("kvbaton", {})))
        return out

    def ask(self, ids: Sequence[int], kvbaton: dict[str, Any] | None = None, answer: int = 6,
            **sampling: Any) -> Served:
        return self.serve([ids], self.params(answer, kvbaton, **sampling))[0]

    def settle(self) -> None:
        """Finish what is left over from requests that ended: captures, freed blocks, learning."""
        def drain(_: Any) -> None:  # local, so that it is sent whole: workers cannot import this module
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().worker.drain()

        for _ in range(3):
            self.llm.llm_engine.step()
        if self.scheduler.connector is not None:
            self.llm.collective_rpc(drain)

    def play(self, scenario: Scenario, group: str = "g") -> list[list[Served]]:
        """Play a scenario hop by hop; the answers are noted in it. The last token has no KV and is left out."""
        played = []
        for hops in scenario.runs:
            answers, results = {}, []
            for hop in hops:
                ids, spans = [], []
                for part, share in hop.filled(answers):
                    if share is not None:
                        spans.append([len(ids), len(ids) + len(part), share])
                    ids += part
                served = self.ask(ids, {"group": group, "method": scenario.method, "agent": hop.reader, "spans": spans})
                hop.answer = answers[hop.reader] = served.ids[:-1]
                results.append(served)
                self.settle()
            played.append(results)
        return played


@contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[Engine]:
    """An engine that leaves the process ready for the next one."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    engine = Engine(*args, **kwargs)
    try:
        yield engine
    finally:
        engine.core.shutdown()
        engine.llm = engine.core = None  # what they hold ends with them, not under the next engine
        gc.collect()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
