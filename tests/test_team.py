"""Teams on a tiny random model with a toy tokenizer, through the real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import presets
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Sampled
from kvbaton.engine.session import Session
from kvbaton.errors import PromptTooLong, TeamError, UnknownName, Unsupported, UsageError
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import Isolated, Origin
from kvbaton.team import Agent, Team, replay
from kvbaton.teamfile import parse_team
from tiny import build, engine_with_text

SOLVER = Agent("solver", "{question}", system="You solve.")
CRITIC = Agent("critic", "{question}\n\nA colleague wrote:\n{solver}", system="You find mistakes.")
JUDGE = Agent("judge", "{question}\n\nSolution:\n{solver}\n\nReview:\n{critic}\nDecide.", system="You decide.")
TRIO = [SOLVER, CRITIC, JUDGE]
QUESTION = "How many eggs are left? Say <|im_end|> if you know."


@cache
def engine():
    return engine_with_text()


def team(agents=TRIO, method="full-shared", **options):
    return Team(agents, engine=engine(), method=method, **{"max_new_tokens": 6, **options})


def answers(run):
    return [(turn.agent, turn.round, turn.hop.output_ids) for turn in run]


def test_three_agents_answer_and_later_ones_reuse():
    with team() as trio:
        run = trio.run(question=QUESTION)
    assert [turn.agent for turn in run] == ["solver", "critic", "judge"]
    assert run["solver"].reuse == 0
    assert run["critic"].reuse == run["judge"].reuse == 1
    assert len(run["judge"].hop.output_ids) == 6
    assert run["judge"].text == engine().text.decode(run["judge"].hop.output_ids)


def test_every_reader_reads_the_very_ids():
    with team() as trio:
        run = trio.run(question=QUESTION)
    ids = {share: {s.token_ids for turn in run for s in turn.prompt.segments if s.share == share}
           for share in ("question", "solver", "critic")}
    assert ids == {"question": {engine().text.encode(QUESTION)}, "solver": {run["solver"].hop.output_ids},
                   "critic": {run["critic"].hop.output_ids}}
    assert engine().text.decode(run["judge"].prompt.token_ids) == (
        "<|im_start|>system\nYou decide.<|im_end|>\n<|im_start|>user\n"
        f"{QUESTION}\n\nSolution:\n{run['solver'].text}\n\nReview:\n{run['critic'].text}\nDecide.<|im_end|>\n"
        "<|im_start|>assistant\n")


def test_the_dense_method_answers_as_transformers_does():
    with team(method="dense") as trio:
        run = trio.run(question=QUESTION)
    for turn in run:
        ids = torch.tensor([turn.prompt.token_ids])
        want = engine().model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
                                       pad_token_id=0)[0, ids.shape[1]:].tolist()
        stop = next((i for i, token in enumerate(want) if token in engine().eos_ids), len(want))
        assert list(turn.hop.output_ids) == want[:stop]


FREE = [SOLVER, Agent("other", "{question}\nAgain."), Agent("third", "Once more:\n{question}"),
        Agent("last", "{question}\n{solver}\n{other}\n{third}")]
AFTER_SOLVER = [SOLVER, *(Agent(a.name, a.prompt + "\n{solver}") for a in FREE[1:3]), FREE[3]]


@pytest.mark.parametrize(("method", "agents"), [
    (recipe("dense"), FREE),
    (Recipe("isolated", "-", "-", Isolated(writer=True)), FREE),
    (Recipe("origin", "-", "-", Origin()), AFTER_SOLVER),
])
@settings(max_examples=5)
@given(order=st.permutations(range(4)))
def test_independent_agents_may_run_in_any_order(method, agents, order):
    """Always where KV comes from no other reader; with Origin where one agent is every text's first reader."""
    with team(agents, method) as listed, team([agents[i] for i in order], method) as shuffled:
        expected, found = listed.run(question=QUESTION), shuffled.run(question=QUESTION)
    assert sorted(answers(found)) == sorted(answers(expected))


def test_rounds_pass_the_round_before_on_and_start_with_nothing():
    agents = presets.debate(("a", "You doubt."), ("b", "You trust."), ("c", "You judge."))
    with team(agents, rounds=2) as debaters:
        run = debaters.run(question=QUESTION)
    assert [(t.agent, t.round) for t in run] == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", 2)]
    first, second = run.turns[0].prompt, run.turns[2].prompt
    assert [s.share for s in first.segments if s.share] == ["question"]
    assert [s.share for s in second.segments if s.share] == ["question", "a@-1", "b@-1"]
    assert second.segments[3].token_ids == run.turns[0].hop.output_ids
    assert second.segments[5].token_ids == run.turns[1].hop.output_ids
    assert run["a"] is run.turns[2]
    heard = [s.token_ids for s in run["c"].prompt.segments if s.share in ("a", "b")]
    assert heard == [run.turns[2].hop.output_ids, run.turns[3].hop.output_ids]


