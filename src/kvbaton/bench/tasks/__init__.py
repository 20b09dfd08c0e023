"""Tasks by name. Adding one takes a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from kvbaton.bench.tasks.base import Question, Score, Task
from kvbaton.bench.tasks.gsm8k import GSM8K
from kvbaton.bench.tasks.hotpotqa import AgentReports, RetrievedEvidence
from kvbaton.bench.tasks.humaneval import HumanEval
from kvbaton.bench.tasks.mmlu import MMLU
from kvbaton.errors import UnknownName

__all__ = ["TASKS", "Question", "Score", "Task", "task"]

TASKS: Mapping[str, Task] = {t.name: t for t in (GSM8K(), HumanEval(), MMLU(), RetrievedEvidence(), AgentReports())}


def task(name: str) -> Task:
    """The task of that name. Raises UnknownName with the nearest one."""
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    return TASKS[name]
