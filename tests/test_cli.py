"""The command line: light to start, exit codes, errors on stderr with the way out, JSON on every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import kvbaton.cli
from kvbaton import errors
from kvbaton.cli import app, docs
from kvbaton.correctors.none import NoCorrection
from kvbaton.kv import Geometry
from kvbaton.memory import Memory, ModelIdentity
from kvbaton.recipes import names

ROOT = Path(__file__).parent.parent


def cli(*args: str):
    return CliRunner().invoke(app, list(args))


def child(*args: str, code: str = "from kvbaton.cli import main; main()") -> subprocess.CompletedProcess[str]:
    """The console script in a process of its own."""
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def all_commands():
    return [path for path, _ in docs.commands(typer.main.get_command(app), "kvbaton")]


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["models"], ["store", "ls", "--help"]])
def test_light_commands_load_no_torch(args):
    code = ("import sys\nfrom kvbaton.cli import main\ntry: main()\nfinally: "
            "print('HEAVY', *({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)")
    done = child(*args, code=code)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr.split() == ["HEAVY"]


@pytest.mark.parametrize("path", all_commands())
def test_every_command_has_help_and_json(path):
    done = cli(*path.split()[1:], "--help")
    assert done.exit_code == 0
    assert "--json" in done.output
    assert docs.section(path, dict(docs.commands(typer.main.get_command(app), "kvbaton"))[path]).splitlines()[2]


@pytest.mark.parametrize("file", ["cli.md", "methods.md"])
def test_generated_docs_are_current(file):
    assert (ROOT / "docs" / file).read_text() == docs.pages()[file], "run `make docs`"


def test_methods_lists_the_whole_registry():
    listed = json.loads(cli("methods", "--json").output)
    assert [method["name"] for method in listed] == list(names())
    assert all(name in cli("methods").output for name in names())
    assert cli("methods", "--markdown").output == docs.pages()["methods.md"]


def test_models_says_what_is_installed():
    listed = {model["name"]: model for model in json.loads(cli("models", "--json").output)}
    assert set(listed) == {"smollm2", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    assert isinstance(listed["smollm2"]["installed"], bool)
    assert "smollm2" in cli("models").output


@pytest.mark.parametrize(("error", "code"), [
    (errors.UsageError("mend it"), 2), (errors.UnknownName("method", "dens", ["dense"]), 2),
    (errors.StoreError("broken"), 1), (KeyboardInterrupt(), 130), (SystemExit(130), 130),
])
def test_exit_codes(monkeypatch, capsys, error, code):
    def fail():
        raise error

    monkeypatch.setattr(kvbaton.cli, "app", fail)
    with pytest.raises(SystemExit) as stopped:
        kvbaton.cli.main()
    assert stopped.value.code == code
    out = capsys.readouterr()
    assert out.out == ""
    assert ("Ctrl-C" if code == 130 else str(error)) in out.err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def fail():
        raise errors.InvariantError("books")

    monkeypatch.setattr(kvbaton.cli, "app", fail)
    with pytest.raises(errors.InvariantError):
        kvbaton.cli.main()


@pytest.mark.parametrize("args", [["nothing"], ["store", "ls"], ["models", "--jsno"]])
def test_wrong_words_exit_2(args):
    done = child(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error" in done.stderr


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "memory.safetensors"
    Memory(NoCorrection(), Geometry(2, 1, 4, torch.float32)).save(path, ModelIdentity("toy", "f" * 32, "default"))
    return path


def test_store_ls_check_and_rm(saved):
    described = json.loads(cli("store", "ls", str(saved.parent), "--json").output)[0]
    assert described["identity"]["name"] == "toy"
    assert "toy" in cli("store", "ls", str(saved)).output
    assert json.loads(cli("store", "check", str(saved), "--json").output) == [
        {"path": str(saved), "ok": True, "fault": None}]
    assert "removed 1 file" in cli("store", "rm", str(saved)).output
    assert not saved.exists()


def test_store_check_looks_at_every_file_and_fails_on_a_broken_one(saved):
    (saved.parent / "a.safetensors").write_bytes(b"junk")
    done = child("store", "check", str(saved.parent))
    assert done.returncode == 1
    assert "whole" in done.stdout
    assert "kvbaton store rm" in done.stderr


@pytest.mark.parametrize("what", ["missing.safetensors", "empty", "notes.txt"])
def test_store_refuses_what_is_no_memory(tmp_path, what):
    (tmp_path / "empty").mkdir()
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    done = child("store", "rm", str(tmp_path / what))
    assert done.returncode == 2
    assert what in done.stderr
    assert notes.exists()