def test_streamed_pieces_make_the_answers():
    pieces: dict[str, str] = {}
    with team() as trio:
        run = trio.run({"question": QUESTION}, on_token=lambda agent, text: pieces.update(
            {agent: pieces.get(agent, "") + text}))
    assert pieces == {turn.agent: turn.text for turn in run if turn.text}


@cache
def silent_solver():
    """A solver whose first token is its stop text. Random models say odd things: look for one that can be typed."""
    for words in ("You solve.", "Solve it.", "Go.", "Help.", "Answer.", "You are a solver.", "Be brief.", "1", "2"):
        solver = Agent("solver", SOLVER.prompt, system=words)
        with team([solver]) as solo:
            token = solo.run(question=QUESTION)["solver"].hop.output_ids[0]
        text = engine().text.decode([token])
        if engine().text.token_id(text) == token:
            return replace(solver, stop=(text,))
    raise AssertionError("every first token is half a character: add words above")


def test_an_agent_that_says_nothing_is_left_out_and_noted():
    with team([silent_solver(), CRITIC, JUDGE]) as trio:
        run = trio.run(question=QUESTION)
    assert run["solver"].text == ""
    assert [s.share for s in run["judge"].prompt.segments if s.share] == ["question", "critic"]
    assert "said nothing: its readers go without" in run["solver"].notes
    assert "said nothing" in run.report()


def test_a_stop_text_of_several_tokens_is_refused():
    with pytest.raises(TeamError, match=r"agent 'a'.*no single token"):
        team([Agent("a", "{q}", stop=("Hello again and again",))])


def test_limits_of_agent_and_team():
    with team([SOLVER, Agent("brief", "{solver}", max_new_tokens=2)], max_new_tokens=4) as pair:
        run = pair.run(question=QUESTION)
    assert [len(turn.hop.output_ids) for turn in run] == [4, 2]


def test_sampling_repeats_with_its_seed():
    runs = []
    for seed in (0, 0, 1):
        with team(sampler=Sampled(temperature=2.0, seed=seed)) as trio:
            runs.append(answers(trio.run(question=QUESTION)))
    assert runs[0] == runs[1] != runs[2]


def test_a_session_is_shared_and_outlives_the_team():
    session = Session(engine(), recipe("full-shared"))
    with Team(TRIO, session=session, max_new_tokens=2) as trio:
        trio.run(question=QUESTION)
    with Team([SOLVER], session=session, max_new_tokens=2) as solo:
        assert solo.run(question=QUESTION)["solver"].text
    session.close()


def test_session_or_engine_but_not_both():
    with Session(engine(), recipe("dense")) as session:
        with pytest.raises(UsageError, match="either session="):
            Team(TRIO, session=session, method="dense")
        with pytest.raises(UsageError, match="needs a model"):
            Team(TRIO, method="dense")


def test_unknown_method_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'full-shared'"):
        team(method="full-share")


def test_a_recipe_is_a_method():
    with team(method=recipe("full-shared")) as trio:
        assert trio.run(question=QUESTION).method == "full-shared"


def test_an_engine_without_tokenizer():
    with pytest.raises(Unsupported, match="no tokenizer"):
        Team(TRIO, engine=HFEngine(build("llama")), method="dense")


@pytest.mark.parametrize(("inputs", "words"), [
    ({"question": ""}, "input 'question' is empty"),
    ({"question": " \n\t"}, "input 'question' is empty"),
    ({}, "input 'question' is missing"),
    ({"questoin": "x"}, "'question' is missing: is 'questoin' meant"),
    ({"question": "x", "hint": "y"}, "unknown input 'hint'"),
    ({"question": "x", "solver": "y"}, "'solver' is an agent"),
    ({"question": 7}, "must be text, not int"),
])
def test_bad_inputs(inputs, words):
    with team() as trio, pytest.raises(TeamError, match=words):
        trio.run(inputs)


def test_an_input_of_characters_that_the_model_does_not_know(monkeypatch):
    with team() as trio:
        monkeypatch.setattr(trio.text, "encode", lambda text: ())
        with pytest.raises(TeamError, match="no character that this model knows"):
            trio.run(question="\x16")


