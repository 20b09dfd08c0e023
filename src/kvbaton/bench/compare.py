"""Several methods on one team and one question, side by side, from the same texts.

    warm-up   dense runs of other questions, replayed to every method that learns             not timed
    truth     the dense run of the question: its answers are forced on every method           not timed
    repeats   A B C, B C A, C A B ...: one replay a method, interleaved                        timed
    answers   every method answers by itself, for reading                                      not timed

The question itself teaches nothing, so that repeats are equal and no method has seen what it is measured on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvbaton.bench.accounting import Account, account, require_reuse
from kvbaton.bench.cast import TaughtMemory, teaching
from kvbaton.bench.chain import Chain, agreement, divergence
from kvbaton.bench.chain import replay as recite
from kvbaton.bench.conditions import conditions
from kvbaton.bench.warmup import WarmUp
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.session import Session
from kvbaton.errors import Unsupported, UsageError
from kvbaton.recipes import Recipe, recipe
from kvbaton.team import Team, TeamRun, Turn, replay

DENSE = "dense"

Inputs = Mapping[str, str]
BuildTeam = Callable[[Session], Team]
Tick = Callable[[str], None]
"""Called after every step with what was done."""


@dataclass(frozen=True)
class HopRow:
    """One hop of one method. ``turn``: the first repeat's, without logits; ``ttfts_s``: one a repeat.

    ``speed_up``: median dense TTFT over median TTFT. ``kl`` (nats a token) and ``agree`` (share of tokens with the same
    most likely one): over the dense answer, None where the dense agent said nothing.
    """

    turn: Turn
    ttfts_s: tuple[float, ...]
    speed_up: float
    kl: float | None
    agree: float | None

    @property
    def ttft_s(self) -> float:
        return statistics.median(self.ttfts_s)

    def to_dict(self) -> dict[str, Any]:
        return {**self.turn.to_dict(), "ttft_s": self.ttft_s, "ttfts_s": list(self.ttfts_s), "speed_up": self.speed_up,
                "kl": self.kl, "agree": self.agree}


@dataclass(frozen=True)
class MethodRow:
    """One method. ``refused``: why it cannot run here (no hops then); ``answers``: its own run, if asked for.

    Means and books are over the hops after the source hop.
    """

    recipe: Recipe
    hops: tuple[HopRow, ...] = ()
    answers: TeamRun | None = None
    refused: str | None = None

    @property
    def books(self) -> Account:
        return account(self.recipe, [[row.turn.hop for row in self.hops]])

    @property
    def ttft_s(self) -> float:
        return statistics.fmean(row.ttft_s for row in self.hops[1:])

    @property
    def kl(self) -> float | None:
        """Divergence, nats a token."""
        return _mean(row.kl for row in self.hops[1:])

    @property
    def agree(self) -> float | None:
        return _mean(row.agree for row in self.hops[1:])

    def to_dict(self) -> dict[str, Any]:
        if self.refused:
            return {"method": self.recipe.name, "recipe": repr(self.recipe), "refused": self.refused}
        return {
            "method": self.recipe.name, "recipe": repr(self.recipe), "books": asdict(self.books), "ttft_s": self.ttft_s,
            "kl": self.kl, "agree": self.agree, "hops": [row.to_dict() for row in self.hops],
            "answers": None if self.answers is None else {t.agent: t.text for t in self.answers.turns},
        }


@dataclass(frozen=True)
class Comparison:
    """What `Compare.run` found. ``warmup``: questions learned from before."""

    model: str
    dtype: str
    inputs: Inputs
    warmup: int
    repeats: int
    methods: tuple[MethodRow, ...]
    conditions: Mapping[str, Any]

    def __getitem__(self, method: str) -> MethodRow:
        return next(row for row in self.methods if row.recipe.name == method)

    def speed_up(self, row: MethodRow) -> float:
        """Mean dense TTFT over this method's."""
        return self[DENSE].ttft_s / row.ttft_s

    def require_reuse(self) -> None:
        """Raise DataError if a method other than dense never reused anything: its figures would be those of dense.

        Raises Unsupported if none but dense could run.
        """
        others = [row for row in self.methods if row.recipe.name != DENSE]
        if others and all(row.refused for row in others):
            raise Unsupported("; ".join(f"{row.recipe.name}: {row.refused}" for row in others))
        for row in others:
            if not row.refused:
                require_reuse(row.recipe, row.books)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model, "dtype": self.dtype, "inputs": dict(self.inputs), "warmup_questions": self.warmup,
            "repeats": self.repeats, "conditions": dict(self.conditions),
            "methods": [row.to_dict() if row.refused else {**row.to_dict(), "speed_up": self.speed_up(row)}
                        for row in self.methods],
        }


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
                    contender.attempt(lambda c: c.replay(dense.turns))
                    tick(f"{contender.recipe.name}, repeat {repeat + 1}")
            if self.answers:
                for contender in contenders:
                    contender.attempt(lambda c: c.answer(self.build, self.inputs))
                    tick(f"{contender.recipe.name} answers")
        return self._result(contenders, dense, truth)

    def _result(self, contenders: Sequence[_Contender], dense: TeamRun, truth: Sequence[HopResult]) -> Comparison:
        baseline = next(c for c in contenders if c.recipe.name == DENSE)
        identity = self.engine.identity
        return Comparison(
            model=identity.name, dtype=str(self.engine.geometry.dtype).removeprefix("torch."), inputs=self.inputs,
            warmup=len(self.warmup), repeats=self.repeats, conditions=conditions(str(self.engine.device)),
            methods=tuple(c.row(dense.turns, truth, baseline.ttfts_s) for c in contenders))


