"""The scripts behind docs/results keep up with the code."""

from __future__ import annotations

import pytest

from study_scripts import start_all


@pytest.mark.parametrize("folder", ["affine", "field"])
def test_every_study_script_starts(folder: str) -> None:
    start_all(folder)
