"""The README's table says what the results say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbaton.bench import proof
from kvbaton.bench.result import Journal
from made_results import CONDITIONS, IDENTITY, run


def test_table_from_results(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "a.jsonl", IDENTITY, CONDITIONS) as journal:
        for record in run().records:
            journal.append({**record, "recipe": "x"})
    text = proof.proof(proof.runs(tmp_path))
    assert "|  | `full-shared` | `kvcmas` | conditions |" in text
    assert ("| [gsm8k, tiny](docs/results/a.jsonl): KL | 0.0225 (10%) | 0.0125 (10%) "
            "| n 12, 1 learned, float32, 1 thread, seed 0, partly from a dirty tree |") in text
    assert "Measured on cpu;" in text


def test_scores_stand_beside_the_difference_to_dense(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "a.jsonl", {**IDENTITY, "measure": "accuracy"}, CONDITIONS) as journal:
        for record in run(measure="accuracy").records:
            journal.append({**record, "recipe": "x"})
    text = proof.proof(proof.runs(tmp_path))
    assert "[gsm8k, tiny](docs/results/a.jsonl): score, dense 50% |" in text
    assert "| 50% (+0% to +0%) |" in text


def test_speed_ups_of_all_lengths_stand_in_one_cell(tmp_path: Path) -> None:
    identity = {"kind": "single", "model": "tiny", "dtype": "float32", "learn": 1, "seed": 0}
    with Journal.open(tmp_path / "s.jsonl", identity, {**CONDITIONS, "repeats": 3}) as journal:
        for shared, dense_s in ((512, 2.0), (2048, 9.0)):
            for method, ttft_s in (("dense", dense_s), ("hybrid", 1.0)):
                journal.append({**timed(shared, ttft_s), "method": method, "recipe": "x"})
    text = proof.proof(proof.runs(tmp_path))
    assert ("| [teams, tiny](docs/results/s.jsonl): TTFT at 512, 2048 tokens | 2.0, 9.0 "
            "| 3 repeats, 1 learned, float32, 1 thread, seed 0, partly from a dirty tree |") in text


def timed(shared: int, ttft_s: float) -> dict[str, Any]:
    """A record of `bench single` in which nothing but the time to first token matters."""
    hop = {"handed": 1, "ttft_s": ttft_s, "tpot_s": None, "reuse": 0.9, "ceiling_s": 0.1, "mbu": 0.1, "mfu": 0.1,
           "gate_said_no": 0}
    return {"kind": "record", "question": f"shared={shared}", "repeat": 0, "hops": [hop], "output_tokens_per_s": 1.0,
            "point": {"shared": shared, "agents": 2, "rounds": 1}, "peak_process_bytes": 1, "peak_torch_bytes": None,
            "learn": {"learned_bytes": 0, "learn_s": 0.0, "prefill_s": 1.0}}


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