@dataclass
class _Contender:
    """One method's session, and what it did so far. After `attempt` met a refusal it does nothing more."""

    engine: HFEngine
    recipe: Recipe
    stack: ExitStack
    replays: list[tuple[HopResult, ...]] = field(default_factory=list)
    answers: TeamRun | None = None
    refused: str | None = None
    _session: Session = field(init=False)

    def attempt(self, do: Callable[[_Contender], None]) -> None:
        if self.refused is None:
            try:
                do(self)
            except (Unsupported, UsageError) as error:  # this model or these settings: the dense run has gone well
                self.refused = str(error)

    def learn(self, lessons: Sequence[Chain]) -> None:
        """Dense replays with the corrector looking on, or one to fill the prefix cache; no more is learned then."""
        memory = TaughtMemory(self.recipe.corrector, self.engine.geometry)
        self._session = self.stack.enter_context(Session(self.engine, teaching(self.recipe), memory=memory))
        memory.learning = True
        for lesson in lessons if self.recipe.corrector.learns else lessons[-1:]:
            recite(self._session, lesson)
        memory.learning = False
        self._session.recipe = self.recipe

    def replay(self, turns: Sequence[Turn]) -> None:
        self.replays.append(replay(turns, self._session))

    def answer(self, build: BuildTeam, inputs: Inputs) -> None:
        self.answers = build(self._session).run(inputs)

    @property
    def ttfts_s(self) -> list[tuple[float, ...]]:
        """Of every hop, one a repeat."""
        return [tuple(hop.ttft_s for hop in hops) for hops in zip(*self.replays, strict=True)]

    def row(self, dense: Sequence[Turn], truth: Sequence[HopResult], baseline: list[tuple[float, ...]]) -> MethodRow:
        if self.refused is not None:
            return MethodRow(self.recipe, refused=self.refused)
        hops = tuple(
            _hop_row(*each) for each in zip(dense, truth, self.replays[0], self.ttfts_s, baseline, strict=True))
        return MethodRow(self.recipe, hops, self.answers)


def _hop_row(turn: Turn, true: HopResult, hop: HopResult, ttfts_s: tuple[float, ...],
             dense_s: tuple[float, ...]) -> HopRow:
    spoke = true.logits is not None
    return HopRow(
        replace(turn, hop=replace(hop, logits=None)), ttfts_s, statistics.median(dense_s) / statistics.median(ttfts_s),
        divergence(true, hop) if spoke else None, agreement(true, hop) if spoke else None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
