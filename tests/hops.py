"""Hops of tiny engines in one line: what an agent gets dense, and what it gets after others ran."""

from __future__ import annotations

import torch

from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.prompt import Prompt
from kvbaton.recipes import Recipe, recipe
from tiny import ids

ANSWER = Force(ids(4, 99))


def run(engine: HFEngine, method: str | Recipe, *prompts: Prompt, prefix_cache: bool = True) -> list[HopResult]:
    """Every prompt in turn, in one run, each forced to the same answer."""
    chosen = recipe(method) if isinstance(method, str) else method
    with Session(engine, chosen, prefix_cache=prefix_cache) as session:
        store = session.start_run()
        return [session.hop(prompt, ANSWER, store) for prompt in prompts]


def dense(engine: HFEngine, prompt: Prompt) -> HopResult:
    return run(engine, "dense", prompt, prefix_cache=False)[0]


def same(one: HopResult, two: HopResult, atol: float = 2e-4) -> bool:
    assert one.logits is not None
    assert two.logits is not None
    return bool(torch.allclose(one.logits, two.logits, rtol=0, atol=atol))
