"""`eval` on a tiny random model: complete, resumable, seeded, and its numbers are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from kvbaton.agents import Agent
from kvbaton.bench import data
from kvbaton.bench.accuracy import Accuracy
from kvbaton.bench.chain import divergence, replay
from kvbaton.bench.fidelity import Fidelity, nll
from kvbaton.bench.result import read
from kvbaton.bench.runner import ANSWERS, Evaluation, Runner
from kvbaton.bench.script import Script
from kvbaton.bench.tasks import task
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import InvariantError, UsageError
from kvbaton.recipes import recipe
from tiny import build, engine_with_text

ROWS = tuple({"question": f"A box holds {i} eggs and {i} more.", "answer": f"So #### {2 * i}"} for i in range(8))
LOADED = data.Loaded("gsm8k", "toy.jsonl", "0" * 64, ROWS)


@cache
def engine() -> HFEngine:
    return engine_with_text(max_position_embeddings=4096)


def spec(methods: tuple[str, ...] = ("full-shared", "epic"), n: int = 2, learn: int = 1, repeats: int = 1,
         accuracy: bool = False, batch: int = 1) -> Evaluation:
    measure = Accuracy(max_new_tokens=5, batch=batch) if accuracy else Fidelity(batch)
    return Evaluation(task("gsm8k"), tuple(recipe(m) for m in methods), n, learn, 0, repeats, 6, measure)


def run(out: Path, evaluation: Evaluation, step=lambda done, total, what: None):  # type: ignore[no-untyped-def]
    return Runner(engine(), evaluation, LOADED, out, step).run()


def plain(records: object) -> str:
    """Records without their times."""
    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if not k.endswith("_s")}
        return [strip(v) for v in value] if isinstance(value, list) else value
    return json.dumps(sorted(json.dumps(strip(r), sort_keys=True) for r in records))  # type: ignore[attr-defined]


def test_fidelity_records_are_complete_and_right(tmp_path: Path) -> None:
    got = run(tmp_path / "run.jsonl", spec())
    scored = [r for r in got.records if not r["question"].startswith(ANSWERS)]
    assert {(r["question"], r["method"]) for r in scored} == {
        (q, m) for q in {r["question"] for r in scored} for m in ("dense", "full-shared", "epic")}
    assert len(scored) == 6
    for record in scored:
        assert [h["handed"] for h in record["hops"]] == [0, 2, 3, 4]
        assert [h["agent"] for h in record["hops"]] == ["solver", "analyst", "programmer", "judge"]
        if record["method"] == "dense":
            assert all(h["kl"] < 1e-9 and h["agree"] == 1 and h["dense"] for h in record["hops"])
        else:
            assert record["hops"][-1]["kl"] > 1e-9
            assert record["hops"][-1]["reuse"] > 0.05
            assert record["hops"][-1]["handed"] == 4
    assert len({r["floor_nll"] for r in scored}) == 2
    assert len({round(r["gold_nll"], 12) for r in scored}) == 6


def test_the_divergence_equals_a_plain_replay(tmp_path: Path) -> None:
    got = run(tmp_path / "run.jsonl", spec(("full-shared",), n=1, learn=0))
    records = {(r["question"], r["method"]): r for r in got.records}
    (name,) = [q for q, _ in records if q.startswith(ANSWERS)]
    outputs = {a: tuple(ids) for a, ids in records[name, "dense"]["outputs"].items()}
    gsm = task("gsm8k")
    assert engine().text is not None
    script = Script(engine().text, gsm.agents(), engine().eos_ids)
    index = int(name.removeprefix(ANSWERS))
    question = gsm.question(ROWS[index], index)
    assert question is not None
    turns = script.turns(question, outputs)
    exact = Session(engine(), recipe("dense"), prefix_cache=False)
    with exact as dense, Session(engine(), recipe("full-shared")) as full:
        truth, reused = replay(dense, turns), replay(full, turns)
    want = [divergence(t, r) for t, r in zip(truth, reused, strict=True)]
    assert [h["kl"] for h in records[str(index), "full-shared"]["hops"]] == pytest.approx(want, rel=1e-4, abs=1e-9)


def test_a_second_run_measures_nothing_and_more_questions_extend(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    first = run(out, spec())
    steps: list[str] = []
    again = run(out, spec(), lambda done, total, what: steps.append(what))
    assert steps == []
    assert again.records == first.records
    longer = run(out, spec(n=3))
    assert longer.records[:len(first.records)] == first.records
    assert len({r["question"] for r in longer.records}) == len({r["question"] for r in first.records}) + 2


@pytest.mark.parametrize(("accuracy", "batch"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_interrupted_anywhere_gives_the_same_result(tmp_path: Path, accuracy: bool, batch: int) -> None:
    evaluation = spec(("graphflow-bare",), n=2 * batch, accuracy=accuracy, batch=batch)
    whole = run(tmp_path / "whole.jsonl", evaluation)
    calls = 0

    def count(done: int, total: int, what: str) -> None:
        nonlocal calls
        calls += 1
    run(tmp_path / "count.jsonl", evaluation, count)
    for stop in range(1, calls, 4):
        out, left = tmp_path / f"{stop}.jsonl", iter(range(stop))

        def interrupt(done: int, total: int, what: str) -> None:
            if next(left, None) is None:  # noqa: B023  used within the same turn of the loop
                raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            run(out, evaluation, interrupt)
        assert plain(run(out, evaluation).records) == plain(whole.records)


def test_kill_nine_in_the_middle(tmp_path: Path) -> None:
    """A process of its own is killed after its third record; the same command finishes with the same result."""
    code = ("import os, sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\nimport test_runner as t\n"
            "from pathlib import Path\nout = Path(sys.argv[3])\n"
            "def step(done, total, what):\n"
            "    if out.exists() and out.read_bytes().count(b'\\n') > 3: os.kill(os.getpid(), 9)\n"
            "t.run(out, t.spec(), step)\n")
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, str(here), str(here.parent), str(tmp_path / "a.jsonl")],
                          capture_output=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    assert 0 < len(read(tmp_path / "a.jsonl").records) < 9
    whole = run(tmp_path / "b.jsonl", spec())
    assert plain(run(tmp_path / "a.jsonl", spec()).records) == plain(whole.records)


def test_accuracy_scores_and_repeats(tmp_path: Path) -> None:
    got = run(tmp_path / "run.jsonl", spec(repeats=2, accuracy=True))
    assert len(got.records) == 2 * 2 * 3 + 1
    scored = [r for r in got.records if not r["question"].startswith(ANSWERS)]
    assert {r["outcome"] for r in scored} == {"no answer in the stated format"}
    assert all(r["score"] == 0 and r["choice"] is None for r in scored)


def test_a_batch_scores_as_its_questions_do_alone(tmp_path: Path) -> None:
    """float32: the same tokens, one question after the other or four at once, the last batch being a smaller one."""
    methods = ("full-shared", "hybrid")
    alone, together = (run(tmp_path / f"{size}.jsonl", spec(methods, n=5, learn=2, accuracy=True, batch=size))
                       for size in (1, 4))
    sizes = {q: r["together"] for r in together.records if (q := r["question"]).isdigit()}
    assert sorted(sizes.values()) == [1, 4, 4, 4, 4]
    strip = [[{k: v for k, v in r.items() if k != "together"} for r in f.records] for f in (alone, together)]
    assert plain(strip[0]) == plain(strip[1])


def test_dense_answers_decoded_together_are_those_decoded_alone(tmp_path: Path) -> None:
    """float32: same answers and divergences; every answer is written once, as soon as its batch is there."""
    alone, together = (run(tmp_path / f"{size}.jsonl", spec(("full-shared",), n=3, learn=2, batch=size))
                       for size in (1, 2))
    assert "decoded_together" not in alone.identity
    assert together.identity["decoded_together"] == 2
    answers = [[r for r in f.records if r["question"].startswith(ANSWERS)] for f in (alone, together)]
    assert len(answers[1]) == 5
    assert plain(answers[0]) == plain(answers[1])
    scored = [sorted((r for r in f.records if "gold_nll" in r), key=lambda r: (r["question"], r["method"]))
              for f in (alone, together)]
    for one, other in zip(*scored, strict=True):
        assert other["gold_nll"] == pytest.approx(one["gold_nll"], abs=1e-5)


def test_a_batch_that_was_half_written_is_run_whole_and_what_stands_is_kept(tmp_path: Path) -> None:
    evaluation = spec(("full-shared",), n=4, learn=0, accuracy=True, batch=3)
    whole = run(tmp_path / "whole.jsonl", evaluation)
    lines = whole.path.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    marked = lines[1].replace('"outcome": "no answer in the stated format"', '"outcome": "as it stands"')
    cut.write_text(lines[0] + marked)
    again = run(cut, evaluation)
    assert again.records[0]["outcome"] == "as it stands"
    assert plain(again.records[1:]) == plain(whole.records[1:])
    with pytest.raises(UsageError, match="batch was 3, now 2"):
        run(cut, spec(("full-shared",), n=4, learn=0, accuracy=True, batch=2))


def test_one_question_too_long_leaves_its_batch(tmp_path: Path) -> None:
    rows = (*ROWS[:3], {"question": "0123456789" * 450, "answer": "So #### 1"})
    loaded = data.Loaded("gsm8k", "toy.jsonl", "0" * 64, rows)
    evaluation = spec(("full-shared",), n=4, learn=0, accuracy=True, batch=4)
    got = Runner(engine(), evaluation, loaded, tmp_path / "run.jsonl", lambda done, total, what: None).run()
    outcomes = {(r["question"], r["method"]): r["outcome"] for r in got.records}
    assert len(outcomes) == 8
    assert {key for key, outcome in outcomes.items() if outcome == "prompt too long"} == {
        ("3", "dense"), ("3", "full-shared")}


def test_a_method_with_other_settings_is_measured_anew(tmp_path: Path) -> None:
    from kvbaton.overrides import override

    out = tmp_path / "run.jsonl"
    before = run(out, spec(("epic",), n=1, learn=0))
    other = Evaluation(task("gsm8k"), (override(recipe("epic"), "selector.rows=1"),), 1, 0, 0, 1, 6, Fidelity())
    after = run(out, other)
    kl = [[r["hops"][-1]["kl"] for r in f.records if r["method"] == "epic"] for f in (before, after)]
    assert kl[0] != kl[1]


def test_a_method_that_cannot_run_here_is_named_and_left_out(tmp_path: Path) -> None:
    from kvbaton.bench.summary import refused, summarise

    got = run(tmp_path / "run.jsonl", spec(("relaycaching", "full-shared")))
    assert "last layer is 3" in refused(got)["relaycaching"]
    assert {s.method for s in summarise(got)} == {"dense", "full-shared"}


def test_other_seeds_and_settings_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    run(out, spec(n=1, learn=0))
    with pytest.raises(UsageError, match="learn was 0, now 1"):
        run(out, spec(n=1, learn=1))
    with pytest.raises(UsageError, match="measure was"):
        run(out, spec(n=1, learn=0, accuracy=True))


def test_bad_plans() -> None:
    with pytest.raises(UsageError, match="twice"):
        spec(("epic", "epic"))
    with pytest.raises(UsageError, match="repeats"):
        spec(repeats=0)
    with pytest.raises(UsageError, match="at most"):
        Runner(engine(), spec(n=9), LOADED, Path("x"), lambda d, t, w: None)
    bare = HFEngine(build("llama"))
    with pytest.raises(UsageError, match="tokenizer"):
        Runner(bare, spec(), LOADED, Path("x"), lambda d, t, w: None)


def test_an_input_read_once_is_own_text() -> None:
    gsm = task("gsm8k")
    question = gsm.question(ROWS[0], 0)
    assert question is not None
    assert engine().text is not None
    alone = Script(engine().text, [Agent("a", prompt="One: {question} two.")], frozenset({2}))
    shared = Script(engine().text, gsm.agents(), frozenset({2}))
    one = alone.prompt(alone.agents[0], question, {})
    assert len(one.segments) == 1
    assert [s.share for s in shared.prompt(shared.agents[0], question, {}).segments] == [None, "question", None]
    assert shared.turns(question, {a.name: () for a in shared.agents})[0].answer == (2,)


def test_nll_known_value() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    assert nll(logits, (0, 0)) == pytest.approx((0.6931 + 1.3863) / 2, abs=1e-4)
    with pytest.raises(InvariantError):
        nll(None, (1,))
