"""TTFT of one reader behind 2K shared tokens inside vLLM: dense, reuse, reuse with a correction; interleaved.

    make vllm-venv && .venv-vllm/bin/python docs/results/vllm/ttft.py MODEL_FOLDER OUT.json [shared] [repeats] [dtype]

In one process, one stream. The reader's role prompt is in vLLM's prefix cache for every method. ``reuse`` and
``mapped`` compute the same rows (4 lead rows), so their ratio is the price of the correction.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1",
                  HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="2")

import typer
from vllm.config import KVTransferConfig

from kvbaton.bench.conditions import conditions
from kvbaton.correctors.affine import Affine
from kvbaton.recipes import Recipe, register
from kvbaton.references import Origin
from kvbaton.vllm import CONNECTOR, SCHEDULER
from vllm import LLM, SamplingParams

METHODS = ("dense", "reuse", "mapped")
ROLE, TASK, LEARN = 64, 17, 3


@register
def reuse() -> Recipe:
    return Recipe("reuse", "Moved, not corrected; four lead rows.", "-", Origin(), lead_rows=4)


@register
def mapped() -> Recipe:
    return Recipe("mapped", "Affine, every gate open; four lead rows.", "-", Origin(), Affine(), lead_rows=4)


def main(folder: str, out: Path, shared: Annotated[int, typer.Argument()] = 2048,
         repeats: Annotated[int, typer.Argument()] = 7, dtype: Annotated[str, typer.Argument()] = "bfloat16") -> None:
    llm = LLM(folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, block_size=32,
              max_model_len=shared + 512, max_num_batched_tokens=shared + 512, scheduler_cls=SCHEDULER,
              kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both",
                                                  kv_connector_extra_config={"log_requests": False}))
    draw = random.Random(0)
    high = llm.llm_engine.model_config.get_vocab_size()
    new = lambda count: [draw.randrange(100, high - 100) for _ in range(count)]  # noqa: E731
    roles = {agent: new(ROLE) for agent in ("writer", "reader")}

    def ask(agent: str, text: list[int], method: str) -> tuple[float, int]:
        wish = {"kvbaton": {"method": method, "agent": agent, "spans": [[ROLE, ROLE + len(text), "text"]]}}
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False,
                                extra_args=None if method == "dense" else {"kv_transfer_params": wish})
        begin = time.perf_counter()
        result = llm.generate({"prompt_token_ids": roles[agent] + text + new(TASK)}, params, use_tqdm=False)[0]
        took = time.perf_counter() - begin
        for _ in range(2):
            llm.llm_engine.step()
        return took, len(result.prompt_token_ids) - result.num_cached_tokens

    for _ in range(LEARN):
        text = new(shared)
        for agent in roles:
            for method in METHODS:
                ask(agent, text, method)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    computed: dict[str, list[int]] = {method: [] for method in METHODS}
    for number in range(repeats):
        for method in METHODS[number % 3:] + METHODS[:number % 3]:
            text = new(shared)
            ask("writer", text, method)
            took, rows = ask("reader", text, method)
            times[method].append(took)
            computed[method].append(rows)
    middle = {method: statistics.median(values) for method, values in times.items()}
    record = {"model": Path(folder).name, "dtype": dtype, "shared": shared, "repeats": repeats, "ttft_s": times,
              "computed_tokens": computed, "median_s": middle, "dense_over_mapped": middle["dense"] / middle["mapped"],
              "mapped_over_reuse": middle["mapped"] / middle["reuse"], "conditions": conditions()}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "conditions"}, indent=1))


if __name__ == "__main__":
    typer.run(main)
