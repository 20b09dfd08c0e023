"""Tasks: strict extraction, scores, and teams that fit together."""

from __future__ import annotations

import pytest

from kvbaton.agents import Graph
from kvbaton.bench import sandbox
from kvbaton.bench.tasks import TASKS, task
from kvbaton.bench.tasks.base import final_line
from kvbaton.bench.tasks.gsm8k import NUMBER
from kvbaton.bench.tasks.hotpotqa import word_f1
from kvbaton.bench.tasks.humaneval import HumanEval, last_block
from kvbaton.bench.tasks.mmlu import LETTER
from kvbaton.errors import DataError, UnknownName

PARAGRAPHS = [{"title": f"T{i}", "text": f"Text number {i}."} for i in range(10)]
ADD = {"task_id": "HumanEval/0", "entry_point": "add",
       "prompt": "import math\n\ndef add(a, b):\n    \"\"\"Adds.\"\"\"\n",
       "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(0, math.floor(1.5)) == 1\n",
       "canonical_solution": "    return a + b\n"}
ROWS = {
    "gsm8k": {"question": "How many?", "answer": "Work. #### 1,018"},
    "mmlu": {"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": "C", "topic": "t"},
    "humaneval": ADD,
    "hotpotqa": {"id": "h", "question": "Who?", "answer": "The Badr Hari", "paragraphs": PARAGRAPHS},
}


@pytest.mark.parametrize(("text", "number"), [
    ("Final answer: 18", "18"), ("work\nFinal answer: $1,018.50\n", "1,018.50"),
    ("**Final answer:** 18 dollars.", "18"),
    ("Final answer: 3\nno\nFinal answer: -4", "-4"), ("**Final answer: 18**", "18"),
    ("The final answer is 18", None), ("18", None), ("Final answer: eighteen", None), ("Final answer: 18 or 19", None),
    ("I said Final answer: 18 before", None), ("", None), ("Final answer:", None), ("Final answer: 1 2", None),
])
def test_numbers_are_read_strictly(text: str, number: str | None) -> None:
    assert final_line(text, NUMBER) == number


@pytest.mark.parametrize(("text", "letter"), [
    ("Final answer: C", "C"), ("Final answer: (B).", "B"), ("A good question", None), ("A", None), ("C is right", None),
    ("Final answer: A or B", None), ("Final answer: E", None), ("Final answer: c", None),
])
def test_letters_are_read_strictly(text: str, letter: str | None) -> None:
    assert final_line(text, LETTER) == letter


def test_gsm8k_scores() -> None:
    gsm = task("gsm8k")
    question = gsm.question(ROWS["gsm8k"], 3)
    assert question is not None
    assert gsm.score(question, "Final answer: 1018.0").value == 1
    assert gsm.score(question, question.gold).outcome == "right"
    assert gsm.score(question, "Final answer: 10").outcome == "wrong"
    assert gsm.score(question, "It is 1018").choice is None
    with pytest.raises(DataError):
        gsm.question({"question": "q", "answer": "no mark"}, 0)


def test_hotpotqa_scores_and_skips_odd_rows() -> None:
    evidence = task("hotpotqa-evidence")
    question = evidence.question(ROWS["hotpotqa"], 0)
    assert question is not None
    assert evidence.score(question, "Final answer: badr hari!").outcome == "right"
    assert evidence.score(question, "Final answer: Badr").value == pytest.approx(2 / 3)
    assert evidence.score(question, "Badr Hari").value == 0
    assert evidence.question({**ROWS["hotpotqa"], "paragraphs": PARAGRAPHS[:2]}, 0) is None


def test_word_f1_known_values() -> None:
    assert word_f1("the cat sat", "cat sat down") == pytest.approx(2 * 2 / (2 + 3))
    assert word_f1("a cat", "The cat.") == 1
    assert word_f1("dog", "cat") == 0
    assert word_f1("the", "the") == 1


@pytest.mark.parametrize(("text", "outcome"), [
    ("```python\ndef add(a, b):\n    return a + b\n```", "passed"),
    ("First\n```python\ndef add(a, b):\n    return 0\n```\nno\n```py\ndef add(a, b):\n    return a + b\n```", "passed"),
    ("```python\ndef add(a, b):\n    return a - b\n```", "failed"),
    ("```python\ndef other(a, b):\n    return a + b\n```", "failed"),
    ("```python\ndef add(a, b):\n    while True: pass\n```", "timeout"),
    ("def add(a, b):\n    return a + b", "no answer in the stated format"),
    ("```python\ndef add(a, b):\n    return a + b", "no answer in the stated format"),
])
def test_humaneval_scores(text: str, outcome: str) -> None:
    human = HumanEval(sandbox.Limits(seconds=1))
    question = human.question(ADD, 0)
    assert question is not None
    score = human.score(question, text)
    assert (score.outcome, score.value) == (outcome, float(outcome == "passed"))


def test_humaneval_gold_passes() -> None:
    human = HumanEval()
    question = human.question(ADD, 0)
    assert question is not None
    assert last_block(question.gold) is not None
    assert human.score(question, question.gold).value == 1


@pytest.mark.parametrize("name", TASKS)
def test_every_team_fits_together(name: str) -> None:
    made = task(name)
    question = made.question(ROWS[made.data_set], 0)
    assert question is not None
    graph = Graph.of(made.agents())
    assert graph.order[-1].name == made.decider == made.floor().name
    assert set(graph.inputs) == set(question.inputs)
    assert {f.name for f in made.floor().fields} <= set(question.inputs)
    assert len(graph.order) in (4, 11)


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="gsm8k"):
        task("gsm8")
