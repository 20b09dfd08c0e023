"""A team's hops as plain data, playable on vLLM and on the other engine."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

VOCABULARY = 512


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


@dataclass
class Hop:
    """``parts``: (ids, share or None); a part whose ids are None is the answer of the agent that ``share`` names."""

    reader: str
    parts: list[tuple[list[int] | None, str | None]]
    answer: list[int] = field(default_factory=list)

    def filled(self, answers: dict[str, list[int]]) -> list[tuple[list[int], str | None]]:
        return [(answers[share or ""] if ids is None else ids, share) for ids, share in self.parts]


@dataclass
class Scenario:
    """Runs of hops under one method. Text is kept within a run; what was learned is kept over all."""

    method: str
    runs: list[list[Hop]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Scenario:
        return cls(raw["method"], [[Hop(**hop) for hop in run] for run in raw["runs"]])


def team(method: str, seed: int, runs: int = 3) -> Scenario:
    """Three agents, a question, two answers handed on, and text of their own in front, between and behind."""
    own = {reader: tokens(seed + i, length) for i, (reader, length) in enumerate((("a", 35), ("b", 38), ("c", 29)))}
    made = []
    for run in range(runs):
        question = tokens(1000 * seed + run, 90)
        made.append([
            Hop("a", [(own["a"], None), (question, "q"), (tokens(seed + 10, 9), None)]),
            Hop("b", [(own["b"], None), (question, "q"), (tokens(seed + 11, 5), None), (None, "a"),
                      (tokens(seed + 12, 7), None)]),
            Hop("c", [(own["c"], None), (question, "q"), (tokens(seed + 13, 3), None), (None, "a"),
                      (tokens(seed + 14, 21), None), (None, "b"), (question, "q"), (tokens(seed + 15, 6), None)]),
        ])
    return Scenario(method, made)
