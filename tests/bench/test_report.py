"""Report and comparison: from records to numbers, Markdown and one self-contained page."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kvbaton.bench import regression
from kvbaton.bench.page import to_html, to_markdown
from kvbaton.bench.plots import Dot, _frontier
from kvbaton.bench.report import blocks
from kvbaton.bench.result import RunFile
from kvbaton.bench.runner import digest
from kvbaton.bench.summary import summarise
from kvbaton.errors import DataError, UsageError
from made_results import CONDITIONS, IDENTITY, KL, run


def test_summary_is_arithmetic() -> None:
    found = {s.method: s for s in summarise(run())}
    noise = [random.Random(f"{q}").random() * 0.005 for q in range(12)]
    mean = sum(noise) / 12
    assert found["full-shared"].kl is not None
    assert found["full-shared"].kl.value == pytest.approx(0.02 + mean)
    assert found["kvcmas"].recovered is not None
    assert found["kvcmas"].recovered.value == pytest.approx(1 - (0.01 + mean) / (0.02 + mean))
    assert found["kvcmas"].pgr is not None
    assert found["kvcmas"].pgr.value == pytest.approx((2 + mean - 0.01 - mean) / (2 + mean))
    assert found["kvcmas"].speed_up == pytest.approx(5)
    assert found["dense"].recovered is not None
    assert found["dense"].recovered.value == 1


def test_times_of_batched_hops_are_left_out() -> None:
    from kvbaton.bench.summary import cells

    batched = run(measure="accuracy", batch=16)
    found = summarise(batched)
    assert {(s.ttft_ms, s.speed_up) for s in found} == {(None, None)}
    assert cells("accuracy", found[0])[8:10] == ["–", "–"]
    (shown,) = blocks([batched])
    assert "16 questions at once" in shown.lead
    assert not [t.title for t in shown.tables if "TTFT" in t.title]
    assert [t.title for t in blocks([run(measure="accuracy", batch=1)])[0].tables if "TTFT" in t.title]
    assert {c.quantity for c in regression.compare(batched, batched)} == {"score"}


def test_a_question_that_a_method_lacks_is_left_out_for_all() -> None:
    whole = run()
    cut = RunFile(whole.path, whole.identity, whole.conditions, whole.records[:-1])
    assert {s.questions for s in summarise(cut)} == {11}
    with pytest.raises(DataError, match="no question"):
        blocks([RunFile(whole.path, whole.identity, whole.conditions, whole.records[:1] + whole.records[4:5])])


def test_only_the_latest_settings_of_a_method_count() -> None:
    whole = run()
    old, new = "Recipe(rank=8)", "Recipe(rank=32)"
    conditions = tuple({**CONDITIONS, "recipes": {"kvcmas": text}} for text in (old, new))
    records = tuple({**r, "recipe": digest(new if int(r["question"]) < 5 else old)} if r["method"] == "kvcmas" else r
                    for r in whole.records)
    assert {s.questions for s in summarise(RunFile(whole.path, whole.identity, conditions, records))} == {5}
    assert {s.questions for s in summarise(RunFile(whole.path, whole.identity, conditions[:1], records))} == {7}


def test_page_is_self_contained_and_carries_its_conditions() -> None:
    page = to_html("A <b>title</b>", blocks([run(), run(learn=5, path="b.jsonl")]))
    assert not re.search(r"(?:src|href)=[\"'](?!#)", page)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page).replace("http://www.w3.org", "")
    for word in ("abc123", "kvbaton eval &lt;gsm8k&gt;", "dirty", "torch 2", "fingerprint", "seed",
                 "prefers-color-scheme", "Learning curve", "Quality against TTFT", "A &lt;b&gt;title&lt;/b&gt;"):
        assert word in page, word
    assert page.count("<figure>") == 4 + 4 + 1
    assert "var(--c0)" in page
    assert not re.search(r"#0102|#3040", page)


def test_markdown_has_every_method_and_condition() -> None:
    text = to_markdown("T", blocks([run()]))
    assert "| kvcmas |" in text
    assert "- commit: abc123" in text
    assert "0.0" in text.split("| full-shared |")[1]


def test_accuracy_block() -> None:
    text = to_markdown("T", blocks([run(measure="accuracy")]))
    assert "| dense | 6 | 6 |" in text
    assert "0.500 (" in text


def test_noise_floor_of_accuracy() -> None:
    from kvbaton.bench.summary import self_agreement

    once = run(measure="accuracy")
    assert self_agreement(once) is None
    again = tuple({**r, "repeat": 1, "choice": "1"} for r in once.records)
    twice = RunFile(once.path, once.identity, once.conditions, once.records + again)
    assert self_agreement(twice) == 0.5
    assert "same on 50%" in to_markdown("T", blocks([twice]))


def test_the_same_run_shows_no_regression() -> None:
    changes = regression.compare(run(), run(path="b.jsonl"))
    assert {c.verdict for c in changes} == {regression.SAME}
    assert {c.method for c in changes} == set(KL)


@pytest.mark.parametrize(("shift", "verdict"), [(0.01, regression.WORSE), (-0.005, regression.BETTER)])
def test_a_real_change_is_named(shift: float, verdict: str) -> None:
    changes = {(c.method, c.quantity): c.verdict for c in regression.compare(run(), run(shift))}
    assert changes["kvcmas", "KL to dense"] == verdict
    assert changes["dense", "KL to dense"] == regression.SAME


def test_a_change_inside_the_slack_is_noise() -> None:
    changes = {(c.method, c.quantity): c.verdict for c in regression.compare(run(), run(0.00005))}
    assert changes["full-shared", "KL to dense"] == regression.SAME


def test_unlike_runs_are_not_compared() -> None:
    with pytest.raises(UsageError, match="task is"):
        regression.compare(run(), run(task="mmlu"))
    with pytest.raises(UsageError, match="only eval"):
        regression.compare(run(measure=None), run(measure=None))


def test_frontier() -> None:
    dots = [Dot("a", 1, 5), Dot("b", 2, 3), Dot("c", 3, 4), Dot("d", 0.5, 9), Dot("e", 2, 2)]
    assert [d.name for d in _frontier(dots, smaller_y=True)] == ["d", "a", "e"]
    assert [d.name for d in _frontier(dots, smaller_y=False)] == ["d"]


def test_unknown_kind() -> None:
    with pytest.raises(DataError, match="no report draws"):
        blocks([run(kind="other")])


def test_command_writes_both_and_fails_on_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from kvbaton.bench.result import Journal
    from kvbaton.cli import app

    for name, shift in (("old", 0.0), ("new", 0.01)):
        with Journal.open(tmp_path / f"{name}.jsonl", IDENTITY, CONDITIONS) as journal:
            for r in run(shift).records:
                journal.append(r)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("old", "new")]
    out = tmp_path / "deep" / "page.html"
    done = CliRunner().invoke(app, ["report", files[0], "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "| kvcmas |" in out.with_suffix(".md").read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["report", *files, "--compare", "--out", str(out)]).exit_code == 1
    assert CliRunner().invoke(app, ["report", files[0], files[0], "--compare", "--out", str(out)]).exit_code == 0
