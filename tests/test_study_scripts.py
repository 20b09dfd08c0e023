"""The scripts behind docs/results keep up with the code: what they import is there, and each says what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results"
HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, f"{script}: {stop.code}"
"""


@pytest.mark.parametrize("folder", ["affine", "field"])
def test_every_study_script_starts(folder: str) -> None:
    scripts = [str(path) for path in sorted((RESULTS / folder).glob("*.py")) if "__main__" in path.read_text()]
    assert scripts
    run = subprocess.run([sys.executable, "-c", HELP, *scripts],
                         cwd=RESULTS / folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage:") == len(scripts)
