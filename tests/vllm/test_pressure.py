"""Little memory: preemption and resume, block reuse after eviction, a text store that overflows."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

from engines import running, save_model
from scenario import tokens

EXACT = 5e-5
ROLES = [tokens(100 + i, 40) for i in range(4)]
TEXT = tokens(1, 150)


def prompt(i: int) -> list[int]:
    return ROLES[i] + TEXT + tokens(200 + i, 11)


def asks(i: int, group: str = "g") -> dict:
    return {"agent": f"agent {i}", "group": group, "method": "full-shared", "spans": [[40, 190, "q"]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def roomy(model):
    """Answers without pressure: approximate ones behind agent 0, and exact ones."""
    with running(model, {"method": "full-shared"}) as engine:
        engine.ask(prompt(0), asks(0))
        approximate = [engine.ask(prompt(i), asks(i), answer=60) for i in (1, 2, 3)]
        return approximate, [engine.ask(prompt(i), answer=60) for i in (1, 2, 3)]


def test_preempted_requests_resume_with_the_same_answer(model, roomy) -> None:
    """Three requests of 261 tokens in 19 blocks of 32: somebody is preempted, loads again, and answers the same."""
    with running(model, {"method": "full-shared"}, num_gpu_blocks_override=20, max_model_len=512) as engine:
        start, preempted = engine.free_blocks, []
        preempt = engine.scheduler._preempt_request
        engine.scheduler._preempt_request = lambda r, *a, **k: (preempted.append(r.request_id), preempt(r, *a, **k))
        engine.ask(prompt(0), asks(0))
        served = engine.serve([prompt(i) for i in (1, 2, 3)], [engine.params(60, asks(i)) for i in (1, 2, 3)])
        assert preempted
        for got, want in zip(served, roomy[0], strict=True):
            assert got.ids == want.ids
            assert got.difference(want) < EXACT
        for _ in range(3):
            exact = engine.serve([prompt(i) for i in (1, 2, 3)], engine.params(60))
            for got, want in zip(exact, roomy[1], strict=True):
                assert got.ids == want.ids
                assert got.difference(want) < EXACT
        engine.settle()
        assert engine.free_blocks == start


def test_no_foreign_text_after_eviction_churn(model, roomy) -> None:
    """P4: needles are served again and again while other requests take and give back every block."""
    with running(model, {"method": "full-shared"}, num_gpu_blocks_override=24, max_model_len=512) as engine:
        start = engine.free_blocks
        engine.ask(prompt(0), asks(0))
        for round_ in range(8):
            noise = [tokens(1000 + 10 * round_ + i, 180) for i in range(3)]
            engine.serve(noise, [engine.params(5, None if i else {"group": "g", "agent": "noise"}) for i in range(3)])
            i = 1 + round_ % 3
            assert engine.ask(prompt(i), asks(i), answer=20).difference(roomy[0][i - 1]) < EXACT
            assert engine.ask(prompt(i), answer=20).difference(roomy[1][i - 1]) < EXACT
        engine.settle()
        assert engine.free_blocks == start


def test_a_full_text_store_evicts_and_stays_right(model, roomy) -> None:
    per_token = 2 * 3 * 2 * 32 * 4
    with running(model, {"method": "full-shared", "store_bytes": 400 * per_token}) as engine:
        for round_ in range(6):
            engine.ask(prompt(0), asks(0))
            served = engine.ask(prompt(1), asks(1), answer=20)
            assert served.difference(roomy[0][0]) < EXACT
            noise = tokens(2000 + round_, 120)
            engine.ask(noise, {"group": "g", "agent": "noise", "spans": [[20, 110, "n"]]})
            engine.settle()
            assert engine.role.books.nbytes <= 400 * per_token
            assert set(engine.worker.texts) == set(engine.role.books.all_ids())
        assert engine.role.books.evicted > 0


def test_the_stock_scheduler_claims_up_to_the_first_gap(model) -> None:
    with running(model, {"method": "full-shared"}, gap_jump=False) as stock:
        role = tokens(7, 64)
        stock.ask(prompt(0), asks(0))
        exact = stock.ask(role + TEXT + tokens(8, 9))
        cold = stock.ask(prompt(1), asks(1))
        assert (cold.params["loaded_tokens"], cold.params["computed_tokens"]) == (0, len(prompt(1)))
        warm = stock.ask(role + TEXT + tokens(8, 9), {**asks(2), "spans": [[64, 214, "q"]]})
        assert (warm.params["loaded_tokens"], warm.params["computed_tokens"]) == (150, 9)
        assert warm.difference(exact) > 1e-3, "reuse without correction is not exact, or nothing was reused"
