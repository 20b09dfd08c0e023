"""Audit: runs a hop the other way as well, off the TTFT path, so that the divergence of reuse is measured, not guessed.

    hop ran    also run                                         cost                      teaches
    reuse      dense, on a random share of hops                 a dense prefill           yes: it is an exact pair
    dense      reuse, where the gate predicts divergence        a reuse prefill           as every dense hop does
    both       the answer once more over each of the two caches, as one pass

The divergence is KL(dense || reuse) over the answer that the hop gave, teacher-forced. A hop's whole divergence is put
to the record of every edge that it reused, or would have: an upper bound of the edge's own part.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from torch import Tensor

from kvbaton.correctors.record import Recorded
from kvbaton.engine.cache import SplicedCache
from kvbaton.engine.decode import forced_logits
from kvbaton.engine.divergence import divergence
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.splice import Splice
from kvbaton.errors import UsageError
from kvbaton.gates import Residual
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.plan import Action, Plan, Step
from kvbaton.prompt import Prompt
from kvbaton.recipes import Recipe


@dataclass
class Audit:
    """One hop under audit. ``plan``: how the hop itself ran; ``held``: after `run`, the exact KV of a reuse hop's
    segments, by index."""

    engine: HFEngine
    prompt: Prompt
    plan: Plan
    cache: SplicedCache
    first: Tensor
    other: Splice
    other_cache: SplicedCache
    held: dict[int, KV | None]

    def run(self, answer: tuple[int, ...]) -> float:
        """Prefill the other way, force ``answer`` on both; KL(dense || reuse), nats a token."""
        start = len(self.prompt)
        mine = forced_logits(self.engine, self.cache, self.first, start, answer)
        first = self.engine.logits(self.other.prefill())[0]
        theirs = forced_logits(self.engine, self.other_cache, first, start, answer)
        if not self.plan.dense:
            self.held = {step.index: self.other.held(step.index) for step in self.plan.steps}
        dense, reuse = (mine, theirs) if self.plan.dense else (theirs, mine)
        return divergence(dense, reuse)


class Auditor:
    """Chooses the hops to audit and keeps the edges' records. ``share``: of reuse hops, drawn with ``seed``."""

    def __init__(self, engine: HFEngine, memory: Memory, share: float, seed: int = 0) -> None:
        if not 0.0 <= share <= 1.0:
            raise UsageError(f"audit is a share of hops from 0 to 1, got {share}")
        self._engine, self._memory, self._share = engine, memory, share
        self._random = random.Random(seed)

    def begin(self, prompt: Prompt, plan: Plan, recipe: Recipe, cache: SplicedCache, first: Tensor) -> Audit | None:
        """Prepare the other way before anything is learned from this hop; None: no audit of this one.

        ``cache`` and ``first`` (logits of the last prompt row) are the hop's own; the cache is not changed.
        """
        if not self._wanted(plan, recipe):
            return None
        steps = tuple(_reusing(step, recipe) if plan.dense else _computing(step) for step in plan.steps)
        other_cache = self._engine.new_cache(cache.k.shape[2])
        prefix = min(prompt.prefix_tokens, len(prompt) - 1)
        other_cache.k[:, :, :prefix], other_cache.v[:, :, :prefix] = cache.k[:, :, :prefix], cache.v[:, :, :prefix]
        other = Splice(self._engine, prompt, Plan(steps), recipe, other_cache, prefix)
        return Audit(self._engine, prompt, plan, cache, first, other, other_cache, {})

    def record(self, plan: Plan, measured: float) -> None:
        """Put a measured divergence to every edge of the hop. Call after the hop was learned from."""
        for step in plan.steps:
            state = self._memory.state(step.edge) if step.edge is not None else None
            if isinstance(state, Recorded):
                state.record.audited_once(measured)

    def _wanted(self, plan: Plan, recipe: Recipe) -> bool:
        if not any(step.edge is not None for step in plan.steps):
            return False
        predicts = isinstance(recipe.gate, Residual) and recipe.gate.target is not None
        return predicts if plan.dense else self._random.random() < self._share


def _reusing(step: Step, recipe: Recipe) -> Step:
    """The step as it would be if nothing had been refused."""
    if step.edge is None or step.source is None:
        return step
    corrects = recipe.corrector.can_correct(step.state, step.source)
    return replace(step, action=Action.CORRECT if corrects else Action.REUSE)


def _computing(step: Step) -> Step:
    return replace(step, action=Action.RECOMPUTE)