def test_a_misspelt_agent_becomes_a_missing_input_with_the_hint():
    with team([SOLVER, Agent("judge", "{solvr}")]) as pair, pytest.raises(TeamError, match="is 'solver' meant"):
        pair.run(question=QUESTION)


def test_a_prompt_longer_than_the_context_says_by_how_much_and_where():
    context = engine().context_tokens
    text = "16 " * context
    excess = len(engine().text.encode(text))
    with team() as trio, pytest.raises(PromptTooLong) as caught:
        trio.run(question=text)
    own = len(engine().text.prompt("solver", *SOLVER.templates, {"question": (1,)})) - 1
    assert f"by {own + excess + 6 - context} tokens" in str(caught.value)
    assert f"question {excess}" in str(caught.value)
    assert "'solver'" in str(caught.value)


@pytest.mark.parametrize("after", [0, 1, 8])
def test_ctrl_c_frees_the_run_and_leaves_the_team_usable(after, monkeypatch):
    with team() as trio:
        expected = answers(trio.run(question=QUESTION))
        stores = []
        start = trio.session.start_run
        monkeypatch.setattr(trio.session, "start_run", lambda: stores.append(start()) or stores[-1])
        shown = iter(range(1000))

        def press(agent, text):
            if next(shown) == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            trio.run({"question": QUESTION}, on_token=press)
        assert stores[-1].nbytes == 0
        assert answers(trio.run(question=QUESTION)) == expected
        assert stores[-1].nbytes == 0
    trio.session.memory.check()


def test_report_and_record():
    with team() as trio:
        run = trio.run(question=QUESTION)
    lines = run.report().splitlines()
    assert lines[0] == "full-shared on tiny"
    assert [line.split()[0] for line in lines[1:]] == ["agent", "solver", "critic", "judge"]
    assert "recomputed: " in lines[2]
    with team(method="dense") as trio:
        assert trio.run(question=QUESTION)["judge"].notes == ("question, solver, critic recomputed: dense method",)
    record = json.loads(json.dumps(run.to_dict()))
    assert record["inputs"] == {"question": QUESTION}
    for entry, turn in zip(record["turns"], run, strict=True):
        assert entry["text"] == turn.text
        assert sum(entry["entries"].values()) == entry["prompt_tokens"] * entry["layers"]
        assert sum(s["tokens"] for s in entry["segments"]) == entry["prompt_tokens"]
        assert entry["logits"] is None


def test_asking_for_an_agent_that_is_not_there():
    with team() as trio, pytest.raises(UnknownName, match="did you mean 'judge'"):
        trio.run(question=QUESTION)["judg"]


def test_replaying_a_dense_run_densely_gives_its_own_answers():
    with team(method="dense") as trio:
        run = trio.run(question=QUESTION)
    with Session(engine(), recipe("dense")) as session:
        for turn, hop in zip(run, replay(run, session), strict=True):
            assert hop.logits.argmax(-1).tolist() == list(turn.hop.output_ids)
            assert hop.prompt_tokens == len(turn.prompt)


def test_replaying_a_run_in_which_someone_said_nothing():
    with team([silent_solver(), CRITIC], method="dense") as pair:
        run = pair.run(question=QUESTION)
    with Session(engine(), recipe("full-shared")) as session:
        first, second = replay(run, session)
    assert first.logits is None
    assert second.logits.shape[0] == len(run["critic"].hop.output_ids)


def test_a_team_file_becomes_a_team():
    spec = parse_team("""
        method: full-shared
        max_new_tokens: 3
        sampling: {temperature: 2.0, seed: 5}
        inputs: {question: "How many eggs?"}
        agents:
          - {name: solver, prompt: "{question}"}
          - {name: judge, prompt: "{question}\\n{solver}", max_new_tokens: 2}
    """)
    with spec.build(engine=engine()) as by_file:
        run = by_file.run(spec.fill({}))
    assert run.method == "full-shared"
    assert [len(turn.hop.output_ids) for turn in run] == [3, 2]
    agents = [Agent("solver", "{question}"), Agent("judge", "{question}\n{solver}", max_new_tokens=2)]
    with team(agents, max_new_tokens=3, sampler=Sampled(temperature=2.0, seed=5)) as by_hand:
        assert answers(run) == answers(by_hand.run(question="How many eggs?"))
    with spec.build(engine=engine(), method="dense") as other, Session(engine(), recipe("dense")) as session:
        assert other.run(spec.fill({})).method == "dense"
        assert spec.build(session=session).session is session
