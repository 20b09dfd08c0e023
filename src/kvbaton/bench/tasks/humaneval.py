"""HumanEval: Python functions. Planner, programmer and tester, each reading all before it; an editor hands in the code.

The code runs in `sandbox.run`, behind the imports and helpers that its own prompt gives, against the hidden tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from kvbaton.agents import Agent
from kvbaton.bench import sandbox
from kvbaton.bench.data import Row
from kvbaton.bench.tasks.base import REFUSED, Question, Score, peers

_FENCE = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_BLOCK = "one block fenced by ```python and ```"
_A_FEW_LINES = 128
"""Tokens; small models go on for hundreds, whatever they are told."""
_ASK = "Complete this Python function.\n\n{question}"


def last_block(text: str) -> str | None:
    """The last whole fenced Python block. A fence that never closes was cut off and is no answer."""
    found = _FENCE.findall(text)
    return found[-1] if found else None


def program(row: Row, code: str) -> str:
    """Imports and helpers of the prompt, the answer, the hidden tests, and the call that runs them."""
    preamble = row["prompt"].rpartition(f"def {row['entry_point']}")[0]
    return f"{preamble}\n{code}\n{row['test']}\ncheck({row['entry_point']})\n"


@dataclass(frozen=True)
class HumanEval:
    """pass@1: all hidden tests pass."""

    limits: sandbox.Limits = field(default_factory=sandbox.Limits)
    name: ClassVar[str] = "humaneval"
    data_set: ClassVar[str] = "humaneval"
    decider: ClassVar[str] = "editor"

    def agents(self) -> tuple[Agent, ...]:
        return (
            Agent("planner", system="You plan Python functions: inputs, outputs, edge cases, and the algorithm in "
                                    "a few lines. You write no code.",
                  prompt=f"{_ASK}\n\nPlan it.", max_new_tokens=_A_FEW_LINES),
            Agent("programmer", system=f"You write short, correct Python. Reply with the whole function in {_BLOCK}.",
                  prompt=f"{_ASK}{peers('planner')}\n\nWrite the function."),
            Agent("tester", system="You test Python code by hand: you run the examples in your head and name every "
                                   "mistake in a few lines.",
                  prompt=f"{_ASK}{peers('planner', 'programmer')}\n\nWhat fails, if anything?",
                  max_new_tokens=_A_FEW_LINES),
            Agent("editor", system="You hand in the final code after reading what your colleagues wrote. Reply with "
                                   f"the whole function, imports included, in {_BLOCK}.",
                  prompt=f"{_ASK}{peers('planner', 'programmer', 'tester')}\n\nHand in the final function."),
        )

    def floor(self) -> Agent:
        return Agent("editor", system=self.agents()[-1].system, prompt=f"{_ASK}\n\nHand in the final function.")

    def question(self, row: Row, index: int) -> Question | None:
        gold = f"```python\n{row['prompt']}{row.get('canonical_solution', '')}```"
        return Question(row["task_id"], {"question": row["prompt"].strip()}, gold, row)

    def score(self, question: Question, text: str) -> Score:
        code = last_block(text)
        if code is None:
            return REFUSED
        outcome = sandbox.run(program(question.row, code), self.limits)
        return Score(float(outcome is sandbox.Outcome.PASSED), outcome.value, outcome.value)
