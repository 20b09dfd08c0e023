"""Several methods on one team and one question, side by side, from the same texts.

    warm-up   dense runs of other questions, replayed to every method that learns             not timed
    truth     the dense run of the question: its answers are forced on every method           not timed
    repeats   A B C, B C A, C A B ...: one replay a method, interleaved                        timed
    answers   every method answers by itself, for reading                                      not timed

The question itself teaches nothing, so that repeats are equal and no method has seen what it is measured on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kvbaton.bench.cast import taught
from kvbaton.bench.chain import Chain, agreement, divergence
from kvbaton.bench.comparison import DENSE, Comparison, HopRow, MethodRow
from kvbaton.bench.conditions import conditions
from kvbaton.bench.warmup import WarmUp
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.session import Session
from kvbaton.errors import Unsupported, UsageError
from kvbaton.recipes import Recipe, recipe
from kvbaton.team import Team, TeamRun, Turn, replay

Inputs = Mapping[str, str]
BuildTeam = Callable[[Session], Team]
Tick = Callable[[str], None]
"""Called after every step with what was done."""


@dataclass(frozen=True)
class Compare:
    """A comparison to be run. `dense` is added to ``recipes`` where it is missing: everything is measured against it.

    ``build`` makes the team on a session; ``warmup``: other questions to learn from; ``repeats``: timed replays of
    each method; ``answers``: whether every method also answers by itself.
    """

    engine: HFEngine
    build: BuildTeam
    recipes: tuple[Recipe, ...]
    inputs: Inputs
    warmup: Sequence[WarmUp] = ()
    repeats: int = 1
    answers: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"repeats must be 1 or more, got {self.repeats}")
        if DENSE not in (r.name for r in self.recipes):
            object.__setattr__(self, "recipes", (recipe(DENSE), *self.recipes))

    @property
    def steps(self) -> int:
        """How often `run` ticks."""
        n = len(self.recipes)
        return len(self.warmup) + n + 1 + n * self.repeats + n * self.answers

    def run(self, tick: Tick = lambda done: None) -> Comparison:
        """Raises what the team raises on the question. A method that the engine refuses is reported, not raised."""
        with ExitStack() as stack:
            writer = stack.enter_context(Session(self.engine, recipe(DENSE), prefix_cache=False))
            team = self.build(writer)
            lessons, end_id = [], min(self.engine.eos_ids, default=0)
            for number, question in enumerate(self.warmup, 1):
                lessons.append(question.chain(team, end_id))
                tick(f"warm-up question {number}")
            contenders = []
            for method in self.recipes:
                contenders.append(_Contender(self.engine, method, stack))
                contenders[-1].attempt(lambda c: c.learn(lessons))
                tick(f"{method.name} is warm")
            dense = team.run(self.inputs)
            if len(dense) < 2:
                raise UsageError("a run of one hop has nothing to hand on: compare a team of two agents or more")
            truth = replay(dense.turns, writer)
            tick("dense answers to the question")
            for repeat in range(self.repeats):
                turn = repeat % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    contender.attempt(lambda c: c.replay(dense.turns, truth))
                    tick(f"{contender.recipe.name}, repeat {repeat + 1}")
            if self.answers:
                for contender in contenders:
                    contender.attempt(lambda c: c.answer(self.build, dense))
                    tick(f"{contender.recipe.name} answers")
        return self._result(contenders)

    def _result(self, contenders: Sequence[_Contender]) -> Comparison:
        baseline = next(c for c in contenders if c.recipe.name == DENSE)
        identity = self.engine.identity
        return Comparison(
            model=identity.name, dtype=str(self.engine.geometry.dtype).removeprefix("torch."), inputs=self.inputs,
            warmup=len(self.warmup), repeats=self.repeats, conditions=conditions(str(self.engine.device)),
            methods=tuple(c.row(baseline) for c in contenders))


@dataclass(frozen=True)
class _Found:
    """A hop of the first repeat, without logits, beside the truth."""

    turn: Turn
    kl: float | None
    agree: float | None


@dataclass
class _Contender:
    """One method's session, and what it did so far. After `attempt` met a refusal it does nothing more."""

    engine: HFEngine
    recipe: Recipe
    stack: ExitStack
    found: list[_Found] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    answers: TeamRun | None = None
    refused: str | None = None
    _session: Session = field(init=False)

    def attempt(self, do: Callable[[_Contender], None]) -> None:
        """What goes wrong in dense is raised: it is the user's words. Elsewhere it may be this method's settings."""
        if self.refused is None:
            try:
                do(self)
            except (Unsupported, UsageError) as error:
                if self.recipe.name == DENSE:
                    raise
                self.refused = str(error)

    def learn(self, lessons: Sequence[Chain]) -> None:
        """Dense replays with the corrector looking on, or one to fill the prefix cache; no more is learned then."""
        self._session = self.stack.enter_context(taught(self.engine, self.recipe, lessons))

    def replay(self, turns: Sequence[Turn], truth: Sequence[HopResult]) -> None:
        hops = replay(turns, self._session)
        self.times.append([hop.ttft_s for hop in hops])
        self.found = self.found or [_beside(*each) for each in zip(turns, truth, hops, strict=True)]

    def answer(self, build: BuildTeam, dense: TeamRun) -> None:
        self.answers = dense if self.recipe.name == DENSE else build(self._session).run(dense.inputs)

    def row(self, baseline: _Contender) -> MethodRow:
        if self.refused is not None:
            return MethodRow(self.recipe, refused=self.refused)
        hops = []
        for found, mine, theirs in zip(self.found, zip(*self.times, strict=True), zip(*baseline.times, strict=True),
                                       strict=True):
            speed_up = statistics.median(theirs) / statistics.median(mine)
            hops.append(HopRow(found.turn, mine, speed_up, found.kl, found.agree))
        return MethodRow(self.recipe, tuple(hops), self.answers)


def _beside(turn: Turn, true: HopResult, hop: HopResult) -> _Found:
    spoke = true.logits is not None
    return _Found(replace(turn, hop=replace(hop, logits=None)), divergence(true, hop) if spoke else None,
                  agreement(true, hop) if spoke else None)
