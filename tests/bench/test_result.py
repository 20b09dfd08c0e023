"""The journal: nothing lost, nothing twice, nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.bench import conditions as cond
from kvbaton.bench.result import Journal, read
from kvbaton.errors import DataError, UsageError

IDENTITY = {"task": "toy", "seed": 0}
CONDITIONS = {"commit": "abc"}


def record(question: int, method: str = "dense", repeat: int = 0) -> dict[str, object]:
    return {"question": str(question), "method": method, "repeat": repeat, "kl": question / 7}


def fill(path: Path, n: int) -> None:
    with Journal.open(path, IDENTITY, CONDITIONS) as journal:
        for i in range(n):
            journal.append(record(i))


def test_round_trip_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    fill(path, 3)
    with Journal.open(path, IDENTITY, {"commit": "def"}) as journal:
        assert ("1", "dense", 0) in journal.done
        journal.append(record(3))
    got = read(path)
    assert [r["question"] for r in got.records] == ["0", "1", "2", "3"]
    assert [c["commit"] for c in got.conditions] == ["abc", "def"]
    assert got.records[1]["kl"] == 1 / 7


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 400))
def test_any_cut_is_mended(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    fill(path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:max(len(whole) - cut, 0)])
    kept = {k for k in range(4) if (json.dumps({"kind": "record", **record(k)}) + "\n").encode() in path.read_bytes()}
    with Journal.open(path, IDENTITY, CONDITIONS) as journal:
        assert {int(q) for q, _, _ in journal.done} == kept
        for i in range(4):
            if (str(i), "dense", 0) not in journal.done:
                journal.append(record(i))
    got = read(path)
    assert len(got.records) == 4
    assert got.torn == 0
    assert not got.corrupt


def test_a_corrupt_line_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    fill(path, 3)
    lines = path.read_bytes().split(b"\n")
    lines[2] = b'{"kind": "record", "question": \x00'
    path.write_bytes(b"\n".join(lines))
    got = read(path)
    assert [n for n, _ in got.corrupt] == [3]
    assert [r["question"] for r in got.records] == ["0", "2"]
    with Journal.open(path, IDENTITY, CONDITIONS) as journal:
        assert journal.corrupt == got.corrupt
        assert ("1", "dense", 0) not in journal.done


def test_other_identity_is_refused_and_the_file_untouched(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    fill(path, 2)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="seed was 0, now 1"):
        Journal.open(path, {**IDENTITY, "seed": 1}, CONDITIONS)
    assert path.read_bytes() == before


def test_not_a_results_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n", encoding="utf-8")
    with pytest.raises(DataError, match="no header"):
        read(tmp_path / "x")
    with pytest.raises(DataError, match="cannot read"):
        read(tmp_path / "y")


def test_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Journal.open(path, IDENTITY, CONDITIONS), pytest.raises(UsageError, match="another process"):
        Journal.open(path, IDENTITY, CONDITIONS)


def test_disk_full_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    fill(path, 1)
    with Journal.open(path, IDENTITY, CONDITIONS) as journal:
        before = path.read_bytes()
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:9]))
        with pytest.raises(DataError, match="No space left"):
            journal.append(record(1))
        assert path.read_bytes() == before
        assert ("1", "dense", 0) not in journal.done
        monkeypatch.undo()
        journal.append(record(1))
    assert len(read(path).records) == 2


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file size limit is the kernel's own refusal."""
    path = tmp_path / "run.jsonl"
    code = (
        "import resource, signal; from pathlib import Path; from kvbaton.bench.result import Journal\n"
        "from kvbaton.errors import DataError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        f"j = Journal.open(Path({str(path)!r}), {IDENTITY!r}, {CONDITIONS!r})\n"
        "try:\n  [j.append({'question': str(i), 'method': 'm', 'repeat': 0}) for i in range(50)]\n"
        "except DataError as e: print('full:', e)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "full:" in done.stdout
    got = read(path)
    assert got.records
    assert got.torn == 0
    assert not got.corrupt


def test_kill_nine_then_resume(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = ("from pathlib import Path; from kvbaton.bench.result import Journal\n"
            f"j = Journal.open(Path({str(path)!r}), {IDENTITY!r}, {CONDITIONS!r})\n"
            "i = 0\nwhile True:\n  j.append({'question': str(i), 'method': 'm', 'repeat': 0}); i += 1\n"
            "  if i == 5: print('go', flush=True)\n")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        child.send_signal(signal.SIGKILL)
    with Journal.open(path, IDENTITY, CONDITIONS) as journal:
        n = len(journal.done)
        assert n >= 5
    assert [r["question"] for r in read(path).records] == [str(i) for i in range(n)]


def test_conditions_hold_no_machine_paths() -> None:
    line = cond.command_line(["/home/me/bin/kvbaton", "eval", "--data", "/home/me/x.jsonl", "two words"])
    assert line == "kvbaton eval --data x.jsonl 'two words'"
    got = cond.conditions()
    assert {"command", "commit", "dirty", "device", "threads", "libraries", "load", "started"} <= set(got)
    json.dumps(got)
