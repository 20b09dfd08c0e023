"""Tensor parallelism: two workers with half of the heads each say and reuse what one worker does."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

from engines import Engine, Served, running, save_model
from scenario import team

EQUAL = 1e-4
METHODS = ("full-shared", "shift")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(str(tmp_path_factory.mktemp("model")))


def play(engine: Engine) -> list[Served]:
    """Three runs of a team under every method, hop by hop; `shift` learns and corrects."""
    return [served for method in METHODS for run in engine.play(team(method, 3)) for served in run]


@pytest.mark.timeout(400)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds every worker to cores of its own: 2 are needed")
def test_two_workers_say_what_one_says(model, monkeypatch) -> None:
    with running(model, {}) as engine:
        alone = play(engine)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a test's function is sent to the workers
    with running(model, {}, tensor_parallel_size=2) as engine:
        start = engine.free_blocks
        together = play(engine)
        assert engine.free_blocks == start
    reused = {segment["action"] for served in together for segment in served.params["segments"]}
    assert {"reuse", "correct"} <= reused
    for one, two in zip(alone, together, strict=True):
        assert one.ids == two.ids
        assert one.difference(two) < EQUAL
        assert [s["action"] for s in one.params["segments"]] == [s["action"] for s in two.params["segments"]]
