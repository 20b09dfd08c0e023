"""Half an hour of mixed load on the connector: errors, memory, blocks. Tiny random model, everything in one process.

    make vllm-venv && OMP_NUM_THREADS=1 .venv-vllm/bin/python docs/results/vllm/load.py OUT.json [minutes] [plain]

Teams of three tenants under seven methods share text by mark and by content, beside exact requests; a tenth of all
requests is aborted somewhere. Few blocks, small budgets and few lanes, so that blocks, texts, learned state and lanes
are evicted all the time. One exact prompt is asked again and again: its answer may never change, bit for bit.
Time during which the process was stopped does not count. KVBaton runs with the environment of `kvbaton serve`; what is
set already wins, so that ``ONEDNN_PRIMITIVE_CACHE_CAPACITY=1024 LRU_CACHE_CAPACITY=1024`` in front gives vLLM's own.
``plain``: the same requests to vLLM as it comes, without KVBaton, to see what of the memory is vLLM's.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                  HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")

import psutil
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvbaton.bench.conditions import conditions
from kvbaton.gates import Always
from kvbaton.recipes import Recipe, recipe, register
from kvbaton.serve import CPU_ENVIRONMENT
from kvbaton.vllm import CONNECTOR, LOGGER, SCHEDULER
from vllm import LLM, SamplingParams

METHODS = ("dense", "full-shared", "shift-open", "hybrid-open", "kvcmas-open", "hybrid", "kvcmas")
GROUPS, AGENTS, VOCABULARY = ("a", "b", "c"), 3, 512
LONGEST_STEP_S = 2.0
"""A longer step was a stop: the rest of it does not count."""


@register
def shift_open() -> Recipe:
    return replace(recipe("shift"), name="shift-open", gate=Always())


@register
def hybrid_open() -> Recipe:
    return replace(recipe("hybrid"), name="hybrid-open", gate=Always())


@register
def kvcmas_open() -> Recipe:
    return replace(recipe("kvcmas"), name="kvcmas-open", gate=Always())


class Complaints(logging.Handler):
    """Keeps what the connector complains of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage()[:200])


@dataclass
class Team:
    """One team half way: ``said`` are the answers so far, as ids."""

    group: str
    method: str
    text: list[int]
    marked: bool
    said: list[list[int]] = field(default_factory=list)


def kvbaton() -> dict[str, Any]:
    """What switches KVBaton on."""
    options = {"log_requests": False, "store_bytes": 2 * 2**20, "memory_bytes": 2 * 2**20, "max_lanes": 8}
    return {"scheduler_cls": SCHEDULER,
            "kv_transfer_config": KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both",
                                                   kv_connector_extra_config=options)}


def start(folder: str, **engine: Any) -> LLM:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
             "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.15,
             "max_position_embeddings": 4096, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    return LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32, max_model_len=1024,
               max_num_batched_tokens=512, num_gpu_blocks_override=36, **engine)


