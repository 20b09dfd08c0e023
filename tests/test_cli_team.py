"""`run`, `compare` and `demo` on a tiny random model in a folder, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kvbaton.cli import app, demo
from kvbaton.cli.options import SHIPPED, inputs_of, recipes_of, team_of
from kvbaton.errors import UnknownName, UsageError
from toy_tokenizers import byte_level

QUESTION = "question=How many eggs are left in the basket?"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A folder with a random Llama of two layers and a byte-level chat tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def team(tmp_path) -> str:
    path = tmp_path / "team.yaml"
    path.write_text("""
method: full-shared
max_new_tokens: 5
agents:
  - {name: solver, system: You solve., prompt: "{question}"}
  - {name: judge, system: You decide., prompt: "{question}\\n\\nSolution:\\n{solver}\\nDecide."}
""")
    return str(path)


def cli(*args: str):
    return CliRunner().invoke(app, list(args))


def record(*args: str):
    done = cli(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def failure(*args: str) -> Exception:
    done = cli(*args)
    assert isinstance(done.exception, Exception)
    return done.exception


def test_run_prints_answers_and_report(team, model):
    done = cli("run", team, "-i", QUESTION, "--model", model)
    assert done.exit_code == 0
    assert done.stdout.index("[solver]") < done.stdout.index("[judge]") < done.stdout.index("TTFT")
    turns = record("run", team, "-i", QUESTION, "--model", model)["turns"]
    assert [turn["agent"] for turn in turns] == ["solver", "judge"]
    assert turns[1]["effective_reuse_ratio"] == 1


def test_run_reads_inputs_from_files_and_keeps_what_it_learned(team, model, tmp_path):
    (tmp_path / "q.txt").write_text("How many eggs are left?")
    memory = tmp_path / "memory.safetensors"
    words = ("run", team, "--model", model, "--method", "shift", "--memory", str(memory), "-i")
    first = record(*words, f"question=@{tmp_path / 'q.txt'}")["turns"][1]
    again = record(*words, "question=And now, how many are there?")["turns"][1]
    assert first["learned_bytes"] > 0
    assert any(d["action"] == "correct" for d in again["decisions"]) > any(
        d["action"] == "correct" for d in first["decisions"])
    assert json.loads(cli("store", "ls", str(memory), "--json").stdout)[0]["edges"]
    assert "does not fit" in str(failure(*words[:-1], "--dtype", "float16", "-i", QUESTION))


def test_compare_shows_every_method_and_hop(team, model, tmp_path):
    (tmp_path / "warmup.txt").write_text("What is one and two?\nWhat is three and four?\n")
    words = ("compare", team, "-i", QUESTION, "--model", model, "--methods", "full-shared,shift", "--repeat", "2",
             "--warmup-questions", str(tmp_path / "warmup.txt"))
    done = cli(*words)
    assert done.exit_code == 0, done.output
    for word in ("solver", "judge", "dense", "full-shared", "shift", "speed-up", "2 warm-up questions"):
        assert word in done.stdout
    found = record(*words)
    assert [method["method"] for method in found["methods"]] == ["dense", "full-shared", "shift"]
    assert found["repeats"] == 2


def test_compare_fails_when_a_method_never_reused(team, model):
    words = ("compare", team, "-i", QUESTION, "--model", model, "--no-answers", "--methods")
    done = cli(*words, "shift")
    assert "dense" in done.stdout, "the table is printed all the same"
    assert "'shift' never reused" in str(done.exception)


def test_demo_runs_on_any_model(model, tmp_path, monkeypatch):
    lines = [line for line in demo.TRANSCRIPTS.read_text().splitlines() if line.startswith("{")][:2]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(demo, "TRANSCRIPTS", tmp_path / "two.jsonl")
    done = cli("demo", "--model", model, "--methods", "full-shared,shift", "--question", "How many eggs?")
    assert done.exit_code == 0, done.output
    for word in ("How many eggs?", "solver", "critic", "judge", "full-shared", "KL"):
        assert word in done.stdout


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_teams_are_whole(name):
    spec = team_of(name)
    assert spec.graph.inputs
    assert spec.method


@pytest.mark.parametrize(("args", "says"), [
    (["run", "mths"], "did you mean 'maths'"),
    (["run", "nothing.yaml"], "cannot read the team file"),
    (["run", "maths", "-i", "qestion=x"], "did you mean 'question'"),
    (["run", "maths", "-i", "question"], "NAME=TEXT"),
    (["run", "maths", "-i", "question=@/no/such/file"], "cannot read the input"),
    (["run", "maths", "--method", "full-sharde"], "did you mean 'full-shared'"),
    (["compare", "maths", "--methods", ","], "one method at least"),
    (["compare", "maths", "--methods", "dense", "--set", "selector.shre=1"], "unknown setting"),
    (["compare", "maths", "--methods", "dense", "--set", "shift:lead_rows=1"], "method in --set"),
])
def test_wrong_words_are_found_before_a_model_is_loaded(args, says, monkeypatch):
    monkeypatch.setattr("kvbaton.engine.models.load", lambda *a, **k: pytest.fail("a model was loaded"))
    error = failure(*args)
    assert isinstance(error, UsageError)
    assert says in str(error)


def test_a_missing_input_is_found_before_a_model_is_loaded(team):
    error = failure("run", team)
    assert isinstance(error, UsageError)
    assert "--input question=TEXT" in str(error)


def test_settings_reach_the_methods_that_have_them():
    chosen = {r.name: r for r in recipes_of("dense,cacheblend,random", ["selector.share=0.3", "random:lead_rows=2"])}
    assert chosen["cacheblend"].selector.share == chosen["random"].selector.share == 0.3
    assert (chosen["random"].lead_rows, chosen["dense"].lead_rows) == (2, 0)
    with pytest.raises(UnknownName):
        recipes_of("dense", ["selector.share=0.3"])
    with pytest.raises(UsageError, match="wants a number"):
        recipes_of("random", ["selector.share=much"])


def test_inputs_may_hold_equals_signs():
    assert inputs_of(["formula=a=b", "empty="]) == {"formula": "a=b", "empty": ""}


def test_ctrl_c_in_a_run_exits_130_and_prints_no_traceback(model, team, tmp_path):
    slow = tmp_path / "slow.yaml"
    slow.write_text(Path(team).read_text().replace("max_new_tokens: 5", "max_new_tokens: 3000"))
    code = "from kvbaton.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(slow), "-i", QUESTION, "--model", model]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert child.stdout.readline().startswith(b"[solver]"), child.stderr.read()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.splitlines()[-1] == b"kvbaton: stopped by Ctrl-C"
    assert b"Traceback" not in err
