"""The table in docs/known-bugs.md and the tests in this folder list the same 38 classes."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
CLASSES = {f"{letter}{n}" for letter, count in (("R", 10), ("S", 6), ("T", 6), ("Q", 5), ("G", 1), ("W", 3), ("P", 7))
           for n in range(1, count + 1)}
VLLM_ONLY = {"S6", "Q2"}


def test_every_class_is_in_the_table_once() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \|", (HERE.parents[1] / "docs" / "known-bugs.md").read_text(), re.MULTILINE)
    assert len(CLASSES) == 38
    assert sorted(rows) == sorted(CLASSES)


def test_every_class_but_vllms_own_has_a_test_here() -> None:
    names = " ".join(re.findall(r"def (test_\w+)", "".join(p.read_text() for p in HERE.glob("test_*.py"))))
    found = {name.upper() for name in re.findall(r"(?<=_)[rstqgwp]\d+(?=_)", names)}
    assert found & CLASSES == CLASSES - VLLM_ONLY
