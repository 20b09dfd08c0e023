"""bench/gpu.sh without a GPU: what it calls, what it writes, what it leaves out."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"


def run(tmp_path: Path, stub: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    fake = tmp_path / "kvbaton"
    fake.write_text(f"#!/usr/bin/env bash\n{stub}\n", encoding="utf-8")
    fake.chmod(0o755)
    out = tmp_path / "runs" / "gpu.json"
    done = subprocess.run(["bash", str(SCRIPT), str(out)], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "KVBATON": str(fake)})
    return done, out


def test_one_json_of_every_step(tmp_path: Path) -> None:
    done, out = run(tmp_path, 'printf \'{"words": "%s"}\' "$*"')
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found) == {"length", "agents", "rounds", "pool", "rank", "budget"}
    assert "--device cuda" in found["length"]["words"]
    assert "--shape llama-3.1-8b" in found["length"]["words"]


def test_a_step_that_fails_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    done, out = run(tmp_path, 'case "$*" in *--rounds*) exit 1;; esac; echo "{}"')
    assert done.returncode == 0
    assert "rounds did not finish" in done.stderr
    assert "rounds" not in json.loads(out.read_text(encoding="utf-8"))


def test_the_words_are_real_options(tmp_path: Path) -> None:
    """Every option and field that the script names exists."""
    from typer.main import get_command

    from kvbaton.cli import app

    _, out = run(tmp_path, 'printf \'{"words": "%s"}\' "$*"')
    single = get_command(app).commands["bench"].commands["single"]  # type: ignore[attr-defined]
    known = {flag for param in single.params for flag in param.opts}
    for step in json.loads(out.read_text(encoding="utf-8")).values():
        assert {word for word in step["words"].split() if word.startswith("--")} <= known