class Load:
    """``counts``: what was asked and how it ended."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.draw = llm.llm_engine, random.Random(0)
        self.connected = has_kv_transfer_group()
        self.core = self.engine.engine_core.engine_core
        self.roles = [self.new(40 + 5 * agent) for agent in range(AGENTS)]
        self.needle = self.new(300)
        self.truth: Any = None
        self.number = 0
        self.counts = dict.fromkeys(("requests", "finished", "aborted", "preempted", "reused_rows", "wrong"), 0)
        preempt = self.core.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts["preempted"] += 1
            return preempt(*args, **kwargs)

        self.core.scheduler._preempt_request = counted

    @property
    def free_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def new(self, tokens: int) -> list[int]:
        return [self.draw.randrange(3, VOCABULARY) for _ in range(tokens)]

    def submit(self, ids: list[int], wish: dict[str, Any] | None, answer: int) -> str:
        self.number += 1
        extra = {"kv_transfer_params": {"kvbaton": wish}} if wish and self.connected else None
        params = SamplingParams(temperature=0.0, max_tokens=answer, detokenize=False, ignore_eos=True, logprobs=1,
                                extra_args=extra)
        self.counts["requests"] += 1
        self.engine.add_request(str(self.number), {"prompt_token_ids": ids}, params)
        return str(self.number)

    def hop(self, team: Team) -> str:
        agent = len(team.said)
        ids, spans = list(self.roles[agent]), []
        for share, part in [("text", team.text), *((f"agent {i}", said) for i, said in enumerate(team.said))]:
            spans.append([len(ids), len(ids) + len(part), share])
            ids += part
        wish: dict[str, Any] = {"group": team.group, "method": team.method}
        if team.marked:
            wish |= {"agent": f"agent {agent}", "spans": spans}
        return self.submit(ids + self.new(15), wish, self.draw.randrange(4, 40))

    def play(self, teams: list[Team]) -> float:
        """Hops of several teams at a time, with exact requests between; returns the seconds that count."""
        begin, lost, last = time.monotonic(), 0.0, time.monotonic()
        waiting: dict[str, Team | None] = {self.hop(team): team for team in teams}
        waiting[self.submit(self.needle, None, 8)] = None
        if self.draw.random() < 0.5:
            self.submit(self.new(100), None, 8)
        doomed = {name: self.draw.randrange(1, 12) for name in waiting if self.draw.random() < 0.1}
        step = 0
        while self.engine.has_unfinished_requests():
            for name in [name for name, at in doomed.items() if at == step and name in waiting]:
                self.engine.abort_request([name])
                self.counts["aborted"] += 1
                del waiting[name]
            for done in self.engine.step():
                if done.finished:
                    self.end(done, waiting)
            step += 1
            now = time.monotonic()
            lost, last = lost + max(0.0, now - last - LONGEST_STEP_S), now
        return time.monotonic() - begin - lost

    def end(self, done: Any, waiting: dict[str, Team | None]) -> None:
        self.counts["finished"] += 1
        answer = done.outputs[0]
        if list(done.prompt_token_ids) == self.needle:
            said = (list(answer.token_ids), [next(iter(p.values())).logprob for p in answer.logprobs])
            self.truth = self.truth or said
            self.counts["wrong"] += said != self.truth
        self.counts["reused_rows"] += ((done.kv_transfer_params or {}).get("kvbaton") or {}).get("loaded_tokens", 0)
        team = waiting.pop(done.request_id, None)
        if team is not None and len(team.said) + 1 < AGENTS:
            team.said.append(list(answer.token_ids)[:-1])
            waiting[self.hop(team)] = team

    def settle(self) -> None:
        for _ in range(4):
            self.engine.step()
        if self.connected:
            get_kv_transfer_group().worker.drain()

    def held(self) -> dict[str, Any]:
        """What the connector holds, nothing without it."""
        if not self.connected:
            return {}
        worker, books = get_kv_transfer_group().worker, self.core.scheduler.connector.scheduler.books
        return {"texts": len(worker.texts), "memories": len(worker.memories), "texts_mib": books.nbytes / 2**20,
                "texts_match": set(worker.texts) == set(books.all_ids())}


def main(out: Path, minutes: Annotated[float, typer.Argument()] = 30.0,
         engine: Annotated[str, typer.Argument()] = "kvbaton") -> None:
    if engine == "kvbaton":
        os.environ.update({**CPU_ENVIRONMENT, **os.environ})
    complaints = Complaints()
    logging.getLogger(LOGGER).addHandler(complaints)
    with tempfile.TemporaryDirectory() as folder:
        load = Load(start(folder, **(kvbaton() if engine == "kvbaton" else {})))
    first_free, process = load.free_blocks, psutil.Process()
    active, minute, begun, made = 0.0, [], time.monotonic(), conditions()
    while active < 60 * minutes:
        teams = [Team(load.draw.choice(GROUPS), load.draw.choice(METHODS), load.new(load.draw.choice((60, 150, 250))),
                      load.draw.random() < 0.7) for _ in range(load.draw.randrange(1, 5))]
        active += load.play(teams)
        if active < 30 * len(minute) and active < 60 * minutes:
            continue
        load.settle()
        minute.append({"active_s": round(active), "rss_mib": process.memory_info().rss / 2**20,
                       "free_blocks": load.free_blocks, **load.held(), **load.counts})
        record = {"engine": engine, "minutes": active / 60, "wall_minutes": (time.monotonic() - begun) / 60,
                  "counts": load.counts, "blocks": [first_free, load.free_blocks],
                  "drift": {f"last {n} minutes": drift([m for m in minute if m["active_s"] >= active - 60 * n])
                            for n in (15, 10, 5)},
                  "complaints": sorted(set(complaints.texts)), "minute": minute,
                  "kernel_caches": {name: os.environ.get(name) for name in CPU_ENVIRONMENT}, "conditions": made}
        out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(minute[-1]), flush=True)
    print(json.dumps({k: v for k, v in record.items() if k not in ("minute", "conditions")}, indent=1), flush=True)
    os._exit(0 if first_free == load.free_blocks and not load.counts["wrong"] else 1)


def drift(samples: list[dict[str, Any]]) -> dict[str, float]:
    """What resident memory gains in MiB a minute, by least squares, with the standard error."""
    minutes, rss = [s["active_s"] / 60 for s in samples], [s["rss_mib"] for s in samples]
    if len(samples) < 3:
        return {}
    slope, start = statistics.linear_regression(minutes, rss)
    spread = sum((m - statistics.fmean(minutes)) ** 2 for m in minutes)
    left = sum((r - start - slope * m) ** 2 for m, r in zip(minutes, rss, strict=True))
    return {"mib_per_minute": slope, "standard_error": (left / (len(samples) - 2) / spread) ** 0.5}


if __name__ == "__main__":
    typer.run(main)
