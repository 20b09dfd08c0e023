"""`kvbaton profile`: wrong words say the way out before any model is loaded; a profile is found, saved and printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvbaton.engine.models
from kvbaton.bench.profile import Profile
from kvbaton.cli import app
from kvbaton.engine.hf import HFEngine
from kvbaton.errors import UnknownName, UsageError
from tiny import build
from toy_tokenizers import byte_level

ROWS = [{"question": f"Janet has {i} ducks and buys 3 more. How many?", "answer": f"#### {i + 3}"} for i in range(6)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def load(*args: object) -> HFEngine:
        tokenizer = byte_level()
        return HFEngine(build("llama", vocab_size=len(tokenizer), max_position_embeddings=2048), tokenizer, name="toy")

    monkeypatch.setattr(kvbaton.engine.models, "load", load)
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_a_profile_is_found_saved_and_printed(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    done = CliRunner().invoke(app, ["profile", "--data", str(data), "--n", "1", "--budgets", "0.25,0.5",
                                    "--answer-tokens", "3", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    found = Profile.load(out)
    assert [(b.first, b.last) for b in found.blocks] == [(1, 1), (2, 2), (3, 3), (1, 2), (2, 3)]
    assert json.loads(done.stdout)["model"] == found.model == "toy"
    shown = CliRunner().invoke(app, ["profile", "--data", str(data), "--n", "1", "--budgets", "0.25",
                                     "--answer-tokens", "3", "--out", str(out)])
    assert "--set droidspeak:selector.first=" in shown.stdout


def test_wrong_words() -> None:
    with pytest.raises(UnknownName, match="droidspeak"):
        CliRunner().invoke(app, ["profile", "relaycaching"], catch_exceptions=False)
    with pytest.raises(UsageError, match="budgets"):
        CliRunner().invoke(app, ["profile", "--budgets", "a tenth"], catch_exceptions=False)
