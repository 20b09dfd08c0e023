"""`kvbaton serve` for real: a tiny model over HTTP, a team on it, a plain client beside it, the serving benchmark."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

from engines import save_model

from kvbaton.agents import Agent
from kvbaton.bench.serving_run import started
from kvbaton.team import Team
from kvbaton.vllm.client import openai_client
from toy_tokenizers import byte_level

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
KVBATON = [sys.executable, "-c", "from kvbaton.cli import main; main()"]
TRIO = [Agent("solver", "{question}", system="You solve maths problems step by step, slowly."),
        Agent("critic", "{question}\n\nA colleague wrote:\n{solver}", system="You look for mistakes in solutions."),
        Agent("judge", "{question}\n\nSolution:\n{solver}\n\nReview:\n{critic}", system="You decide.")]
QUESTION = "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning. How many are left?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    tokenizer = byte_level()
    save_model(path, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*KVBATON, "serve", folder, "--method", "full-shared", "--dtype", "float32", "--port", str(port),
               "--enforce-eager", "--max-model-len", "4096"]
    os.environ.update(ENVIRONMENT)
    with started(command, f"http://127.0.0.1:{port}/v1", ready_s=500):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.timeout(700)
def test_a_team_reuses_on_a_server(url, folder) -> None:
    with Team(TRIO, engine=openai_client(url, folder, group="team"), method="full-shared", max_new_tokens=12) as team:
        run = team.run(question=QUESTION)
    assert run["solver"].reuse == 0.0
    critic, judge = run["critic"].hop, run["judge"].hop
    assert [d.action for d in critic.decisions] == ["reuse", "reuse"]
    assert [d.action for d in judge.decisions] == ["reuse", "reuse", "reuse"]
    assert run["judge"].reuse > 0.8
    assert judge.entries.total == judge.prompt_tokens
    assert judge.ttft_s > 0


def test_plain_clients_get_exact_answers_and_metrics_count(url, folder) -> None:
    import urllib.request

    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    answers = {client.chat.completions.create(model=folder, messages=messages, max_tokens=8, temperature=0.0)
               .choices[0].message.content for _ in range(3)}
    assert len(answers) == 1
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as page:
        metrics = page.read().decode()
    for name in ("segments_found_total", "segments_reused_total", "tokens_moved_total", "texts",
                 "segments_rejected_total"):
        assert f"vllm:kvbaton_{name}" in metrics


def test_the_serving_benchmark_runs(url, folder, tmp_path) -> None:
    out = tmp_path / "serving.jsonl"
    done = subprocess.run(
        [*KVBATON, "bench", "serving", folder, "--base-url", url, "--methods", "dense,full-shared", "--qps", "1,4",
         "--teams", "3", "--agents", "3", "--shared", "200", "--role", "40", "--private", "10", "--output", "4",
         "--warm-up", "1", "--vocabulary", "3,200", "--out", str(out), "--json"],
        check=True, capture_output=True, text=True, timeout=170)
    records = json.loads(done.stdout)["records"]
    assert [(r["question"], r["method"]) for r in records] == [
        ("1 teams/s", "full-shared"), ("1 teams/s", "dense"), ("4 teams/s", "dense"), ("4 teams/s", "full-shared")]
    dense, shared = (sum(r["computed_tokens"] for r in records if r["method"] == m) for m in ("dense", "full-shared"))
    assert shared < dense / 2
