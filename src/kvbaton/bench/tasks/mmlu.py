"""MMLU: four choices. Expert, researcher and critic, each reading all before it; a judge decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbaton.agents import Agent
from kvbaton.bench.data import Row
from kvbaton.bench.tasks.base import FINAL, FORMAT_LINE, REFUSED, Question, Score, final_line, peers

LETTER = r"\(?([A-D])\)?"
_WHAT = FORMAT_LINE.format(what="the letter only")
_ASK = "Here is a question with four choices.\n\n{question}"


@dataclass(frozen=True)
class MMLU:
    """Exact match of the letter on the judge's final line."""

    name: ClassVar[str] = "mmlu"
    data_set: ClassVar[str] = "mmlu"
    decider: ClassVar[str] = "judge"

    def agents(self) -> tuple[Agent, ...]:
        return (
            Agent("expert", system=f"You know the subject well and reason in a few sentences. {_WHAT}",
                  prompt=f"{_ASK}\n\nReason briefly and choose."),
            Agent("researcher", system=f"You recall the facts and definitions that a question turns on. {_WHAT}",
                  prompt=f"{_ASK}{peers('expert')}\n\nList the facts that matter, then choose."),
            Agent("critic", system=f"You look for the flaw in an argument and test every choice against it. {_WHAT}",
                  prompt=f"{_ASK}{peers('expert', 'researcher')}\n\nName any flaw, then choose."),
            Agent("judge", system="You read a question and the views of several colleagues and decide. Reply with one "
                                  f"line that starts with \"{FINAL}\" and holds the letter only.",
                  prompt=f"{_ASK}{peers('expert', 'researcher', 'critic')}\n\nWhich choice is right?"),
        )

    def floor(self) -> Agent:
        return Agent("judge", system=self.agents()[-1].system, prompt=f"{_ASK}\n\nWhich choice is right?")

    def question(self, row: Row, index: int) -> Question | None:
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return Question(str(index), {"question": f"{row['question']}\n{choices}"}, f"{FINAL} {row['answer']}", row)

    def score(self, question: Question, text: str) -> Score:
        said = final_line(text, LETTER)
        if said is None:
            return REFUSED
        right = said == question.row["answer"]
        return Score(float(right), said, "right" if right else "wrong")
