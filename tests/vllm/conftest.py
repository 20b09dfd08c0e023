"""Helpers beside these tests are imported by name, also by `reference.py` in its own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import extra_recipes


@pytest.fixture(scope="module", autouse=True)
def open_gates() -> Iterator[None]:
    """The recipes that compare engines exist while the tests of this folder run, and no longer."""
    extra_recipes.add()
    yield
    extra_recipes.remove()
