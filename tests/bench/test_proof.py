"""The README's table says what the results say."""

from __future__ import annotations

from pathlib import Path

from kvbaton.bench import proof
from kvbaton.bench.result import Journal
from made_results import CONDITIONS, IDENTITY, run


def test_table_from_results(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "a.jsonl", IDENTITY, CONDITIONS) as journal:
        for record in run().records:
            journal.append({**record, "recipe": "x"})
    text = proof.proof(proof.runs(tmp_path))
    assert "| `full-shared` | 0.0225 (10% recomputed) |" in text
    assert "| `kvcmas` | 0.0125 (44% off, 10% recomputed) |" in text
    assert "[a](docs/results/a.jsonl): n 12, seed 0, cpu, 1 thread, commit abc123 (dirty)" in text


def test_scores_stand_beside_the_difference_to_dense(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "a.jsonl", {**IDENTITY, "measure": "accuracy"}, CONDITIONS) as journal:
        for record in run(measure="accuracy").records:
            journal.append({**record, "recipe": "x"})
    text = proof.proof(proof.runs(tmp_path))
    assert "| method | gsm8k score, tiny float32, 1 learned |" in text
    assert "| `dense` | 50% |" in text
    assert "| `kvcmas` | 50% (+0%, +0% to +0%) |" in text


def test_splice() -> None:
    assert proof.splice("a\n<!-- proof -->\nold\n<!-- /proof -->\nb", "new") == \
        "a\n<!-- proof -->\nnew\n<!-- /proof -->\nb"
    assert proof.splice("no marks", "new") == "no marks"
    assert proof.splice("<!-- proof --><!-- /proof -->", "") == "<!-- proof --><!-- /proof -->"


def test_no_results() -> None:
    assert proof.proof([]) == ""


def test_the_readme_is_current() -> None:
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert readme == proof.splice(readme, proof.proof(proof.runs(root / "docs" / "results"))), "run `make docs`"
