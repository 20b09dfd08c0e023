"""Model-written code: what passes, what is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.bench import sandbox
from kvbaton.bench.sandbox import Limits, Outcome, run

QUICK = Limits(seconds=1, memory_bytes=300 << 20)


@pytest.mark.parametrize(("source", "outcome"), [
    ("assert 1 + 1 == 2", Outcome.PASSED),
    ("from typing import List\ndef f(x: List[int]):\n    return sorted(x)\nassert f([2, 1]) == [1, 2]", Outcome.PASSED),
    ("print('x' * 100000)", Outcome.PASSED),
    ("assert False", Outcome.FAILED),
    ("def f(:", Outcome.FAILED),
    ("import sys; sys.exit(0)", Outcome.FAILED),
    ("import os; os._exit(0)", Outcome.FAILED),
    ("raise SystemExit", Outcome.FAILED),
    ("x = input()", Outcome.FAILED),
    ("x = '\\ud800'", Outcome.PASSED),
])
def test_outcomes(source: str, outcome: Outcome) -> None:
    assert run(source, QUICK) is outcome


def test_an_endless_loop_ends() -> None:
    assert run("while True: pass", QUICK) is Outcome.TIMEOUT


def test_sleeping_ends_too() -> None:
    assert run("import time; time.sleep(60)", QUICK) is Outcome.TIMEOUT


def test_memory_is_limited() -> None:
    assert run("x = bytearray(1 << 30)", QUICK) is Outcome.FAILED


@pytest.mark.parametrize("source", [
    "import socket; socket.socket()",
    "import os; os.system('true')",
    "import subprocess; subprocess.run(['true'])",
    "import os; os.fork()",
    "import os; os.kill(os.getppid(), 9)",
    "import ctypes; ctypes.CDLL(None)",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
])
def test_network_and_processes_are_barred(source: str) -> None:
    assert run(source, QUICK) is Outcome.FAILED


def test_network_is_barred_even_without_unshare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "network_cut", tuple)
    assert run("import socket; socket.socket()", QUICK) is Outcome.FAILED
    assert run("pass", QUICK) is Outcome.PASSED


def test_files_outside_its_folder_are_safe(tmp_path: Path) -> None:
    victim = tmp_path / "kept"
    victim.write_text("whole", encoding="utf-8")
    assert run(f"open({str(victim)!r}, 'w')", QUICK) is Outcome.FAILED
    assert run(f"import os; os.remove({str(victim)!r})", QUICK) is Outcome.FAILED
    assert victim.read_text(encoding="utf-8") == "whole"
    assert run("open('own', 'w').write('x'); assert open('own').read() == 'x'", QUICK) is Outcome.PASSED


def test_file_size_is_limited() -> None:
    assert run("open('big', 'w').write('x' * (2 << 20))", QUICK) is not Outcome.PASSED
