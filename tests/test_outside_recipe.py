"""A part and a recipe from outside the package: one module and one entry point, as AGENTS.md says, nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbaton.recipes import Recipe
from kvbaton.references import Chained
from kvbaton.selectors.base import Fixed


@dataclass(frozen=True)
class EveryOther:
    """Compute every second reused row."""

    first: int = 0
    needs: ClassVar[frozenset] = frozenset()
    entry: ClassVar[int | None] = None

    def begin(self, reused):
        return Fixed(torch.arange(self.first, len(reused), 2))


def every_other():
    return Recipe("every-other", "Compute every second row.", "-", Chained(), selector=EveryOther())
'''
USE = '''
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.overrides import override
from kvbaton.recipes import names, recipe
from tiny import engine, ids, prompt

assert "every-other" in names()
method = override(recipe("every-other"), "selector.first=1")
question = ("question", ids(20, 1))
with Session(engine(), method) as session:
    run = session.start_run()
    session.hop(prompt("solver", (None, ids(5, 2)), question, (None, ids(3, 3))), Force((1, 2)), run)
    result = session.hop(prompt("critic", (None, ids(8, 4)), question, (None, ids(3, 5))), Force((1, 2)), run)
assert result.rows_per_layer == (10,) * 4, result.rows_per_layer
print("computed", sum(result.rows_per_layer))
'''


def test_a_part_and_a_recipe_from_outside(tmp_path: Path) -> None:
    (tmp_path / "toy_recipes.py").write_text(MODULE)
    info = tmp_path / "toy_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvbaton.recipes]\nevery-other = toy_recipes:every_other\n")
    root = Path(__file__).parent.parent
    path = os.pathsep.join(map(str, (tmp_path, root / "src", root / "tests")))
    done = subprocess.run([sys.executable, "-c", USE], env={**os.environ, "PYTHONPATH": path}, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "computed 40"
