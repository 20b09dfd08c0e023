"""Comparisons on a tiny random model: what is measured, from which texts, and that the question teaches nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from kvbaton.agents import Graph
from kvbaton.bench.compare import Compare
from kvbaton.bench.warmup import WarmUp, read_warmup
from kvbaton.correctors.affine import Affine
from kvbaton.engine.session import Session
from kvbaton.errors import DataError, TeamError, Unsupported, UsageError
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import Origin
from kvbaton.team import Agent, Team
from tiny import engine_with_text

AGENTS = [
    Agent("solver", "{question}", system="You solve."),
    Agent("critic", "{question}\n\nA colleague wrote:\n{solver}", system="You find mistakes."),
    Agent("judge", "{question}\n\nSolution:\n{solver}\n\nReview:\n{critic}\nDecide.", system="You decide."),
]
LEARNER = Recipe("learner", "The mean offset of the edge.", "-", Origin(), corrector=Affine(rank=0))
QUESTION = {"question": "How many eggs are left in the basket?"}
WARMUP = [WarmUp({"question": f"What is {i} and {i + 1}, in words?"}) for i in range(3)]


@cache
def engine():
    return engine_with_text()


def team(session):
    return Team(AGENTS, session=session, max_new_tokens=6)


def compare(*methods, **options):
    recipes = tuple(recipe(m) if isinstance(m, str) else m for m in methods)
    return Compare(engine(), team, recipes, **{"inputs": QUESTION, **options})


def test_every_method_is_measured_on_the_dense_texts():
    found = compare("full-shared", repeats=2).run()
    assert [row.recipe.name for row in found.methods] == ["dense", "full-shared"]
    for row in found.methods:
        assert [hop.turn.agent for hop in row.hops] == ["solver", "critic", "judge"]
        assert [hop.turn.prompt for hop in row.hops] == [hop.turn.prompt for hop in found["dense"].hops]
        assert all(len(hop.ttfts_s) == 2 for hop in row.hops)
        assert [turn.agent for turn in row.answers] == ["solver", "critic", "judge"]
    assert found["dense"].books.effective == 0
    assert found["full-shared"].books.effective == 1
    assert all(hop.speed_up == 1 for hop in found["dense"].hops)


def test_dense_is_the_truth_and_reuse_is_not():
    found = compare("dense", "full-shared").run()
    assert found["dense"].kl == pytest.approx(0, abs=1e-9)
    assert found["dense"].agree == 1
    assert found["full-shared"].hops[0].kl == pytest.approx(0, abs=1e-9), "the first hop has nothing to reuse"
    assert found["full-shared"].kl > 1e-7


def test_ticks_are_counted_before_they_come():
    for options in ({}, {"warmup": WARMUP, "repeats": 2}, {"answers": False}):
        trial, said = compare("full-shared", **options), []
        trial.run(said.append)
        assert len(said) == trial.steps


def test_learning_helps_and_the_question_teaches_nothing():
    cold = compare(LEARNER, answers=False, repeats=3).run()
    warm = compare(LEARNER, answers=False, repeats=3, warmup=WARMUP).run()
    assert all(hop.turn.hop.learned_bytes == 0 for hop in cold["learner"].hops)
    assert warm["learner"].hops[-1].turn.hop.learned_bytes > 0
    assert warm["learner"].hops[-1].turn.hop.entries.corrected > 0


def test_repeats_turn_the_order():
    said = []
    compare("full-shared", "cacheblend", repeats=3, answers=False).run(said.append)
    timed = [what.split(",")[0] for what in said if "repeat" in what]
    assert timed == ["dense", "full-shared", "cacheblend", "full-shared", "cacheblend", "dense",
                     "cacheblend", "dense", "full-shared"]


def test_a_refused_method_is_reported_and_the_others_go_on(monkeypatch):
    from kvbaton.bench import compare as module

    def taught(engine, recipe, lessons):
        if recipe.name == "bad":
            raise Unsupported("no path computes the moon right")
        return real(engine, recipe, lessons)

    real = module.taught
    monkeypatch.setattr(module, "taught", taught)
    found = compare(replace(recipe("full-shared"), name="bad"), "full-shared").run()
    assert found["bad"].refused == "no path computes the moon right"
    assert found["bad"].to_dict()["refused"]
    assert found["full-shared"].hops
    found.require_reuse()
    with pytest.raises(Unsupported, match="bad: no path"):
        compare(replace(recipe("full-shared"), name="bad")).run().require_reuse()


def test_a_method_that_never_reuses_says_why():
    compare("full-shared", answers=False).run().require_reuse()
    never = replace(recipe("full-shared"), name="never", gate=recipe("dense").gate)
    with pytest.raises(DataError, match=r"'never' never reused anything .*never"):
        compare(never, answers=False).run().require_reuse()


def test_the_record_is_json():
    record = compare("full-shared", warmup=WARMUP[:1]).run().to_dict()
    read = json.loads(json.dumps(record))
    assert read["conditions"]["commit"]
    assert read["methods"][1]["speed_up"] > 0
    assert read["methods"][1]["hops"][2]["entries"]["reused"] > 0
    assert set(read["methods"][1]["answers"]) == {"solver", "critic", "judge"}


def test_a_team_of_one_has_nothing_to_compare():
    alone = replace(compare("full-shared"), build=lambda s: Team(AGENTS[:1], session=s, max_new_tokens=2))
    with pytest.raises(UsageError, match="two agents"):
        alone.run()


def test_wrong_words():
    with pytest.raises(UsageError, match="repeats"):
        compare("dense", repeats=0)
    with pytest.raises(TeamError, match="question"):
        compare("dense", inputs={"questoin": "?"}).run()


def graph_of(agents=AGENTS, **options):
    return Graph.of(agents, **options)


def test_questions_and_transcripts_are_read(tmp_path):
    file = tmp_path / "warmup"
    file.write_text('# a comment\n\nWhat is two?\n{"question": "Three?", "solver": "a", "critic": "b", "judge": "c"}\n')
    plain, transcript = read_warmup(file, graph_of(), {})
    assert plain == WarmUp({"question": "What is two?"})
    assert transcript == WarmUp({"question": "Three?"}, {"solver": "a", "critic": "b", "judge": "c"})


def test_a_transcript_gives_the_prompts_of_the_run_it_records():
    session = Session(engine(), recipe("dense"))
    ran = team(session).run(QUESTION)
    lesson = WarmUp(QUESTION, {turn.agent: turn.text for turn in ran}).chain(team(session), 0)
    assert [turn.writes for turn in lesson] == ["solver", "critic", "judge"]
    assert lesson[0].prompt == ran["solver"].prompt
    assert [engine().text.decode(turn.answer) for turn in lesson] == [turn.text for turn in ran]


@pytest.mark.parametrize(("line", "says"), [
    ('{"question": "Three?", "solver": "a"}', "'critic' is missing"),
    ('{"qestion": "Three?"}', "did you mean 'question'"),
    ('{"question": 3}', "must be a text"),
    ('{"question": "Three?"', "line 2"),
    ('{"question": " "}', "not empty"),
])
def test_a_bad_line_is_named(tmp_path, line, says):
    file = tmp_path / "warmup.jsonl"
    file.write_text(f"# head\n{line}\n")
    with pytest.raises(DataError, match=r"warmup.jsonl, line 2: ") as error:
        read_warmup(file, graph_of(), {})
    assert says in str(error.value)


def test_warmup_that_cannot_be_used(tmp_path):
    file = tmp_path / "w.txt"
    with pytest.raises(DataError, match="cannot read"):
        read_warmup(file, graph_of(), {})
    file.write_text("# nothing\n")
    with pytest.raises(DataError, match="holds no"):
        read_warmup(file, graph_of(), {})
    file.write_text("A plain line\n")
    two = graph_of([Agent("a", "{x} {y}"), Agent("b", "{x} {a}")])
    with pytest.raises(DataError, match="which input"):
        read_warmup(file, two, {})
    assert read_warmup(file, graph_of([Agent("a", "{x}")]), {})[0].inputs == {"x": "A plain line"}


def test_the_shipped_questions_fit_the_shipped_team():
    from kvbaton.cli.options import EXAMPLES
    from kvbaton.teamfile import load_team

    graph = load_team(EXAMPLES / "maths.yaml").graph
    assert len(read_warmup(EXAMPLES / "maths-warmup.txt", graph, {})) == 20
