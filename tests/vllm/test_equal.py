"""vLLM against the other engine: same recipe, same state, same log-probabilities, whatever the server's settings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

from engines import running, save_model
from scenario import team

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("KVBATON_PYTHON", HERE.parents[1] / ".venv" / "bin" / "python"))
METHODS = ("full-shared", "moved", "mapped", "mapped-leading", "chained-mapped", "shift", "hybrid-open",
           "kvcmas-open", "dense")
SETTINGS = [
    {"block_size": 32, "max_num_batched_tokens": 2048, "enable_prefix_caching": True},
    {"block_size": 64, "max_num_batched_tokens": 64, "enable_prefix_caching": True, "max_num_seqs": 4},
    {"block_size": 32, "max_num_batched_tokens": 64, "enable_prefix_caching": False, "max_num_seqs": 4},
    {"block_size": 64, "max_num_batched_tokens": 2048, "enable_prefix_caching": False},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def played(model, tmp_path_factory):
    """Every scenario on every setting, and its replay on the other engine, in one process each."""
    if not PYTHON.exists():
        pytest.skip(f"the other engine's environment is missing: {PYTHON} (make setup, or set KVBATON_PYTHON)")
    scenarios, served = [], []
    for number, setting in enumerate(SETTINGS):
        with running(model, {"method": "full-shared"}, **setting) as engine:
            start = engine.free_blocks
            for method in METHODS:
                scenario = team(method, seed=number + 1)
                served.append(engine.play(scenario))
                scenarios.append(scenario)
            engine.settle()
            assert engine.free_blocks == start, "blocks leaked"
            assert engine.worker.broken is None
    folder = tmp_path_factory.mktemp("reference")
    (folder / "in.json").write_text(json.dumps([s.to_dict() for s in scenarios]))
    subprocess.run([str(PYTHON), str(HERE / "reference.py"), model, str(folder / "in.json"), str(folder / "out.pt")],
                   check=True, timeout=170, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return list(zip(scenarios, served, torch.load(folder / "out.pt"), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", range(len(SETTINGS)), ids=lambda i: "-".join(str(v) for v in SETTINGS[i].values()))
def test_log_probabilities_equal_the_other_engine(played, setting, method) -> None:
    scenario, served, reference = played[setting * len(METHODS) + METHODS.index(method)]
    assert scenario.method == method
    worst, reused = 0.0, 0
    for run, (hops, results, wanted) in enumerate(zip(scenario.runs, served, reference, strict=True)):
        for hop, got, want in zip(hops, results, wanted, strict=True):
            where = f"run {run}, hop {hop.reader}"
            assert [s["action"] for s in got.params["segments"]] == want["actions"], where
            logprobs = want["logits"].log_softmax(-1)
            for position in range(len(hop.answer)):
                for token, value in got.logprobs[position].items():
                    worst = max(worst, abs(float(logprobs[position, token]) - value))
            reused += got.params["loaded_tokens"]
    assert worst < 1e-4
    assert (reused > 0) == (method != "dense")
