"""Starts the scripts of a folder of docs/results, in one child process, as far as their help goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def start_all(folder: str) -> None:
    """Fails where a script no longer imports what it needs, or does not say what it takes."""
    scripts = [str(path) for path in sorted((RESULTS / folder).glob("*.py")) if "__main__" in path.read_text()]
    assert scripts
    run = subprocess.run([sys.executable, "-c", HELP, *scripts], cwd=RESULTS / folder, capture_output=True, text=True,
                         timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.casefold().count("usage:") == len(scripts)
