"""What a task is: a team, questions for it, and a strict score.

The decider is told one format. An answer is what that format yields and nothing else: prose that happens to hold a
letter or a number scores nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvbaton.agents import Agent
from kvbaton.bench.data import Row

FINAL = "Final answer:"
FORMAT_LINE = "End with one line that starts with \"Final answer:\" and holds {what}."

_MARKUP = r"[*_`]*"


@dataclass(frozen=True)
class Question:
    """One question, ready for the team. ``gold``: what a right decider would say, in the stated format."""

    id: str
    inputs: Mapping[str, str]
    gold: str
    row: Row


@dataclass(frozen=True)
class Score:
    """``value`` 0 to 1. ``choice``: what was extracted, None if the format was not met. ``outcome``: for counting."""

    value: float
    choice: str | None
    outcome: str


REFUSED = Score(0.0, None, "no answer in the stated format")


class Task(Protocol):
    """A task as a team. Stateless."""

    @property
    def name(self) -> str: ...
    @property
    def data_set(self) -> str:
        """Name in `data.DATA_SETS`."""
        ...

    @property
    def decider(self) -> str:
        """The agent whose answer is scored."""
        ...

    def agents(self) -> tuple[Agent, ...]: ...

    def floor(self) -> Agent:
        """The decider without the shared evidence: what the question alone is worth."""
        ...

    def question(self, row: Row, index: int) -> Question | None:
        """The question of a row; None: this task cannot use the row. ``index``: its place in the draw."""
        ...

    def score(self, question: Question, text: str) -> Score: ...


def final_line(text: str, pattern: str) -> str | None:
    """What ``pattern`` captured on the last line that is exactly ``Final answer: <pattern>``, markup set aside."""
    line = rf"^\s*{_MARKUP}{FINAL}{_MARKUP}\s*{_MARKUP}{pattern}{_MARKUP}\s*\.?\s*{_MARKUP}\s*$"
    found = list(re.finditer(line, text, re.MULTILINE))
    return found[-1].group(1) if found else None


def peers(*names: str) -> str:
    """The part of a prompt that shows earlier answers, each under its writer's name."""
    return "".join(f"\n\nThe {name} wrote:\n{{{name}}}" for name in names)
