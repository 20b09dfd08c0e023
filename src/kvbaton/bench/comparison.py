"""What a comparison of methods found: a row a method, a row a hop. See `compare` for how it is measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvbaton.bench.accounting import Account, account, require_reuse
from kvbaton.errors import Unsupported
from kvbaton.recipes import Recipe
from kvbaton.team import TeamRun, Turn

DENSE = "dense"


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
    """Everything that was found. ``warmup``: questions learned from before."""

    model: str
    dtype: str
    inputs: Mapping[str, str]
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


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
