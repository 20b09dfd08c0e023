"""GSM8K: grade-school maths. Solver, analyst and programmer, each reading all before it; a judge decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbaton.agents import Agent
from kvbaton.bench.data import Row
from kvbaton.bench.tasks.base import FINAL, FORMAT_LINE, REFUSED, Question, Score, final_line, peers
from kvbaton.errors import DataError

NUMBER = r"\$?\s*(-?\d[\d,]*(?:\.\d+)?)(?:\s*(?:dollars|%))?"
_WHAT = FORMAT_LINE.format(what="the number only")
_ASK = "Here is a problem.\n\n{question}"


def _value(number: str) -> float:
    return float(number.replace(",", ""))


@dataclass(frozen=True)
class GSM8K:
    """Exact match of the number on the judge's final line."""

    name: ClassVar[str] = "gsm8k"
    data_set: ClassVar[str] = "gsm8k"
    decider: ClassVar[str] = "judge"

    def agents(self) -> tuple[Agent, ...]:
        return (
            Agent("solver", system=f"You solve maths problems in short numbered steps. {_WHAT}",
                  prompt=f"{_ASK}\n\nSolve it step by step."),
            Agent("analyst", system="You are a careful mathematician. You name the quantities, write down how they "
                                    f"depend on each other, and then compute. {_WHAT}",
                  prompt=f"{_ASK}{peers('solver')}\n\nSay what is right or wrong in it, then give your own result."),
            Agent("programmer", system="You turn maths problems into a few lines of Python and state their result. "
                                       f"{_WHAT}",
                  prompt=f"{_ASK}{peers('solver', 'analyst')}\n\nWrite it as Python and state the result."),
            Agent("judge", system="You read a problem and the work of several colleagues and decide which result is "
                                  f"right. Reply with one line that starts with \"{FINAL}\" and holds the number only.",
                  prompt=f"{_ASK}{peers('solver', 'analyst', 'programmer')}\n\nWhich result is right?"),
        )

    def floor(self) -> Agent:
        judge = self.agents()[-1]
        return Agent("judge", system=judge.system, prompt=f"{_ASK}\n\nWhich result is right?")

    def question(self, row: Row, index: int) -> Question | None:
        tail = row["answer"].rpartition("####")[2].strip()
        if final_line(f"{FINAL} {tail}", NUMBER) is None:
            raise DataError(f"the answer of GSM8K question {index} has no number after '####': {row['answer'][-40:]!r}")
        return Question(str(index), {"question": row["question"]}, f"{FINAL} {tail}", row)

    def score(self, question: Question, text: str) -> Score:
        said, gold = final_line(text, NUMBER), final_line(question.gold, NUMBER)
        if said is None or gold is None:
            return REFUSED
        right = _value(said) == _value(gold)
        return Score(float(right), f"{_value(said):g}", "right" if right else "wrong")
